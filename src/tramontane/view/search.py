"""Searches a run's rollouts: by narrow columns immediately, by text one file at a time.

A text search answers within `SECONDS`, with its results and progress so far; repeating the request
continues it, so a page never waits for a long scan.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tramontane.errors import InputError
from tramontane.view.rollouts import THREADS, Rollouts, UpdateFile, opened

Row = dict[str, Any]
SECONDS = 0.5  # per response
KEPT = 8  # searches kept for continuation
SNIPPET = 160  # characters
SORTS = ("update", "reward", "advantage", "tokens")


@dataclass(frozen=True)
class Query:
    """The conditions of a search; None or "" means no condition. Texts match in any case.

    Args:
        text: part of the completion.
        problem: part of the problem's id or statement.
        reason: part of the verdict's reason.
        verdict, language, domain, finish_reason, ending: equal to the column; several, separated by
            commas.
        tool: name of a tool that a conversation called.
        trained: `trained`, or a kind of filtered group, or `filtered` for any of them.
        version: of weights that sampled at least one token, or between such versions.
        update, reward, tokens: of the completion; these and `version` are a number or `low..high`,
        where either end may be omitted.
    """

    text: str = ""
    problem: str = ""
    reason: str = ""
    verdict: str = ""
    language: str = ""
    domain: str = ""
    finish_reason: str = ""
    ending: str = ""
    tool: str = ""
    trained: str = ""
    version: str = ""
    update: str = ""
    reward: str = ""
    tokens: str = ""


def parse_range(text: str) -> tuple[float | None, float | None]:
    """Ends of `low..high`, `low..`, `..high` or a single number.

    Raises:
        InputError: not in this form.
    """
    low, dots, high = text.partition("..")
    try:
        if not dots:
            return float(low), float(low)
        return (float(low) if low.strip() else None), (float(high) if high.strip() else None)
    except ValueError:
        raise InputError(f"{text!r} is not a number or a range low..high") from None


class Search:
    """One search over the rollouts at its start."""

    def __init__(self, rollouts: Rollouts, query: Query) -> None:
        self.rollouts, self.query = rollouts, query
        self._lock = threading.Lock()  # an abandoned request of a page may still be running
        self.parts, self.table = rollouts.current()
        chosen = np.flatnonzero(_mask(self.table, query))
        self._numbers = np.asarray(self.table["part"])
        self.unreadable: set[str] = set()
        self._left: list[tuple[int, NDArray[np.int64]]] = []
        self.found = chosen
        if query.text or query.problem:
            self.found = np.array([], np.int64)
            numbers = self._numbers[chosen]
            cuts = np.flatnonzero(np.diff(numbers)) + 1
            self._left = [
                (int(self._numbers[rows[0]]), rows) for rows in np.split(chosen, cuts) if len(rows)
            ]  # the newest update is last, and taken first
        self.files = len(self._left)

    @property
    def done(self) -> bool:
        return not self._left

    def advance(self, seconds: float) -> None:
        """Scan more files for about this many seconds, at least one round."""
        end = time.monotonic() + seconds
        with self._lock, ThreadPoolExecutor(THREADS) as pool:
            while self._left and (time.monotonic() < end):
                count = min(4 * THREADS, len(self._left))
                taken, self._left = self._left[-count:], self._left[:-count]
                hits = list(pool.map(lambda item: self._scan(self.parts[item[0]], item[1]), taken))
                self.found = np.concatenate([self.found, *hits])

    def _scan(self, part: UpdateFile, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        columns = ["text"] * bool(self.query.text) + ["problem"] * bool(self.query.problem)
        try:
            with opened(part.path) as file:
                read = file.read(columns, use_threads=False)
        except InputError:
            self.unreadable.add(part.path.name)
            return np.array([], np.int64)
        places = np.asarray(self.table["row"])[rows]
        keep = np.ones(len(places), bool)
        if self.query.text:
            keep &= _contains(read["text"], self.query.text)[places]
        if self.query.problem:
            ids = _contains(part.table["problem_id"], self.query.problem)
            keep &= (_contains(read["problem"], self.query.problem) | ids)[places]
        return rows[keep]

    def page(self, sort: str, descending: bool, offset: int, limit: int) -> Row:
        """Rows found so far, in order, with the start of their texts."""
        order = self._order(sort, descending)[offset : offset + limit]
        rows = self.table.take(pa.array(order, pa.int64())).to_pylist()
        by_part: dict[int, list[Row]] = {}
        for row in rows:
            by_part.setdefault(row["part"], []).append(row)
        for number, members in by_part.items():
            part = self.parts[number]
            places = [row["row"] for row in members]
            try:
                wide = self.rollouts.wide_rows(part, places, ["problem", "text"])
            except InputError:
                self.unreadable.add(part.path.name)
                wide = [{"problem": None, "text": None}] * len(places)
            for row, texts in zip(members, wide, strict=True):
                row["problem"] = _snippet(texts["problem"] or "", self.query.problem)
                row["snippet"] = _snippet(texts["text"] or "", self.query.text)
        return self._progress() | {"rows": rows}

    def groups(self, sort: str, descending: bool, offset: int, limit: int) -> Row:
        """The groups of the rows found so far, in order, each with its `members` among them, how
        many are `right`, and the means of tokens and of the reward where it could be judged."""
        found = np.sort(self.found)
        taken = self.table.take(pa.array(found, pa.int64()))
        numbers = np.stack([np.asarray(taken["part"]), np.asarray(taken["group"])])
        _, firsts, of = np.unique(numbers, axis=1, return_index=True, return_inverse=True)
        of = of.reshape(-1)
        judged = np.asarray(pc.not_equal(taken["verdict"], "unscorable"), dtype=float)

        def means(name: str) -> NDArray[np.float64]:
            values = np.asarray(pc.fill_null(taken[name].cast(pa.float64()), 0.0), dtype=float)
            counted = judged if name == "reward" else np.ones(len(of))
            totals = np.bincount(of, counted, len(firsts))
            sums = np.bincount(of, values * counted, len(firsts))
            return np.divide(sums, totals, out=np.full(len(firsts), np.nan), where=totals > 0)

        values = numbers[0][firsts].astype(float) if sort == "update" else means(sort)
        # Within an update, groups keep the order of their rows.
        places = np.lexsort((firsts, -values if descending else values))
        rewards, tokens, rows = means("reward"), means("tokens"), []
        for place in places[offset : offset + limit]:
            members = taken.take(pa.array(np.flatnonzero(of == place), pa.int64())).to_pylist()
            first = members[0]
            kept = ("update", "group", "problem_id", "language", "filtered", "ending", "row")
            rows.append(
                {key: first[key] for key in kept}
                | {
                    "problem": self._problem(first),
                    "right": sum(member["verdict"] == "right" for member in members),
                    "reward": None if np.isnan(rewards[place]) else float(rewards[place]),
                    "tokens": float(tokens[place]),
                    "members": [
                        {key: m[key] for key in ("row", "index", "verdict", "reward")}
                        for m in members
                    ],
                }
            )
        return self._progress() | {"rows": rows, "count": len(firsts)}

    def _problem(self, row: Row) -> str:
        part = self.parts[row["part"]]
        try:
            text = self.rollouts.wide(part, row["row"], ["problem"])["problem"]
        except InputError:
            self.unreadable.add(part.path.name)
            text = None
        return _snippet(text or "", self.query.problem)

    def _progress(self) -> Row:
        return {
            "count": len(self.found),
            "total": len(self.table),
            "done": self.done,
            "scanned": self.files - len(self._left),
            "files": self.files,
            "unreadable": sorted(self.unreadable),
        }

    def _order(self, sort: str, descending: bool) -> NDArray[np.int64]:
        found = np.sort(self.found)
        if sort == "update":  # rows lie in the order of updates, groups and completions
            numbers = self._numbers[found]
            return found[np.argsort(-numbers, kind="stable")] if descending else found
        values = np.asarray(
            self.table[sort].take(pa.array(found, pa.int64())).cast(pa.float64()), dtype=float
        )
        values = np.where(np.isnan(values), np.inf, -values if descending else values)
        return found[np.argsort(values, kind="stable")]


class Searches:
    """The latest searches of one run; a repeated one is continued."""

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self._kept: OrderedDict[tuple[Query, int], Search] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, query: Query) -> Search:
        """The search for this query, over the current files.

        Raises:
            InputError: an invalid range.
        """
        with self._lock:
            key = (query, id(self.rollouts.table()))
            search = self._kept.pop(key, None) or Search(self.rollouts, query)
            self._kept[key] = search
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return search


def _contains(column: pa.ChunkedArray, pattern: str) -> NDArray[np.bool_]:
    found = pc.match_substring(column, pattern, ignore_case=True)
    return np.asarray(pc.fill_null(found, False), dtype=bool)


def _mask(table: pa.Table, query: Query) -> NDArray[np.bool_]:
    keep = np.ones(len(table), bool)
    for condition in _conditions(table, query):
        keep &= np.asarray(pc.fill_null(condition, False), dtype=bool)
    return keep


def _conditions(table: pa.Table, query: Query) -> Iterator[Any]:
    for name in ("verdict", "language", "domain", "finish_reason", "ending"):
        if wanted := getattr(query, name):
            values = pa.array([value.strip() for value in wanted.split(",")], pa.string())
            yield pc.is_in(table[name], value_set=values)
    if query.reason:
        yield pc.match_substring(table["reason"], query.reason, ignore_case=True)
    if query.tool:
        yield pc.match_substring(table["tools"], f",{query.tool},")
    if query.trained:
        filtered = table["filtered"]
        yield (
            pc.is_null(filtered) if query.trained == "trained"
            else pc.is_valid(filtered) if query.trained == "filtered"
            else pc.equal(filtered, query.trained)
        )  # fmt: skip
    ranges = {name: (name, name) for name in ("update", "reward", "tokens")}
    for name, (least, greatest) in (ranges | {"version": ("oldest", "newest")}).items():
        if text := getattr(query, name):
            low, high = parse_range(text)
            if low is not None:
                yield pc.greater_equal(table[greatest], low)
            if high is not None:
                yield pc.less_equal(table[least], high)


def _snippet(text: str, pattern: str) -> str:
    """The part of a text around the first match, or its start."""
    place = text.lower().find(pattern.lower()) if pattern else 0
    start = max(0, place - SNIPPET // 3)
    cut = text[start : start + SNIPPET]
    return ("…" if start else "") + cut + ("…" if start + SNIPPET < len(text) else "")
