"""One completion with its tokens, and the groups of one update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tramontane.config.images import ImageFormat
from tramontane.errors import InputError, reading
from tramontane.models.images import THUMBNAIL, Limits, data_uri, thumbnail
from tramontane.run.columns import versions_of
from tramontane.view.rollouts import UpdateFile
from tramontane.view.runs import Run

Row = dict[str, Any]
SHOWN = ("row", "group", "index", "verdict", "reward", "advantage", "tokens", "oldest", "newest",
         "reason", "finish_reason", "language", "ending")  # fmt: skip
TOKENWISE = ("token_ids", "tokens_text", "logprobs", "log_ratios", "versions")  # one entry a token
READ_AT_ONCE = 8  # completions: with their tokens each may take megabytes
OF_GROUP = 192  # pixels a side of an image beside others of its update
# Of images in a folder that may come from elsewhere.
LIMITS = Limits(2**26, 2**26, get_args(ImageFormat))


def pictures(row: Row, run: Run, missing: list[str], side: int = THUMBNAIL) -> Iterator[Row]:
    """The images that a row or a message names, as a page shows them.

    Each has its `file`; `image`, a data URI of at most `side` pixels a side, None if it cannot be
    read, which is added to `missing`; and `tokens`, the number that it takes in a prompt, None if
    that was not recorded.
    """
    names = [Path(name).name for name in row.get("image_files") or ()]
    tokens = row.get("image_tokens") or [None] * len(names)
    for name, count in zip(names, tokens, strict=True):
        image = None
        try:
            with reading(file := run.path / "images" / name):
                image = thumbnail(data_uri(file.read_bytes()), LIMITS, side)
        except InputError as error:
            missing.append(str(error))
        yield {"file": name, "image": image, "tokens": count}


def with_pictures(turns: Sequence[Row] | None, run: Run) -> list[Row] | None:
    """The turns of an evaluation's row with the `pictures` of their messages."""
    if turns is None:
        return None
    return [
        turn | {"messages": [m | {"pictures": [*pictures(m, run, [])]} for m in turn["messages"]]}
        for turn in turns
    ]


def rollout(run: Run, update: int, row: int) -> Row:
    """A completion; see `rollouts`."""
    [found] = rollouts(run, update, [row])
    return found


def rollouts(run: Run, update: int, rows: Sequence[int]) -> Iterator[Row]:
    """Completions with their tokens, each with the completions of its group.

    `pictures` are those of its first prompt, small; messages of turns have theirs.
    `prompt` is what a conversation began with, and None otherwise. `tokens_text` is None without a
    tokenizer; it, `logprobs`, `log_ratios` and `versions` have an entry per token. In a
    conversation, each of its `turns` has its own.

    Raises:
        KeyError: no such completion.
        InputError: its file is damaged or gone.
    """
    part = run.rollouts.of(update)
    for start in range(0, len(rows), READ_AT_ONCE):
        some = rows[start : start + READ_AT_ONCE]
        if part is None or not all(0 <= row < len(part.table) for row in some):
            raise KeyError((update, some))
        for row, texts in zip(some, run.rollouts.texts(part, some), strict=True):
            yield _rollout(run, part, row, texts)


def _rollout(run: Run, part: UpdateFile, row: int, found: Row) -> Row:
    """A completion, by its wide columns."""
    [narrow] = part.table.slice(row, 1).to_pylist()
    found["token_ids"] = found["token_ids"] or []
    found["tokens_text"] = texts = run.tokens.texts(found["token_ids"])
    earlier = [_earlier(sequence, run) for sequence in found.pop("earlier") or ()]
    first = next((sequence["prompt_ids"] for sequence in earlier), found.pop("prompt_ids"))
    found["prompt"] = run.tokens.text(first)
    if found["turns"]:
        found["turns"] = [_with_tokens(turn, [*earlier, found]) for turn in found["turns"]]
        found |= {name: [] for name in TOKENWISE}
        found["versions"] = sorted({v for turn in found["turns"] for v in turn["versions"]})
    same = part.table.append_column("row", pa.array(np.arange(len(part.table))))
    siblings = same.filter(pc.equal(same["group"], narrow["group"])).select(SHOWN).to_pylist()
    if found["turns"]:
        narrow["tokens"] += sum(len(sequence["token_ids"]) for sequence in earlier)
        if own := [version for version in found["versions"] if version >= 0]:
            narrow["oldest"], narrow["newest"] = own[0], own[-1]
    missing = []
    if texts is None:
        missing.append(f"texts of tokens: {run.tokens.missing}")
    messages = [message for turn in found["turns"] or () for message in turn["messages"]]
    for each in (found, *messages):
        each["pictures"] = [*pictures(each, run, missing)]
        for name in ("image_files", "image_tokens"):
            each.pop(name, None)
    for name in sorted({"advantage", "log_ratios"} & run.rollouts.missing):
        missing.append(f"{name}: not recorded by the version that wrote this run")
    return {
        **narrow,
        **found,
        "row": row,
        "group_rows": _with_centered(siblings),
        "missing": missing,
    }


def _earlier(sequence: Row, run: Run) -> Row:
    """What is known of the tokens of a forked conversation's earlier sequence."""
    return {
        **sequence,
        "tokens_text": run.tokens.texts(sequence["token_ids"]),
        "versions": versions_of(sequence["version_spans"]),
        "log_ratios": None,  # not recorded
    }


def _with_tokens(turn: Row, sequences: list[Row]) -> Row:
    sequence, span = sequences[turn["sequence"]], slice(turn["start"], turn["end"])
    return turn | {name: sequence[name] and sequence[name][span] for name in TOKENWISE}


def groups(run: Run, update: int) -> Row:
    """The groups of an update, with the reward, advantage and verdict of each completion.

    `centered` is the reward minus the group's mean reward, which runs of earlier versions have
    instead of the advantage.

    Raises:
        InputError: the update's file is damaged or gone.
    """
    if (part := run.rollouts.of(update)) is None:
        return {"update": update, "groups": [], "missing": []}
    rows = part.table.append_column("row", pa.array(np.arange(len(part.table)))).to_pylist()
    by_group: dict[int, list[Row]] = {}
    for row in rows:
        by_group.setdefault(row["group"], []).append(row)
    firsts = [members[0]["row"] for members in by_group.values()]
    names = ["problem", "filtered_detail", "image_files", "image_tokens"]
    wide = run.rollouts.wide_rows(part, firsts, names)
    missing = ["advantage"] if "advantage" in run.rollouts.missing else []
    shown = [
        {
            "group": number,
            "problem_id": members[0]["problem_id"],
            "problem": texts["problem"],
            "pictures": [*pictures(texts, run, missing, OF_GROUP)],
            "language": members[0]["language"],
            "difficulty": members[0]["difficulty"],
            "filtered": members[0]["filtered"],
            "filtered_detail": texts["filtered_detail"],
            "completions": _with_centered([{key: row[key] for key in SHOWN} for row in members]),
        }
        for (number, members), texts in zip(by_group.items(), wide, strict=True)
    ]
    return {"update": update, "groups": shown, "missing": missing}


def _with_centered(rows: list[Row]) -> list[Row]:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    mean = sum(rewards) / max(1, len(rewards))
    return [
        row | {"centered": None if row["reward"] is None else row["reward"] - mean} for row in rows
    ]
