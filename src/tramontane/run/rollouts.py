"""The rollouts of a run: one Parquet file per update, one row per completion.

    rollouts/update_000007.parquet

`COLUMNS` lists the columns, as pandas, polars or DuckDB show them; `read_rollouts` is for
tramontane's own readers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from tramontane.config import Config
from tramontane.controller.observer import Update
from tramontane.data.images import TokensOf, first_images, images_of, named
from tramontane.errors import InputError
from tramontane.run.columns import TOKEN_FIELDS, Row, read_rows, token_columns, versions_of, writer
from tramontane.tokens import EarlierSequence
from tramontane.types import IMAGE, PLACE, FilterReason, Group, Message, ToolCall, TurnRecord

PATTERN = "update_*.parquet"
SAMPLED_GROUPS = 16  # `rollouts: sample` records one group in this many
ROW_GROUP = 256  # completions compressed together

Recorded = tuple[Group, FilterReason | None]

_CALL = pa.struct(
    [
        pa.field("name", pa.string()),
        pa.field("arguments", pa.string()),  # JSON
        pa.field("answer", pa.string()),
        pa.field("error", pa.bool_()),
        pa.field("seconds", pa.float32()),
    ]
)
_IMAGES = [
    pa.field("image_files", pa.list_(pa.string())),  # names in the run's `images`
    pa.field("image_tokens", pa.list_(pa.int32())),  # that each takes in a prompt
]
_MESSAGE = pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string()), *_IMAGES])
_TURN = pa.struct(
    [
        pa.field("start", pa.int32()),
        pa.field("end", pa.int32()),
        pa.field("sequence", pa.int32()),
        pa.field("text", pa.string()),
        pa.field("messages", pa.list_(_MESSAGE)),
        pa.field("calls", pa.list_(_CALL)),
        pa.field("reward", pa.float64()),
        pa.field("seconds", pa.float32()),
    ]
)
_SEQUENCE = pa.struct([pa.field("prompt_ids", pa.list_(pa.int32())), *TOKEN_FIELDS])

COLUMNS: list[pa.Field] = [
    pa.field("update", pa.int32()),
    pa.field("group", pa.int64()),
    pa.field("index", pa.int32()),
    pa.field("problem_id", pa.string()),
    pa.field("problem", pa.string()),
    pa.field("images", pa.int32()),  # number of the prompt's, and of those put in behind turns
    *_IMAGES,  # of the prompt; messages of turns have theirs
    pa.field("domain", pa.string()),
    pa.field("reference", pa.string()),
    pa.field("language", pa.string()),
    pa.field("difficulty", pa.int32()),
    pa.field("effort", pa.string()),
    pa.field("text", pa.string()),
    *TOKEN_FIELDS,
    pa.field("log_ratios", pa.list_(pa.float32())),
    pa.field("finish_reason", pa.string()),
    pa.field("reward", pa.float64()),
    pa.field("advantage", pa.float64()),
    pa.field("verdict", pa.string()),
    pa.field("reason", pa.string()),
    pa.field("answer", pa.string()),
    # Of conversations; null for completions without an environment.
    pa.field("ending", pa.string()),
    pa.field("ending_reason", pa.string()),
    pa.field("turns", pa.list_(_TURN)),
    pa.field("earlier", pa.list_(_SEQUENCE)),
    pa.field("prompt_ids", pa.list_(pa.int32())),
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
    file: IO[bytes],
    update: int,
    groups: Iterable[Recorded],
    parts: Sequence[str],
    tokens_of: TokensOf | None = None,
) -> None:
    """Write the completions of an update's groups.

    Args:
        file: an empty file.
        update: number of the update.
        groups: each with the reason why it was filtered, or None.
        parts: names of the reward's parts.
        tokens_of: number of tokens that an image, a data URI, takes in a prompt; None: it is not
            recorded.
    """
    part_fields = [pa.field(part, pa.float64()) for part in parts]
    schema = pa.schema([*COLUMNS, pa.field("parts", pa.struct(part_fields))])
    tables: list[pa.Table] = []
    with writer(file, schema) as parquet:
        for group, reason in groups:
            rows = _columns(update, group, reason, tokens_of)
            arrays = [
                values if isinstance(values, pa.Array) else pa.array(values, field.type)
                for field, values in ((field, rows[field.name]) for field in schema)
            ]
            tables.append(pa.Table.from_arrays(arrays, schema=schema))
            if sum(len(table) for table in tables) >= ROW_GROUP:
                parquet.write_table(pa.concat_tables(tables))
                tables = []
        parquet.write_table(pa.concat_tables([schema.empty_table(), *tables]))


def _columns(
    update: int, group: Group, reason: FilterReason | None, tokens_of: TokensOf | None
) -> dict[str, Any]:
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
        "effort": problem.effort,
        "filtered": reason.kind if reason else None,
        "filtered_detail": reason.detail if reason else None,
    }
    shown = [named(first_images(problem, c), tokens_of) for c in completions]
    return {name: [value] * len(completions) for name, value in same.items()} | {
        "index": [c.index for c in completions],
        "images": [len(images_of(problem, c)) for c in completions],
        **{field.name: [row[field.name] for row in shown] for field in _IMAGES},
        "text": [_text(c.text) for c in completions],
        "token_ids": token_ids,
        "logprobs": logprobs,
        "version_spans": spans,
        "finish_reason": [c.finish_reason for c in completions],
        "ending": [c.ending for c in completions],
        "ending_reason": [_text(c.ending_reason) if c.ending else None for c in completions],
        "turns": [
            [_turn(t, tokens_of) for t in c.turns] if c.ending else None for c in completions
        ],
        "earlier": [[_sequence(s) for s in c.earlier] if c.ending else None for c in completions],
        "prompt_ids": [c.prompt_ids if c.ending else None for c in completions],
        "reward": [v.reward for v in verdicts],
        "advantage": group.learned.advantages if group.learned else [None] * len(completions),
        "log_ratios": _log_ratios(group),
        "verdict": [v.verdict for v in verdicts],
        "reason": [v.reason for v in verdicts],
        "answer": [v.answer for v in verdicts],
        "parts": [v.parts for v in verdicts],
    }


def _text(text: str) -> bytes:
    """A text for a column; it may hold half a surrogate pair."""
    return text.encode(errors="replace")


def _turn(turn: TurnRecord, tokens_of: TokensOf | None) -> Row:
    calls = [
        vars(call)
        | {
            "name": _text(call.name),
            "arguments": _text(json.dumps(call.arguments)),
            "answer": _seen(call.answer),
        }
        for call in turn.calls
    ]
    messages = [
        {
            "role": m["role"],
            "content": _seen(m["content"]),
            **named(m.get("images", ()), tokens_of),
        }
        for m in turn.messages
    ]
    return vars(turn) | {"text": _text(turn.text), "messages": messages, "calls": calls}


def _seen(text: str) -> bytes:
    """A text for a column, with `IMAGE` at the places of images."""
    return _text(text.replace(PLACE, IMAGE))


def turns_of(turns: Iterable[Row]) -> list[TurnRecord]:
    """The turns of a row's column, without images."""
    return [
        TurnRecord(
            **turn
            | {
                "messages": [
                    Message(role=m["role"], content=m["content"]) for m in turn["messages"]
                ],
                "calls": [
                    ToolCall(**call | {"arguments": json.loads(call["arguments"])})
                    for call in turn["calls"]
                ],
            }
        )
        for turn in turns
    ]


def _sequence(sequence: EarlierSequence) -> Row:
    columns = zip(TOKEN_FIELDS, token_columns([sequence]), strict=True)
    tokens = {field.name: column.to_pylist()[0] for field, column in columns}
    return {"prompt_ids": sequence.prompt_ids, **tokens}


def _log_ratios(group: Group) -> pa.Array:
    """log π_θ/μ of each of `token_ids`, trainer against generator; null if not trained on."""
    kind = pa.list_(pa.float32())
    if group.learned is None:
        return pa.nulls(len(group.completions), kind)
    learned, ratios, end = np.array(group.learned.logprobs, np.float32), [], 0
    for c in group.completions:
        end += c.n_tokens
        ratios.append(learned[end - len(c.token_ids) : end] - np.array(c.logprobs, np.float32))
    ends = np.cumsum([0, *map(len, ratios)])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(np.concatenate(ratios)))


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


def check_text(row: Row, file: Path, use: str) -> None:
    """Check that a completion's prompt is text alone: images are recorded to be seen alone.

    Raises:
        InputError: it had images, without which its `use` would be wrong.
    """
    if row.get("images"):
        raise InputError(
            f"{file}: problem {row['problem_id']!r} has an image, and {use} "
            f"without it would teach to guess; take a run on text"
        )


def read_run(folder: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows of all updates of a run, in order; see `read_rollouts`.

    Raises:
        InputError: the run has no rollouts, or a file is damaged.
    """
    paths = files(folder / "rollouts")
    if not paths:
        raise InputError(f"{folder}: no rollouts/{PATTERN} in it")
    for file in paths:
        yield from read_rollouts(file, columns)
