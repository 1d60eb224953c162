"""Selects the most discriminating tests: those on which wrong programs fail.

Training uses few tests of a problem (the paper: 20), and random ones let many wrong programs pass.
Wrong programs are those that the source or the votes call wrong, and mutants of right solutions:
one small change each, as in typical wrong submissions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from random import Random

from tramontane.data.code import Solution

# Pattern and replacement, for Python and C++ alike. Every test detects a change that breaks
# everything, so that does not matter.
_CHANGES = [
    (r"<=", "<"), (r">=", ">"), (r"(?<![<>=!-])>(?![>=])", ">="), (r"(?<![<=])<(?![<=])", "<="),
    (r"(?<![<>=!])==(?!=)", "!="), (r"\bmax\b", "min"), (r"\bmin\b", "max"), (r"\band\b", "or"),
    (r"\bor\b", "and"), (r"&&", "||"), (r"\|\|", "&&"), (r"\babs\(", "("), (r"\bnot ", ""),
    (r"(?<=[\w\])] )\+(?= [\w(])", "-"), (r"(?<=[\w\])])\+(?=[\w(])", "-"),
    (r"\bsorted\(", "list("),
    (r"\bset\(", "list("), (r"\.sort\(\)", ".copy()"), (r"\[::-1\]", ""), (r"//", "/"),
    (r"\b(?:long long|int64_t)\b", "int"), (r"\bll\b", "int"), (r"\blong double\b", "float"),
    (r"\belif\b", "if"), (r"\belse if\b", "if"), (r"\bbreak\b", "pass"), (r"\bcontinue\b", "break"),
]  # fmt: skip
_NUMBER = re.compile(r"(?<![\w.])\d{1,9}(?![\w.])")


def mutants(solutions: Sequence[Solution], count: int, seed: str) -> list[Solution]:
    """Up to `count` programs, each a solution with one operator, name or number changed."""
    rng, found = Random(seed), dict.fromkeys(solutions)
    places = [place for solution in solutions for place in _places(solution)]
    for solution, start, end, text in rng.sample(places, len(places)):
        if len(found) == len(solutions) + count:
            break
        code = solution.code[:start] + text + solution.code[end:]
        found.setdefault(Solution(solution.language, code))
    return list(found)[len(dict.fromkeys(solutions)) :]


def _places(solution: Solution) -> list[tuple[Solution, int, int, str]]:
    """Every change of a solution, as (solution, start, end, replacement)."""
    found = []
    for pattern, text in _CHANGES:
        spans = [match.span() for match in re.finditer(pattern, solution.code)]
        found += [(solution, *span, text) for span in spans]
    for match in _NUMBER.finditer(solution.code):
        near = int(match[0]) + 1, int(match[0]) - 1
        found += [(solution, *match.span(), str(number)) for number in near]
    return found


def most_telling(
    failed: Sequence[set[int]], sizes: Sequence[int], count: int, before: Sequence[set[int]] = ()
) -> list[int]:
    """`count` of the tests, in order: the one with the largest input, on which slow programs fail,
    then repeatedly the one that rejects most wrong programs not yet rejected.

    Args:
        failed: by test, the numbers of the wrong programs that fail on it.
        sizes: by test, the length of its input.
        count: number of tests to choose.
        before: the same for tests already chosen.
    """
    tests = range(len(failed))
    rarity = Counter(program for programs in (*failed, *before) for program in programs)
    found = Counter(program for programs in before for program in programs)
    chosen: list[int] = []

    def worth(test: int) -> tuple[bool, float, int, int]:
        largest = not chosen and not before and sizes[test] == max(sizes)
        # A program rejected by few tests counts most, and less each time it is rejected.
        gain = sum(1 / rarity[program] / 4 ** found[program] for program in failed[test])
        return largest, gain, sizes[test], -test

    while len(chosen) < min(count, len(failed)):
        best = max((test for test in tests if test not in chosen), key=worth)
        chosen.append(best)
        found.update(failed[best])
    return sorted(chosen)
