"""Drills: series of bare equations, which teach a tiny model to add before it reads stories.

A worked trace has one equation per 25 tokens or so, and two thirds of the traces have none; a drill
has one per 12. Drills are not problems and are never graded.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from .arithmetic import Step
from .statements import sum_steps

PROMPT = "Practise mental arithmetic."


def drills(
    seed: int, count: int, levels: tuple[int, int], equations: int
) -> Iterator[tuple[str, str]]:
    """`count` pairs of a prompt and `equations` shuffled steps from chains of the given levels."""
    rng = Random(f"drills/{seed}")
    for _ in range(count):
        steps: list[Step] = []
        while len(steps) < equations:
            steps += sum_steps(rng, rng.randint(*levels))
        rng.shuffle(steps)
        yield PROMPT, " ".join(f"{a} {op} {b} = {c}." for a, op, b, c in steps[:equations])
