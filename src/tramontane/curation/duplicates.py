"""Stage 1: problems that came before.

The first in the order of the input stays. Of two that are spelt alike, the later is dropped
whatever its answer: as `duplicate`, or as `duplicate_conflict` where the answers differ. Near
duplicates are dropped as `near_duplicate` only where the answers agree: problems that differ in a
word and in the answer are mostly two problems ("the larger", "the smaller"), so these stay, with
the note `near_conflict`.

What a programming problem has for an answer are its tests: two agree where they want the same
output for more than half of the inputs that both have, and where they share none nothing says so.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tramontane.config import VerifierConfig
from tramontane.curation.config import DeduplicateConfig
from tramontane.curation.judge import ReferenceJudge
from tramontane.curation.rows import Row, Stage
from tramontane.curation.similarity import SimilarityIndex, numbers, similarity, spelling

MAX_TESTS = 64  # compared of one problem
NO_COMMON_TEST = "with which it shares no test"


class Seen(NamedTuple):
    """What is remembered of a problem: on disk, its keys alone in memory."""

    id: str
    answer: str | None
    spelt: str
    tests: dict[str, str]  # as `labels` has them


def labels(tests: dict[str, Any] | None) -> dict[str, str]:
    """What is wanted for each input, both hashed. Of many the inputs with the least hashes: so two
    problems that have inputs in common are compared on these. Of a function's tests each assertion
    is one, its label what is behind the last `==`."""
    tests = tests or {}
    if tests.get("type") == "stdio":
        pairs = [(case["input"], case["output"]) for case in tests["cases"]]
    else:
        lines = (line for line in tests.get("code", "").splitlines() if "assert" in line)
        pairs = [(given, wanted) for given, _, wanted in (line.rpartition("==") for line in lines)]
    hashed = {_hash(given): _hash(wanted) for given, wanted in pairs}
    return dict(sorted(hashed.items())[:MAX_TESTS])


def _hash(text: str) -> str:
    """White space aside, as tests are compared."""
    words = " ".join(text.split()).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(words, digest_size=6).hexdigest()


class Deduplicate(Stage):
    """Drops every problem that is like an earlier one.

    Memory: 8 bytes a kept problem for its place in `seen.jsonl`, and 12 for each of its 17 keys.
    """

    name = "deduplicate"

    def __init__(self, config: DeduplicateConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self.index = SimilarityIndex(config.threshold, config.same_numbers)
        self.judge = ReferenceJudge(VerifierConfig())
        self.places = array("Q")  # of each kept problem in the file
        self.file = (folder / "seen.jsonl").open("ab")
        self.reader = (folder / "seen.jsonl").open("rb")
        self._fresh: tuple[np.ndarray, np.ndarray, int]  # of the last chunk: keys, places, end

    def decide(self, rows: Sequence[Row]) -> list[Row]:
        spelt = [spelling(row.task.problem) for row in rows]
        keys = np.array([self._keys(row, text) for row, text in zip(rows, spelt, strict=True)])
        earlier = self.index.find(keys)
        first = len(self.places)
        places = array("Q")
        fresh: list[Seen] = []  # kept of this chunk, which the index does not hold yet
        by_key: dict[int, list[int]] = defaultdict(list)
        chosen, decided = [], []
        end = self.file.tell()
        for i, row in enumerate(rows):
            new = Seen(row.task.id, row.task.answer, spelt[i], labels(row.task.tests))
            here = sorted({n for key in keys[i].tolist() for n in by_key[key]})
            old = [*(self._read(n) for n in earlier[i]), *(fresh[n] for n in here)]
            row = self._standing(row, new, old)
            decided.append(row)
            if row.decision != "dropped":
                for key in keys[i].tolist():
                    by_key[key].append(len(fresh))
                fresh.append(new)
                chosen.append(i)
                places.append(end)
                end += self.file.write(json.dumps(new).encode() + b"\n")
        self.file.flush()
        self.places.extend(places)
        self.index.add(keys[chosen], range(first, len(self.places)))
        self._fresh = (keys[chosen], np.array(places, dtype=np.uint64), end)
        return decided

    def save(self, chunk: int) -> None:
        with (self.folder / f"index-{chunk:06d}.npz").open("wb") as file:
            keys, places, end = self._fresh
            np.savez(file, keys=keys, places=places, end=end)

    def restore(self, chunks: int) -> None:
        end = 0
        for chunk in range(chunks):
            file = self.folder / f"index-{chunk:06d}.npz"
            if not file.is_file():  # no row of that chunk came so far
                continue
            with np.load(file) as saved:
                first = len(self.places)
                self.places.extend(saved["places"].tolist())
                self.index.add(saved["keys"], range(first, len(self.places)))
                end = int(saved["end"])
        self.file.truncate(end)
        self.file.seek(end)

    def close(self) -> None:
        self.file.close()
        self.reader.close()
        self.judge.close()

    def _keys(self, row: Row, spelt: str) -> np.ndarray:
        problem = row.task
        # The same statement may be a task for Python and one for C++; and a row without an answer
        # must not push out one that has it.
        tests = (problem.tests or {}).get("type")
        kind = f"{problem.domain} {tests} {problem.metadata.get('programming_language')}"
        return self.index.keys(spelt, f"{kind} {bool(problem.answer or tests)}")

    def _read(self, item: int) -> Seen:
        self.reader.seek(self.places[item])
        return Seen(*json.loads(self.reader.readline()))

    def _standing(self, row: Row, new: Seen, old: Sequence[Seen]) -> Row:
        like = [(1.0 if o.spelt == new.spelt else similarity(o.spelt, new.spelt), o) for o in old]
        for _, o in like:
            if o.spelt == new.spelt:
                other = self._difference(o, new)
                if not other or other == NO_COMMON_TEST:
                    return row.drop(self.name, "duplicate", f"of {o.id}")
                return row.drop(self.name, "duplicate_conflict", f"of {o.id}, {other}")
        note = ""
        for likeness, o in like:
            if likeness < self.config.threshold:
                continue
            if self.config.same_numbers and numbers(o.spelt) != numbers(new.spelt):
                continue  # a collision of hashes
            detail = f"of {o.id}, similarity {likeness:.2f}"
            other = self._difference(o, new)
            if not other:
                return row.drop(self.name, "near_duplicate", detail)
            note = note or f"{detail}, {other}"
        return row.note(self.name, "near_conflict", note) if note else row

    def _difference(self, old: Seen, new: Seen) -> str:
        """In what the answers of two problems differ; empty where they agree."""
        if not self.judge.same(old.answer, new.answer):
            return f"whose answer is {old.answer!r} and not {new.answer!r}"
        if not old.tests and not new.tests:
            return ""
        common = old.tests.keys() & new.tests.keys()
        if not common:
            return NO_COMMON_TEST
        others = sum(old.tests[given] != new.tests[given] for given in common)
        if 2 * others < len(common):
            return ""
        return f"whose tests want something else for {others} of {len(common)} common inputs"
