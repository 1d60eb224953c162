"""Models asked outside the training loop: a checkpoint in this process, or a server.

    model = open_model(config)
    for place, answers in model.answers(prompts, n, record):
        ...  # the n answers to prompts[place], as soon as the last of them has arrived

Every answer is written to the file `record` when it arrives, so another process that asks the same
prompts requests only the missing ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from tramontane.types import PAPER_TAGS, ThinkingTags


class Prompt(NamedTuple):
    """A question; `key` and the config's seed determine the sampling seed of its answers. Its
    `images`, as data URIs, come before the text."""

    key: str
    text: str
    images: Sequence[str] = ()


class Answer(NamedTuple):
    """An answer and its number of tokens. `fault` says why there is no answer; `cut` is True if a
    server says that the answer ended at a limit.

    Its thoughts, if any, are between the paper's tags, whatever the tags of the model.
    """

    text: str
    tokens: int
    fault: str = ""
    cut: bool = False


class Model(Protocol):
    """A model that can be asked."""

    def answers(
        self, prompts: Sequence[Prompt], n: int, record: Path
    ) -> Iterator[tuple[int, list[Answer]]]:
        """Yield (the prompt's index, its n answers) as each prompt's last answer arrives.

        Args:
            prompts: all prompts at once.
            n: answers per prompt.
            record: a file for the answers. Another call with the same prompts and file, in any
                process, resumes and gives the same answers.

        Raises:
            InputError: the model cannot answer any prompt until the user corrects something.
        """


def in_paper_tags(text: str, tags: ThinkingTags) -> str:
    """An answer with the model's thinking tags replaced by the paper's."""
    return text.replace(tags.opening, PAPER_TAGS.opening).replace(tags.closing, PAPER_TAGS.closing)


def conclusion(text: str) -> str:
    """The part of an answer after its thoughts, up to any further thoughts; empty if there are only
    thoughts."""
    start, end = conclusion_span(text)
    return text[start:end].strip()


def conclusion_span(text: str) -> tuple[int, int]:
    """Where the conclusion of an answer begins and ends, white space included."""
    closing = text.rfind(PAPER_TAGS.closing)
    start = closing + len(PAPER_TAGS.closing) if closing >= 0 else 0
    opening = text.find(PAPER_TAGS.opening, start)
    return start, opening if opening >= 0 else len(text)


def answer_seed(seed: int, key: str, index: int) -> int:
    """The seed of answer number `index` to a prompt, independent of other prompts; 56 bits."""
    text = f"{seed}/{key}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


class Collector:
    """Collects answers by prompt until all n answers of a prompt have arrived."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._answers: dict[int, dict[int, Answer]] = {}

    def add(self, place: int, index: int, answer: Answer) -> Iterator[tuple[int, list[Answer]]]:
        """Yield (place, its n answers) if this was the prompt's last answer."""
        answers = self._answers.setdefault(place, {})
        answers[index] = answer
        if len(answers) == self.n:
            del self._answers[place]
            yield place, [answers[i] for i in range(self.n)]
