"""The teachers of a run: checked before it starts, and started where its placement says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from tramontane.config import Config
from tramontane.controller.teachers import Teachers
from tramontane.errors import InputError
from tramontane.evaluation.placed import model_for_workers
from tramontane.models import loading
from tramontane.models.shape import load_shape
from tramontane.placement import Handle, WorkerLost
from tramontane.placement.place import Placement
from tramontane.trainer.teacher import Teacher


def check(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the teachers read the policy's tokens, whose tokenizer is given.

    Raises:
        InputError: no such model, or one with another tokenizer.
    """
    own = tokenizer.get_vocab()
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


def start(
    config: Config, placement: Placement, replaced: Callable[[WorkerLost], None]
) -> AbstractContextManager[Teachers | None]:
    """The teachers of a run, if it has any; `replaced` is called with every worker that was
    lost."""
    if config.teacher is None:
        return nullcontext()
    teacher, top_k = config.teacher, config.trainer.objective.distill.top_k
    budget, vocabulary = config.trainer.microbatch_tokens, load_shape(config.model).vocabulary

    def make(name: str, model: str) -> Handle:
        portable: Any = model_for_workers(config, model)
        load = partial(Teacher.load, portable, teacher, budget, top_k, vocabulary)
        return placement.teacher(name, load)

    return Teachers(make, config, replaced)
