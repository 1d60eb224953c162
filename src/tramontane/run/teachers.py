"""Whether a run's teachers can score what its policy writes."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from tramontane.config import Config
from tramontane.data.lengths import PromptLimit
from tramontane.errors import InputError
from tramontane.models import loading
from tramontane.models.shape import load_shape


def check(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Reject teachers whose tokens differ from the policy's; `tokenizer` is the policy's."""
    own, head = tokenizer.get_vocab(), load_shape(config.model).vocabulary
    for model in config.teachers:
        try:
            theirs = loading.load_tokenizer(model).get_vocab()
        except InputError as error:
            raise InputError(f"teacher: {error}") from None
        if theirs != own:
            different = len(own.items() ^ theirs.items())
            raise InputError(
                f"teacher {model!r}: its tokenizer has {len(theirs):,} tokens, and that of "
                f"{config.model!r} {len(own):,}; {different:,} of them are not the same in both. A "
                f"teacher scores the policy's own tokens: name one of the same family"
            )
        if (rows := load_shape(model).vocabulary) < head:
            raise InputError(
                f"teacher {model!r}: its output head has a vocabulary of {rows:,} tokens, and that "
                f"of {config.model!r} {head:,}: it cannot score the others. Name a teacher whose "
                f"head is as large"
            )


def limit_prompts(config: Config, limit: PromptLimit, tools: int) -> PromptLimit:
    """The limit of prompts, lowered to what teachers' contexts leave next to completions.

    Args:
        config: the run's.
        limit: that of the policy.
        tools: tokens that the descriptions of tools add to every prompt.

    Raises:
        InputError: a completion of `pipeline.l_max` does not fit into a teacher's context.
    """
    longest = max(stage.pipeline.l_max for stage in config.by_stage())
    limits = [limit]
    for model in config.teachers:
        context = loading.context_length(loading.load_config(model))
        whose = f"the context of teacher {model!r}"
        limits.append(PromptLimit.of(config.data.max_prompt_tokens, context, longest, tools, whose))
    return min(limits, key=lambda each: (each.tokens, each.room))
