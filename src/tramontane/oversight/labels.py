"""The answers in responses: a letter, a number, and the text after hidden thoughts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

from tramontane.oversight.questions import LETTERS
from tramontane.types import PAPER_TAGS

# Emphasis, quotation marks and brackets before a letter.
_BEFORE = r"[\s*_`\"'“‘«(\[{$]*(?:\\text\w*\{)?"
_LETTER = re.compile(
    rf"\\boxed\{{{_BEFORE}(?P<boxed>[A-Z])[\W_]*\}}"
    rf"|(?i:\banswer\b)[\s*_`]*(?:[:：=–—-]|(?i:is)\b\s*:?){_BEFORE}(?P<stated>[A-Z])(?![^\W_])"
    rf"|\A{_BEFORE}(?P<alone>[A-Z])(?![^\W_])"
)
_GOES_ON = re.compile(r"[ \t]+\w|[-/'’]\w|_+[^\W_]")  # then a letter is not an answer: "A man"
_NUMBER = re.compile(r"\d+")


def conclusion(text: str) -> str:
    """The part of a response after its thoughts, up to any further thoughts; empty if there are
    only thoughts."""
    start, end = _conclusion(text)
    return text[start:end].strip()


def letter_place(text: str, choices: Sequence[str] = ()) -> tuple[int, int] | None:
    r"""(side, position in the text) of a response's answer: the last `Answer: A`, `The answer is A`
    or `\boxed{A}` after the thoughts, or a letter alone; None without an answer.

    Emphasis, quotation marks and brackets around the letter are ignored. A letter followed by words
    is not an answer, since `A man` may be the other one, unless the words are its choice.

    Args:
        text: the response.
        choices: texts of the answers, if known; otherwise there are two.
    """
    start, end = _conclusion(text)
    shown = text[start:end]
    start += len(shown) - len(shown.lstrip())
    shown = shown.strip()
    letters = ascii_uppercase[: len(choices)] if choices else LETTERS
    for found in reversed(list(_LETTER.finditer(shown))):
        kind = str(found.lastgroup)
        side, rest = letters.find(found[kind]), shown[found.end(kind) :]
        choice = _bare(choices[side]) if choices else ""
        if side >= 0 and _is_answer(kind, rest, choice):
            return side, start + found.start(kind)
    return None


def letter_of(text: str, choices: Sequence[str] = ()) -> int | None:
    """The side that a response answers with; see `letter_place`."""
    place = letter_place(text, choices)
    return None if place is None else place[0]


def number_of(text: str, count: int) -> int | None:
    """The last number from 1 to `count` in a response's conclusion, as an index from 0."""
    numbers = [int(found) for found in _NUMBER.findall(conclusion(text))]
    return next((n - 1 for n in reversed(numbers) if 1 <= n <= count), None)


def _conclusion(text: str) -> tuple[int, int]:
    """Start and end of the conclusion."""
    closing = text.rfind(PAPER_TAGS.closing)
    start = closing + len(PAPER_TAGS.closing) if closing >= 0 else 0
    opening = text.find(PAPER_TAGS.opening, start)
    return start, opening if opening >= 0 else len(text)


def _is_answer(kind: str, rest: str, choice: str) -> bool:
    """True if a letter is the answer, given what follows it and the text of its choice."""
    if kind == "boxed":
        return True
    if kind == "alone":
        return _bare(rest) in ("", choice)
    return not _GOES_ON.match(rest) or bool(choice and _bare(rest).startswith(choice))


def _bare(text: str) -> str:
    """The text without leading and trailing characters other than letters and digits."""
    return re.sub(r"\A[\W_]+|[\W_]+\Z", "", text)
