"""Stages `deduplicate` and `decontaminate`: drop problems that came earlier in the input, and
problems of evaluation sets.

The first problem in input order is kept. If two have the same spelling, the later one is dropped
regardless of its answer: as `duplicate`, or as `duplicate_conflict` if the answers differ. Near
duplicates are dropped as `near_duplicate` only if the answers agree: problems that differ in a word
and in the answer are usually different ("the larger", "the smaller"), so they are kept with the
note `near_conflict`.

A programming problem's answer is its tests: two problems agree if they expect the same output for
more than half of their common inputs. Without common inputs, agreement is unknown.

A row is `contaminated` if it is an exact or near duplicate of an evaluation problem, whatever their
answers, or if it contains a large share of the evaluation problem's 13-grams of words. One shared
13-gram is not enough, since competition problems have similar endings ("where m and n are
relatively prime positive integers"). A statement with fewer words is compared as a whole, including
its signs. A Chinese or Japanese character counts as a word.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tramontane.config import VerifierConfig
from tramontane.curation.config import DecontaminateConfig, DeduplicateConfig
from tramontane.curation.judge import ReferenceJudge
from tramontane.curation.load import check_inputs, read_problems
from tramontane.curation.rows import Row, Stage
from tramontane.data.load import RowRules
from tramontane.data.similarity import (
    Copy,
    Originals,
    SimilarityIndex,
    numbers,
    similarity,
    spelling,
)
from tramontane.errors import InputError

MAX_TESTS = 64  # tests compared per problem
NO_COMMON_TEST = "with which it shares no test"
# Minimum words of a statement to search for inside others, with a number or a sign and without:
# "find the value of x" is in many.
FEWEST, FEWEST_PLAIN = 5, 8
_CHARACTER = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORDS = re.compile(rf"[{_CHARACTER}]|[^\W{_CHARACTER}]+")
_SIGNED = re.compile(rf"[{_CHARACTER}]|[^\W{_CHARACTER}]+|[+*/=<>^\\-]")


class Seen(NamedTuple):
    """A kept problem: its text is on disk, only its keys are in memory."""

    id: str
    answer: str | None
    spelt: str
    tests: dict[str, str]  # `labels` of its tests


def labels(tests: dict[str, Any] | None) -> dict[str, str]:
    """Hash of each test's input → hash of its expected output, for at most `MAX_TESTS` tests.

    The inputs with the smallest hashes are used, so that problems with common inputs are compared
    on these. In function tests each assertion is one test, and the expected output is the text
    after the last `==`.
    """
    tests = tests or {}
    if tests.get("type") == "stdio":
        pairs = [(case["input"], case["output"]) for case in tests["cases"]]
    else:
        lines = (line for line in tests.get("code", "").splitlines() if "assert" in line)
        pairs = [(call, expected) for call, _, expected in (s.rpartition("==") for s in lines)]
    hashed = {_hash(text): _hash(expected) for text, expected in pairs}
    return dict(sorted(hashed.items())[:MAX_TESTS])


def _hash(text: str) -> str:
    """A hash that ignores differences in white space, like the comparison of outputs."""
    words = " ".join(text.split()).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(words, digest_size=6).hexdigest()


class Deduplicate(Stage):
    """Drops every duplicate and near duplicate of an earlier problem.

    Memory per kept problem: 8 bytes for its offset in `seen.jsonl`, and 12 for each of 17 keys.
    """

    name = "deduplicate"

    def __init__(self, config: DeduplicateConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self.index = SimilarityIndex(config.threshold, config.same_numbers)
        self.judge = ReferenceJudge(VerifierConfig())
        self.offsets = array("Q")  # offset of each kept problem in seen.jsonl
        self.file = (folder / "seen.jsonl").open("ab")
        self.reader = (folder / "seen.jsonl").open("rb")
        self._last_chunk: tuple[np.ndarray, np.ndarray, int]  # keys, offsets, end of seen.jsonl

    def decide(self, rows: Sequence[Row]) -> list[Row]:
        spelt = [spelling(row.task.problem) for row in rows]
        keys = np.array([self._keys(row, text) for row, text in zip(rows, spelt, strict=True)])
        earlier = self.index.find(keys)
        first = len(self.offsets)
        offsets = array("Q")
        fresh: list[Seen] = []  # problems kept in this chunk, not in the index yet
        by_key: dict[int, list[int]] = defaultdict(list)
        chosen, decided = [], []
        end = self.file.tell()
        for i, row in enumerate(rows):
            new = Seen(row.task.id, row.task.answer, spelt[i], labels(row.task.tests))
            here = sorted({n for key in keys[i].tolist() for n in by_key[key]})
            old = [*(self._read(n) for n in earlier[i]), *(fresh[n] for n in here)]
            row = self._decide(row, new, old)
            decided.append(row)
            if row.decision != "dropped":
                for key in keys[i].tolist():
                    by_key[key].append(len(fresh))
                fresh.append(new)
                chosen.append(i)
                offsets.append(end)
                end += self.file.write(json.dumps(new).encode() + b"\n")
        self.file.flush()
        self.offsets.extend(offsets)
        self.index.add(keys[chosen], range(first, len(self.offsets)))
        self._last_chunk = (keys[chosen], np.array(offsets, dtype=np.uint64), end)
        return decided

    def save(self, chunk: int) -> None:
        with (self.folder / f"index-{chunk:06d}.npz").open("wb") as file:
            keys, offsets, end = self._last_chunk
            np.savez(file, keys=keys, places=offsets, end=end)

    def restore(self, chunks: int) -> None:
        end = 0
        for chunk in range(chunks):
            file = self.folder / f"index-{chunk:06d}.npz"
            if not file.is_file():  # an earlier stage dropped all rows of that chunk
                continue
            with np.load(file) as saved:
                first = len(self.offsets)
                self.offsets.extend(saved["places"].tolist())
                self.index.add(saved["keys"], range(first, len(self.offsets)))
                end = int(saved["end"])
        self.file.truncate(end)
        self.file.seek(end)

    def close(self) -> None:
        self.file.close()
        self.reader.close()
        self.judge.close()

    def _keys(self, row: Row, spelt: str) -> np.ndarray:
        problem = row.task
        # The same statement may be one task for Python and another for C++. A row without an answer
        # must not displace a row with one.
        tests = (problem.tests or {}).get("type")
        kind = f"{problem.domain} {tests} {problem.metadata.get('programming_language')}"
        return self.index.keys(spelt, f"{kind} {bool(problem.answer or tests)}")

    def _read(self, item: int) -> Seen:
        self.reader.seek(self.offsets[item])
        try:
            return Seen(*json.loads(self.reader.readline()))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{self.reader.name}:{item + 1}: damaged ({error}); remove the folder "
                f"{self.folder}, and its stage is repeated"
            ) from None

    def _decide(self, row: Row, new: Seen, old: Sequence[Seen]) -> Row:
        same = next((o for o in old if o.spelt == new.spelt), None)
        if same:
            difference = self._difference(same, new)
            if not difference or difference == NO_COMMON_TEST:
                return row.drop(self.name, "duplicate", f"of {same.id}")
            return row.drop(self.name, "duplicate_conflict", f"of {same.id}, {difference}")
        note = ""
        for o in old:
            likeness = similarity(o.spelt, new.spelt)
            if likeness < self.config.threshold:
                continue
            if self.config.same_numbers and numbers(o.spelt) != numbers(new.spelt):
                continue  # a hash collision
            detail = f"of {o.id}, similarity {likeness:.2f}"
            difference = self._difference(o, new)
            if not difference:
                return row.drop(self.name, "near_duplicate", detail)
            note = note or f"{detail}, {difference}"
        return row.note(self.name, "near_conflict", note) if note else row

    def _difference(self, old: Seen, new: Seen) -> str:
        """The difference between the answers of two problems; empty if they agree."""
        if not self.judge.same(old.answer, new.answer):
            return f"whose answer is {old.answer!r} and not {new.answer!r}"
        if not old.tests and not new.tests:
            return ""
        common = old.tests.keys() & new.tests.keys()
        if not common:
            return NO_COMMON_TEST
        conflicts = sum(old.tests[key] != new.tests[key] for key in common)
        if 2 * conflicts < len(common):
            return ""
        return f"whose tests expect another output for {conflicts} of {len(common)} common inputs"


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
