"""Combinations and permutations: `C(5,2)`, `{}_5C_2`, `C_5^2` and, only alone, `5C2`, `P(5,2)`."""

from __future__ import annotations

import math
import re

_KIND = r"(?P<kind>[ACP]|\\(?:text|mathrm|operatorname)\s*\{\s*[ACP]\s*\})\s*"
_TAKEN = r"(?:\{[^{}]{1,12}\}|\d{1,3}|[a-z])\s*"
_COUNTS = [
    re.compile(pattern)
    for pattern in (
        rf"(?<![A-Za-z\\]){_KIND}\((?P<n>[^(){{}},;]{{1,12}}),(?P<k>[^(){{}},;]{{1,12}})\)",
        rf"(?:\{{\s*\}}|^|(?<=[-+*/(,{{]))\s*[_^]\s*(?P<n>{_TAKEN}){_KIND}_\s*(?P<k>{_TAKEN})",
        rf"(?<![A-Za-z\\]){_KIND}_\s*(?P<n>{_TAKEN})\^\s*(?P<k>{_TAKEN})",
        rf"(?<![A-Za-z\\]){_KIND}\^\s*(?P<k>{_TAKEN})_\s*(?P<n>{_TAKEN})",
        rf"^(?P<n>\d{{1,3}})\s*{_KIND}_?\s*(?P<k>{_TAKEN})$",
    )
]
MAX_COUNTED = 999


def with_counts(text: str, other: str) -> str:
    r"""An answer with its combinations and permutations as numbers: 10 for `C(5,2)`, `C_5^2`,
    `{}_5C_2` and `5C2`; 20 for `P(5,2)`, `5P2` and `A_5^2`, which must stand alone.

    `C_5^2` may be the square of a constant, so it is left where the answer has other letters. If
    the `other` side shows a binomial coefficient, `C(n,k)` is one too.
    """
    if not re.search("[ACP]", text):
        return text
    if alone := next((m for pattern in _COUNTS if (m := pattern.fullmatch(text))), None):
        counted = _counted(alone, other)
        return counted[1:-1] if counted.startswith("(") else counted

    def combination(m: re.Match[str]) -> str:
        return _counted(m, other) if "C" in m["kind"] else m[0]

    for pattern in _COUNTS[:2]:
        text = pattern.sub(combination, text)
    counted = text
    for pattern in _COUNTS[2:4]:
        counted = pattern.sub(combination, counted)
    return text if re.search(r"(?<![\\A-Za-z])[A-Za-z]", counted) else counted


def _counted(m: re.Match[str], other: str) -> str:
    kind = "C" if "C" in m["kind"] else "P"
    n, k = (m[name].strip(" {}") for name in "nk")
    if not (n.isdecimal() and k.isdecimal()):
        return rf"\binom{{{n}}}{{{k}}}" if kind == "C" and "\\binom" in other else m[0]
    if kind == "C" and "," in m[0] and int(n) > MAX_COUNTED and int(k) <= int(n):
        return rf"\binom{{{n}}}{{{k}}}"
    if not int(k) <= int(n) <= MAX_COUNTED or ("A" in m["kind"] and "(" in m[0]):
        return m[0]
    return f"({(math.comb if kind == 'C' else math.perm)(int(n), int(k))})"
