r"""Sets of numbers in words: `all odd integers`, `n \text{ is odd}`."""

from __future__ import annotations

import re

_KINDS = (
    "positive|negative|non-?negative|non-?zero|odd|even|prime|composite|real|rational|irrational"
    "|natural|whole"
)
_NOUNS = "integers?|numbers?|primes?|reals?|rationals?"
_SET = re.compile(
    r"(?:for )?(?P<all>all |any |every |each |the set of (?:all )?|the )?"
    rf"(?P<kinds>(?:(?:{_KINDS}),? )*)"
    rf"(?P<noun>{_NOUNS})?(?: ?(?P<letter>[a-z]))?"
)
_OF_LETTER = re.compile(
    rf"(?P<letter>[a-z]) (?:(?:is|are|must be|can be|be) )?(?:(?:an?|any|all) )?"
    rf"(?P<kinds>(?:(?:{_KINDS})(?:,? |$))+)(?P<noun>{_NOUNS})?"
)
_MULTIPLES = re.compile(r"(?:all )?(?:the )?(positive )?(?:integer )?multiples of (\d{1,9})")
_WHOLE = {"odd", "even", "prime", "composite"}
_NOTATION = {
    frozenset({"real"}): r"\mathbb{R}",
    frozenset({"integer"}): r"\mathbb{Z}",
    frozenset({"positive", "integer"}): r"\mathbb{Z}_{>0}",
    frozenset({"nonzero", "integer"}): r"\mathbb{Z}\setminus\{0\}",
    frozenset({"nonzero", "real"}): r"\mathbb{R}\setminus\{0\}",
    frozenset({"positive", "real"}): r"(0, \infty)",
    frozenset({"negative", "real"}): r"(-\infty, 0)",
    frozenset({"nonnegative", "real"}): r"[0, \infty)",
    frozenset({"natural"}): r"\mathbb{N}",
    frozenset({"rational"}): r"\mathbb{Q}",
}
_FAMILIES = {
    r"\text{all even}": r"2k, k\in\mathbb{Z}",
    r"\text{all odd}": r"2k+1, k\in\mathbb{Z}",
    r"\text{all even positive}": r"2k, k\in\mathbb{Z}_{>0}",
    r"\text{all odd positive}": r"2k-1, k\in\mathbb{Z}_{>0}",
}


def canonical(words: str) -> str:
    r"""One spelling for a set of numbers: `\text{all odd}`, `\mathbb{Z}`; empty for other words.

    Args:
        words: text in lower case, without commands and a final full stop.
    """
    match = _SET.fullmatch(words)
    if match is not None:
        named = match["noun"] or ""
        is_whole = bool(match["kinds"] and match["letter"])  # odd n
        is_set = match["all"] or named.endswith("s") or is_whole
        if not is_set or not (match["kinds"] or named) or not (named or match["letter"]):
            return ""
    elif (match := _OF_LETTER.fullmatch(words)) is None:
        return ""
    kinds = set(re.findall(_KINDS, match["kinds"]))
    kinds = {kind.replace("-", "") for kind in kinds} | _of_noun(match["noun"] or "")
    if kinds & _WHOLE:
        kinds -= {"integer", "natural", "whole"} if "natural" not in kinds else {"integer"}
    elif not kinds & {"integer", "real", "rational", "irrational", "natural", "whole"}:
        return ""  # positive numbers: of which kind?
    if "natural" in kinds:
        kinds -= {"integer"}
    return _NOTATION.get(frozenset(kinds), rf"\text{{all {' '.join(sorted(kinds))}}}")


def letter_of(words: str) -> str:
    """The letter that a set of numbers in words is about, n of `odd n` and `n is odd`; else
    empty."""
    match = _OF_LETTER.fullmatch(words) or _SET.fullmatch(words)
    return (match["letter"] or "") if match and match["kinds"] else ""


def _of_noun(noun: str) -> set[str]:
    singular = noun.removesuffix("s")
    return {singular} if singular in ("integer", "prime", "real", "rational") else set()


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", re.sub(r"\\(?:text|mathrm)\b", " ", text).lower())


def as_families(reference: str, prediction: str, gold: str, pred: str) -> tuple[str, str]:
    r"""Both answers as written, with `2k+1, k\in\mathbb{Z}` for odd integers in words if the other
    is not in words.

    Args:
        reference: as written.
        prediction: as written.
        gold: the reference normalized.
        pred: the prediction normalized.
    """
    several: list[re.Match[str] | None] = []
    if "positive" in reference or "positive" in prediction:
        several = [_MULTIPLES.fullmatch(" ".join(_words(side))) for side in (reference, prediction)]
    if any(m and m[1] for m in several):
        reference, prediction = (
            rf"{m[2]}k, k\in\mathbb{{Z}}{'_{>0}' if m[1] else ''}" if m else side
            for m, side in zip(several, (reference, prediction), strict=True)
        )
    if gold in _FAMILIES and pred not in _FAMILIES and "all" not in pred:
        return _FAMILIES[gold], prediction
    if pred in _FAMILIES and gold not in _FAMILIES and "all" not in gold:
        return reference, _FAMILIES[pred]
    return reference, prediction
