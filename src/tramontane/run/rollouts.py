"""The rollouts of a run: one Parquet file per update, one row per completion.

    rollouts/update_000007.parquet

`COLUMNS` lists the columns, as pandas, polars or DuckDB show them; `read_rollouts` is for
tramontane's own readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa

from tramontane.config import Config
from tramontane.controller.observer import Update
from tramontane.errors import InputError
from tramontane.run.columns import TOKEN_FIELDS, Row, read_rows, token_columns, versions_of, writer
from tramontane.types import FilterReason, Group

PATTERN = "update_*.parquet"
SAMPLED_GROUPS = 16  # `rollouts: sample` records one group in this many
ROW_GROUP = 256  # completions compressed together

Recorded = tuple[Group, FilterReason | None]

COLUMNS: list[pa.Field] = [
    pa.field("update", pa.int32()),
    pa.field("group", pa.int64()),
    pa.field("index", pa.int32()),
    pa.field("problem_id", pa.string()),
    pa.field("problem", pa.string()),
    pa.field("domain", pa.string()),
    pa.field("reference", pa.string()),
    pa.field("language", pa.string()),
    pa.field("difficulty", pa.int32()),
    pa.field("text", pa.string()),
    *TOKEN_FIELDS,
    pa.field("log_ratios", pa.list_(pa.float32())),
    pa.field("finish_reason", pa.string()),
    pa.field("reward", pa.float64()),
    pa.field("advantage", pa.float64()),
    pa.field("verdict", pa.string()),
    pa.field("reason", pa.string()),
    pa.field("answer", pa.string()),
    pa.field("filtered", pa.string()),
    pa.field("filtered_detail", pa.string()),
]
"""`parts`, a struct with a field for each part of the reward, is the last column of a file."""


def file_name(update: int) -> str:
    return f"update_{update:06d}.parquet"


def update_of(file: Path) -> int:
    """The update whose rollouts are in a file."""
    return int(file.stem.removeprefix("update_"))


def files(folder: Path) -> list[Path]:
    """The files of a run's `rollouts` folder, in the order of the updates."""
    return sorted(folder.glob(PATTERN))


def groups_to_record(update: Update, config: Config) -> list[Recorded]:
    """The groups of an update that `rollouts` selects: first those trained on, then the filtered.

    A sample has one of `SAMPLED_GROUPS` groups of each kind, and at least one.
    """
    trained: list[Recorded] = [(group, None) for group in update.batch.groups]
    filtered: list[Recorded] = [*update.filtered]
    if config.rollouts == "all":
        return trained + filtered
    if config.rollouts == "sample":
        return trained[::SAMPLED_GROUPS] + filtered[::SAMPLED_GROUPS]
    return []


def write_rollouts(
    file: IO[bytes], update: int, groups: Iterable[Recorded], parts: Sequence[str]
) -> None:
    """Write the completions of an update's groups.

    Args:
        file: an empty file.
        update: number of the update.
        groups: each with the reason why it was filtered, or None.
        parts: names of the reward's parts.
    """
    part_fields = [pa.field(part, pa.float64()) for part in parts]
    schema = pa.schema([*COLUMNS, pa.field("parts", pa.struct(part_fields))])
    tables: list[pa.Table] = []
    with writer(file, schema) as parquet:
        for group, reason in groups:
            tables.append(_table(update, group, reason, schema))
            if sum(len(table) for table in tables) >= ROW_GROUP:
                parquet.write_table(pa.concat_tables(tables))
                tables = []
        parquet.write_table(pa.concat_tables([schema.empty_table(), *tables]))


def _table(update: int, group: Group, reason: FilterReason | None, schema: pa.Schema) -> pa.Table:
    problem, completions, verdicts = group.problem, group.completions, group.verdicts
    token_ids, logprobs, spans = token_columns(completions)
    same = {
        "update": update,
        "group": group.id,
        "problem_id": problem.id,
        "problem": problem.problem,
        "domain": problem.domain,
        "reference": problem.answer,
        "language": problem.language,
        "difficulty": problem.difficulty,
        "filtered": reason.kind if reason else None,
        "filtered_detail": reason.detail if reason else None,
    }
    columns = {name: [value] * len(completions) for name, value in same.items()} | {
        "index": [c.index for c in completions],
        "text": [c.text.encode(errors="replace") for c in completions],  # half a surrogate pair
        "token_ids": token_ids,
        "logprobs": logprobs,
        "version_spans": spans,
        "finish_reason": [c.finish_reason for c in completions],
        "reward": [v.reward for v in verdicts],
        "advantage": group.learned.advantages if group.learned else [None] * len(completions),
        "log_ratios": _log_ratios(group),
        "verdict": [v.verdict for v in verdicts],
        "reason": [v.reason for v in verdicts],
        "answer": [v.answer for v in verdicts],
        "parts": [v.parts for v in verdicts],
    }
    arrays = [
        values if isinstance(values, pa.Array) else pa.array(values, schema.field(name).type)
        for name, values in ((name, columns[name]) for name in schema.names)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _log_ratios(group: Group) -> pa.Array:
    """log π_θ/μ of each token, of the trainer against the generator; null if not trained on."""
    kind = pa.list_(pa.float32())
    if group.learned is None:
        return pa.nulls(len(group.completions), kind)
    ends = np.cumsum([0, *(len(c.token_ids) for c in group.completions)])
    sampled = np.concatenate([np.array(c.logprobs, np.float32) for c in group.completions])
    ratios = np.array(group.learned.logprobs, np.float32) - sampled
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(ratios))


def read_rollouts(file: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows of one file; `version_spans` is replaced by `versions`, one version per token.

    Args:
        file: a file of a run's `rollouts` folder.
        columns: columns to read; None reads all.

    Raises:
        InputError: the file is truncated or damaged.
    """
    for row in read_rows(file, columns):
        if "version_spans" in row:
            row["versions"] = versions_of(row.pop("version_spans"))
        yield row


def read_run(folder: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows of all updates of a run, in order; see `read_rollouts`.

    Raises:
        InputError: the run has no rollouts, or a file is damaged.
    """
    found = files(folder / "rollouts")
    if not found:
        raise InputError(f"{folder}: no rollouts/{PATTERN} in it")
    for file in found:
        yield from read_rollouts(file, columns)
