"""Days, times of day and ordinals: `March 15, 2021` is `15 March 2021`, `7:30 PM` is `19:30`, and
`3rd` is `third`."""

from __future__ import annotations

import re

from tramontane.verifier.math.wording import unwrap

_MONTHS = "january february march april may june july august september october november december"
_NUMBER = {m[:3]: n for n, m in enumerate(_MONTHS.split(), 1)}
_MONTH = "(?:" + "|".join(f"{m[:3]}(?:{m[3:]})?" for m in _MONTHS.split()) + r"|sept)\.?"
_WEEKDAY = r"(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day,?\s+)?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_DATES = (
    re.compile(rf"{_WEEKDAY}(?P<month>{_MONTH})\s+(?:the\s+)?{_DAY}(?:,?\s*(?P<year>\d{{4}}))?"),
    re.compile(
        rf"{_WEEKDAY}(?:the\s+)?{_DAY}\s+(?:of\s+)?(?P<month>{_MONTH}),?(?:\s*(?P<year>\d{{4}}))?"
    ),
    re.compile(r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)"),
    re.compile(r"(?:(?P<year>\d{4})\s*年\s*)?(?P<month>\d\d?)\s*月\s*(?P<day>\d\d?)\s*[日号]"),
)
_TIME = re.compile(r"(\d{1,2})(?:[:.](\d\d))?\s*(?:([ap])\.?\s*m\.?)?")
_NAMED_TIMES = {"noon": 720, "12:00": 720, "12 noon": 720, "midnight": 0, "12 midnight": 0}
_ORDINAL = re.compile(r"(\d{1,9})(?:st|nd|rd|th)")
_SUFFIX = re.compile(r"\s*\^?\s*\{?\s*(st|nd|rd|th)\s*\}?$")
_WORDS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
_ORDINALS = {word: number for number, word in enumerate(_WORDS.split(), 1)}


def same_day(gold: str, pred: str) -> bool | None:
    """Compare dates, times of day, or ordinals; None unless both sides are of one kind, or one is
    an ordinal in digits and the other an integer."""
    if not (re.search(r"[^\W\d_]{2}|:", gold) and re.search(r"[\d\w]", pred)):
        return _same_ordinal(gold, pred) if gold.isdigit() else None
    for same in (_same_date, _same_time, _same_ordinal):
        if (decided := same(gold, pred)) is not None:
            return decided
    return None


def _same_date(gold: str, pred: str) -> bool | None:
    dates = [_read_date(" ".join(unwrap(side).lower().split())) for side in (gold, pred)]
    return None if None in dates else dates[0] == dates[1]


def _read_date(text: str) -> tuple[int, int, str | None] | None:
    match = next(filter(None, (date.fullmatch(text) for date in _DATES)), None)
    if match is None:
        return None
    month = match["month"]
    number = int(month) if month.isdigit() else _NUMBER[month[:3]]
    return number, int(match["day"]), match["year"]


def _same_time(gold: str, pred: str) -> bool | None:
    """Compare in minutes; only a time with `am` or `pm` is known to be one."""
    sides = [" ".join(unwrap(side).lower().split()) for side in (gold, pred)]
    times = [_NAMED_TIMES.get(side, _read_time(side)) for side in sides]
    is_known = any(side in _NAMED_TIMES or side.rstrip(".").endswith("m") for side in sides)
    return times[0] == times[1] if is_known and None not in times else None


def _read_time(text: str) -> int | None:
    match = _TIME.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        return None
    hours, minutes = int(match[1]), int(match[2] or 0)
    if match[3] and 1 <= hours <= 12:
        hours = hours % 12 + 12 * (match[3] == "p")
    elif match[3] or (0 < hours < 13 and match[1][0] != "0"):  # 7:30 may be either, 07:30 not
        return None
    return 60 * hours + minutes if hours < 24 and minutes < 60 else None


def _same_ordinal(gold: str, pred: str) -> bool | None:
    plain = [_SUFFIX.sub(r"\1", unwrap(side).lower()).strip() for side in (gold, pred)]
    in_digits = [_ORDINAL.fullmatch(side) for side in plain]
    if not any(in_digits):
        return None
    numbers = [
        match[1] if match else str(_ORDINALS.get(side, side))
        for match, side in zip(in_digits, plain, strict=True)
    ]
    return numbers[0] == numbers[1] if all(map(str.isdigit, numbers)) else None
