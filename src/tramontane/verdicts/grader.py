r"""Grades texts outside of a run, in worker processes that are killed when late.

What is graded is named by a kind:

| kind | reward | needs |
|---|---|---|
| `math` | 1 if the last `\boxed{}` of the text equals the reference, else 0 | `answer` |
| `plain` | 1 if the whole text (after its thoughts) equals the reference, else 0 | `answer` |
| `code` | 1 if the first fenced block passes the tests, else 0 | `tests` |
| `format` | 1 if the text has one pair of thinking tags and a `\boxed{}`, else 0 | |
| `language` | 1 if problem, thoughts and answer are in one language, else 0 | `problem` |
| `length` | −1 to 0 over the last `l_cache` tokens before `l_max` | `n_tokens` |
| `magistral` | the sum of all four, with the paper's weights (arXiv 2506.10910, section 2.2) | |
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import groupby
from threading import Lock
from typing import Any, Literal, get_args

from tramontane.config import VerifierConfig, parse
from tramontane.data.code import parse_tests
from tramontane.errors import InputError
from tramontane.types import Problem, Verdict
from tramontane.verifier.correctness import unscorable
from tramontane.verifier.format import boxes
from tramontane.verifier.pool import VerifierPool

Kind = Literal["math", "plain", "code", "format", "language", "length", "magistral"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_OFF = {"format": 0.0, "correctness": 0.0, "length": 0.0, "language": 0.0}
_BOXED = {"answer": "boxed", "thinking": "optional"}
_FENCED = {"answer": "fenced", "thinking": "optional"}
# Of each kind: its axis, and the verifier and format of its domain.
_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "math": ("correctness", {"verifier": "math", "format": _BOXED}),
    "plain": ("correctness", {"verifier": "math"}),
    "code": ("correctness", {"verifier": "code", "format": _FENCED}),
    "format": ("format", {"format": "boxed"}),
    "language": ("language", {}),
    "length": ("length", {}),
}


@dataclass(frozen=True)
class Sample:
    """A text to grade, and what it is graded by.

    Args:
        text: the completion.
        answer: the reference answer; None if the kind needs none.
        tests: the tests of a program, in any form of docs/data.md.
        problem: the statement, which decides the language that is expected.
        language: its ISO 639-1 code; None: detected from the statement.
        n_tokens: tokens of the completion, for `length`.
    """

    text: str
    answer: str | None = None
    tests: Any = None
    problem: str = ""
    language: str | None = None
    n_tokens: int = 0


@dataclass(frozen=True)
class Grader:
    """Grades samples of one kind. Graders with equal settings share a pool of worker processes,
    which starts with the first sample and ends with this process; a copy in another process, forked
    or pickled, has a pool there.

    Args:
        kind: what is graded; see the table above.
        l_max: tokens at which the length penalty reaches its maximum; None: no penalty.
        l_cache: tokens before `l_max` at which it starts.
        settings: keys of `verifier`, such as `{"timeout_s": 5, "math": {"log": "natural"}}`.
            `workers` is the number of cores unless it is set.

    Raises:
        InputError: no such kind or setting, or `length` without `l_max`.
    """

    kind: Kind = "math"
    l_max: int | None = None
    l_cache: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"kind {self.kind!r}: choose from {', '.join(KINDS)}")
        if self.kind == "length" and self.l_max is None:
            raise InputError("kind 'length': give l_max, the tokens of the longest completion")
        self.config()

    def config(self) -> VerifierConfig:
        """The pool's config."""
        raw: dict[str, Any] = {"workers": os.cpu_count() or 1, **self.settings}
        if self.kind in _PARTS:
            raw["domains"] = {kind: domain for kind, (_, domain) in _PARTS.items()}
            raw["reward"] = _OFF | {_PARTS[self.kind][0]: 1.0}
        return parse(VerifierConfig, raw, "settings")

    def submit(self, samples: Sequence[Sample]) -> list[Future[list[Verdict]]]:
        """Hand samples to the workers; a future for each run of samples that differ in their text
        alone, whose reference or tests are then read once. A sample without a reference, or with
        tests that cannot be read, is unscorable."""
        pool = _pool(self)
        return [self._score(pool, key, [*found]) for key, found in groupby(samples, _reference)]

    def _score(
        self, pool: VerifierPool, key: tuple[Any, ...], samples: list[Sample]
    ) -> Future[list[Verdict]]:
        answer, tests, statement, language = key
        domain = self.kind
        if domain == "magistral":
            domain = "math" if tests is None else "code"
        try:
            parsed = parse_tests(tests, "tests") if tests and domain == "code" else None
        except InputError as error:
            refused: Future[list[Verdict]] = Future()
            refused.set_result(
                [unscorable(str(error), self.config().reward.parts) for _ in samples]
            )
            return refused
        problem = Problem("", domain, statement, answer, parsed, language=language)
        return pool.score(problem, [(sample.text, sample.n_tokens) for sample in samples])

    def grade(self, samples: Sequence[Sample]) -> list[Verdict]:
        """The verdicts on samples, in their order."""
        return self._flat(group.result() for group in self.submit(samples))

    async def grade_async(self, samples: Sequence[Sample]) -> list[Verdict]:
        """`grade`, without blocking the event loop."""
        return self._flat(await asyncio.gather(*map(asyncio.wrap_future, self.submit(samples))))

    def _flat(self, groups: Iterable[list[Verdict]]) -> list[Verdict]:
        """All verdicts. Without a verifier, the reward alone says what is right."""
        verdicts = [verdict for group in groups for verdict in group]
        if self.kind not in ("format", "language", "length"):
            return verdicts
        best = 0.0 if self.kind == "length" else 1.0
        return [
            replace(v, verdict="right", reason="")
            if v.reward == best and v.verdict == "wrong"
            else v
            for v in verdicts
        ]


def _reference(sample: Sample) -> tuple[Any, ...]:
    tests = sample.tests
    text = tests if tests is None or isinstance(tests, str) else json.dumps(tests)
    return sample.answer, text, sample.problem, sample.language


_pools: dict[tuple[int, str], VerifierPool] = {}  # by process and settings
_starting = Lock()


def _pool(grader: Grader) -> VerifierPool:
    weighed = _PARTS[grader.kind][0] if grader.kind in _PARTS else grader.kind
    settings = [weighed, grader.l_max, grader.l_cache, dict(grader.settings)]
    key = os.getpid(), json.dumps(settings)
    with _starting:
        if key not in _pools:
            l_max = sys.maxsize if grader.l_max is None else grader.l_max
            _pools[key] = VerifierPool(grader.config(), l_max, grader.l_cache)
        return _pools[key]


@atexit.register
def close() -> None:
    """Close the pools of this process."""
    for key in [key for key in _pools if key[0] == os.getpid()]:
        _pools.pop(key).close()


def _forget() -> None:
    """In a forked process: the pools are the parent's, and its lock may be held there."""
    global _starting
    _pools.clear()
    _starting = Lock()


os.register_at_fork(after_in_child=_forget)


def _kind_of(text: str) -> Kind:
    return "math" if boxes(text) else "plain"


def verify(answer: str, reference: str, **settings: Any) -> Verdict:
    r"""Whether a mathematical answer equals a reference.

    Args:
        answer: a response, whose last `\boxed{}` counts, or an answer alone.
        reference: LaTeX or plain text.
        settings: keys of `verifier`, such as `timeout_s=5`.
    """
    return Grader(_kind_of(answer), settings=settings).grade([Sample(answer, reference)])[0]


async def verify_async(answer: str, reference: str, **settings: Any) -> Verdict:
    """`verify`, without blocking the event loop."""
    grader = Grader(_kind_of(answer), settings=settings)
    return (await grader.grade_async([Sample(answer, reference)]))[0]


def rewards(verdicts: Iterable[Verdict]) -> list[float | None]:
    """The rewards of verdicts; None where no judgment was possible."""
    return [None if v.verdict == "unscorable" else v.reward for v in verdicts]
