"""What is refused by its size before any parser sees it: one pass over the text each."""

from __future__ import annotations

import re

MAX_LENGTH = 1000
MAX_NESTING = 25
MAX_ITEMS = 64
MAX_CELLS = 100
MAX_DIGITS = 1000
MAX_OPERATORS = 150

_OPERATOR = re.compile(r"[-+*/^_=<>!|%]|\\[A-Za-z]+")
_CHOOSE = re.compile(r"\\[dt]?binom|\\choose|\\brace|\\brack")


def nesting(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


def too_large(text: str) -> str:
    """Why this may not reach the parser, or nothing. Values are bounded later, by `values`; here
    is what costs while it is parsed, or is computed there."""
    if sum(1 for _ in _OPERATOR.finditer(text)) > MAX_OPERATORS:
        return f"more than {MAX_OPERATORS} operators"
    if text.count("&") > MAX_CELLS:
        return f"a matrix of more than {MAX_CELLS} cells"
    if _CHOOSE.search(text) and re.search(r"\d{4}|\^|!", text):
        return "a binomial coefficient is too large"
    return ""
