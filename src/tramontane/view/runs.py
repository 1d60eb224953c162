"""The runs that the page shows: their configs, logs and findings."""

from __future__ import annotations

import json
import math
import shlex
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from tramontane.audit.findings import KINDS
from tramontane.config import read_settings
from tramontane.config.verifier import RewardConfig
from tramontane.errors import InputError, reading
from tramontane.journals import parse_object, read_log
from tramontane.pages import json_values
from tramontane.run.folder import RunFolder, flat
from tramontane.view.rollouts import Rollouts
from tramontane.view.search import Searches
from tramontane.view.table import Table, flattened, table_of
from tramontane.view.tokens import Tokens

Row = dict[str, Any]
MARKED = 1024  # bytes, more than a line's update and time


class Run:
    """One run folder. Files other than its config are read lazily.

    Args:
        path: the folder.
        number: the run's place on the command line, which is its name in requests.

    Attributes:
        keys: its config by dotted path.
        fault: the error in its config, which is then empty.
    """

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path, number
        self.config: Row = {}
        self.fault = ""
        file = path / "config.yaml"
        try:
            with reading(file):
                RunFolder(path).check_begun()
                self.config = read_settings(file)
        except InputError as error:
            self.fault = str(error)
        self.keys = flattened(self.config)
        self.rollouts = Rollouts(path / "rollouts")
        self.searches = Searches(self.rollouts)
        self._evaluations: dict[Path, tuple[int, list[Row]]] = {}  # modified, rows
        named = self.config.get("tokenizer") or self.config.get("model", "tiny")
        self.tokens = Tokens(path, str(named))

    def describe(self) -> Row:
        """Content of the page's header and menus."""
        config = self.config
        pipeline = _section(config, "pipeline")
        return {
            "run": self.number,
            "name": str(config.get("name", self.path.name)),
            "path": str(self.path),
            "model": str(config.get("model", "")),
            "updates": pipeline.get("updates"),
            "group_size": pipeline.get("group_size"),
            "n_batch": pipeline.get("n_batch"),
            "objective": _section(config, "trainer", "objective").get("name", "magistral"),
            "tags": _section(config, "verifier").get("thinking_tags"),
            "finished": (self.path / "summary.json").is_file(),
        }

    @property
    def rates(self) -> list[str]:
        """The figures of an evaluation, beside pass@1, that are shown (`RewardConfig.rates`)."""
        data = _section(self.config, "data")
        talks = bool(data.get("environment") or data.get("tools"))
        earned = (
            talks and _section(self.config, "conversation").get("reward", "verifier") != "verifier"
        )
        weights = _section(self.config, "verifier", "reward")
        return RewardConfig.model_construct(**weights).rates(earned=earned)

    def metrics(self, offset: int, mark: int) -> Row:
        """The lines of `metrics.jsonl` from a byte on; `offset` and `mark` are for the next call.

        `mark` is a checksum of the bytes before `offset`: if a resumed run has rewritten the file,
        reading starts over. A line that is not an update is skipped, and named in `damaged`.
        """
        file = self.path / "metrics.jsonl"
        faults = [self.fault] if self.fault else []
        if not file.is_file():
            if any(self.path.glob("rollouts/*.parquet")):
                faults.append(f"{file}: lost; this run has rollouts, so it had metrics")
            return {"rows": [], "offset": 0, "mark": 0, "reset": offset > 0, "damaged": faults}
        with reading(file), file.open("rb") as handle:
            handle.seek(max(0, offset - MARKED))
            before = handle.read(min(offset, MARKED))
            if reset := zlib.crc32(before) != mark:
                offset, before = handle.seek(0), b""
            text = handle.read()
        whole = text[: text.rfind(b"\n") + 1]  # a line may be incomplete
        rows, damaged = [], faults
        for line in whole.splitlines(keepends=True):
            if (row := _update(line)) is not None:
                rows.append(row)
            else:
                damaged.append(
                    f"{file}: the line at byte {offset} is not an update, and is skipped"
                )
            offset += len(line)
        mark = zlib.crc32((before + whole)[-MARKED:])
        return {"rows": rows, "offset": offset, "mark": mark, "reset": reset, "damaged": damaged}

    def measured(self) -> list[Row]:
        """The figures of `evaluations.jsonl`, without slices."""
        keys = ("when", "set", "version", "n_problems", "samples", "pass_at_1", "maj_at_k")
        rows = read_log(self.path / "evaluations.jsonl")
        return [{key: row.get(key) for key in keys} for row in rows]

    def evaluations(self) -> dict[str, list[Row]]:
        """The rows of `evaluation_*.jsonl` by the name of the measurement, such as `before` or
        `update_20`, oldest first."""
        found = {}
        for file in sorted(self.path.glob("evaluation_*.jsonl"), key=_order):
            with reading(file):
                modified = file.stat().st_mtime_ns
                if self._evaluations.get(file, (0, []))[0] != modified:
                    rows = [row | {"problem_id": str(row["problem_id"])} for row in read_log(file)]
                    self._evaluations[file] = (modified, rows)
            found[file.stem.removeprefix("evaluation_")] = self._evaluations[file][1]
        return found

    def findings(self) -> Row:
        """The findings of `tramontane audit`; those in rollouts have the place of their row."""
        file = self.path / "audit.jsonl"
        with reading(file):
            rows = [_located(row) for row in read_log(file)]
        counts = Counter(str(row.get("kind")) for row in rows)
        return {
            "audited": file.is_file(),
            "command": f"tramontane audit {shlex.quote(str(self.path))}",
            "kinds": [
                {"kind": kind, "meaning": meaning, "count": counts[kind]}
                for kind, meaning in KINDS.items()
            ],
            "rows": rows,
        }


def _order(file: Path) -> tuple[float, str]:
    """Place of a measurement in its run."""
    name = file.stem.removeprefix("evaluation_")
    number = name.removeprefix("update_").partition("_")[0]
    ends = {"base": -2.0, "before": -1.0, "after": math.inf}
    place = float(number) if number.isdigit() else ends.get(name.partition("_")[0], -1.0)
    return place, name


def _section(config: Row, *keys: str) -> Row:
    """A section of a config; empty if missing, as in configs of other versions."""
    for key in keys:
        inner = config.get(key)
        config = inner if isinstance(inner, dict) else {}
    return config


def _update(line: bytes) -> Row | None:
    try:
        row = parse_object(line)
    except ValueError:
        return None
    if not isinstance(row.get("update"), int):
        return None
    return flat(row)


def _located(row: Row) -> Row:
    """A finding with `update` and `row` of its completion in the rollouts, if it is there."""
    stem = Path(str(row.get("file", ""))).stem
    if not stem.startswith("update_") or not isinstance(row.get("line"), int):
        return row
    return row | {"update": int(stem.removeprefix("update_")), "row": row["line"] - 1}


def load_runs(paths: list[Path]) -> list[Run]:
    """The runs of these folders; a folder of run folders stands for all of them.

    An unreadable one is shown with its error.

    Raises:
        InputError: none of them can be read.
    """
    found: list[Path] = []
    for path in paths:
        # Of a study, the runs of each arm have a folder.
        inner = sorted(f.parent for each in ("*", "*/*") for f in path.glob(f"{each}/config.yaml"))
        if (path / "config.yaml").is_file() or not inner:
            found.append(path)
        else:
            found += inner
    unique = list(dict.fromkeys(path.resolve() for path in found))
    runs = [Run(path, number) for number, path in enumerate(unique)]
    if all(run.fault for run in runs):
        raise InputError("\n".join(run.fault for run in runs))
    return runs


def side_by_side(runs: list[Run]) -> Table:
    """The table of these runs."""
    return table_of({run.path: run.keys for run in runs})


def dumps(value: Any) -> bytes:
    """JSON of any value; numbers that JSON lacks (NaN and infinities) become null, and other
    unsupported values, such as dates, text."""
    try:
        return json.dumps(value, allow_nan=False, default=str).encode()
    except ValueError:
        return json.dumps(json_values(value), allow_nan=False, default=str).encode()
