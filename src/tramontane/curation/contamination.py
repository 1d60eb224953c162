"""Stage `decontaminate`: drops problems of evaluation sets, and problems close to them.

A row is `contaminated` if it is an exact or near duplicate of an evaluation problem (as in
`duplicates`, but regardless of the answers), or if it contains a large share of the evaluation
problem's 13-grams of words. One shared 13-gram is not enough, since competition problems end alike
("where m and n are relatively prime positive integers").
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
from tramontane.data.similarity import Copy, Originals, spelling
from tramontane.errors import InputError


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
        # Only statements are compared: the domain plays no part.
        statements: list[str] = []
        rules = RowRules(config.fields, domain="math", gradable=False)
        for row in read_problems(config.against, rules, config.split):
            if row.problem is None:
                raise InputError(f"{row.where}: {row.detail}; fix this evaluation set first")
            self.ids.append(row.problem.id)
            statements.append(row.problem.problem)
            grams = self._grams(row.problem.problem)
            self.sizes.append(len(grams))
            for gram in grams:
                self.grams[gram].append(len(self.ids) - 1)
        self.originals = Originals(statements, config.threshold, config.same_numbers)

    def decide(self, rows: Sequence[Row]) -> list[Row]:
        copies = self.originals.copies([row.task.problem for row in rows])
        return [self._decide(*each) for each in zip(rows, copies, strict=True)]

    def _decide(self, row: Row, copy: Copy | None) -> Row:
        if copy:
            detail = f"{self.ids[copy.original]}, similarity {copy.similarity:.2f}"
            return row.drop(self.name, "contaminated", detail)
        shared = Counter(
            i for gram in self._grams(row.task.problem) for i in self.grams.get(gram, ())
        )
        for item in sorted(shared):
            share = shared[item] / self.sizes[item]
            if share >= self.config.overlap:
                detail = f"{self.ids[item]}, {share:.0%} of its {self.config.ngram}-grams"
                return row.drop(self.name, "contaminated", detail)
        return row

    def _grams(self, text: str) -> set[str]:
        """The text's n-grams of words and numbers; empty if it has fewer than n."""
        words = re.findall(r"\w+", spelling(text))
        n = self.config.ngram
        return {" ".join(words[i : i + n]) for i in range(len(words) - n + 1)}
