"""What others read of a response: its conclusion, the answer in it, and its checked quotes.

An agent quotes between `<quote>` and `</quote>`. What others read is `<v_passage>` if the article
holds this text, else `<u_passage>` (arXiv 2407.04622): one changed character makes a quote
unverified. Only white space may differ, and the Unicode form of equal characters.

An agent that writes `<v_passage>` itself gains nothing: each of the three tags opens a quote, which
is checked, and anything else that looks like a mark is removed. What others read is a single line,
so a line break cannot fake another speaker's turn.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from string import ascii_uppercase

from tramontane.asking import conclusion, conclusion_span
from tramontane_oversight.transcript import LETTERS

# Emphasis, quotation marks and brackets before a letter.
_BEFORE = r"[\s*_`\"'“‘«(\[{$]*(?:\\text\w*\{)?"
_LETTER = re.compile(
    rf"\\boxed\{{{_BEFORE}(?P<boxed>[A-Z])[\W_]*\}}"
    rf"|(?i:\banswer\b)[\s*_`]*(?:[:：=–—-]|(?i:is)\b\s*:?){_BEFORE}(?P<stated>[A-Z])(?![^\W_])"
    rf"|\A{_BEFORE}(?P<alone>[A-Z])(?![^\W_])"
)
_GOES_ON = re.compile(r"[ \t]+\w|[-/'’]\w|_+[^\W_]")  # then a letter is not an answer: "A man"
_NUMBER = re.compile(r"\d+")
_TAG = re.compile(r"<\s*(/?)\s*(?:quote\b|[uv]_passage)[^<>]*>", re.IGNORECASE)
_PASSAGE = re.compile(r"<(v|u)_passage>(.*?)</\1_passage>", re.DOTALL)
# The word of a mark in any spelling, with its brackets. `au passage` is an honest word.
_MARK = re.compile(
    r"(?:(?:<|&lt;?)[^\w<>]*|(?<![^\W_]))[uv][\W_]*passage(?:[^\w<>]*(?:>|&gt;?))?", re.IGNORECASE
)
_INVISIBLE = ("Cf", "Cc")  # Unicode categories: format and control characters


def letter_place(text: str, choices: Sequence[str] = ()) -> tuple[int, int] | None:
    r"""(side, position in the text) of a response's answer: the last `Answer: A`, `The answer is A`
    or `\boxed{A}` after the thoughts, or a letter alone; None without an answer.

    Emphasis, quotation marks and brackets around the letter are ignored. A letter followed by words
    is not an answer, since `A man` may be the other one, unless the words are its choice.

    Args:
        text: the response.
        choices: texts of the answers, if known; otherwise there are two.
    """
    start, end = conclusion_span(text)
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


def check_quotes(argument: str, article: str | None) -> str:
    """An argument on one line, with each quote marked as verified or unverified.

    White space around a quote is not part of it. An empty quote disappears, and so does a tag
    without its partner. Without an article every quote is unverified.
    """
    argument = _cleaned(_one_line(argument), quotes=True)
    source = None if article is None else _article_on_one_line(article)
    tags = _tags(argument)
    pieces, end = list[str](), 0
    for opening, closing in zip(tags[::2], tags[1::2], strict=True):
        quote = argument[opening.end() : closing.start()].strip()
        mark = "v" if source is not None and quote in source else "u"
        pieces += [argument[end : opening.start()], f"<{mark}_passage>{quote}</{mark}_passage>"]
        end = closing.end()
    return "".join([*pieces, argument[end:]])


def without_marks(text: str) -> str:
    """A text on one line, without quotes' tags and anything that could be read as a mark: what
    others read of participants whose quotes are not checked."""
    return _cleaned(_one_line(text), quotes=False).strip()


def quotes_of(argument: str) -> list[bool]:
    """For each quote of an argument from `check_quotes`, whether it is verified."""
    return [mark == "v" for mark, _ in _PASSAGE.findall(argument)]


def _one_line(text: str) -> str:
    """The text with single spaces for all white space, composed, and without characters that do
    not show."""
    if text.isascii() and text.isprintable():  # nothing to remove, and nothing to compose
        return " ".join(text.split())
    shown = (c for c in text if c.isspace() or unicodedata.category(c) not in _INVISIBLE)
    return unicodedata.normalize("NFC", " ".join("".join(shown).split()))


_article_on_one_line = lru_cache(maxsize=128)(_one_line)  # which many arguments quote


def _plain(text: str) -> str:
    """The text in which other forms of ASCII characters, e.g. full-width ones, are the ASCII ones;
    every character keeps its place."""
    return text if text.isascii() else "".join(map(_ascii, text))


@lru_cache(maxsize=4096)
def _ascii(character: str) -> str:
    plain = unicodedata.normalize("NFKC", character)
    return plain if len(plain) == 1 and plain.isascii() else character


def _tags(text: str) -> list[re.Match[str]]:
    return list(_TAG.finditer(_plain(text)))


def _pairs(text: str, tags: list[re.Match[str]]) -> list[re.Match[str]]:
    """The tags around a non-empty quote."""
    return [
        tag
        for first, second in pairwise(tags)
        if not first[1] and second[1] and text[first.end() : second.start()].strip()
        for tag in (first, second)
    ]


def _cleaned(text: str, *, quotes: bool) -> str:
    """The text without marks, except the tags of its `quotes`.

    Repeated, since the remaining text may form another mark.
    """
    while True:
        tags = _tags(text)
        kept = _pairs(text, tags) if quotes else []
        removed = [tag for tag in tags if tag not in kept] or _other_marks(text, tags)
        if not removed:
            return text
        pieces, end = list[str](), 0
        for mark in removed:
            pieces.append(text[end : mark.start()])
            end = mark.end()
        text = "".join([*pieces, text[end:]])


def _other_marks(text: str, tags: list[re.Match[str]]) -> list[re.Match[str]]:
    """What could be read as a mark between the tags."""
    plain = _plain(text)
    starts = [0, *(tag.end() for tag in tags)]
    ends = [*(tag.start() for tag in tags), len(text)]
    return [
        mark
        for start, end in zip(starts, ends, strict=True)
        for mark in _MARK.finditer(plain, start, end)
    ]
