"""The pipeline's state in a checkpoint.

    pipeline.json        counters, stage, position in the data, groups without their tokens;
                         each problem once
    completions.parquet  tokens of every pending completion, finished or not; its text if finished;
                         several rows for the sequences of a forked conversation
    manifest.json        sizes and checksums of all files (`run.manifest`)

The pipeline's state is written in pieces, in a thread, so that the event loop keeps running.
"""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tramontane.controller.snapshot import FrozenGroup, Snapshot
from tramontane.run.columns import TOKEN_FIELDS, Row, read_rows, sampled_of, token_columns, writer
from tramontane.status import Status
from tramontane.tokens import AllowedTokens, EarlierSequence
from tramontane.types import (
    Completion,
    FilterReason,
    Group,
    Problem,
    SamplingParams,
    ToolCall,
    TurnRecord,
    Verdict,
)

PIECE = 1000  # items of a dictionary or list encoded at once
SCHEMA = pa.schema(
    [
        pa.field("group", pa.int64()),
        pa.field("index", pa.int32()),
        *TOKEN_FIELDS,
        pa.field("text", pa.string()),  # null for an unfinished completion
        # For an unfinished completion: why the turn that awaits its environment ended.
        pa.field("finish_reason", pa.string()),
        pa.field("prompt_ids", pa.list_(pa.int32())),  # null: the group's
        pa.field("conversation", pa.string()),  # JSON; null without an environment
        # The recorded experts, int16, and how many numbers a token has; null: none recorded.
        pa.field("experts", pa.large_binary()),
        pa.field("experts_per_token", pa.int32()),
        # The sampling masks, `tokens.AllowedTokens`, int32; null: none recorded.
        pa.field("allowed_counts", pa.large_binary()),
        pa.field("allowed_ids", pa.large_binary()),
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

    def pack(group: Group) -> Row:
        if id(group.problem) not in problems:
            problems[id(group.problem)] = len(statements)
            statements.append(group.problem)
        return {
            "id": group.id,
            "problem": problems[id(group.problem)],
            "deadline": group.deadline,
            "prompt_ids": _prompt(group),
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
        rows: defaultdict[int, list[Row]] = defaultdict(list)
        for sequence in sampled[row["id"]]:
            rows[sequence["index"]].append(sequence)
        problem, prompt, number = statements[row["problem"]], row["prompt_ids"], row["id"]
        requests = [
            Completion.requested(
                number,
                r["index"],
                seed=r["seed"],
                sampling=SamplingParams(**r["sampling"]),
                **_conversation(rows.pop(r["index"]), prompt, problem),
            )
            for r in row["requests"]
        ]
        completions = [
            Completion(
                number,
                index,
                text=sequences[-1]["text"],
                **_conversation(sequences, prompt, problem),
            )
            for index, sequences in sorted(rows.items())
        ]
        for each in (*requests, *completions):
            each.illustrate(each.images)
        verdicts = [Verdict(**v) for v in row["verdicts"]]
        return FrozenGroup(
            Group(
                number,
                problem,
                completions,
                verdicts,
                deadline=row["deadline"],
                requests=requests,
            )
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


def _table(group: Group) -> pa.Table:
    """The rows of one group: the finished completions, then the unfinished ones. A forked
    conversation's earlier sequences come before its last."""
    whole: list[Completion] = [*group.completions, *group.requests]
    owners, prompt = [s for s in whole for _ in s.sequences], _prompt(group)
    sequences: list[EarlierSequence | Completion]
    sequences = [part for s in whole for part in s.sequences]
    prompts = [part.prompt_ids for s in whole for part in s.sequences]
    lasts = [o if o is s else None for o, s in zip(owners, sequences, strict=True)]
    columns = [
        pa.array([group.id] * len(sequences), pa.int64()),
        pa.array([o.index for o in owners], pa.int32()),
        *token_columns(sequences),
        pa.array([s.text if s and s.status is Status.ENDED else None for s in lasts], pa.string()),
        pa.array([s.finish_reason if s else None for s in lasts], pa.string()),
        pa.array([None if ids == prompt else ids for ids in prompts], pa.list_(pa.int32())),
        pa.array([_json(s, group.problem) if s else None for s in lasts], pa.string()),
        *_experts_columns(sequences),
        *_allowed_columns(sequences),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _experts_columns(
    sequences: Sequence[EarlierSequence | Completion],
) -> list[pa.Array]:
    """The recorded experts of each sequence as bytes, and the numbers of a token."""
    experts = [s.experts for s in sequences]
    return [
        pa.array([None if x is None else x.tobytes() for x in experts], pa.large_binary()),
        pa.array([None if x is None else x.shape[1] for x in experts], pa.int32()),
    ]


def _allowed_columns(
    sequences: Sequence[EarlierSequence | Completion],
) -> list[pa.Array]:
    """The sampling mask of each sequence: its counts and its ids, as bytes."""
    allowed = [s.allowed for s in sequences]
    return [
        pa.array([None if x is None else x.counts.tobytes() for x in allowed], pa.large_binary()),
        pa.array([None if x is None else x.ids.tobytes() for x in allowed], pa.large_binary()),
    ]


def _recorded_of(row: Row) -> dict[str, Any]:
    """The experts and the sampling mask of a row, as far as they were recorded."""
    fields: dict[str, Any] = {}
    if (numbers := row.get("experts")) is not None:
        fields["experts"] = np.frombuffer(numbers, np.int16).reshape(-1, row["experts_per_token"])
        fields["experts"] = fields["experts"].copy()
    if (counts := row.get("allowed_counts")) is not None:
        fields["allowed"] = AllowedTokens(array("i", counts), array("i", row["allowed_ids"]))
    return fields


def _prompt(group: Group) -> list[int]:
    """The prompt of most sequences of a group."""
    return (group.requests or group.completions)[0].prompt_ids


def _json(sequence: Completion, problem: Problem) -> str | None:
    """What a conversation has besides its tokens."""
    fields = {"turn_start": sequence.turn_start, "turns": [asdict(t) for t in sequence.turns]}
    if sequence.ending:
        fields |= {"ending": sequence.ending, "ending_reason": sequence.ending_reason}
    if (images := [*sequence.sequences[0].images]) != problem.images:  # the environment's own
        fields["images"] = images
    if sequence.opened:
        fields["opened"] = [*sequence.opened]
    return json.dumps(fields) if sequence.turns or len(fields) > 2 else None


def _conversation(rows: list[Row], prompt: list[int], problem: Problem) -> dict[str, Any]:
    """The fields of a completion, finished or not, from the rows of its sequences; its `images` are
    those of the first."""
    *earlier, last = rows
    fields = json.loads(last.get("conversation") or "{}")
    for turn in fields.get("turns", []):
        turn["calls"] = [ToolCall(**call) for call in turn["calls"]]
    return {
        "images": problem.images,
        **fields,
        **sampled_of(last),
        **_recorded_of(last),
        "prompt_ids": _own_prompt(last, prompt),
        "finish_reason": last["finish_reason"],
        "turns": [TurnRecord(**turn) for turn in fields.get("turns", [])],
        "earlier": [
            EarlierSequence(
                prompt_ids=_own_prompt(row, prompt), **sampled_of(row), **_recorded_of(row)
            )
            for row in earlier
        ],
    }


def _own_prompt(row: Row, prompt: list[int]) -> list[int]:
    """The prompt of a row; `prompt` is the group's."""
    own: list[int] | None = row.get("prompt_ids")
    return prompt if own is None else own


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
