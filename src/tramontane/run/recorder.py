"""The recorder of a run: metrics, rollouts, checkpoints and measurements after each update."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tramontane.controller.generators import GeneratorPool
from tramontane.controller.observer import Activity, Update
from tramontane.controller.pipeline import Pipeline
from tramontane.controller.verifiers import Verifiers
from tramontane.controller.waits import in_background
from tramontane.evaluation.thinking import thinking_counters
from tramontane.journals import read_log
from tramontane.models.tokenizers import save_tokenizer
from tramontane.placement import Handle, Limit, WaitTimeout, call, release, written
from tramontane.placement.files import Folder
from tramontane.run.canaries import Canaries
from tramontane.run.checkpoint import PipelineCheckpoint, write_pipeline
from tramontane.run.checks import SignalMonitor
from tramontane.run.measurement import Judges, measure
from tramontane.run.metrics import (
    conversation_metrics,
    effort_metrics,
    reward_metrics,
    staleness_histogram,
    trajectory_metrics,
    waited_for,
)
from tramontane.run.parity_gate import check_parity
from tramontane.run.rollouts import groups_to_record
from tramontane.run.sample import Sample
from tramontane.run.session import Session
from tramontane.tokens import INSERTED
from tramontane.types import FilterReason, Group

SAMPLE_EVERY = 5  # updates between sample completions on the screen
PACE = 6  # recent updates whose mean time predicts the end of the next
# Seconds between checks that the trainer's state is written: at first, and at most.
POLL_SECONDS = (0.01, 0.5)


class Recorder:
    """The pipeline's observer: writes each update into the run's folder and shows it.

    Args:
        session: the run's folder, config and screen.
        generators, judges, trainer: for statistics, checkpoints and measurements.
    """

    def __init__(
        self,
        session: Session,
        generators: GeneratorPool,
        judges: Judges,
        trainer: Handle,
    ) -> None:
        self.session = session
        self.config, self.folder, self.screen = session.config, session.folder, session.screen
        self.encoder = session.prepared.encoder
        self.tokenizer = self.encoder.tokenizer
        self.generators, self.judges, self.trainer = generators, judges, trainer
        self._parity_due = True  # checked once more after the session's first update
        self._thinking = thinking_counters(self.encoder)
        self.throughput = Throughput(generators, judges.verifiers, self.config.verifier.workers)
        self._signal = SignalMonitor(
            self.config,
            self.folder.path,
            session.announce,
            session.version,
            self.encoder.decode,
        )
        self._canaries = None
        if self.config.verifier.judge:
            self._canaries = Canaries(self.config, judges.verifiers, self.folder.path)
        self._waits: deque[tuple[float, float]] = deque()  # of the trainer, for batches to record
        self._filtered, self._last_filtered = 0, "–"  # groups since the last update
        self._off_policy = False  # in the last update
        self._saved_version = session.restored.version if session.restored else -1
        self._committing: asyncio.Task[None] | None = None  # the checkpoint being written
        self._ended: deque[float] = deque(maxlen=PACE)  # `time.monotonic()` of the last updates

    @property
    def updates(self) -> int:
        return self.config.pipeline.updates

    async def trained(self, update: Update, pipeline: Pipeline) -> None:
        """Record one update; take a checkpoint and a measurement where due."""
        number, batch = update.number, update.batch
        self._filtered = 0
        await self.committed()
        metrics = await asyncio.to_thread(self._record, update)
        if self._canaries:
            metrics |= await self._canaries.figures()  # those of the previous update
            self._canaries.begin(update)
        self.folder.log(metrics)
        self.session.trackers.log_update(metrics)
        if self.config.log_completions and number % self.config.log_completions == 0:
            self.session.trackers.log_completions(number, batch.groups)
        self.screen.update(metrics)
        if skipped := int(metrics["skipped_steps"]):
            steps = "1 optimizer step was" if skipped == 1 else f"{skipped} optimizer steps were"
            self.session.announce(
                f"update {number}: {steps} skipped, since the gradient is not finite; "
                f"{self.config.trainer.max_nonfinite_steps} in a row end the run"
            )
        self._watch_sample_size(metrics)
        if self.session.on_update:
            self.session.on_update(metrics)
        if number % SAMPLE_EVERY == 1:
            group = batch.groups[0]
            first = (group.problem, group.completions[0], group.verdicts[0])
            self.screen.sample(Sample.of(*first, self.encoder.decode))
        if self._parity_due:
            await check_parity(self.session.prepared, self.generators, self.trainer)
            self._parity_due = False
        if self._saves(number):
            await self.checkpoint(pipeline)
        if self._measures(number):
            await self._measure_unless_stopped(number, pipeline)
            self.throughput.restart(update)  # the measurement's time is not the pipeline's
        self._ended.append(time.monotonic())

    def _watch_sample_size(self, metrics: Mapping[str, Any]) -> None:
        """Warn when the effective sample size falls below its limit."""
        size = metrics.get("effective_sample_size", 1.0)
        below = size < (limit := self.config.trainer.min_effective_sample_size)
        if below and not self._off_policy:
            self.session.announce(
                f"update {metrics['update']}: the effective sample size is {size:.2g} of 1 (below "
                f"trainer.min_effective_sample_size, {limit:g}): weighted by π/μ, few completions "
                f"outweigh the rest, so the policy is far from the one that sampled. Fewer updates "
                f"behind (pipeline.n_async) or a mask (trainer.objective.mask) help; see "
                f"docs/off-policy.md"
            )
        self._off_policy = below

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
            await measure(self.session, self.generators, self.judges, f"update_{number}", number)

    async def _measure_unless_stopped(self, number: int, pipeline: Pipeline) -> None:
        """Measure the weights; a stopping run does not wait for the result."""
        when = f"update_{number}"
        tasks = [
            asyncio.create_task(measure(self.session, self.generators, self.judges, when, number)),
            asyncio.create_task(pipeline.stopped.wait()),
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
        tools = self.judges.conversations.tools.pop(group.id, ())
        self._signal.graded(group, filtered, tools)

    def spent(self, worker: str, activity: Activity, began: float) -> None:
        """Log an activity, unless it was too short to be seen."""
        if activity == "wait for a batch" and self.config.converses:
            self._waits.append((began, time.time()))
        self.session.spent(worker, activity, began)

    def happened(self, event: str) -> None:
        """Log and show an event of the pipeline."""
        self.session.announce(event, logging.INFO)

    async def ended(self, pipeline: Pipeline) -> None:
        """Take the last checkpoint; a stopped run has more pending than at the previous one."""
        if self._saved_version != pipeline.version or pipeline.stopped.is_set():
            await self.checkpoint(pipeline)
        await self.committed()
        if self._canaries:
            await self._canaries.figures()

    async def checkpoint(self, pipeline: Pipeline) -> None:
        """Save weights, trainer state and everything pending; the folder will be complete or
        absent.

        The trainer may step again when this returns, while its ranks still write their state. The
        folder gets its final name once all have finished, at the latest when the next update is
        recorded.
        """
        began = time.time()
        await self.committed()
        version, config = pipeline.version, self.config
        dtype = getattr(torch, config.checkpoint.weights_dtype or config.generator.dtype)
        limit = Limit.of(config.timeouts, "training")
        partial = self.folder.checkpoint_dir(version).absolute()
        with self.folder.writing(partial), ExitStack() as stack:
            files = stack.enter_context(written(partial))
            await call(self.trainer, "save_weights", files.within("weights"), dtype, limit=limit)
            if config.trainer.lora:
                await call(self.trainer, "save_adapters", files.within("adapter"), limit=limit)
            await call(self.trainer, "save_state", files.within("trainer"), False, limit=limit)
            ledger = pipeline.ledger
            pending = PipelineCheckpoint(ledger.snapshot(), self.session.seconds)
            records = ledger.problems.records()
            await asyncio.to_thread(self._write_pending, partial, pending, records)
            commit = self._commit(partial, files, stack.pop_all())
            self._committing = in_background(commit, f"commit {version}")
        self._saved_version = version
        self.spent(self.trainer.name, "checkpoint", began)

    def _write_pending(
        self, partial: Path, pipeline: PipelineCheckpoint, records: Iterable[dict[str, Any]]
    ) -> None:
        """The controller's part of a checkpoint; runs in a thread."""
        save_tokenizer(self.tokenizer, partial / "weights")
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
                        raise WaitTimeout(
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
            tokens_of = self.encoder.tokens_of_image
            self.folder.write_rollouts(update.number, groups, parts, tokens_of)
        return self._metrics(update)

    def _metrics(self, update: Update) -> dict[str, Any]:
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
        shown = [*self.config.verifier.reward.rewarded, *self.config.evaluated_rates]
        metrics |= reward_metrics(graded, shown, self._thinking)
        metrics |= effort_metrics(graded, self._thinking)
        metrics |= trajectory_metrics(batch)
        if self.config.converses:
            metrics |= conversation_metrics(graded) | self.judges.conversations.counts
            taken = self.judges.conversations.steps
            steps = [s for g in batch.groups for s in taken.get(g.id, ())]
            metrics["waited_for"] = waited_for(self._waits.popleft(), steps)
            for group in graded:
                taken.pop(group.id, None)
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


class Throughput:
    """Tokens per second and idle share of each kind of worker, from one update to the next."""

    def __init__(self, generators: GeneratorPool, verifiers: Verifiers, workers: int) -> None:
        self.generators, self.verifiers, self.workers = generators, verifiers, workers
        self._time, self._totals = time.monotonic(), self._count(0.0)

    def restart(self, update: Update) -> None:
        """Count from now on."""
        self._time, self._totals = time.monotonic(), self._count(update.busy_seconds)

    def metrics(self, update: Update) -> dict[str, float]:
        """The rates since the last call, or since `restart`."""
        then, before = self._time, self._totals
        self.restart(update)
        seconds = self._time - then
        done = {key: self._totals[key] - before[key] for key in before}
        cached = max(1.0, done["parked"] + done["prefilled"])
        return {
            "parked_share": done["parked"] / cached,
            "generator_tokens_per_second": done["generated"] / seconds,
            "generator_idle_fraction": max(0.0, 1 - done["generating"] / seconds),
            "generator_held_fraction": min(1.0, done["without_work"] / seconds),
            "trainer_tokens_per_second": update.metrics["computed_tokens"] / seconds,
            "trainer_idle_fraction": max(0.0, 1 - done["training"] / seconds),
            "verifier_verdicts_per_second": done["verdicts"] / seconds,
            "verifier_idle_fraction": max(0.0, 1 - done["verifying"] / (seconds * self.workers)),
        }

    def _count(self, training: float) -> dict[str, float]:
        """Totals so far: tokens, verdicts, and seconds (the generators' mean; `training` is the
        trainer's)."""
        verifiers, generators = self.verifiers.stats(), [*self.generators]
        number = max(1, len(generators))
        return {
            "generated": sum(g.generated_tokens for g in generators),
            "prefilled": sum(g.prefilled_tokens for g in generators),
            "parked": sum(g.parked_tokens for g in generators),
            "generating": sum(g.busy_seconds for g in generators) / number,
            "without_work": sum(g.seconds_without_work for g in generators) / number,
            "training": training,
            "verdicts": verifiers.verdicts,
            "verifying": verifiers.busy_seconds,
        }
