"""Chains of arithmetic, the basis of every sum and story.

A chain is a list of steps (a, op, b, result); each step starts from the previous result. All values
are non-negative integers, and divisions are exact. A chain's difficulty is a level from 1 to 8: a
higher level has more steps and larger numbers, like synthetic arithmetic of GSM-like generators.
"""

from __future__ import annotations

from random import Random

from .language import pick

Step = tuple[int, str, int, int]

# By level, from 1.
STEPS = (2, 2, 3, 3, 4, 4, 5, 6)
OPERAND = (9, 20, 30, 50, 99, 200, 500, 999)
CEILING = (200, 200, 200, 200, 1000, 1000, 10000, 10000)
FACTOR = (3, 4, 5, 5, 6, 9, 9, 12)
LEVELS = (1, len(STEPS))

# Mostly additions and subtractions; a product and a quotient occur at most once in a chain.
_OPS = "++++----**/"


def apply(a: int, op: str, b: int) -> int:
    if op == "+":
        return a + b
    if op == "-":
        return a - b
    return a * b if op == "*" else a // b


def chain(
    rng: Random,
    level: int,
    low: int = 0,
    factors: tuple[int, ...] = (),
    divisors: tuple[int, ...] = (),
) -> list[Step]:
    """A chain of the given level.

    Args:
        rng: source of randomness.
        level: from 1 to 8.
        low: minimum of every result (stories need plurals).
        factors: allowed factors; if empty, 2 to the level's maximum.
        divisors: allowed divisors; if empty, 2 to the level's maximum.
    """
    top, ceiling = OPERAND[level - 1], CEILING[level - 1]
    small = tuple(range(2, FACTOR[level - 1] + 1))
    ops = _OPS
    value = 2 + int(rng.random() * (top - 1))
    steps: list[Step] = []
    for _ in range(STEPS[level - 1]):
        op = pick(rng, ops)
        choices: list[int] = []
        if op == "*":
            choices = [f for f in factors or small if value * f <= ceiling]
        elif op == "/":
            choices = [d for d in divisors or small if value % d == 0 and value // d >= max(low, 1)]
        if choices:
            ops = ops.replace(op, "")
            b = pick(rng, choices)
        else:
            room, taken = min(top, ceiling - value), min(top, value - low)
            if (op == "-" and taken >= 2) or room < 2:
                op, limit = "-", taken
            else:
                op, limit = "+", room
            b = 2 + int(rng.random() * (limit - 1))
        steps.append((value, op, b, apply(value, op, b)))
        value = steps[-1][3]
    return steps


def expression(steps: list[Step]) -> str:
    """The chain as one expression with no redundant brackets, e.g. `(17 + 25) * 2 - 9`."""
    text, additive = str(steps[0][0]), False
    for _, op, b, _ in steps:
        if op in "*/" and additive:
            text = f"({text})"
        additive = op in "+-"
        text = f"{text} {op} {b}"
    return text
