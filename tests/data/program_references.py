"""The playground's program tasks as functions, independent of their solutions' texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import combinations, groupby
from typing import Any


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
