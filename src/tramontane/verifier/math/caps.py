"""Size limits of maths answers, checked before any parsing, each in one pass over the text."""

from __future__ import annotations

import re

MAX_LENGTH = 1000
MAX_NESTING = 8  # the parser's time at least doubles with each level
MAX_ITEMS = 64
MAX_CELLS = 100
MAX_TOKENS = 300
MAX_OPERATORS = 150
MAX_CHAIN = 12  # consecutive commands, and a third of it for exponents, which nest like brackets

_OPERATOR = re.compile(r"[-+*/^_=<>!|%]|\\[A-Za-z]+")
_TOKEN = re.compile(r"\\[A-Za-z]+|\d+|\S")
_CHAIN = re.compile(
    rf"(?:\\[A-Za-z]+\s?){{{MAX_CHAIN}}}|(?:\^\s?\{{?\w+\}}?\s?){{{MAX_CHAIN // 3}}}"
)
_CHOOSE = re.compile(r"\\[dt]?binom|\\choose|\\brace|\\brack")


def nesting(text: str) -> int:
    """The depth of the deepest bracket, of any kind."""
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


def too_large(text: str) -> str:
    """Why an answer must not be passed to the parser; empty if it may.

    These limits bound the cost of parsing, and of functions computed while parsing. The size of
    values is bounded later, in `values`.
    """
    if sum(1 for _ in _OPERATOR.finditer(text)) > MAX_OPERATORS:
        return f"more than {MAX_OPERATORS} operators"
    if sum(1 for _ in _TOKEN.finditer(text)) > MAX_TOKENS:
        return f"more than {MAX_TOKENS} symbols"
    if _CHAIN.search(text):
        return "a chain of functions or exponents"
    if text.count("&") > MAX_CELLS:
        return f"a matrix of more than {MAX_CELLS} cells"
    if _CHOOSE.search(text) and re.search(r"\d{4}|\^|!", text):
        return "a binomial coefficient is too large"
    return ""
