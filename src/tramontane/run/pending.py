"""The pipeline's state in a checkpoint: `pipeline.json`, and the sampled tokens in Parquet.

    pipeline.json        counters, stage, position in the data, groups without their tokens;
                         each problem once
    completions.parquet  tokens of every pending completion, finished or not; its text if finished

Both are written in pieces, in a thread, so that the event loop keeps running.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from tramontane.controller.groups import FrozenGroup, OpenGroup
from tramontane.controller.ledger import Snapshot
from tramontane.run.columns import TOKEN_FIELDS, Row, read_rows, sampled_of, token_columns, writer
from tramontane.types import Completion, FilterReason, Problem, Request, SamplingParams, Verdict

PIECE = 1000  # items of a dictionary or list encoded at once
SCHEMA = pa.schema(
    [
        pa.field("group", pa.int64()),
        pa.field("index", pa.int32()),
        *TOKEN_FIELDS,
        pa.field("text", pa.string()),  # null for an unfinished completion, as is the next
        pa.field("finish_reason", pa.string()),
    ]
)


@dataclass
class PipelineCheckpoint:
    """A pipeline's snapshot, and the wall seconds of the run when it was taken."""

    snapshot: Snapshot
    seconds: float


def write_pipeline(folder: Path, checkpoint: PipelineCheckpoint) -> None:
    """Write a pipeline's state into a checkpoint's folder."""
    snapshot = checkpoint.snapshot
    problems: dict[int, int] = {}  # place of each problem object in `statements`
    statements: list[Problem] = []

    def pack(group: OpenGroup) -> Row:
        if id(group.problem) not in problems:
            problems[id(group.problem)] = len(statements)
            statements.append(group.problem)
        sequences: list[Request | Completion]
        sequences = [*group.requests, *group.completions.values()]
        return {
            "id": group.id,
            "problem": problems[id(group.problem)],
            "deadline": group.deadline,
            "prompt_ids": sequences[0].prompt_ids,
            "requests": [
                {"index": r.index, "seed": r.seed, "sampling": asdict(r.sampling)}
                for r in group.requests
            ],
            "verdicts": [asdict(v) for v in group.verdicts],
        }

    rows, filtered = [], []
    with (
        (folder / "completions.parquet").open("wb") as file,
        writer(file, SCHEMA) as parquet,
    ):
        for frozen, reason in snapshot.all_groups():
            group = frozen.thaw()
            parquet.write_table(_table(group))
            if reason is None:
                rows.append(pack(group))
            else:
                filtered.append([pack(group), asdict(reason)])
    state = {
        "version": snapshot.version,
        "next_group": snapshot.next_group,
        "stage": snapshot.stage,
        "problems": snapshot.problems,
        "replay": snapshot.replay,
        "seconds": checkpoint.seconds,
        "groups": rows,
        "filtered": filtered,
        "statements": [asdict(problem) for problem in statements],
    }
    with (folder / "pipeline.json").open("w", encoding="utf-8") as text:
        text.writelines(json_pieces(state))


def read_pipeline(folder: Path) -> PipelineCheckpoint:
    """Read what `write_pipeline` wrote."""
    state = json.loads((folder / "pipeline.json").read_bytes())
    sampled: defaultdict[int, list[Row]] = defaultdict(list)
    for row in read_rows(folder / "completions.parquet"):
        sampled[row["group"]].append(row)
    statements = [Problem(**fields) for fields in state["statements"]]

    def unpack(row: Row) -> FrozenGroup:
        rows = {sequence["index"]: sequence for sequence in sampled[row["id"]]}
        problem, prompt, number = statements[row["problem"]], row["prompt_ids"], row["id"]
        requests = [
            Request(
                number,
                r["index"],
                prompt,
                r["seed"],
                SamplingParams(**r["sampling"]),
                **sampled_of(rows.pop(r["index"])),
            )
            for r in row["requests"]
        ]
        completions = {
            index: Completion(
                number,
                index,
                prompt,
                **sampled_of(sequence),
                finish_reason=sequence["finish_reason"],
                text=sequence["text"],
            )
            for index, sequence in rows.items()
        }
        verdicts = [Verdict(**v) for v in row["verdicts"]]
        return FrozenGroup(
            OpenGroup(number, problem, row["deadline"], requests, completions, verdicts)
        )

    snapshot = Snapshot(
        version=state["version"],
        next_group=state["next_group"],
        stage=state["stage"],
        problems=state["problems"],
        groups=[unpack(row) for row in state["groups"]],
        filtered=[(unpack(row), FilterReason(**reason)) for row, reason in state["filtered"]],
        replay=state.get("replay", {}),
    )
    return PipelineCheckpoint(snapshot, state["seconds"])


def _table(group: OpenGroup) -> pa.Table:
    """The rows of one group: the finished completions, then the unfinished."""
    finished = list(group.completions.values())
    sequences: list[Completion | Request] = [*finished, *group.requests]
    unfinished = [None] * len(group.requests)
    columns = [
        pa.array([group.id] * len(sequences), pa.int64()),
        pa.array([s.index for s in sequences], pa.int32()),
        *token_columns(sequences),
        pa.array([*(c.text for c in finished), *unfinished], pa.string()),
        pa.array([*(c.finish_reason for c in finished), *unfinished], pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def json_pieces(value: Any) -> Iterator[str]:
    """The JSON text of a value in pieces. The encoder blocks all other threads, so no piece has
    more than `PIECE` items of a dictionary or list."""
    if isinstance(value, dict | list) and len(value) > PIECE:
        kind, items = type(value), iter(value.items() if isinstance(value, dict) else value)
        separator = "{" if kind is dict else "["
        while piece := kind(islice(items, PIECE)):
            yield separator + json.dumps(piece)[1:-1]
            separator = ","
        yield "}" if kind is dict else "]"
    elif isinstance(value, dict):
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            yield ("," if number else "") + json.dumps(key) + ":"
            yield from json_pieces(item)
        yield "}"
    else:
        yield json.dumps(value)
