r"""When are two statements the same problem? Texts compared, and an index of all seen so far.

Statements are compared in a common spelling and never changed by it. Two that are spelt alike are
exact duplicates. Near ones share most of their five-character pieces (Jaccard), found by MinHash
(Broder, 1997) and locality-sensitive hashing over bands of it, then checked exactly. Maths
problems that differ in a number or a sign differ, so near duplicates must have these in common.

The index is our own: the libraries for this hold a dictionary entry for each band and problem, and
cannot go on from what a killed process left on disk. Sorted arrays take 12 bytes each.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
PIECE = 5  # characters
BANDS = 16
MAX_CANDIDATES = 64  # looked at for one statement: what bounds the time of hostile sets
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
    """A statement as it is compared: NFKC, lower case, one way to write spaces and LaTeX."""
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
    """The multiset of numbers, operators and LaTeX commands in a spelt text, as one string."""
    return repr(sorted(Counter(_SIGNS.findall(spelt)).items()))


def pieces(spelt: str) -> Keys:
    """The set of a spelt text's five-character pieces, hashed and sorted."""
    points = np.frombuffer(_words(spelt).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    if len(points) < PIECE:
        points = np.pad(points, (0, PIECE - len(points)))
    hashed = np.zeros(len(points) - PIECE + 1, dtype=np.uint64)
    for offset in range(PIECE):
        hashed = hashed * np.uint64(0x9E3779B97F4A7C15) + points[offset:][: len(hashed)]
    return np.unique(hashed)


def _words(spelt: str) -> str:
    """Without punctuation: what is left of "Find x!" is "find x"."""
    return re.sub(r"\s+", " ", re.sub(r"[^\w+*/=<>^\\-]+", " ", spelt)).strip()


def similarity(a: str, b: str) -> float:
    """The Jaccard index of two spelt texts' pieces."""
    first, second = pieces(a), pieces(b)
    common = len(np.intersect1d(first, second, assume_unique=True))
    return common / (len(first) + len(second) - common)


class SimilarityIndex:
    """Finds, among the statements added so far, those that a statement may be a duplicate of.

    Args:
        threshold: the least similarity of near duplicates; pairs at it are found with
            probability 0.99, more similar ones more surely.
        same_numbers: only pairs with the same `numbers` are found.
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
        """What a statement is filed under: its hash, and one hash for each band. Statements of
        another `kind` share none."""
        exact = _hash(spelt.encode("utf-8", "surrogatepass"), kind)
        if not self.rows:
            return np.array([exact], dtype=np.uint64)
        hashed = pieces(spelt)[:, None] * self._multiply + self._add
        least = hashed.min(axis=0).reshape(BANDS, self.rows)
        if self.same_numbers:
            kind += numbers(spelt)
        return np.array([exact, *(_hash(band.tobytes(), kind) for band in least)], dtype=np.uint64)

    def find(self, keys: Keys) -> list[list[int]]:
        """For each row of `keys`, the items that share one, the first added first."""
        found: list[set[int]] = [set() for _ in keys]
        for column, table in enumerate(self._tables):
            table.find(keys[:, column], found)
        return [sorted(items)[:MAX_CANDIDATES] for items in found]

    def add(self, keys: Keys, items: Iterable[int]) -> None:
        """File items, numbered upwards, under each row's keys."""
        filed = np.fromiter(items, dtype=np.uint32)
        for column, table in enumerate(self._tables):
            table.add(keys[:, column], filed)


def _hash(data: bytes, kind: str) -> int:
    state = hashlib.blake2b(kind.encode(), digest_size=8)
    state.update(data)
    return int.from_bytes(state.digest(), "little")


class _Table:
    """Key → items: sorted runs of doubling length, so that adding costs little in all."""

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
