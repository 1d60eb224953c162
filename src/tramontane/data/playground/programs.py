"""Small Python tasks on stdin and stdout, with tests, in English.

A task's texts (statement, plan, solution, slips) are in `programs.yaml`. This module has the input
generators, and reference functions that compute the expected outputs independently of the
solution's text.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import combinations, groupby
from random import Random
from typing import Any

import yaml

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
    texts = yaml.safe_load((files(__package__) / "programs.yaml").read_text(encoding="utf-8"))
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
    task, reference = tasks()[program.name], REFERENCES[program.name]
    rng = Random(program.canonical)
    shape = SHAPES[task.input]
    inputs: dict[str, Any] = {}
    wanted = rng.randint(20, 24)
    while len(inputs) < wanted:
        value = shape(rng, *task.values)
        inputs.setdefault(_line(value), value)
    return [
        {"input": line, "output": _line(reference(value, **program.params))}
        for line, value in inputs.items()
    ]


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


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def _sequence(n: int, a: int, b: int) -> int:
    terms = [a, b]
    while len(terms) < n:
        terms.append(terms[-1] + terms[-2])
    return terms[n - 1]


def _collatz(n: int) -> int:
    if n == 1:
        return 0
    return 1 + _collatz(3 * n + 1 if n % 2 else n // 2)


def _in_base(n: int, k: int) -> str:
    return (_in_base(n // k, k) if n >= k else "") + str(n % k)


def _ways(n: int, coins: tuple[int, ...]) -> int:
    if len(coins) == 1:
        return int(n % coins[0] == 0)
    return sum(_ways(n - used, coins[1:]) for used in range(0, n + 1, coins[0]))


def _climb(n: int, k: int) -> int:
    ways = [1]
    for stair in range(1, n + 1):
        ways.append(sum(ways[max(0, stair - k) : stair]))
    return ways[n]


def _increasing(x: list[int]) -> int:
    tails: list[int] = []
    for value in x:
        place = sum(tail < value for tail in tails)
        tails[place : place + 1] = [value]
    return len(tails)


@lru_cache(maxsize=4096)
def _edit(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    replaced = _edit(a[1:], b[1:]) + (a[0] != b[0])
    return min(replaced, _edit(a[1:], b) + 1, _edit(a, b[1:]) + 1)


def _balanced(text: str) -> bool:
    while "()" in text:
        text = text.replace("()", "")
    return not text


def _survivor(n: int, k: int) -> int:
    place = 0
    for size in range(2, n + 1):
        place = (place + k) % size
    return place + 1


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"


REFERENCES: dict[str, Callable[..., Any]] = {
    "add": lambda x, k: sum(x, k),
    "times": lambda n, k: n * k,
    "remainder": lambda n, k: n - n // k * k,
    "larger": lambda x, k: max(x) - k,
    "repeat": lambda word, k: "".join([word] * k),
    "total": lambda x, k: sum(v * k for v in x),
    "multiples": lambda x, k: len([v for v in x if not v % k]),
    "reverse": lambda word: "".join(reversed(word)),
    "distance": lambda x, k: (max(x) - min(x)) * k,
    "last_digit": lambda n, k: str(n + k)[-1],
    "above": lambda x, k: len([v for v in x if v > k]),
    "spread": lambda x, k: max(x) - min(x) + k,
    "letter": lambda words, c: sum(word.count(c) for word in words),
    "vowels": lambda words: sum(word.count(c) for word in words for c in "aeiou"),
    "sum_to": lambda n, k: k * (n // k) * (n // k + 1) // 2,
    "power": lambda n, k: k**n,
    "gcd": lambda x, k: math.gcd(*x) * k,
    "factorial": lambda n, k: math.factorial(n) + k,
    "digits": lambda n, k: k * sum(map(int, str(n))),
    "palindrome": lambda word: _yes(word == "".join(reversed(word))),
    "sorted_plus": lambda x, k: sorted(v + k for v in x),
    "prime": lambda n, k: _yes(_is_prime(n + k)),
    "fibonacci": _sequence,
    "divisors": lambda n, k: len([d for d in range(k, n + 1) if n % d == 0]),
    "lcm": lambda x, k: math.lcm(*x) + k,
    "words": lambda words: list(reversed(words)),
    "run_length": lambda word: "".join(f"{c}{len(list(run))}" for c, run in groupby(word)),
    "caesar": lambda word, k: "".join(chr((ord(c) - ord("a") + k) % 26 + ord("a")) for c in word),
    "collatz": lambda n, k: _collatz(n) * k,
    "base": _in_base,
    "second": lambda x, k: max([v for v in x if v < max(x)], default=k),
    "prime_sum": lambda n, k: k * sum(filter(_is_prime, range(n + 1))),
    "window": lambda x, k: max(sum(x[i : i + k]) for i in range(len(x) - k + 1)),
    "most_common": lambda word: min(set(word), key=lambda c: (-word.count(c), c)),
    "brackets": lambda text: _yes(_balanced(text)),
    "pairs": lambda x, k: sum(a + b == k for a, b in combinations(x, 2)),
    "coins": lambda n, a, b: _ways(n, (b, a, 1)),
    "increasing": _increasing,
    "edit": lambda words: _edit(*words),
    "stairs": _climb,
    "circle": _survivor,
}
