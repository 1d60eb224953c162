"""Answers in words: choice letters and text, compared as words and never as algebra."""

from __future__ import annotations

import re

_LETTER = re.compile(r"\(?([A-Z])\)?")
_LETTER_WITH_TEXT = re.compile(r"\(?([A-Z])([).:]?)(?:\s+|(?<=\W)|(?=\\))(\S.*)", re.DOTALL)
WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
)
_FUNCTIONS = re.compile(
    r"\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|max|min|arc\w+|mod|gcd|lcm)\b"
)
_CHOICE_NAME = re.compile(r"\s*(?:option|choice|answer)\s*:?\s+(?=\(?[A-Z]\b)", re.IGNORECASE)


def choice(gold: str, pred: str) -> bool | None:
    """Compare choice letters: `C`, `(C)`, `\\text{(C)}`, and a letter with its option's text.

    None if a side is not a choice.
    """
    gold, pred = (_CHOICE_NAME.sub("", unwrap(side)) for side in (gold, pred))
    g, p = _LETTER.fullmatch(gold), _LETTER.fullmatch(pred)
    if g and p:
        return g[1] == p[1]
    if g and (option := _option(pred)):
        return g[1] == option[0] and not re.search(r"\b[A-Z]\b|\b(?:or|not)\b", option[1])
    if p and (option := _option(gold)):
        return p[1] == option[0]
    return None


def _option(text: str) -> tuple[str, str] | None:
    """A letter and its option's text, of `C) 12`, `(C) Cecile`, `C Cecile`; None of `C + 12`."""
    match = _LETTER_WITH_TEXT.fullmatch(text)
    if match is None or not (match[2] or _is_words(match[3])):
        return None
    return match[1], match[3]


_OPERATORS = re.compile(r"^\s*-|[|+*/^<>=~]|!\s*[\w=]")  # -abc and |abc| are not abc


def same_text(gold: str, pred: str) -> bool | None:
    """Compare with a reference in words, case aside; None where the reference is not words."""
    bare = unwrap(gold)
    if not _is_words(bare):
        return None
    return _words(bare) == _words(unwrap(pred)) and not _OPERATORS.search(unwrap(pred))


def unwrap(text: str) -> str:
    """Replace text commands such as `\\text{…}` by their content."""
    return WRAPPER.sub(r" \1 ", text).strip()


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.casefold())


def _is_words(text: str) -> bool:
    """True for words, false for a product of variables.

    Words consist of letters; in ASCII, one word has at least three letters and a vowel.
    """
    if not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[ ,.;:'()!?-])*", text) or _FUNCTIONS.search(text):
        return False
    longest = max(_words(text), key=len)
    if not longest.isascii():
        return True
    return len(longest) >= 3 and bool(re.search("[aeiouy]", longest))
