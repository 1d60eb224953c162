"""The recorder of a run: metrics, rollouts, checkpoints and measurements after each update."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from typing import Any

from tramontane.controller.generators import GeneratorPool
from tramontane.controller.observer import PipelineState, Update
from tramontane.placement import Handle, Limit, call
from tramontane.run.gate import check_parity
from tramontane.run.learning_signal import SignalMonitor
from tramontane.run.measurement import measure
from tramontane.run.metrics import Throughput, reward_metrics, staleness_histogram
from tramontane.run.session import Session, Verifiers
from tramontane.types import FilterReason, Group
from tramontane.verifier.format import split_response

SAMPLE_EVERY = 5  # updates between two completions that are shown


class Recorder:
    """The pipeline's observer: writes each update into the run's folder and shows it.

    Args:
        session: the run's folder, config and screen.
        generators, verifiers, trainer: asked for their statistics, checkpoints and measurements.
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
        self._pieces: dict[int, str] = {}  # text of each token
        self.throughput = Throughput(generators, verifiers, self.config.verifier.workers)
        self._signal = SignalMonitor(
            self.config, self.folder.path, session.announce, session.version
        )
        self._filtered, self._last_filtered = 0, "–"  # groups since the last update
        self._saved_version = session.restored.version if session.restored else -1

    @property
    def updates(self) -> int:
        return self.config.pipeline.updates

    async def trained(self, update: Update, state: PipelineState) -> None:
        """Record one update; take a checkpoint and measure where they are due."""
        number, batch = update.number, update.batch
        self._filtered = 0
        await asyncio.to_thread(self.folder.write_rollouts, number, self._rollouts(update))
        metrics = self._metrics(update)
        self.folder.log(metrics)
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
        measured = self._measures(number)
        if measured or self._saves(number):
            await self.checkpoint(state)
        if measured:
            weights = self.folder.checkpoints / f"step_{number}" / "weights"
            name = f"update_{number}"
            await asyncio.to_thread(measure, self.session, self.verifiers, name, weights)
            self.throughput.restart(update)  # the measurement's time is not the pipeline's

    def holds(self, update: int) -> bool:
        """True if the trainer must wait for the record of this update: the parity check, a
        checkpoint and a measurement all need its weights."""
        return self._parity_due or self._saves(update) or self._measures(update)

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

    def happened(self, event: str) -> None:
        """Log and show an event of the pipeline."""
        self.session.announce(event, logging.INFO)

    async def ended(self, state: PipelineState) -> None:
        """Take the last checkpoint; a run that was stopped has more pending than at its last."""
        if self._saved_version != state.version or state.stopping:
            await self.checkpoint(state)

    async def checkpoint(self, state: PipelineState) -> None:
        """Save weights, trainer state and everything pending; the folder is complete or absent."""
        version = state.version
        limit = Limit.of(self.config.timeouts, "training")
        partial = self.folder.checkpoint_dir(version).absolute()
        with self.folder.room_for(partial):
            await call(self.trainer, "save_weights", partial / "weights", limit=limit)
            await call(self.trainer, "save_state", partial / "trainer", limit=limit)
            self.tokenizer.save_pretrained(partial / "weights")
            snapshot = state.snapshot() | {"seconds": self.session.seconds}
            (partial / "pipeline.json").write_text(json.dumps(snapshot), encoding="utf-8")
            if records := list(state.problem_records()):
                await asyncio.to_thread(self.folder.write_problems, records)
            keep = self.config.checkpoint.keep
            await asyncio.to_thread(self.folder.commit_checkpoint, partial, keep)
        self._saved_version = version

    def _metrics(self, update: Update) -> dict[str, Any]:
        """The update's line in `metrics.jsonl`."""
        batch, filtered = update.batch, update.filtered
        graded = batch.groups + [group for group, _ in filtered]
        metrics: dict[str, Any] = {
            "update": update.number,
            "wall_seconds": round(self.session.seconds, 3),
        }
        if batch.settings.stage:
            metrics["stage"] = batch.settings.stage
        metrics |= update.metrics
        metrics |= reward_metrics(graded, self.config.verifier.reward.parts, self.encoder)
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

    def _rollouts(self, update: Update) -> list[dict[str, Any]]:
        """Every completion of the update: first those trained on, then the filtered ones."""
        groups: list[tuple[Group, FilterReason | None]]
        groups = [*((group, None) for group in update.batch.groups), *update.filtered]
        return [row for group, reason in groups for row in self._rows(update.number, group, reason)]

    def _rows(
        self, update: int, group: Group, filtered: FilterReason | None
    ) -> Iterable[dict[str, Any]]:
        problem = group.problem
        for completion, verdict in zip(group.completions, group.verdicts, strict=True):
            yield {
                "update": update,
                "group": group.id,
                "index": completion.index,
                "problem_id": problem.id,
                "problem": problem.problem,
                "domain": problem.domain,
                "answer": problem.answer,
                "language": problem.language,
                "difficulty": problem.difficulty,
                "text": completion.text,
                "tokens": self._texts(completion.token_ids),
                "versions": completion.versions,
                "logprobs": [round(x, 4) for x in completion.logprobs],
                "finish_reason": completion.finish_reason,
                "reward": round(verdict.reward, 6),
                "parts": verdict.parts,
                "verdict": verdict.verdict,
                "reason": verdict.reason,
                "advantage_kept": filtered is None,
                "filtered": filtered.kind if filtered else None,
                "filtered_detail": filtered.detail if filtered else None,
            }

    def _texts(self, token_ids: list[int]) -> list[str]:
        """Text of each token; a character spelt by several tokens is the text of the last."""
        texts: list[str] = []
        pending: list[int] = []  # tokens that have not completed a character
        for token in token_ids:
            pending.append(token)
            text = self._piece(token) if len(pending) == 1 else str(self.tokenizer.decode(pending))
            partial = text.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < 4
            texts.append("" if partial else text)
            pending = pending if partial else []
        return texts

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = str(self.tokenizer.decode([token]))
        return self._pieces[token]
