"""The recorder of a run: metrics, rollouts, checkpoints and measurements after each update."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tramontane.controller.generators import GeneratorPool
from tramontane.controller.observer import Activity, PipelineState, Update
from tramontane.evaluation.thinking import ThinkingCounter
from tramontane.placement import Handle, Limit, WorkerStalled, call, release, written
from tramontane.placement.files import Folder
from tramontane.run.gate import check_parity
from tramontane.run.learning_signal import SignalMonitor
from tramontane.run.measurement import measure
from tramontane.run.metrics import (
    Throughput,
    reward_metrics,
    staleness_histogram,
    trajectory_metrics,
)
from tramontane.run.pending import PipelineCheckpoint, write_pipeline
from tramontane.run.rollouts import groups_to_record
from tramontane.run.session import Session, Verifiers
from tramontane.types import INSERTED, FilterReason, Group
from tramontane.verifier.format import split_response
from tramontane.workplace import read_log

SAMPLE_EVERY = 5  # updates between sample completions on the screen
PACE = 6  # recent updates whose mean time predicts the end of the next
# Seconds between checks whether the trainer's state is written: the first, and the longest.
POLL_SECONDS = (0.01, 0.5)


class Recorder:
    """The pipeline's observer: writes each update into the run's folder and shows it.

    Args:
        session: the run's folder, config and screen.
        generators, verifiers, trainer: for statistics, checkpoints and measurements.
    """

    def __init__(
        self,
        session: Session,
        generators: GeneratorPool,
        verifiers: Verifiers,
        trainer: Handle,
    ) -> None:
        self.session = session
        self.config, self.folder, self.screen = session.config, session.folder, session.screen
        self.encoder = session.prepared.encoder
        self.tokenizer = self.encoder.tokenizer
        self.generators, self.verifiers, self.trainer = generators, verifiers, trainer
        self._parity_due = True  # checked once more after the session's first update
        self._thinking = ThinkingCounter(self.tokenizer, self.encoder.response)
        self.throughput = Throughput(generators, verifiers, self.config.verifier.workers)
        self._signal = SignalMonitor(
            self.config, self.folder.path, session.announce, session.version
        )
        self._filtered, self._last_filtered = 0, "–"  # groups since the last update
        self._saved_version = session.restored.version if session.restored else -1
        self._committing: asyncio.Task[None] | None = None  # the checkpoint being written
        self._ended: deque[float] = deque(maxlen=PACE)  # `time.monotonic()` of the last updates

    @property
    def updates(self) -> int:
        return self.config.pipeline.updates

    async def trained(self, update: Update, state: PipelineState) -> None:
        """Record one update; take a checkpoint and a measurement where due."""
        number, batch = update.number, update.batch
        self._filtered = 0
        await self.committed()
        metrics = await asyncio.to_thread(self._record, update)
        self.folder.log(metrics)
        self.session.track_update(metrics)
        self.screen.update(metrics)
        if skipped := int(metrics["skipped_steps"]):
            steps = "1 optimizer step was" if skipped == 1 else f"{skipped} optimizer steps were"
            self.session.announce(
                f"update {number}: {steps} skipped, since the gradient is not finite; "
                f"{self.config.trainer.max_nonfinite_steps} in a row end the run"
            )
        if self.session.on_update:
            self.session.on_update(metrics)
        if number % SAMPLE_EVERY == 1:
            group = batch.groups[0]
            response = split_response(group.completions[0].text, self.encoder.tags)
            self.screen.sample(group.problem.problem, response, group.verdicts[0].verdict)
        if self._parity_due:
            await check_parity(self.session.prepared, self.generators, self.trainer)
            self._parity_due = False
        if self._saves(number):
            await self.checkpoint(state)
        if self._measures(number):
            await self._measure_unless_stopped(number, state)
            self.throughput.restart(update)  # the measurement's time is not the pipeline's
        self._ended.append(time.monotonic())

    def holds(self, update: int) -> bool:
        """True if the trainer must wait for the record of this update: the parity check, a
        checkpoint and a measurement all need its weights."""
        return self._parity_due or self._saves(update) or self._measures(update)

    def when(self) -> str:
        """When the current update will be done, estimated from recent ones."""
        if len(self._ended) < 2:
            return "after this update"
        ended = [*self._ended]
        mean = (ended[-1] - ended[0]) / (len(ended) - 1)
        return f"after this update, about {max(1, mean - (time.monotonic() - ended[-1])):.0f} s"

    async def catch_up(self) -> None:
        """Take the measurement due at the update that the session continues from, if the previous
        session was stopped or killed before it; nothing may be in flight."""
        number = self.session.version
        measured = {row["when"] for row in read_log(self.folder.evaluations_file)}
        if number and self._measures(number) and f"update_{number}" not in measured:
            await measure(self.session, self.generators, self.verifiers, f"update_{number}", number)

    async def _measure_unless_stopped(self, number: int, state: PipelineState) -> None:
        """Measure the weights; a stopping run does not wait for the result."""
        when = f"update_{number}"
        tasks = [
            asyncio.create_task(
                measure(self.session, self.generators, self.verifiers, when, number)
            ),
            asyncio.create_task(state.stopped.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    def _saves(self, update: int) -> bool:
        return update % self.config.checkpoint.every == 0

    def _measures(self, update: int) -> bool:
        every = self.config.evaluation.every
        return bool(every) and update % every == 0 and update < self.updates

    def graded(self, group: Group, filtered: FilterReason | None, ready: int) -> None:
        """Show the figures that change between updates.

        Raises:
            NoSignal: there is nothing to learn from.
        """
        if filtered is not None:
            self._filtered += 1
            self._last_filtered = str(filtered)
        self.screen.status(
            {
                "groups ready": ready,
                "groups filtered": self._filtered,
                "last filtered": self._last_filtered,
            }
        )
        self._signal.graded(group, filtered)

    def spent(self, worker: str, activity: Activity, began: float) -> None:
        """Log an activity, unless it was too short to be seen."""
        self.session.spent(worker, activity, began)

    def happened(self, event: str) -> None:
        """Log and show an event of the pipeline."""
        self.session.announce(event, logging.INFO)

    async def ended(self, state: PipelineState) -> None:
        """Take the last checkpoint; a stopped run has more pending than at the previous one."""
        if self._saved_version != state.version or state.stopped.is_set():
            await self.checkpoint(state)
        await self.committed()

    async def checkpoint(self, state: PipelineState) -> None:
        """Save weights, trainer state and everything pending; the folder will be complete or
        absent.

        The trainer may step again when this returns, while its ranks still write their state. The
        folder gets its final name once all have finished, at the latest when the next update is
        recorded.
        """
        began = time.time()
        await self.committed()
        version, config = state.version, self.config
        dtype = getattr(torch, config.checkpoint.weights_dtype or config.generator.dtype)
        limit = Limit.of(config.timeouts, "training")
        partial = self.folder.checkpoint_dir(version).absolute()
        with self.folder.writing(partial), ExitStack() as stack:
            files = stack.enter_context(written(partial))
            await call(self.trainer, "save_weights", files.within("weights"), dtype, limit=limit)
            if config.trainer.lora:
                await call(self.trainer, "save_adapters", files.within("adapter"), limit=limit)
            await call(self.trainer, "save_state", files.within("trainer"), False, limit=limit)
            pipeline = PipelineCheckpoint(state.snapshot(), self.session.seconds)
            records = state.problem_records()
            await asyncio.to_thread(self._write_pending, partial, pipeline, records)
            commit = self._commit(partial, files, stack.pop_all())
            self._committing = asyncio.create_task(commit, name=f"commit {version}")
        self._saved_version = version
        self.spent(self.trainer.name, "checkpoint", began)

    def _write_pending(
        self, partial: Path, pipeline: PipelineCheckpoint, records: Iterable[dict[str, Any]]
    ) -> None:
        """The controller's part of a checkpoint; runs in a thread."""
        self.tokenizer.save_pretrained(partial / "weights")
        write_pipeline(partial, pipeline)
        self.folder.write_problems(records)

    async def _commit(self, partial: Path, files: Folder, writing: ExitStack) -> None:
        """Make a checkpoint valid as soon as all trainer ranks have written their state; workers
        then write no more `files`, and `writing` is closed.

        The trainer answers between two calls, so this never delays a step.
        """
        limit = Limit.of(self.config.timeouts, "training")
        deadline = time.monotonic() + limit.seconds
        pause, longest = POLL_SECONDS
        with self.folder.writing(partial):
            with writing:
                while not await call(self.trainer, "state_saved", limit=limit):
                    if time.monotonic() > deadline:
                        raise WorkerStalled(
                            f"{self.trainer.name} did not write its state within "
                            f"{limit.seconds:g} s ({limit.key})",
                            self.trainer.name,
                        )
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, longest)
                await release(self.trainer, files, limit)
            keep = self.config.checkpoint.keep
            await asyncio.to_thread(self.folder.commit_checkpoint, partial, keep)

    async def committed(self) -> None:
        """Wait for the checkpoint being written; its errors are raised here."""
        if self._committing is not None:
            await self._committing
            self._committing = None

    def _record(self, update: Update) -> dict[str, Any]:
        """Write the update's rollouts and compute its metrics; runs in a thread."""
        update.batch.share_learned()
        if groups := groups_to_record(update, self.config):
            parts = self.config.verifier.reward.parts
            self.folder.write_rollouts(update.number, groups, parts)
        return self._metrics(update)

    def _metrics(self, update: Update) -> dict[str, Any]:
        """The update's line in `metrics.jsonl`."""
        batch, filtered = update.batch, update.filtered
        graded = [group for group in batch.groups if group.sampled]
        graded += [group for group, _ in filtered]
        metrics: dict[str, Any] = {
            "update": update.number,
            "wall_seconds": round(self.session.seconds, 3),
        }
        if batch.settings.stage:
            metrics["stage"] = batch.settings.stage
        metrics |= update.metrics
        metrics |= reward_metrics(graded, self.config.verifier.reward.parts, self._thinking)
        metrics |= trajectory_metrics(batch)
        if self.config.generator.interruption and graded:
            completions = [c for group in graded for c in group.completions]
            interrupted = sum(INSERTED in c.versions for c in completions)
            metrics["interrupted_rate"] = interrupted / len(completions)
        return (
            metrics
            | self.throughput.metrics(update)
            | {
                "groups_kept": len(batch.groups),
                "groups_filtered": len(filtered),
                "groups_unscorable": sum(r.kind == "unscorable" for _, r in filtered),
                "unscorable_trained": sum(
                    v.verdict == "unscorable" for g in batch.groups for v in g.verdicts
                ),
                "staleness_histogram": staleness_histogram(batch),
                "weight_update_pause_ms": 1000 * update.pause_seconds,
            }
        )
