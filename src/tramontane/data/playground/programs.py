"""Small Python tasks on stdin and stdout, with tests, in English.

A task's texts (statement, plan, solution, slips) are in `programs.yaml`. This module has the
generators of inputs; expected outputs are what the solution prints.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.resources import files
from random import Random
from types import CodeType
from typing import Any

from tramontane.config.yaml_text import read_own
from tramontane.types import Problem

from .language import pick

OPENINGS = ("Write a Python program.", "Solve this in Python.")


@dataclass(frozen=True)
class Task:
    """One entry of `programs.yaml`."""

    level: int
    input: str
    statement: str
    plan: str
    solution: str
    slips: list[tuple[str, str]]
    params: dict[str, Any]
    values: tuple[int, int]


@dataclass(frozen=True)
class Program:
    """A task with its constants; `opening` is the first sentence of the statement."""

    name: str
    params: dict[str, Any]
    opening: str

    @property
    def canonical(self) -> str:
        return f"{self.name} {sorted(self.params.items())}"

    def fill(self, text: str) -> str:
        for key, value in self.params.items():
            text = text.replace(f"{{{key}}}", str(value))
        return text


@lru_cache
def tasks() -> dict[str, Task]:
    texts = read_own((files(__package__) / "programs.yaml").read_bytes())
    defaults: dict[str, Any] = {"params": {}, "values": (0, 99)}
    return {name: Task(**(defaults | entry)) for name, entry in texts.items()}


def draw(rng: Random, level: int) -> Program:
    """A random task of this level with random constants."""
    name = pick(rng, [name for name, task in tasks().items() if task.level == level])
    params = {
        key: pick(rng, spec) if isinstance(spec, str) else rng.randint(*spec)
        for key, spec in tasks()[name].params.items()
    }
    return Program(name, params, pick(rng, OPENINGS))


def problem(program: Program) -> Problem:
    """The problem with its tests, which depend only on the task and its constants."""
    task = tasks()[program.name]
    solution = program.fill(task.solution)
    slips = [(program.fill(old), program.fill(new)) for old, new in task.slips]
    statement = f"{program.opening} {program.fill(task.statement)}"
    return Problem(
        id=f"playground-programs-{hashlib.sha256(statement.encode()).hexdigest()[:16]}",
        domain="code",
        problem=statement,
        tests={"type": "stdio", "cases": cases(program), "checker": "tokens"},
        language="en",
        difficulty=task.level,
        source="playground",
        metadata={
            "kind": "programs",
            "task": program.name,
            "plan": program.fill(task.plan),
            "solution": solution,
            "wrong": [solution.replace(old, new) for old, new in slips],
        },
    )


def cases(program: Program) -> list[dict[str, str]]:
    """20 to 24 distinct inputs with their expected outputs."""
    found = _cases(program.name, tuple(program.params.items()))
    return [{"input": line, "output": printed} for line, printed in found]


@lru_cache(maxsize=2048)  # a stream repeats most programs, in another opening
def _cases(name: str, params: tuple[tuple[str, Any], ...]) -> list[tuple[str, str]]:
    program, task = Program(name, dict(params), ""), tasks()[name]
    solution = compile(program.fill(task.solution), name, "exec")
    rng = Random(program.canonical)
    shape = SHAPES[task.input]
    inputs: dict[str, None] = {}
    wanted = rng.randint(20, 24)
    while len(inputs) < wanted:
        inputs.setdefault(_line(shape(rng, *task.values)))
    return [(line, _printed(solution, line)) for line in inputs]


def failed(source: str, cases: Sequence[dict[str, str]]) -> tuple[int, str] | None:
    """(place of the first case that a slip's source fails, what it prints); None: it passes."""
    program = compile(source, "<slip>", "exec")
    for place, case in enumerate(cases):
        printed = _printed(program, case["input"])
        if printed.split() != case["output"].split():
            return place, printed
    return None


def _printed(solution: CodeType, line: str) -> str:
    printed = io.StringIO()
    exec(solution, {"input": line.rstrip, "print": partial(print, file=printed)})
    return printed.getvalue()


def _line(value: Any) -> str:
    return (" ".join(map(str, value)) if isinstance(value, list) else str(value)) + "\n"


def _word(rng: Random, letters: str = "abcdeefghiijklmnooprstuvwxyz", longest: int = 8) -> str:
    return "".join(rng.choices(letters, k=rng.randint(3, longest)))


def _mirrored(rng: Random, lo: int, hi: int) -> str:
    half = _word(rng, "abc", 4)
    return half + (half[::-1] if rng.random() < 0.5 else _word(rng, "abc", 4))


def _brackets(rng: Random, lo: int, hi: int) -> str:
    """Balanced brackets, unbalanced ones, and ones balanced only in number."""
    text = ""
    for _ in range(rng.randint(2, 5)):
        text = f"({text})" if rng.random() < 0.5 else f"{text}()"
    if rng.random() < 0.5:
        mixed = list(text)
        rng.shuffle(mixed)
        text = "".join(mixed)
    return text if rng.random() < 0.7 else text + rng.choice("()")


def _integers(rng: Random, lo: int, hi: int, least: int, most: int) -> list[int]:
    return [rng.randint(lo, hi) for _ in range(rng.randint(least, most))]


# Generators of inputs: functions from (rng, low, high) to a value. Texts ignore the range.
SHAPES: dict[str, Callable[[Random, int, int], Any]] = {
    "number": lambda rng, lo, hi: rng.randint(lo, hi),
    "pair": lambda rng, lo, hi: _integers(rng, lo, hi, 2, 2),
    "numbers": lambda rng, lo, hi: _integers(rng, lo, hi, 1, 8),
    "long": lambda rng, lo, hi: _integers(rng, lo, hi, 6, 12),
    "word": lambda rng, lo, hi: _word(rng),
    "runs": lambda rng, lo, hi: _word(rng, "ab" if rng.random() < 0.5 else "abc", 9),
    "mirrored": _mirrored,
    "text": lambda rng, lo, hi: [_word(rng) for _ in range(rng.randint(2, 6))],
    "words": lambda rng, lo, hi: [_word(rng, "abcd", 7) for _ in range(2)],
    "brackets": _brackets,
}
