"""Checks quotes in arguments against the article, and marks them so that the marks cannot be
forged.

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
from functools import lru_cache
from itertools import pairwise

_TAG = re.compile(r"<\s*(/?)\s*(?:quote\b|[uv]_passage)[^<>]*>", re.IGNORECASE)
_PASSAGE = re.compile(r"<(v|u)_passage>(.*?)</\1_passage>", re.DOTALL)
# The word of a mark in any spelling, with its brackets. `au passage` is an honest word.
_MARK = re.compile(
    r"(?:(?:<|&lt;?)[^\w<>]*|(?<![^\W_]))[uv][\W_]*passage(?:[^\w<>]*(?:>|&gt;?))?", re.IGNORECASE
)
_INVISIBLE = ("Cf", "Cc")  # Unicode categories: format and control characters


def check_quotes(argument: str, article: str | None) -> str:
    """An argument on one line, with each quote marked as verified or unverified.

    White space around a quote is not part of it. An empty quote disappears, and so does a tag
    without its partner. Without an article every quote is unverified.
    """
    argument = _cleaned(_one_line(argument), quotes=True)
    source = None if article is None else _one_line(article)
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


def count_quotes(argument: str) -> tuple[int, int]:
    """(verified, unverified) quotes of an argument from `check_quotes`."""
    marks = [mark for mark, _ in _PASSAGE.findall(argument)]
    return marks.count("v"), marks.count("u")


def _one_line(text: str) -> str:
    """The text with single spaces for all white space, composed, and without characters that do
    not show."""
    shown = (c for c in text if c.isspace() or unicodedata.category(c) not in _INVISIBLE)
    return unicodedata.normalize("NFC", " ".join("".join(shown).split()))


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
    """The text without marks, but for the tags of its `quotes`.

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
