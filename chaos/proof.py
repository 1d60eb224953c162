"""Checks a run's promises from its records. Only the run folder is read."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measure import Promise
from tramontane.models.loading import load_tokenizer
from tramontane.run import rollouts
from tramontane.run.folder import RunFolder
from tramontane.tokens import INSERTED

Row = dict[str, Any]


def read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def prove(folder: Path) -> list[Promise]:
    sizes = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["pipeline"]
    files = rollouts.files(folder / "rollouts")
    rows = [row for file in files for row in rollouts.read_rollouts(file)]
    return [
        *_problems(folder, rows, sizes),
        _updates(folder, files, sizes),
        *_tokens(rows, sizes),
        _generators(read(folder / "workers.jsonl")),
    ]


def _problems(folder: Path, rows: list[Row], sizes: Row) -> list[Promise]:
    """Every problem handed out is trained on once, filtered with a reason, or pending."""
    groups: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["group"]].append(row)
    newest = RunFolder(folder).checkpoint(RunFolder(folder).newest_version)
    state = json.loads((newest / "pipeline.json").read_text(encoding="utf-8"))
    pending = {g["id"] for g in state["groups"]} | {g["id"] for g, _ in state["filtered"]}
    trained = {g for g, completions in groups.items() if completions[0]["filtered"] is None}
    filtered = {g for g, completions in groups.items() if completions[0]["filtered"]}
    # Once: each completion of a group is recorded once, all in one update, for one reason.
    size = sizes["group_size"]
    whole = [
        sorted(r["index"] for r in completions) == list(range(size))
        and len({(r["update"], r["filtered"]) for r in completions}) == 1
        for completions in groups.values()
    ]
    lost = set(range(state["next_group"])) - trained - filtered - pending
    twice = (trained | filtered) & pending
    ids = [completions[0]["problem_id"] for completions in groups.values()]
    reasons = sorted({groups[g][0]["filtered"] for g in filtered})
    return [
        Promise(
            "every problem handed out is trained on once, filtered with a reason, or pending",
            f"{state['next_group']} handed out: {len(trained)} trained on, {len(filtered)} "
            f"filtered ({', '.join(reasons)}), {len(pending)} pending, {len(lost)} lost, "
            f"{len(twice) + whole.count(False)} twice or in part",
            not lost and not twice and all(whole),
        ),
        Promise(
            "no problem is handed out under two numbers",
            f"{len(ids) - len(set(ids))} of {len(ids)}",
            len(set(ids)) == len(ids),
        ),
    ]


def _updates(folder: Path, files: list[Path], sizes: Row) -> Promise:
    """Every update is recorded once, even if a resumed run did it again after its checkpoint."""
    metrics = [row["update"] for row in read(folder / "metrics.jsonl")]
    written = [rollouts.update_of(file) for file in files]
    trained = [
        sum(row["filtered"] is None for row in rollouts.read_rollouts(file, ["filtered"]))
        for file in files
    ]
    expected = list(range(1, sizes["updates"] + 1))
    return Promise(
        "metrics and rollouts have every update once, of n_batch completions",
        f"{len(metrics)} and {len(written)} of {sizes['updates']}; completions {set(trained)}",
        metrics == written == expected and set(trained) == {sizes["n_batch"]},
    )


def _tokens(rows: list[Row], sizes: Row) -> list[Promise]:
    """Versions within a completion rise, none is too old, and no token is missing."""
    sampled = [[v for v in row["versions"] if v != INSERTED] for row in rows]
    decreasing = sum(versions != sorted(versions) for versions in sampled)
    pairs = zip(rows, sampled, strict=True)
    ages = [r["update"] - 1 - v for r, versions in pairs if r["filtered"] is None for v in versions]
    tokenizer = load_tokenizer("tiny")

    def text(row: Row) -> str:
        ids, eos = row["token_ids"], tokenizer.eos_token_id
        if not row["turns"]:
            return str(tokenizer.decode(ids, skip_special_tokens=True))
        sequences = [*(each["token_ids"] for each in row["earlier"]), ids]
        parts = [sequences[t["sequence"]][t["start"] : t["end"]] for t in row["turns"]]
        parts = [part[:-1] if part[-1] == eos else part for part in parts]
        return "\n\n".join(map(tokenizer.decode, parts))

    whole = sum(
        text(row) == row["text"]
        and len(ids) == len(row["versions"]) == len(row["logprobs"])
        and (ids[-1] == tokenizer.eos_token_id or len(ids) == sizes["l_max"])
        for row in rows
        for ids in [row["token_ids"]]
    )
    spanning = sum(len(set(versions)) > 1 for versions in sampled)
    return [
        Promise(
            "weights' versions never decrease within a completion",
            f"{decreasing} of {len(rows):,}; {spanning:,} span several versions",
            decreasing == 0,
        ),
        Promise(
            f"no token trained on is more than {sizes['max_staleness']} versions old",
            f"{min(ages)} to {max(ages)} over {len(ages):,} tokens",
            min(ages) >= 0 and max(ages) <= sizes["max_staleness"],
        ),
        Promise(
            "every completion is whole: its tokens are its text, to its end",
            f"{whole:,} of {len(rows):,}",
            whole == len(rows),
        ),
    ]


def _generators(rows: list[Row]) -> Promise:
    """The weights' versions that each generator sampled under, as the controller recorded them.
    After a resume, or a restart of the trainer, a session begins with its checkpoint's weights."""
    newest: dict[str, int] = {}
    seen, back, sessions = 0, [], 0
    for row in rows:
        if row["worker"] == "controller" or "restarted_from" in row:
            newest, sessions = {}, sessions + 1
        if "version" in row:
            seen += row["version"] != newest.get(row["worker"])
            if row["version"] < newest.get(row["worker"], 0):
                back.append(row)
            newest[row["worker"]] = row["version"]
    return Promise(
        "weights' versions are monotone for each generator, its replacements included",
        f"{len(back)} of {seen} changes went back, in {sessions} sessions",
        not back,
    )
