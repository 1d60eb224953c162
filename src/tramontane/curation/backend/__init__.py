"""Who answers the questions of a curation: a checkpoint that is run here, or an endpoint.

Both are a `Backend`: prompts in, n answers to each out, and whatever was answered before a kill is
read from a file and not asked again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tramontane.curation.config import ModelConfig


class Prompt(NamedTuple):
    """A question; `key` decides, with the config's seed, how its answers are drawn."""

    key: str
    text: str


class Answer(NamedTuple):
    """What came back, of so many tokens; or, in `fault`, why nothing did."""

    text: str
    tokens: int
    fault: str = ""


class Backend(Protocol):
    """Anyone who can be asked."""

    def answers(
        self, prompts: Sequence[Prompt], n: int, record: Path
    ) -> Iterator[tuple[int, list[Answer]]]:
        """Yield (the prompt's place, its n answers) as each prompt's last answer comes in.

        Args:
            prompts: asked all at once.
            n: answers to each.
            record: a file for the answers. Called again with the same prompts and file, by whatever
                process, it goes on where it was, and ends with the same answers.

        Raises:
            InputError: the model cannot be asked anything, until somebody mends that.
        """


def check_model(config: ModelConfig) -> dict[str, Any]:
    """Refuse a model that cannot be asked; returns a fingerprint of its files.

    Raises:
        InputError: no such checkpoint, device or key.
    """
    if config.endpoint:
        from tramontane.curation.backend.endpoint import authorization

        authorization(config.endpoint)
        return {}
    from tramontane.curation.backend.checkpoint import check_checkpoint

    return check_checkpoint(config)


def open_backend(config: ModelConfig) -> Backend:
    """The one that a config names; a checkpoint is loaded."""
    # torch takes seconds to import, and an endpoint has no need of it.
    if config.endpoint:
        from tramontane.curation.backend.endpoint import Endpoint

        return Endpoint(config)
    from tramontane.curation.backend.checkpoint import Checkpoint

    return Checkpoint(config)


def answer_seed(seed: int, key: str, index: int) -> int:
    """An answer's own seed, whatever is asked beside it."""
    text = f"{seed}/{key}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


class Gathering:
    """Answers by prompt, until all n of one are there."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._answers: dict[int, dict[int, Answer]] = {}

    def add(self, place: int, index: int, answer: Answer) -> Iterator[tuple[int, list[Answer]]]:
        """Yield the prompt if this was its last."""
        answers = self._answers.setdefault(place, {})
        answers[index] = answer
        if len(answers) == self.n:
            del self._answers[place]
            yield place, [answers[i] for i in range(self.n)]
