"""Stage `decontaminate`: drops problems of evaluation sets, and problems close to them.

A row is `contaminated` if it is an exact or near duplicate of an evaluation problem (as in
`duplicates`, but regardless of the answers), or if it contains a large share of the evaluation
problem's 13-grams of words. One shared 13-gram is not enough, since competition problems have
similar endings ("where m and n are relatively prime positive integers"). A statement with fewer
words is compared as a whole, including its signs. A Chinese or Japanese character counts as a word.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tramontane.curation.config import DecontaminateConfig
from tramontane.curation.load import check_inputs, read_problems
from tramontane.curation.rows import Row, Stage
from tramontane.data.load import RowRules
from tramontane.data.similarity import Copy, Originals, numbers, spelling
from tramontane.errors import InputError

# Minimum words of a statement to search for inside others, with a number or a sign and without:
# "find the value of x" is in many.
FEWEST, FEWEST_PLAIN = 5, 8
_CHARACTER = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORDS = re.compile(rf"[{_CHARACTER}]|[^\W{_CHARACTER}]+")
_SIGNED = re.compile(rf"[{_CHARACTER}]|[^\W{_CHARACTER}]+|[+*/=<>^\\-]")


class Decontaminate(Stage):
    """Drops rows that are in evaluation sets; the evaluation sets are held in memory.

    Raises:
        InputError: an evaluation set has a row that cannot be read.
    """

    name = "decontaminate"

    @classmethod
    def check(cls, config: DecontaminateConfig) -> dict[str, Any]:
        return check_inputs(config.against, config.fields)

    def __init__(self, config: DecontaminateConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self.ids: list[str] = []
        self.grams: dict[str, list[int]] = defaultdict(list)  # n-gram → problems
        self.sizes: list[int] = []
        self.whole: dict[int, dict[str, int]] = defaultdict(dict)  # length → statement → problem
        # Only statements are compared: the domain plays no part.
        statements: list[str] = []
        rules = RowRules(config.fields, domain="math", gradable=False)
        for row in read_problems(config.against, rules, config.split):
            if row.problem is None:
                raise InputError(f"{row.where}: {row.detail}; fix this evaluation set first")
            self.ids.append(row.problem.id)
            statements.append(row.problem.problem)
            item, spelt = len(self.ids) - 1, spelling(row.problem.problem)
            words = _WORDS.findall(spelt)
            grams = _grams(words, config.ngram)
            self.sizes.append(len(grams))
            for gram in grams:
                self.grams[gram].append(item)
            plain = numbers(spelt) == numbers("")
            if not grams and len(words) >= (FEWEST_PLAIN if plain else FEWEST):
                signed = _SIGNED.findall(spelt)
                self.whole[len(signed)].setdefault(" ".join(signed), item)
        self.originals = Originals(statements, config.threshold, config.same_numbers)

    def decide(self, rows: Sequence[Row]) -> list[Row]:
        copies = self.originals.copies([row.task.problem for row in rows])
        return [self._decide(*each) for each in zip(rows, copies, strict=True)]

    def _decide(self, row: Row, copy: Copy | None) -> Row:
        if copy:
            detail = f"{self.ids[copy.original]}, similarity {copy.similarity:.2f}"
            return row.drop(self.name, "contaminated", detail)
        spelt = spelling(row.task.problem)
        grams = _grams(_WORDS.findall(spelt), self.config.ngram)
        shared = Counter(i for gram in grams for i in self.grams.get(gram, ()))
        for item in sorted(shared):
            share = shared[item] / self.sizes[item]
            if share >= self.config.overlap:
                detail = f"{self.ids[item]}, {share:.0%} of its {self.config.ngram}-grams"
                return row.drop(self.name, "contaminated", detail)
        words = _SIGNED.findall(spelt)
        for length, statements in self.whole.items():
            if found := statements.keys() & _grams(words, length):
                item = min(statements[text] for text in found)
                return row.drop(self.name, "contaminated", f"{self.ids[item]}, the whole of it")
        return row


def _grams(words: Sequence[str], n: int) -> set[str]:
    """The n-grams of words; empty if there are fewer than n."""
    return {" ".join(words[i : i + n]) for i in range(len(words) - n + 1)}
