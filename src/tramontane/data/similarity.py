r"""Similarity of two statements, and an index of the statements seen so far.

Statements are compared in a normal spelling, without changing them. Two with the same spelling are
exact duplicates. Near duplicates share most of their five-character pieces (Jaccard index). MinHash
(Broder, 1997) with locality-sensitive hashing over bands finds candidates, which are then compared
exactly. Math problems that differ in a number or a sign are different, so near duplicates must
have the same numbers and signs.

No library is used for the index: known ones hold a dictionary entry for each band and problem, and
cannot resume from a killed process's files. The sorted arrays here take 12 bytes per band and
problem.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
PIECE = 5  # characters
BANDS = 16
MAX_CANDIDATES = 64  # per statement, to bound the time for hostile sets
_SEED = 20_250_612

_SUPER = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_LAYOUT = re.compile(
    r"\\(?:(?:left|right|big{1,2}[lr]?|displaystyle|textstyle|limits|q?quad)(?![a-z])|[,;:!\s]"
    r"|(?:text|mathrm|textbf|mathbf|rm|bf|emph|textit)(?=\s*\{))\s*|~"
)
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,(?:\\!)?|\\,)(?=\d{3}(?!\d))")
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\[dtc]frac(?![a-z])", r"\\frac"),
        (r"\\(?:\(|\)|\[|\])|(?<!\\)\$", " "),
        (r"\\geq(?:slant)?(?![a-z])|≥", r"\\ge "),
        (r"\\leq(?:slant)?(?![a-z])|≤", r"\\le "),
        (r"\\(?:cdot|times)(?![a-z])|[×·]", r"\\times "),
        (r"[‐‑–—−]", "-"),
        (r"\{(\w)\}", r"\1"),
        (r"[.,;:](?!\d)|[?\"'‘’´`“”。，？]", " "),
    ]
]


def spelling(text: str) -> str:
    """A statement in normal spelling: NFKC, lower case, uniform spaces and LaTeX."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda m: f"^{m[0].translate(_SUPER)}", text)
    text = re.sub("(?<=[0-9])(?=[¼-¾⅐-⅞])", " ", text)  # 1½ is not 11/2
    text = unicodedata.normalize("NFKC", text).casefold()
    text = _LAYOUT.sub(" ", _THOUSANDS.sub("", text))
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"(?<!\w) | (?!\w)", "", text)  # "5 6" is not "56"


_NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty "
    "ninety hundred thousand million half third quarter twice thrice double triple"
)
_SIGNS = re.compile(
    r"\d+(?:\.\d+)?|[+*/=<>^]|(?<![a-z]{2})-|\\(?!frac|text|mathrm)[a-z]{2,}|(?<![a-z])(?:"
    + "|".join(_NUMBER_WORDS.split())
    + r")(?![a-z])"
)


def numbers(spelt: str) -> str:
    """The multiset of numbers, operators and LaTeX commands in a text in normal spelling, as one
    string."""
    return repr(sorted(Counter(_SIGNS.findall(spelt)).items()))


def pieces(spelt: str) -> Keys:
    """Sorted hashes, shape (pieces,), of the distinct five-character pieces of a text in normal
    spelling."""
    points = np.frombuffer(_words(spelt).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    if len(points) < PIECE:
        points = np.pad(points, (0, PIECE - len(points)))
    hashed = np.zeros(len(points) - PIECE + 1, dtype=np.uint64)
    for offset in range(PIECE):
        hashed = hashed * np.uint64(0x9E3779B97F4A7C15) + points[offset:][: len(hashed)]
    return np.unique(hashed)


def _words(spelt: str) -> str:
    """The text without punctuation: "find x!" becomes "find x"."""
    return re.sub(r"\s+", " ", re.sub(r"[^\w+*/=<>^\\-]+", " ", spelt)).strip()


def similarity(a: str, b: str) -> float:
    """The Jaccard index of the pieces of two texts in normal spelling."""
    first, second = pieces(a), pieces(b)
    common = len(np.intersect1d(first, second, assume_unique=True))
    return common / (len(first) + len(second) - common)


class Copy(NamedTuple):
    """A copy or near copy of an original: the original's index, and the similarity."""

    original: int
    similarity: float


class Originals:
    """Statements, and a search for copies of them.

    Args:
        statements: the originals.
        threshold, same_numbers: see `SimilarityIndex`.
    """

    def __init__(self, statements: Sequence[str], threshold: float, same_numbers: bool) -> None:
        self._index = SimilarityIndex(threshold, same_numbers)
        self._digits = {_digits(statement) for statement in statements}
        self._spelt = [spelling(statement) for statement in statements]
        keys = [self._index.keys(spelt) for spelt in self._spelt]
        self._index.add(np.array(keys, dtype=np.uint64), range(len(keys)))

    def copies(self, statements: Sequence[str]) -> list[Copy | None]:
        """For each statement, the first original that it copies, if any."""
        found: list[Copy | None] = [None] * len(statements)
        places: Sequence[int] = range(len(statements))
        if self._index.same_numbers:  # rules out most others, before the spelling, which is slow
            places = [place for place in places if _digits(statements[place]) in self._digits]
        spelt = {place: spelling(statements[place]) for place in places}
        if spelt:
            keys = np.array([self._index.keys(text) for text in spelt.values()], dtype=np.uint64)
            for (place, text), near in zip(spelt.items(), self._index.find(keys), strict=True):
                found[place] = self._copied(text, near)
        return found

    def _copied(self, spelt: str, near: Sequence[int]) -> Copy | None:
        index = self._index
        for item in near:
            other = self._spelt[item]
            likeness = 1.0 if other == spelt else similarity(other, spelt)
            same = not index.same_numbers or numbers(other) == numbers(spelt)
            if likeness >= index.threshold and same:
                return Copy(item, likeness)
        return None


THRESHOLD = 0.8  # similarity of near copies with the same numbers


def near_copies(statements: Sequence[str], originals: Sequence[str]) -> dict[int, Copy]:
    """The statements, by index, that are copies or near copies of originals, with a similarity of
    at least `THRESHOLD` and the same numbers."""
    copies = Originals(originals, THRESHOLD, same_numbers=True).copies(statements)
    return {place: copy for place, copy in enumerate(copies) if copy}


def _digits(text: str) -> str:
    """The digits of a statement, sorted: equal if `numbers` are."""
    return "".join(sorted(re.sub(r"\D", "", unicodedata.normalize("NFKC", text))))


class SimilarityIndex:
    """Finds candidates for duplicates among the statements added so far.

    Args:
        threshold: minimum similarity of near duplicates. A pair exactly at the threshold is found
            with probability 0.99, a more similar pair with a higher probability.
        same_numbers: find only pairs with the same `numbers`.
    """

    def __init__(self, threshold: float, same_numbers: bool) -> None:
        self.threshold = threshold
        self.same_numbers = same_numbers
        # 1 − (1 − tʳ)ᵇ ≥ 0.99, solved for the rows r of a band.
        rows = np.log(1 - 0.01 ** (1 / BANDS)) / np.log(threshold) if threshold < 1 else 0
        self.rows = int(rows)
        random = np.random.default_rng(_SEED)
        size = BANDS * self.rows
        self._multiply = random.integers(2**63, size=size, dtype=np.uint64) | np.uint64(1)
        self._add = random.integers(2**63, size=size, dtype=np.uint64)
        self._tables = [_Table() for _ in range(BANDS + 1 if self.rows else 1)]

    def keys(self, spelt: str, kind: str = "") -> Keys:
        """A statement's keys, shape (1 + bands,): its hash, and one hash for each band.

        Statements of different `kind` have no key in common.
        """
        exact = _hash(spelt.encode("utf-8", "surrogatepass"), kind)
        if not self.rows:
            return np.array([exact], dtype=np.uint64)
        hashed = pieces(spelt)[:, None] * self._multiply + self._add
        least = hashed.min(axis=0).reshape(BANDS, self.rows)
        if self.same_numbers:
            kind += numbers(spelt)
        return np.array([exact, *(_hash(band.tobytes(), kind) for band in least)], dtype=np.uint64)

    def find(self, keys: Keys) -> list[list[int]]:
        """For each row of `keys`, the items that share a key with it, in order of addition, those
        with the same spelling first."""
        exact, near = ([set[int]() for _ in keys] for _ in range(2))
        for column, table in enumerate(self._tables):
            table.find(keys[:, column], near if column else exact)
        return [
            [*sorted(same), *sorted(items - same)][:MAX_CANDIDATES]
            for same, items in zip(exact, near, strict=True)
        ]

    def add(self, keys: Keys, items: Iterable[int]) -> None:
        """Add an item under the keys of each row; item numbers ascend."""
        numbered = np.fromiter(items, dtype=np.uint32)
        for column, table in enumerate(self._tables):
            table.add(keys[:, column], numbered)


def _hash(data: bytes, kind: str) -> int:
    state = hashlib.blake2b(kind.encode(), digest_size=8)
    state.update(data)
    return int.from_bytes(state.digest(), "little")


class _Table:
    """Key → items, in sorted runs of doubling length, which keeps adding cheap in total."""

    def __init__(self) -> None:
        self.runs: list[tuple[Keys, npt.NDArray[np.uint32]]] = []

    def add(self, keys: Keys, items: npt.NDArray[np.uint32]) -> None:
        while self.runs and len(self.runs[-1][0]) <= 2 * len(keys):
            old_keys, old_items = self.runs.pop()
            keys, items = np.concatenate([old_keys, keys]), np.concatenate([old_items, items])
        order = np.argsort(keys, kind="stable")
        self.runs.append((keys[order], items[order]))

    def find(self, keys: Keys, found: list[set[int]]) -> None:
        for run, items in self.runs:
            low, high = np.searchsorted(run, keys, "left"), np.searchsorted(run, keys, "right")
            for row in np.flatnonzero(high > low):
                found[row].update(items[low[row] : high[row]][:MAX_CANDIDATES].tolist())
