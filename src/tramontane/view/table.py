"""The table of runs: config keys that differ, states, results with intervals, times, machines."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tramontane.config import read_settings
from tramontane.errors import InputError, reading
from tramontane.journals import parse_object
from tramontane.run.figures import clock
from tramontane.run.folder import flat
from tramontane.workplace import owner_of

Row = dict[str, Any]
IGNORED = ("name", "run_dir")  # keys that differ between all runs
LOGS = ("summary.json", "metrics.jsonl", "evaluations.jsonl", "workers.jsonl")
MOST_KEPT = 1000  # figures and curves of runs
TAIL = 1 << 16  # bytes at the end of a log, more than its last line
MACHINE_BYTES = 1 << 12  # at the start of `workers.jsonl`, more than its first line


@dataclass(frozen=True)
class Table:
    """Runs side by side.

    Args:
        keys: dotted paths of the config keys that differ.
        results: names of the figures that at least one run has.
        rows: for each run `name`, `state`, `config` and `results` by name (a result has `value`,
            and `low` and `high` of a 95 % interval), `update` and `updates`, `seconds`, `machine`,
            and `fault`, a file's error.
        metrics: names of the numbers of the runs' last updates, sorted.
    """

    keys: Sequence[str]
    results: Sequence[str]
    rows: Sequence[Row]
    metrics: Sequence[str]

    @property
    def header(self) -> list[str]:
        """Names of the columns."""
        return ["run", "state", *self.keys, *self.results, "updates", "time", "machine"]

    def cells(self) -> list[list[str]]:
        """The texts of each row."""
        return [
            [
                row["name"],
                row["state"],
                *(shown(row["config"].get(key)) for key in self.keys),
                *(_rounded(row["results"].get(name)) for name in self.results),
                f"{row['update']}/{row['updates']}",
                clock(row["seconds"]) if row["seconds"] is not None else "",
                row["machine"],
            ]
            for row in self.rows
        ]

    def markdown(self) -> str:
        """The table in Markdown."""
        rows = [self.header, ["---"] * len(self.header), *self.cells()]
        cells = ([" ".join(t.replace("|", "\\|").split()) for t in row] for row in rows)
        lines = ("| " + " | ".join(row) + " |" for row in cells)
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """The table as CSV, with plain numbers: a result has three columns; seconds."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        ends = [f"{name}{end}" for name in self.results for end in ("", " low", " high")]
        writer.writerow(
            ["run", "state", *self.keys, *ends, "update", "updates", "seconds", "machine"]
        )
        for row in self.rows:
            found = [row["results"].get(name) or {} for name in self.results]
            figures = [each.get(end) for each in found for end in ("value", "low", "high")]
            values = [shown(row["config"].get(key)) for key in self.keys]
            last = [row[name] for name in ("update", "updates", "seconds", "machine")]
            writer.writerow([row["name"], row["state"], *values, *figures, *last])
        return text.getvalue()


def table_of(folders: Mapping[Path, Row | None]) -> Table:
    """The table of some run folders, in their order; a damaged run has its error as `fault`.

    Args:
        folders: the folders, each with its config `flattened`; None: not read yet.
    """
    rows = [run_row(folder, keys) for folder, keys in folders.items()]
    configs = [row.pop("keys") for row in rows]
    metrics = sorted({name for row in rows for name in row.pop("metrics")})
    seen: dict[str, Any] = {}  # the first value of each key
    differing: dict[str, None] = {}
    for keys in configs:
        for key, value in keys.items():
            if value != seen.setdefault(key, value) and key not in IGNORED:
                differing[key] = None
    for row, keys in zip(rows, configs, strict=True):
        row["config"] = {key: keys[key] for key in differing if key in keys}
    results = dict.fromkeys(name for row in rows for name in row["results"])
    # A key that a config of another version lacks is not a difference.
    return Table([key for key in seen if key in differing], list(results), rows, metrics)


def run_row(folder: Path, keys: Row | None = None) -> Row:
    """What the table says of one run; `keys` are all keys of its config, flattened, and `metrics`
    the names of its last update's numbers."""
    row: Row = {"name": folder.name, "path": str(folder), "fault": "", "machine": ""}
    row |= {"state": "not started", "update": 0, "updates": None, "seconds": None}
    row |= {"results": {}, "keys": {}, "metrics": []}
    try:
        with reading(folder):
            begun = (folder / "config.yaml").is_file()
            if not keys and begun:
                keys = flattened(read_settings(folder / "config.yaml"))
            if keys:
                row |= {"keys": keys, "updates": keys.get("pipeline.updates")}
                row |= _measured(folder, *(_state(folder / name) for name in LOGS))
            if keys and begun:
                ended = "finished" if row["ended"] else "stopped"
                row["state"] = "running" if owner_of(folder) else ended
    except InputError as error:
        row |= {"state": "damaged", "fault": str(error)}
    row.pop("ended", None)
    return row


def _state(file: Path) -> tuple[int, int] | None:
    """When a file was last written, and its size: while they are the same, it need not be read."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size


@lru_cache(MOST_KEPT)
def _measured(folder: Path, *states: tuple[int, int] | None) -> Row:
    """The figures of a run whose `LOGS` have these states."""
    file = folder / "summary.json"
    summary = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    last = last_row(folder / "metrics.jsonl")
    return {
        "ended": bool(summary),
        "update": last.get("update", 0),
        "seconds": summary.get("wall_seconds", last.get("wall_seconds")),
        "machine": summary.get("machine") or _machine(folder),
        "results": _results(folder, last),
        "metrics": [
            name
            for name, value in flat(last).items()
            if isinstance(value, int | float) and name not in ("update", "wall_seconds")
        ],
    }


def _results(folder: Path, last: Row) -> dict[str, Row]:
    """The newest figures: of the evaluations after training, else in training; and the mean reward
    of the last update."""
    found: dict[str, Row] = {}
    for figures in whole_rows(folder / "evaluations.jsonl"):
        name = "" if figures.get("set") in (None, "held_out") else f" {figures['set']}"
        if figures.get("when") in ("base", "before"):
            continue
        found[f"pass@1{name}"] = figures["pass_at_1"]
        votes = figures.get("maj_at_k") or {}
        if most := max((int(k) for k in votes), default=1) - 1:
            found[f"maj@{most + 1}{name}"] = votes[str(most + 1)]
    if isinstance(reward := last.get("reward"), int | float):
        found["reward"] = {"value": reward}
    return found


def whole_rows(file: Path) -> Iterator[Row]:
    """The rows of a log, without lines that are damaged or not yet complete; faster than
    `read_log`, which refuses them."""
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def curve(folder: Path, metric: str) -> list[tuple[int, Any, float]]:
    """(update, wall seconds, value) of each update that has a metric, e.g. `endings.completed`."""
    file = folder / "metrics.jsonl"
    return _curve(file, metric, _state(file))


@lru_cache(MOST_KEPT)
def _curve(file: Path, metric: str, state: tuple[int, int] | None) -> list[tuple[int, Any, float]]:
    name, _, inner = metric.partition(".")
    found = []
    for row in whole_rows(file):
        value = row.get(metric)
        if inner and isinstance(row.get(name), dict):
            value = row[name].get(inner)
        if isinstance(value, int | float) and isinstance(row.get("update"), int):
            found.append((row["update"], row.get("wall_seconds"), value))
    return found


def last_row(file: Path) -> Row:
    """The last complete line of a log; empty without any."""
    if not file.is_file():
        return {}
    with file.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - TAIL))
        text = log.read()
    for line in reversed(text[: text.rfind(b"\n") + 1].splitlines()):
        try:
            return parse_object(line)
        except ValueError:
            continue
    return {}


def _machine(folder: Path) -> str:
    """The machine that a run began on, which its first worker's line names."""
    file = folder / "workers.jsonl"
    if not file.is_file():
        return ""
    with file.open("rb") as log:
        line = log.read(MACHINE_BYTES).partition(b"\n")[0]
    try:
        return str(parse_object(line).get("machine", ""))
    except ValueError:
        return ""


def flattened(config: Row) -> Row:
    """The values of a config by dotted path; lists are values."""
    found: Row = {}

    def add(section: Row, path: str) -> None:
        for key, value in section.items():
            if isinstance(value, dict) and value:
                add(value, f"{path}{key}.")
            else:
                found[f"{path}{key}"] = value

    add(config, "")
    return found


def shown(value: Any) -> str:
    """A value of a config as text."""
    if isinstance(value, str):
        return value
    return f"{value:.15g}" if isinstance(value, float) else json.dumps(value)


def _rounded(result: Mapping[str, float] | None) -> str:
    if result is None:
        return ""
    interval = f" [{result['low']:.3f}, {result['high']:.3f}]" if "low" in result else ""
    return f"{result['value']:.3f}{interval}"
