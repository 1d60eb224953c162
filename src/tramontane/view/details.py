"""One completion with its tokens, and the groups of one update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tramontane.view.runs import Run

Row = dict[str, Any]
SHOWN = ("row", "group", "index", "verdict", "reward", "advantage", "tokens", "oldest", "newest",
         "reason", "finish_reason", "language")  # fmt: skip


def rollout(run: Run, update: int, row: int) -> Row:
    """A completion with its tokens, and the completions of its group.

    `tokens` are texts, or None without a tokenizer; `logprobs`, `log_ratios` and `versions` have an
    entry per token.

    Raises:
        KeyError: no such completion.
        InputError: its file is damaged or gone.
    """
    part, narrow = run.rollouts.at(update, row)
    found = run.rollouts.texts(part, row)
    ids = found.pop("token_ids") or []
    texts = run.tokens.texts(ids)
    same = part.table.append_column("row", pa.array(np.arange(len(part.table))))
    siblings = same.filter(pc.equal(same["group"], narrow["group"])).select(SHOWN).to_pylist()
    missing = []
    if texts is None:
        missing.append(f"texts of tokens: {run.tokens.missing}")
    for name in sorted({"advantage", "log_ratios"} & run.rollouts.missing):
        missing.append(f"{name}: not recorded by the version that wrote this run")
    return {
        **narrow,
        **found,
        "row": row,
        "token_ids": ids,
        "tokens_text": texts,
        "group_rows": _with_centred(siblings),
        "missing": missing,
    }


def groups(run: Run, update: int) -> Row:
    """The groups of an update, with the reward, advantage and verdict of each completion.

    `centred` is the reward minus the group's mean reward, which runs of earlier versions have
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
    wide = run.rollouts.wide_rows(part, firsts, ["problem", "filtered_detail"])
    shown = [
        {
            "group": number,
            "problem_id": members[0]["problem_id"],
            "problem": texts["problem"],
            "language": members[0]["language"],
            "difficulty": members[0]["difficulty"],
            "filtered": members[0]["filtered"],
            "filtered_detail": texts["filtered_detail"],
            "completions": _with_centred([{key: row[key] for key in SHOWN} for row in members]),
        }
        for (number, members), texts in zip(by_group.items(), wide, strict=True)
    ]
    missing = ["advantage"] if "advantage" in run.rollouts.missing else []
    return {"update": update, "groups": shown, "missing": missing}


def _with_centred(rows: list[Row]) -> list[Row]:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    mean = sum(rewards) / max(1, len(rewards))
    return [
        row | {"centred": None if row["reward"] is None else row["reward"] - mean} for row in rows
    ]
