"""What ends a completion: EOS tokens, stop tokens and stop texts."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tramontane.generator.stops import StopTexts
from tramontane.generator.text import Detokenizer
from tramontane.types import Completion, ResponseText


class Endings:
    """Everything that ends a completion of a model, except its length.

    Args:
        model: for its generation config's EOS tokens and its vocabulary size.
        tokenizer: for its EOS token and the texts.
        stop: `generator.stop`.
        response: thinking tags, and the beginning of every response.

    Attributes:
        ids: tokens that end a completion.
        texts: finds the texts that end a completion; None if there are none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str | int],
        response: ResponseText,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, response)
        stop_ids, texts = _split_stops(tokenizer, stop)
        self.ids = _eos_ids(model, tokenizer) | stop_ids
        vocab = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[union-attr, index, arg-type]
        self.texts = StopTexts(self._detokenizer, texts, vocab) if texts else None

    def text(self, completion: Completion) -> str:
        """The text of a response, without the stop that ended it."""
        prefix, text = self._detokenizer.parts(completion, self.ids)
        return prefix + (self.texts.cut(text) if self.texts else text)


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """EOS tokens of the tokenizer and of the generation config; chat models have several."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    listed = configured if isinstance(configured, list) else [configured]
    return {t for t in [tokenizer.eos_token_id, *listed] if t is not None}


def _split_stops(
    tokenizer: PreTrainedTokenizerBase, stop: Sequence[str | int]
) -> tuple[set[int], list[str]]:
    """(token ids, texts) of `generator.stop`; a text that is a special token is the token."""
    ids, texts = {s for s in stop if isinstance(s, int)}, list[str]()
    added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
    for text in (s for s in stop if isinstance(s, str)):
        if text in added:
            ids.add(added[text])
        else:
            texts.append(text)
    return ids, texts
