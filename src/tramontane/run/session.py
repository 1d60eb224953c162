"""The session: the state that the parts of a run share. A run has one session for its start,
and one more for each resume and each loss of the trainer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tramontane.config import Change, Config
from tramontane.controller.observer import Activity
from tramontane.errors import reading
from tramontane.evaluation.calibration import calibrate
from tramontane.models.names import with_tokenizer
from tramontane.placement import WorkerLost
from tramontane.run.changes import begins_again, changes_cold_start, check_changes, record_changes
from tramontane.run.checkpoint import PipelineCheckpoint, read_pipeline
from tramontane.run.columns import warm_up
from tramontane.run.folder import RunFolder
from tramontane.run.header import header, prompt_line
from tramontane.run.input import RunInput, read_input
from tramontane.run.prepare import Prepared, check_devices, prepare, resolved
from tramontane.run.screen import Screen
from tramontane.run.trackers import Trackers
from tramontane.verifier.pool import try_functions

SHORTEST_ACTIVITY = 0.005  # seconds; shorter ones are invisible in a timeline and not logged

OnUpdate = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Restored:
    """The checkpoint that a session continues: its folder and the pipeline's state."""

    path: Path
    pipeline: PipelineCheckpoint

    @property
    def version(self) -> int:
        """Updates done at the checkpoint."""
        return self.pipeline.snapshot.version


@dataclass
class Session:
    """A run, or the part of it that continues from a checkpoint after a resume or the loss of the
    trainer.

    Args:
        prepared: the config with everything loaded and checked for it.
        folder: the run's folder.
        screen: shows progress.
        began: `time.monotonic()` at the start, minus the seconds of earlier sessions.
        on_update: called with the metrics of each update.
        restored: the checkpoint to continue from; None at the start of a run.

    Attributes:
        trackers: receive the metrics too.
    """

    prepared: Prepared
    folder: RunFolder
    screen: Screen
    began: float
    on_update: OnUpdate | None = None
    restored: Restored | None = None
    trackers: Trackers = field(init=False)

    @classmethod
    def open(
        cls,
        config: Config,
        screen: Screen,
        folder: RunFolder,
        on_update: OnUpdate | None = None,
        given: RunInput | None = None,
    ) -> Session:
        """Check all input, begin the folder or rewind it to its last checkpoint, open the screen.

        `given` is the result of `read_input` for the config; None: read here.

        Raises:
            InputError: before any work is done.
        """
        session = cls._begin(config, screen, folder, on_update, given or read_input(config))
        title = f"{config.name} → {session.folder.path}"
        facts, sizes = header(session.prepared), resolved(session.prepared)
        sizes["whole prompt"] = prompt_line(session.prepared)
        screen.start(title, facts, config.pipeline.updates, sizes)
        warm_up()
        for warning in session.prepared.warnings:
            session.announce(warning)
        return session

    def after_loss(self, lost: Exception) -> Session:
        """The next session of the run after the loss of its trainer: from the newest checkpoint, as
        with `--resume`, but in the same process.

        Raises:
            InputError: no checkpoint is intact.
        """
        folder, reached = self.folder, len(self.folder.metrics())
        session = self._again()
        folder.log_worker(
            "trainer", restarted_from=session.version, reached=reached, lost=str(lost)
        )
        session.announce(
            f"trainer restarted: lost after update {reached}, continues from update "
            f"{session.version}: {lost}"
        )
        return session

    def after_damage(self, damage: Exception) -> Session:
        """The next session of the run after its trainer could not load the checkpoint: from an
        older one.

        Raises:
            InputError: no checkpoint is intact.
        """
        assert self.restored
        self.folder.set_aside(self.restored.path, str(damage), self.announce)
        return self._again()

    def _again(self) -> Session:
        self.trackers.close(finished=False)
        return self._begin(self.folder.config(), self.screen, self.folder, self.on_update)

    @classmethod
    def _begin(
        cls,
        config: Config,
        screen: Screen,
        folder: RunFolder,
        on_update: OnUpdate | None,
        given: RunInput | None = None,
    ) -> Session:
        began, resumes = time.monotonic(), folder.begun
        changes = check_changes(folder, config) if resumes else []
        prepared = prepare(config, given)
        if given:  # after a loss, a temporary failure of a reward must not end the run
            try_functions(prepared.config.verifier, prepared.sample)
        check_devices(prepared)
        calibration = None
        if not resumes and (judge := prepared.config.verifier.judge) and judge.calibration:
            calibration = calibrate(
                prepared.config.verifier, partial(screen.phase, "calibration of the judge")
            )
        session = cls(prepared, folder, screen, began, on_update)
        if resumes:
            session._restore(changes)
        else:
            folder.begin(prepared.config)
        if calibration:
            folder.write_json("calibration.json", calibration.to_dict())
            prepared.warnings.append(f"judge: {calibration}")
        with reading(folder.metrics_file):
            reached = max((int(row["update"]) for row in folder.metrics()), default=0)
        session.folder.rewind(session.version)
        if lost := session.version - len({row["update"] for row in folder.metrics()}):
            session.announce(
                f"{folder.metrics_file}: the metrics of {lost} of {session.version} updates are "
                f"lost; curves and averages lack them"
            )
        session.trackers = Trackers(
            folder.path, session.config, session.announce, session.version, reached
        )
        return session

    def _restore(self, changes: list[Change]) -> None:
        folder = self.folder
        if folder.finished:
            folder.reopen()
        if begins_again(folder, changes):
            folder.forget_start(cold_start=changes_cold_start(changes))
        if checkpoint := folder.whole_checkpoint(self.announce):
            with reading(checkpoint / "pipeline.json"):
                self.restored = Restored(checkpoint, read_pipeline(checkpoint))
            self.began -= self.restored.pipeline.seconds
        record_changes(folder, self.config, changes, self.version)
        for change in changes:
            self.announce(f"changed from update {self.version + 1} on: {change}", logging.INFO)

    @property
    def config(self) -> Config:
        return self.prepared.config

    @property
    def base(self) -> str:
        """Checkpoint that the run starts from, with the given tokenizer."""
        return with_tokenizer(self.config.model, self.config.tokenizer)

    @property
    def model(self) -> str:
        """Checkpoint that reinforcement learning starts from."""
        return str(self.folder.sft) if self.config.cold_start else self.base

    @property
    def seconds(self) -> float:
        """Wall time of the run, over all its sessions."""
        return time.monotonic() - self.began

    @property
    def version(self) -> int:
        """Updates done when the session began."""
        return self.restored.version if self.restored else 0

    def announce(self, event: str, level: int = logging.WARNING) -> None:
        """Log and show an event for the user."""
        self.folder.log_event(event, level)
        self.screen.warn(event)

    def log_evaluation(self, figures: dict[str, Any]) -> None:
        """Log the figures of an evaluation, in the folder and in the trackers."""
        self.folder.log_evaluation(figures)
        self.trackers.log_evaluation(figures)

    def spent(self, worker: str, activity: Activity, began: float) -> None:
        """Log an activity of a worker that has ended; `began` is the `time.time()` of its start."""
        seconds = time.time() - began
        if seconds >= SHORTEST_ACTIVITY:
            self.folder.log_activity(worker, activity, began, seconds)

    def replaced(self, lost: WorkerLost) -> None:
        """Log that a lost worker is being replaced."""
        self.folder.log_event(f"replaced: {lost}")
        self.folder.log_worker(lost.worker, lost=str(lost))
        self.screen.status({"replaced": str(lost)})
