"""The rollouts of a run as one table of narrow columns, and single rows of the wide ones.

No index is kept on disk: Parquet stores columns one by one, so the narrow columns of 100,000
completions in 400 files are read in 0.3 s on two cores (`benchmarks/view.py`). Texts and tokens are
read only for the rows shown, or scanned for a search (`view.search`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tramontane.errors import InputError, reading
from tramontane.run import rollouts
from tramontane.run.columns import versions_of

Row = dict[str, Any]
NARROW = (
    "update", "group", "index", "problem_id", "domain", "language", "difficulty", "finish_reason",
    "reward", "advantage", "verdict", "reason", "filtered", "ending",
)  # fmt: skip
"""Columns read when a run is opened, with the lengths and versions from `version_spans`, and the
`tools` that a conversation called, as `,python,search,`."""
FROM_SPANS = ("tokens", "oldest", "newest")
_CALLED = "turns.list.element.calls.list.element.name"
THREADS = 4
NEVER = 2**31 - 1  # above all versions
_TYPES = {field.name: field.type for field in rollouts.COLUMNS}


@dataclass(frozen=True)
class UpdateFile:
    """The path, the narrow columns of the rows, and the error if the file could not be read, in
    which case it has no rows."""

    path: Path
    update: int
    table: pa.Table
    damage: str = ""


class Rollouts:
    """The files of a run's `rollouts` folder; `refresh` reads new ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.missing: set[str] = set()  # columns missing from a file of an earlier version
        # By name, time of the last change and size: a resumed run rewrites files.
        self._parts: dict[tuple[str, int, int], UpdateFile] = {}
        self._table: pa.Table | None = None
        self._lock = threading.Lock()

    @property
    def damaged(self) -> dict[str, str]:
        """What is wrong with each damaged file, by its name."""
        return {part.path.name: part.damage for part in self.refresh() if part.damage}

    def refresh(self) -> Sequence[UpdateFile]:
        """The current files, in the order of updates; a row's `part` is its file's place."""
        with self._lock, reading(self.folder):
            keys = {}
            for path in rollouts.files(self.folder):
                stat = path.stat()
                keys[path.name, stat.st_mtime_ns, stat.st_size] = path
            new = [(key, path) for key, path in keys.items() if key not in self._parts]
            if new or keys.keys() != self._parts.keys():
                with ThreadPoolExecutor(THREADS) as pool:
                    read = list(pool.map(self._read, [path for _, path in new]))
                self._parts |= {key: part for (key, _), part in zip(new, read, strict=True)}
                self._parts = {key: self._parts[key] for key in keys}
                self._table = None
            return list(self._parts.values())

    def table(self) -> pa.Table:
        """All rows: the columns `NARROW`, `FROM_SPANS` and `tools`, and `part` and `row`, their
        places."""
        return self.current()[1]

    def current(self) -> tuple[list[UpdateFile], pa.Table]:
        """The files of `refresh`, and their `table`; another thread's refresh cannot come between
        the two."""
        self.refresh()
        with self._lock:
            parts = list(self._parts.values())
            if self._table is None:
                tables = [_placed(part.table, number) for number, part in enumerate(parts)]
                self._table = pa.concat_tables([_placed(_empty(), 0), *tables])
            return parts, self._table

    def _read(self, path: Path) -> UpdateFile:
        update = 0
        try:
            with opened(path) as file:
                update = rollouts.update_of(path)
                present = file.schema_arrow.names
                wanted = [name for name in NARROW if name in present]
                table = file.read([*wanted, "version_spans"], use_threads=False)
                columns = {name: table[name].cast(_TYPES[name]) for name in wanted}
                columns |= _from_spans(table["version_spans"].combine_chunks())
                columns["tools"] = pa.nulls(len(table), pa.string())
                if "ending" in wanted and table["ending"].null_count < len(table):
                    called = file.read([_CALLED], use_threads=False)["turns"].to_pylist()
                    columns["tools"] = pa.array(map(_tools, called), pa.string())
        except InputError as error:
            return UpdateFile(path, update, _empty(), str(error))
        absent = {*NARROW} - {*present} - {"ending"}
        self.missing |= absent | ({"log_ratios"} - {*present})
        columns |= {name: pa.nulls(len(table), _TYPES[name]) for name in {*NARROW} - {*present}}
        return UpdateFile(path, update, pa.table(columns).select(_schema().names))

    def wide(self, part: UpdateFile, row: int, columns: Sequence[str]) -> Row:
        """Columns of one row; those that the file lacks are None."""
        return self.wide_rows(part, [row], columns)[0]

    def wide_rows(self, part: UpdateFile, rows: Sequence[int], columns: Sequence[str]) -> list[Row]:
        """Columns of some rows; only the pages that hold them are read.

        Raises:
            InputError: the file is damaged or gone.
        """
        with opened(part.path) as file:
            names = file.schema_arrow.names
            present = [name for name in columns if name in names]
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            ends = np.cumsum([0, *sizes])
            found: dict[int, Row] = {}
            for number in sorted({int(np.searchsorted(ends, row, "right")) - 1 for row in rows}):
                first = int(ends[number])
                inside = [row for row in rows if first <= row < ends[number + 1]]
                table = file.read_row_group(number, columns=present, use_threads=False)
                taken = table.take([row - first for row in inside]).to_pylist()
                found |= dict(zip(inside, taken, strict=True))
        return [{name: found[row].get(name) for name in columns} for row in rows]

    def of(self, update: int) -> UpdateFile | None:
        """The file of an update, if it is there.

        Raises:
            InputError: it is damaged.
        """
        part = next((part for part in self.refresh() if part.update == update), None)
        if part and part.damage:
            raise InputError(part.damage)
        return part

    def texts(self, part: UpdateFile, rows: Sequence[int]) -> list[Row]:
        """The wide columns of some rows, with `versions` instead of `version_spans`."""
        names = [
            "problem", "image_files", "image_tokens", "reference", "text", "answer",
            "filtered_detail", "parts", "token_ids", "logprobs", "log_ratios", "version_spans",
            "ending_reason", "turns", "earlier", "prompt_ids",
        ]  # fmt: skip
        return [
            found | {"versions": versions_of(found.pop("version_spans") or [])}
            for found in self.wide_rows(part, rows, names)
        ]


@contextmanager
def opened(path: Path) -> Iterator[pq.ParquetFile]:
    """A file of rollouts, whose checksums are verified.

    Raises:
        InputError: it is damaged or gone, now or while the block reads it.
    """
    with reading(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        yield file


def _schema() -> pa.Schema:
    fields = [pa.field(name, _TYPES[name]) for name in NARROW]
    spans = (pa.field(name, pa.int32()) for name in FROM_SPANS)
    return pa.schema([*fields, *spans, pa.field("tools", pa.string())])


def _tools(turns: list[Row] | None) -> str | None:
    """The tools that a conversation called; None if it called none."""
    names = {call["name"] for turn in turns or () for call in turn["calls"] if call["name"]}
    return f",{','.join(sorted(names))}," if names else None


def _empty() -> pa.Table:
    return _schema().empty_table()


def _placed(table: pa.Table, part: int) -> pa.Table:
    places: dict[str, NDArray[np.int32]] = {
        "part": np.full(len(table), part, np.int32),
        "row": np.arange(len(table), dtype=np.int32),
    }
    for name, values in places.items():
        table = table.append_column(name, pa.array(values))
    return table


def _from_spans(spans: pa.ListArray) -> dict[str, pa.Array]:
    """Generated tokens of each completion, and the oldest and newest version that sampled any;
    null if none did: a completion without tokens, or a recorded one."""
    offsets = np.asarray(spans.offsets, dtype=np.int64)
    tokens = np.asarray(spans.values.field("tokens"), dtype=np.int64)
    versions = np.asarray(spans.values.field("version"), dtype=np.int64)[: int(offsets[-1])]
    ends = np.concatenate([[0], np.cumsum(tokens)])
    filled = offsets[1:] > offsets[:-1]
    oldest, newest = np.full(len(spans), NEVER), np.full(len(spans), -1)
    if filled.any():
        starts = offsets[:-1][filled]
        # Versions below 0 mark tokens not sampled by the run's weights.
        oldest[filled] = np.minimum.reduceat(np.where(versions < 0, NEVER, versions), starts)
        newest[filled] = np.maximum.reduceat(versions, starts)
    return {
        "tokens": pa.array(ends[offsets[1:]] - ends[offsets[:-1]], pa.int32()),
        "oldest": pa.array(oldest, pa.int32(), mask=oldest == NEVER),
        "newest": pa.array(newest, pa.int32(), mask=newest < 0),
    }
