"""Problems of Reasoning Gym's generators, which the verifier `reasoning_gym` judges.

A generator's items depend on its seed and, for some, on the order of sets and on the `random`
module. So they are drawn in a process of their own, where both are fixed: every start and resume of
a run draws the same. `python -m tramontane.data.gym` is that process: requests come as lines of
JSON, and answers go back as such.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from threading import Lock
from typing import Any, Literal, TextIO

from tramontane.data import playground
from tramontane.errors import InputError, install
from tramontane.imports import command_of
from tramontane.types import Problem

Split = Literal["train", "test"]
ITEMS = 1000  # of one seed, with which a generator's data set is made
CHUNK = 64  # items of a request; the first one asks for BEGIN, and each for twice as many
BEGIN = 8
ITEM_SECONDS = 60  # limit to draw one item
CHECKED = 16  # items on which a generator is checked
FIRST = 4  # of these, on which a text must get full marks once before all are scored
FEW = 200  # draws contain a test problem, except in 1 of 10¹¹ cases
# Texts that no problem should accept whatever it asks.
CONSTANTS = (
    "", "a", "x", "yes", "no", "True", "False", "None", "[]", "()", "{}", "[0]", "0 0", "0,0",
    "nan", "inf", "0.", "0.5", *map(str, range(-1, 21)), "100",
)  # fmt: skip


class _Drawer:
    """The process that draws; one at a time for each process of ours."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process = subprocess.Popen(
            command_of("tramontane.data.gym"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": "0"},
        )

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        """Items, or an empty list for a check that finds nothing.

        Raises:
            InputError: what is wrong with the generator.
        """
        source = f"data 'reasoning_gym:{request['name']}'"
        with self._lock:
            assert self._process.stdin
            assert self._process.stdout
            try:
                print(json.dumps(request), file=self._process.stdin, flush=True)
                line = self._process.stdout.readline()
            except BrokenPipeError:
                line = ""
        if not line:
            _drawer.cache_clear()
            raise InputError(
                f"{source}: its generator died, or took longer than {ITEM_SECONDS} s for an item; "
                f"choose another"
            )
        answer = json.loads(line)
        if fault := answer.get("fault"):
            raise InputError(f"{source}: {fault}")
        return list(answer["items"])


@lru_cache(maxsize=1)
def _drawer(process: int) -> _Drawer:
    return _Drawer()


@lru_cache
def _check(name: str) -> None:
    if find_spec("reasoning_gym") is None:
        raise InputError(
            f"data 'reasoning_gym:{name}' needs a package that is not installed: "
            f"{install('reasoning-gym')}"
        )
    _drawer(os.getpid()).ask(name=name, seed=0, first=0, count=0)


def gym_problems(name: str, split: Split, seed: int) -> Iterator[Problem]:
    """An endless stream of problems, the same for the same arguments.

    A hash of the statement determines the split, as in the playground, since neighboring seeds of
    Reasoning Gym share most of their problems.

    Raises:
        InputError: the package is missing, it knows no such generator, or the generator's scorer
            cannot be trusted: it gives full marks to a constant text, or to its own answers beside
            others, or not to its own answers.
    """
    _check(name)
    return _stream(name, split, seed)


def _stream(name: str, split: Split, seed: int) -> Iterator[Problem]:
    unfit = 0
    size = BEGIN
    for start in range(seed, 2**63, ITEMS):
        first = 0
        while first < ITEMS:
            count, size = min(size, ITEMS - first), min(2 * size, CHUNK)
            for item in _drawer(os.getpid()).ask(name=name, seed=start, first=first, count=count):
                statement = item["question"].strip()
                if playground.split_of(statement) == split:
                    unfit = 0
                    yield _problem(name, statement, item)
                elif (unfit := unfit + 1) == FEW:
                    raise InputError(
                        f"data 'reasoning_gym:{name}': {FEW} draws without a {split} problem; its "
                        f"problems are too few; choose another generator"
                    )
            first += count


def _problem(name: str, statement: str, item: dict[str, Any]) -> Problem:
    return Problem(
        id=f"{name}-{hashlib.sha256(statement.encode()).hexdigest()[:16]}",
        domain="reasoning_gym",
        problem=statement,
        answer=item["answer"],
        language="en",
        source=f"reasoning_gym:{name}",
        metadata={"generator": name, "entry": item["entry"]},
    )


# ------------------------------------------------------------------ in the process that draws


def main(requests: TextIO, answers: TextIO) -> None:
    """Answer requests, one a line, until the input ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends this process
    for line in requests:
        request = json.loads(line)
        try:
            drawn = _draw(**request) if request["count"] else _examined(request["name"])
            answer: dict[str, Any] = {"items": drawn}
        except InputError as error:
            answer = {"fault": str(error)}
        except Exception as error:  # of a generator's code
            answer = {"fault": f"it cannot be drawn from: {type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


def _draw(name: str, seed: int, first: int, count: int) -> list[dict[str, Any]]:
    return [_item(name, seed, index) for index in range(first, first + count)]


@contextmanager
def _limited() -> Iterator[None]:
    """A block that ends this process if it takes longer than ITEM_SECONDS."""
    signal.alarm(ITEM_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


@lru_cache(maxsize=2)
def _dataset(name: str, seed: int) -> Any:
    from reasoning_gym.factory import create_dataset

    random.seed(seed)
    with _limited():
        return create_dataset(name, size=ITEMS, seed=seed)


@lru_cache(maxsize=CHECKED)  # those of the check are the first ones of seed 0
def _item(name: str, seed: int, index: int) -> dict[str, Any]:
    import numpy as np

    dataset = _dataset(name, seed)
    random.seed(index)
    np.random.seed(index)
    with _limited():
        entry = _literal(dataset[index])
    answer = entry["answer"]
    text = None if answer is None else str(answer)
    return {"question": entry["question"], "answer": text, "entry": repr(entry)}


def _literal(value: Any) -> Any:
    """A value in types whose `repr` is a literal."""
    if isinstance(value, dict):
        return {_literal(key): _literal(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(_literal, value))
    value = value.item() if hasattr(value, "item") else value
    plain = isinstance(value, str | int | bytes | None)
    plain |= isinstance(value, float) and math.isfinite(value)
    return value if plain else str(value)


def _examined(name: str) -> list[dict[str, Any]]:
    """Nothing, if a generator exists and its scorer can tell answers apart."""
    import ast

    from reasoning_gym.factory import DATASETS

    from tramontane.verifier import gym

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)
        raise InputError(f"no such dataset; did you mean one of {', '.join(near)}?")
    items = _draw(name, 0, 0, CHECKED)
    entries = [ast.literal_eval(item["entry"]) for item in items]

    def full(text: str, entry: Any) -> bool:
        with _limited():
            return gym.has_full_marks(name, entry, text)

    for item, entry in zip(items, entries, strict=True):
        if item["answer"] is not None and not full(gym.answer_of(item["answer"]), entry):
            raise InputError(
                "its scorer does not give full marks to its own answer "
                f"{item['answer'][:80]!r}; choose another generator"
            )
    own = [item["answer"] for item in items]
    for text in dict.fromkeys((*CONSTANTS, *filter(None, own[:FIRST]))):
        # Of two choices, one is right half of the time; but then it is the answer.
        others = [e for a, e in zip(own, entries, strict=True) if not _same(text, a)]
        if not any(full(text, entry) for entry in others[:FIRST]):
            continue
        bought = sum(full(text, entry) for entry in others)
        if 2 * bought >= len(entries):
            raise InputError(
                f"its scorer gives full marks to the text {text[:80]!r} whatever the problem "
                f"({bought} of {len(entries)} with another answer), which a policy would learn to "
                f"write; choose another generator"
            )
    _refuse_hedges([gym.answer_of(text or "") for text in own], entries, full)
    return []


def _refuse_hedges(own: list[str], entries: list[Any], full: Callable[[str, Any], bool]) -> None:
    """Refuse a scorer that reads an answer in a text that has another's beside it."""
    for form in ("{0} or {1}", "{1} or {0}"):
        pairs = zip(own, own[1:] + own[:1], strict=True)
        texts = [form.format(*pair) if pair[0] != pair[1] else "" for pair in pairs]
        bought = sum(full(text, entry) for text, entry in zip(texts, entries, strict=True) if text)
        if 2 * bought >= len(entries):
            raise InputError(
                f"its scorer gives full marks to its own answer beside another one, as "
                f"{texts[0][:80]!r} ({bought} of {len(entries)}), so that a policy would learn to "
                f"write several; choose another generator"
            )


def _same(text: str, answer: str | None) -> bool:
    return answer is not None and text.casefold() == answer.strip().casefold()


if __name__ == "__main__":
    # The end of the input ends this process. A signal at the parent's death would do so early: it
    # comes when the thread that started this process ends.
    private = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # generators may print
    main(sys.stdin, private)
