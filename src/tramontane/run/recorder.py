"""The recorder of a run: metrics, rollouts, checkpoints and measurements after each update."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from tramontane.batches import Batch
from tramontane.controller.conversations import Step
from tramontane.controller.generators import GeneratorPool
from tramontane.controller.observer import Activity, Update
from tramontane.controller.pipeline import Pipeline
from tramontane.controller.verifiers import Verifiers
from tramontane.controller.waits import in_background
from tramontane.evaluation.conversed import ConversationFigures, conversation_row
from tramontane.evaluation.thinking import ThinkingCounter, thinking_counters
from tramontane.models.tokenizers import save_tokenizer
from tramontane.placement import Handle, Limit, WaitTimeout, call, release, written
from tramontane.placement.files import Folder
from tramontane.run.canaries import Canaries
from tramontane.run.checkpoint import PipelineCheckpoint, write_pipeline
from tramontane.run.checks import SignalMonitor, check_parity
from tramontane.run.measurement import Judges, measure
from tramontane.run.rollouts import groups_to_record
from tramontane.run.sample import Sample
from tramontane.run.session import Session
from tramontane.types import INSERTED, Ending, FilterReason, Group, Verdict
from tramontane.verifier.functions import failures
from tramontane.workplace import read_log

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
            self.folder.write_rollouts(update.number, groups, parts)
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
        metrics |= reward_metrics(graded, self.config.verifier.reward.parts, self._thinking)
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


def reward_metrics(
    groups: Sequence[Group], parts: Sequence[str], thinking: Mapping[str | None, ThinkingCounter]
) -> dict[str, Any]:
    """Means over all completions of the groups; empty without groups. `failures` counts the
    completions that could not be judged, by the kind of the reason.

    The reward, its parts, `pass_rate`, `format_rate` and `language_rate` are means over the
    completions that could be judged, and absent if there are none.

    Args:
        groups: every group sampled and graded since the last update, including filtered groups.
        parts: names of the reward's parts.
        thinking: counts the thinking tokens of completions at each level of effort.
    """
    completions = [c for g in groups for c in g.completions]
    verdicts = [v for g in groups for v in g.verdicts]
    n = len(verdicts)
    if not n:
        return {}
    judged = [v for v in verdicts if v.verdict != "unscorable"]
    return _means_of_judged(judged, parts) | {
        "unscorable_rate": 1 - len(judged) / n,
        "failures": failures(v.reason for v in verdicts if v.verdict == "unscorable"),
        "completion_tokens": sum(c.n_tokens for c in completions) / n,
        "length_limited_rate": sum(c.finish_reason == "length" for c in completions) / n,
        "thinking_tokens": sum(
            thinking[g.problem.effort].count(c) for g in groups for c in g.completions
        )
        / n,
    }


def _means_of_judged(verdicts: Sequence[Verdict], parts: Sequence[str]) -> dict[str, float]:
    n = len(verdicts)
    if not n:
        return {}
    return {
        "reward": sum(v.reward for v in verdicts) / n,
        **{f"reward_{part}": sum(v.parts[part] for v in verdicts) / n for part in parts},
        "pass_rate": sum(v.verdict == "right" for v in verdicts) / n,
        "format_rate": sum(v.verdict != "malformed" for v in verdicts) / n,
        "language_rate": sum(v.parts["language"] > 0 for v in verdicts) / n,
    }


def effort_metrics(
    groups: Sequence[Group], thinking: Mapping[str | None, ThinkingCounter]
) -> dict[str, dict[str, Any]]:
    """`reward_metrics` by level of effort; empty without levels."""
    at: defaultdict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if group.problem.effort is not None:
            at[group.problem.effort].append(group)
    found = {name: reward_metrics(at[name], (), thinking) for name in sorted(at)}
    keys = ("pass_rate", "completion_tokens") if found else ()
    return {
        f"effort_{key}": {name: found[name][key] for name in found if key in found[name]}
        for key in keys
    }


def conversation_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Figures of the conversations of all groups graded since the last update: means, shares of the
    endings, and each tool's mean and longest call in seconds; `environment` stands for whole steps.
    Empty without groups.
    """
    conversations = [c for group in groups for c in group.completions]
    found = ConversationFigures.of([conversation_row(c) for c in conversations])
    if found is None:
        return {}
    turns = [turn for c in conversations for turn in c.turns]
    calls = [made for turn in turns for made in turn.calls]
    tokens = sum(c.n_tokens for c in conversations) / len(conversations)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for name, taken in [("environment", t.seconds) for t in turns] + [
        (made.name, made.seconds) for made in calls if made.name
    ]:
        seconds[name].append(taken)
    return {
        "turns": found.mean_turns,
        "sampled_tokens": tokens - found.mean_inserted_tokens,
        "inserted_tokens": found.mean_inserted_tokens,
        "calls": found.mean_calls,
        "calls_parsed": found.parsed_rate,
        "calls_failed": found.failed_rate,
        "forked_rate": sum(bool(c.earlier) for c in conversations) / len(conversations),
        "endings": {ending: found.endings.get(ending, 0.0) for ending in get_args(Ending)},
        "step_seconds": {name: sum(times) / len(times) for name, times in seconds.items()},
        "step_seconds_max": {name: max(times) for name, times in seconds.items()},
    }


def waited_for(wait: tuple[float, float], steps: Iterable[Step]) -> dict[str, float]:
    """Seconds of a wait for a batch during which steps of its conversations were under way, by
    tool; simultaneous steps count once."""
    found: defaultdict[str, float] = defaultdict(float)
    reached: dict[str, float] = {}
    for began, ended, tool in sorted(steps):
        start, end = max(began, wait[0], reached.get(tool, 0.0)), min(ended, wait[1])
        if end > start:
            found[tool] += end - start
            reached[tool] = end
    return dict(found)


def trajectory_metrics(batch: Batch) -> dict[str, float]:
    """Number, tokens and mean reward of the batch's recorded trajectories; empty without any."""
    groups = [group for group in batch.groups if not group.sampled]
    verdicts = [v for g in groups for v in g.verdicts]
    if not verdicts:
        return {}
    rewards = [v.reward for v in verdicts if v.verdict != "unscorable"]
    mean = {"trajectory_reward": sum(rewards) / len(rewards)} if rewards else {}
    return mean | {
        "trajectories": float(len(verdicts)),
        "trajectory_tokens": float(sum(len(c.token_ids) for g in groups for c in g.completions)),
    }


def staleness_histogram(batch: Batch) -> dict[str, int]:
    """Number of trained tokens that the run sampled, by age in weight versions."""
    counts: Counter[int] = Counter()
    for sequence in (s for completion in batch.completions for s in completion.sequences):
        versions = np.array(sequence.versions)
        tokens = np.bincount(batch.version - versions[versions >= 0])
        ages = np.flatnonzero(tokens)
        counts.update(dict(zip(ages.tolist(), tokens[ages].tolist(), strict=True)))
    return {str(age): counts[age] for age in sorted(counts)}


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
