"""A run is a folder: config, metrics, rollouts, checkpoints, report; nothing else is the run.

config.yaml              resolved
metrics.jsonl            a line per update
rollouts/update_N.jsonl  every completion that update N trained on, or that was filtered before
checkpoints/step_N/      weights/ (Hugging Face), trainer/ (state), pipeline.json (the rest)
summary.json report.html at the end
events.log               workers that were lost and replaced, if any
workers.jsonl            which process is which worker, and what weights generators sampled under
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tramontane.config import Config, load_config
from tramontane.errors import InputError


class RunFolder:
    """Paths and files of one run.

    Files and checkpoints are written beside their place and renamed: complete or absent. Only the
    two logs grow line by line; `rewind` forgets a line that was cut short.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics_file = self.path / "metrics.jsonl"
        self.evaluations_file = self.path / "evaluations.jsonl"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """A new folder: `run_dir`, or `runs/NAME`, with a number added where that exists.

        Raises:
            InputError: `run_dir` is given and holds something already.
        """
        if config.run_dir is not None:
            path = Path(config.run_dir)
            if path.is_file():
                raise InputError(f"run_dir {path}: a file; name a folder")
            if path.exists() and any(path.iterdir()):
                raise InputError(
                    f"run_dir {path}: not empty; continue that run with --resume {path}, "
                    f"or name another folder"
                )
        else:
            base = Path("runs") / config.name
            path, number = base, 2
            while path.exists():
                path, number = base.with_name(f"{base.name}-{number}"), number + 1
        folder = cls(path)
        folder.rollouts.mkdir(parents=True, exist_ok=True)
        folder.checkpoints.mkdir(exist_ok=True)
        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        _write(path / "config.yaml", text)
        return folder

    @classmethod
    def open(cls, path: str | Path) -> tuple[RunFolder, Config]:
        """An existing run and its config.

        Raises:
            InputError: not a run folder.
        """
        folder = cls(path)
        if not (folder.path / "config.yaml").is_file():
            raise InputError(f"{path}: not a run folder (it has no config.yaml)")
        return folder, load_config(folder.path / "config.yaml")

    def log(self, metrics: dict[str, Any]) -> None:
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    def log_event(self, text: str) -> None:
        """Something out of the ordinary, for people: a worker that was lost and replaced."""
        with (self.path / "events.log").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def log_worker(self, worker: str, **facts: Any) -> None:
        """What a worker is or does, for programs: its `process` once that has started, each
        `version` of the weights that a generator begins to sample under, and what the one that
        takes its place `continues`: [group, index, tokens] each."""
        row = {"time": round(time.time(), 3), "worker": worker} | facts
        with (self.path / "workers.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def log_evaluation(self, figures: dict[str, Any]) -> None:
        with self.evaluations_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        if not self.metrics_file.is_file():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def write_rollouts(self, update: int, rows: Iterable[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        _write(self.rollouts / f"update_{update:06d}.jsonl", text)

    def write_json(self, name: str, value: Any, indent: int | None = 2) -> Path:
        path = self.path / name
        _write(path, json.dumps(value, indent=indent) + "\n")
        return path

    def checkpoint_dir(self, update: int) -> Path:
        """An empty folder to write a checkpoint into; `commit_checkpoint` makes it count."""
        partial = self.checkpoints / f"step_{update}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        return partial

    def commit_checkpoint(self, partial: Path, keep: int) -> Path:
        """Flush to disk, rename into place, and drop all but the newest `keep`."""
        for file in partial.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        final = partial.with_suffix("")
        old = partial.with_suffix(".old")
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
        for old in self._committed()[:-keep]:
            shutil.rmtree(old)
        return final

    def latest_checkpoint(self) -> Path | None:
        committed = self._committed()
        return committed[-1] if committed else None

    def rewind(self, update: int) -> None:
        """Forget what was written after `update`: a resumed run writes it again.

        A last metrics line that a crash cut short goes too.
        """
        for file, keep in (
            (self.metrics_file, lambda row: row["update"] <= update),
            (self.evaluations_file, lambda row: _update_of(row["when"]) <= update),
        ):
            if file.is_file():
                rows = [row for row in _complete_rows(file) if keep(row)]
                _write(file, "".join(json.dumps(row) + "\n" for row in rows))
        for file in self.rollouts.glob("update_*.jsonl"):
            if int(file.stem.removeprefix("update_")) > update:
                file.unlink()

    def _committed(self) -> list[Path]:
        found = [p for p in self.checkpoints.glob("step_*") if not p.suffix]
        return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def _update_of(when: str) -> float:
    """Where in a run a measurement belongs: `before`, `update_N`, `after`."""
    ends = {"before": 0.0, "after": math.inf}
    return ends[when] if when in ends else int(when.removeprefix("update_"))


def _complete_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a log, up to one that a crash cut short."""
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
