"""The folder of a run, which holds everything about it.

config.yaml              with every default filled in
data/                    rows that were given as Python objects
changes.jsonl            keys that were changed when the run was resumed
metrics.jsonl            one line per update
rollouts/update_N.parquet  every completion that update N trained on, or that was filtered before it
sft/                     result of the cold start
checkpoints/update_N/    weights/ (Hugging Face), trainer/ (state), pipeline.json and
                         completions.parquet (the rest), manifest.json
problems.jsonl           record of each problem of a finite source, at the last checkpoint
summary.json report.html at the end
events.log               stages that began, lost workers, restarts of the trainer, damaged
                         checkpoints
printed.log              what rewards, tools and environments have printed
workers.jsonl            process of each worker, weights that each generator sampled with, losses
timeline.jsonl           steps and waits of the trainer, waits of generators, evaluations
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tramontane.config import (
    Config,
    check_complete,
    load_config,
    sealed,
)
from tramontane.config.yaml_text import read_own
from tramontane.data.images import TokensOf, images_of, keep
from tramontane.errors import InputError, reading
from tramontane.journals import read_log
from tramontane.models.names import numbered
from tramontane.placement.printed import PrintedLog
from tramontane.run.manifest import damage, seal
from tramontane.run.resuming import other_than_a_run, resume_command
from tramontane.workplace import HIDDEN, commit, disk_faults, owned_folder, sync, whole_file

if TYPE_CHECKING:
    from tramontane.run import rollouts

logger = logging.getLogger("tramontane.run")


class RunFolder:
    """Paths and files of one run.

    Files and checkpoints are written under a temporary name and renamed: they are complete or
    absent. Only logs grow line by line; `read_log` and `rewind` ignore a truncated last line. They
    are not flushed to disk: a power failure may lose lines since the last checkpoint, from which
    the run continues in any case.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics_file = self.path / "metrics.jsonl"
        self.evaluations_file = self.path / "evaluations.jsonl"
        self.rollouts = self.path / "rollouts"
        self.images = self.path / "images"
        self.checkpoints = self.path / "checkpoints"
        self.sft = self.path / "sft"
        self._begun = False  # True once it is known to hold a run, even if it is moved away then

    @classmethod
    @contextmanager
    def owned(cls, path: str | Path, *, new: bool = False) -> Iterator[RunFolder]:
        """Own a run's folder; see `workplace.owned_folder`, also for errors."""
        folder = cls(path)
        with owned_folder(path, "trained", new=new, then=folder._remedy) as before:
            if before and folder.begun:
                folder.log_event(f"taken over; was being {before}, which has ended")
            with PrintedLog(folder.path / "printed.log", lambda: folder.begun):
                yield folder

    @classmethod
    @contextmanager
    def new(cls, config: Config) -> Iterator[RunFolder]:
        """Own the folder of a new run: `run_dir`, or `runs/NAME` with a number added if that
        exists. If the run does not start, nothing is left behind.

        Raises:
            InputError: `run_dir` is not empty; or see `workplace.owned_folder`.
        """
        if config.run_dir is not None:
            with cls.owned(config.run_dir) as folder:
                folder.check_new()
                yield folder
            return
        path, number = Path("runs") / config.name, 1
        with ExitStack() as stack:
            while True:
                try:  # whoever creates the folder gets the name
                    folder = stack.enter_context(cls.owned(path, new=True))
                    break
                except FileExistsError:
                    number += 1
                    path = path.with_name(f"{config.name}-{number}")
            yield folder

    def begin(self, config: Config) -> None:
        """Create the folder if missing, and write the config of a new run into it.

        Raises:
            InputError: see `check_new`.
        """
        with self.writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.check_new()
            self.rollouts.mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
        self.write_config(config)
        self._begun = True

    def check_new(self) -> None:
        """Check that the folder holds nothing but data, its lock, and leftovers of a killed start.

        Raises:
            InputError: it holds more.
        """
        kept = [item for item in self.path.iterdir() if item.name not in ("data", *HIDDEN)]
        if any((item.is_file() and item.suffix != ".tmp") or any(item.glob("*")) for item in kept):
            remedy = f"continue that run with --resume {self.path}, or name" * self.begun or "name"
            raise InputError(f"run_dir {self.path}: not empty; {remedy} another folder")

    @property
    def begun(self) -> bool:
        """True if the folder holds a run, which can be resumed, or held one before."""
        self._begun = self._begun or (self.path / "config.yaml").is_file()
        return self._begun

    @classmethod
    def open(cls, path: str | Path) -> tuple[RunFolder, Config]:
        """Open an existing run and load its config.

        Raises:
            InputError: not a run folder.
        """
        folder = cls(path)
        folder.check_begun()
        return folder, folder.config()

    def check_begun(self) -> None:
        """Check that the folder holds a run.

        Raises:
            InputError: it does not.
        """
        if not self.begun:
            raise InputError(f"{self.path}: not a run folder ({other_than_a_run(self.path)})")

    def config(self, overrides: list[str] | None = None) -> Config:
        """Load the run's config, with `key.sub=value` overrides.

        Raises:
            InputError: the file was cut or edited; or see `config.load_section`.
        """
        check_complete(Config, self.path / "config.yaml")
        return load_config(self.path / "config.yaml", overrides)

    def name(self) -> str:
        """The run's name. Unlike `config`, this loads none of the functions of a config.

        Raises:
            InputError: the file was cut or edited.
        """
        file = self.path / "config.yaml"
        check_complete(Config, file)
        return str(read_own(file.read_bytes())["name"])

    def write_config(self, config: Config) -> None:
        self._write("config.yaml", sealed(config))

    @property
    def finished(self) -> bool:
        """True if the run has reached its end."""
        return (self.path / "summary.json").is_file()

    @property
    def newest_version(self) -> int:
        """Updates done at the newest checkpoint, intact or not; 0 without any."""
        return max((_version(path) for path in self._committed()), default=0)

    def reopen(self) -> None:
        """Mark the run as unfinished, to get more updates."""
        for file in (self.path / "summary.json", *self.path.glob("evaluation_after*.jsonl")):
            file.unlink(missing_ok=True)

    def forget_start(self, cold_start: bool) -> None:
        """Delete everything in a run without updates: a checkpoint of pending work, the
        evaluations, and, if `cold_start`, the cold start's result."""
        for checkpoint in self._committed():
            shutil.rmtree(checkpoint)
        for file in (self.evaluations_file, *self.path.glob("evaluation_*.jsonl")):
            file.unlink(missing_ok=True)
        if cold_start:
            for result in (self.sft, self.sft.with_suffix(".partial")):
                shutil.rmtree(result, ignore_errors=True)

    def changes(self) -> list[dict[str, Any]]:
        """Keys that were changed when the run was resumed: `update` (the first under the new
        value), `key`, `before`, `after`."""
        return list(read_log(self.path / "changes.jsonl"))

    def write_changes(self, rows: Iterable[dict[str, Any]]) -> None:
        self._write("changes.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def log(self, metrics: dict[str, Any]) -> None:
        self._append("metrics.jsonl", json.dumps(metrics))

    def log_event(self, text: str, level: int = logging.WARNING) -> None:
        """Add an event to `events.log`, and to the logger `tramontane.run` at the given level."""
        logger.log(level, text)
        indented = text.replace("\n", "\n    ")
        self._append("events.log", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {indented}")

    def log_worker(self, worker: str, **facts: Any) -> None:
        """Add facts about a worker to `workers.jsonl`, for programs to read.

        The facts are: its `process`, once started; each `version` of the weights that a generator
        begins to sample with; the requests that a replacement `continues` (a list of [group, index,
        tokens]); for every lost worker the reason (`lost`); and for a lost trainer the update
        `reached` and the checkpoint's update that it is `restarted_from`.
        """
        row = {"time": round(time.time(), 3), "worker": worker} | facts
        self._append("workers.jsonl", json.dumps(row))

    def log_activity(self, worker: str, activity: str, began: float, seconds: float) -> None:
        """Add a line to `timeline.jsonl`: a worker's activity (`controller.observer.Activity`),
        from `began`, in seconds since the epoch."""
        row: dict[str, Any] = {"worker": worker, "activity": activity}
        row |= {"began": round(began, 3), "seconds": round(seconds, 3)}
        self._append("timeline.jsonl", json.dumps(row))

    def log_evaluation(self, figures: dict[str, Any]) -> None:
        self._append("evaluations.jsonl", json.dumps(figures))

    def metrics(self) -> list[dict[str, Any]]:
        """The line of each update, without a truncated last line.

        Raises:
            InputError: an earlier line is broken.
        """
        return list(read_log(self.metrics_file))

    def write_rollouts(
        self,
        update: int,
        groups: Sequence[rollouts.Recorded],
        parts: Sequence[str],
        tokens_of: TokensOf | None = None,
    ) -> None:
        """Write the completions of an update's groups (see `rollouts.write_rollouts`), and those of
        their images that are not there yet."""
        from tramontane.run import rollouts  # with Arrow, which the base installation lacks

        images = (
            image
            for group, _ in groups
            for completion in group.completions
            for image in images_of(group.problem, completion)
        )
        keep(images, self.images, self._remedy)
        with self._whole_file(f"rollouts/{rollouts.file_name(update)}") as file:
            rollouts.write_rollouts(file, update, groups, parts, tokens_of)

    def write_problems(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write the problems' records; no file if there are none."""
        if lines := [json.dumps(row).encode() + b"\n" for row in rows]:
            with self._whole_file("problems.jsonl") as file:
                file.writelines(lines)

    def write_json(self, name: str, value: Any) -> Path:
        return self._write(name, json.dumps(value, indent=2) + "\n")

    def checkpoint(self, update: int) -> Path:
        """The folder of an update's checkpoint, whether or not it was taken."""
        taken = {_version(path): path for path in self._committed()}
        return taken.get(update, self.checkpoints / f"update_{update}")

    def checkpoint_dir(self, update: int) -> Path:
        """Create an empty folder for a checkpoint, to be passed to `commit_checkpoint`."""
        partial = self.checkpoints / f"update_{update}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        return partial

    def commit_checkpoint(self, partial: Path, keep: int) -> Path:
        """Seal a checkpoint, flush it to disk, rename it, and delete all but the newest `keep`."""
        seal(partial)
        if self.metrics_file.is_file():
            sync(self.metrics_file)
        final = partial.with_suffix("")
        old = partial.with_suffix(".old")
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        commit(partial, final)
        shutil.rmtree(old, ignore_errors=True)
        for old in self._committed()[:-keep]:
            shutil.rmtree(old)
        return final

    def whole_checkpoint(self, warn: Callable[[str], None]) -> Path | None:
        """Find the newest checkpoint without damage outside of the trainer's tensors, which are
        checked as they are loaded; None if none was ever taken. Damaged ones are set aside.

        Raises:
            InputError: all checkpoints are damaged, or those that were taken are missing: the run
                would begin again, and what is recorded of its updates would be deleted.
        """
        with reading(self.metrics_file):
            reached = max((int(row["update"]) for row in self.metrics()), default=0)
        gone = reached and not self.checkpoints.is_dir()
        is_empty = not any(self.checkpoints.glob("*"))
        if gone or (is_empty and reached > self.config().checkpoint.every):
            raise InputError(
                f"{self.checkpoints}: the run's checkpoints are missing (moved or deleted?), of "
                f"{reached:,} updates: put them back, or start a new run"
            )
        self.checkpoints.mkdir(exist_ok=True)
        for old in self.checkpoints.glob("*.old"):  # a crash interrupted its replacement
            if not old.with_suffix("").exists():
                old.rename(old.with_suffix(""))
        names = []
        for folder in reversed(self._committed()):
            if (reason := damage(folder, state=False)) is None:
                return folder
            names.append(f"{folder.name} ({reason})")
            self.set_aside(folder, reason, warn)
        names = names or [path.stem for path in self.checkpoints.glob("*.damaged")]
        if names:
            raise InputError(
                f"{self.checkpoints}: no checkpoint is whole: {', '.join(names)}; they are kept as "
                f"update_N.damaged. Restore one from a copy, or start a new run"
            )
        return None

    def set_aside(self, checkpoint: Path, reason: str, warn: Callable[[str], None]) -> None:
        """Rename a damaged checkpoint to `update_N.damaged`, and call `warn`."""
        aside = checkpoint.with_suffix(".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
        warn(f"damaged checkpoint, set aside: {checkpoint}: {reason}")

    def rewind(self, update: int) -> None:
        """Delete everything written after `update`, which a resumed run will write again.

        Unfinished checkpoints and a truncated last line of metrics are deleted too.

        Raises:
            InputError: a line before the last is broken.
        """
        from tramontane.run import rollouts

        for partial in self.checkpoints.glob("*.partial"):
            shutil.rmtree(partial)
        for unfinished in (
            found
            for folder in (self.path, self.rollouts, self.images)
            for found in folder.glob("*.tmp")
        ):
            unfinished.unlink()
        for file, stays in (
            (self.metrics_file, lambda row: row["update"] <= update),
            (self.evaluations_file, lambda row: _update_of(row["when"]) <= update),
            (self.path / "workers.jsonl", lambda row: True),
            (self.path / "timeline.jsonl", lambda row: True),
        ):
            if file.is_file():
                with reading(file):
                    rows = [row for row in read_log(file) if stays(row)]
                self._write(file.name, "".join(json.dumps(row) + "\n" for row in rows))
        for file in rollouts.files(self.rollouts):
            if rollouts.update_of(file) > update:
                file.unlink()

    def writing(self, path: Path) -> AbstractContextManager[None]:
        """Report disk faults in a block that writes a path; see `workplace.disk_faults`.

        Raises:
            InputError: see there.
        """
        return disk_faults(path, self._remedy)

    @property
    def resume_command(self) -> str:
        """The command that continues the run, for messages."""
        return resume_command(self.path)

    def _remedy(self) -> str:
        return f"continue with: {self.resume_command}" if self.begun else "start the run again"

    def _append(self, name: str, line: str) -> None:
        path = self.path / name
        with self.writing(path), path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _write(self, name: str, text: str) -> Path:
        with self._whole_file(name) as file:
            file.write(text.encode())
        return self.path / name

    def _whole_file(self, name: str) -> AbstractContextManager[IO[bytes]]:
        return whole_file(self.path / name, self._remedy)

    def _committed(self) -> list[Path]:
        return numbered(self.checkpoints)


def _version(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("_")[2])


def _update_of(when: str) -> float:
    """The update after which a measurement was taken: `before`, `update_N` or `after`."""
    ends = {"base": 0.0, "before": 0.0, "after": math.inf}
    return ends[when] if when in ends else int(when.removeprefix("update_"))


def flat(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """An update's metrics, with those by name (`{"endings": {"completed": 1}}`) as
    `endings.completed`; histograms stay as they are."""
    values: dict[str, Any] = {}
    for key, value in metrics.items():
        if isinstance(value, dict) and not key.endswith("_histogram"):
            values |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            values[key] = value
    return values
