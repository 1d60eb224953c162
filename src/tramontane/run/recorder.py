"""What becomes of an update: metrics, rollouts, checkpoints, and a look at a sample."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from tramontane.config import Config
from tramontane.controller.generators import GeneratorPool
from tramontane.controller.observer import PipelineState, Update
from tramontane.evaluation.evaluate import thinking_text
from tramontane.placement import Handle, Limit, call
from tramontane.run.folder import RunFolder
from tramontane.types import Completion, FilterReason, Group, Outcome


class Screen(Protocol):
    """Where progress is shown; `display.LiveDisplay` is one."""

    def status(self, values: dict[str, Any]) -> None: ...

    def update(self, metrics: dict[str, Any]) -> None: ...

    def warn(self, text: str) -> None: ...

    def sample(self, problem: str, text: str, verdict: Outcome) -> None: ...


class Recorder:
    """The pipeline's observer for one run folder."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        generators: GeneratorPool,
        trainer: Handle,
        pool: Any,
        tokenizer: PreTrainedTokenizerBase,
        screen: Screen,
        gate: Callable[[], Awaitable[None]] | None,
        measure: Callable[[str, Path], Any],
        began: float,
        done: int,
    ) -> None:
        self.config, self.folder, self.screen = config, folder, screen
        self.generators, self.trainer, self.pool = generators, trainer, pool
        self.tokenizer = tokenizer
        self.gate = gate  # run once, after the session's first update
        self.measure = measure  # (name, weights) → evaluation
        self._pieces: dict[int, str] = {}
        self._began = began
        zero = {"generated": 0, "generating": 0.0, "without_work": 0.0, "training": 0.0}
        self._last = (time.monotonic(), zero)
        verified = pool.stats()
        self._verified = (verified.verdicts, verified.busy_seconds)
        self._saved_at = done

    @property
    def updates(self) -> int:
        return self.config.pipeline.updates

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, over all its sessions."""
        return time.monotonic() - self._began

    async def trained(self, update: Update, state: PipelineState) -> None:
        """Write down one update; take a checkpoint where one is due."""
        seen = update.batch.groups + [group for group, _ in update.filtered]
        rows = [r for g in update.batch.groups for r in self._rows(update.number, g, None)]
        rows += [r for g, reason in update.filtered for r in self._rows(update.number, g, reason)]
        await asyncio.to_thread(self.folder.write_rollouts, update.number, rows)
        metrics: dict[str, Any] = {"update": update.number, "wall_seconds": round(self.seconds, 3)}
        if update.batch.settings.stage:
            metrics["stage"] = update.batch.settings.stage
        metrics |= update.metrics | self._rewards(seen) | self._throughput(update)
        metrics |= {
            "groups_kept": len(update.batch.groups),
            "groups_filtered": len(update.filtered),
            "groups_unscorable": sum(r.kind == "unscorable" for _, r in update.filtered),
            "unscorable_trained": sum(
                v.verdict == "unscorable" for g in update.batch.groups for v in g.verdicts
            ),
            "staleness_histogram": _ages(update.batch.version, update.batch.completions),
            "weight_update_pause_ms": 1000 * update.pause_seconds,
        }
        self.folder.log(metrics)
        self.screen.update(metrics)
        if update.number % 5 == 1:
            group = update.batch.groups[0]
            self.screen.sample(
                group.problem.problem, group.completions[0].text, group.verdicts[0].verdict
            )
        if self.gate is not None:
            await self.gate()
            self.gate = None
        measured = self._measures(update.number)
        if measured or update.number % self.config.checkpoint.every == 0:
            await self.checkpoint(state)
        if measured:
            weights = self.folder.checkpoints / f"step_{update.number}" / "weights"
            await asyncio.to_thread(self.measure, f"update_{update.number}", weights)
            self._throughput(update)  # what the measurement took is nobody's throughput

    def holds(self, update: int) -> bool:
        """Whether the trainer must stay as it is after this update: for the gate, a checkpoint or
        a measurement."""
        due = update % self.config.checkpoint.every == 0
        return self.gate is not None or due or self._measures(update)

    def _measures(self, update: int) -> bool:
        every = self.config.evaluation.every
        return bool(every) and update % every == 0 and update < self.updates

    def graded(self, ready: int, filtered: list[FilterReason]) -> None:
        """Show what moves between updates."""
        values = {"groups ready": ready, "groups filtered": len(filtered)}
        self.screen.status(values | ({"last filtered": str(filtered[-1])} if filtered else {}))

    def happened(self, event: str) -> None:
        """Something that a person may want to know of."""
        self.folder.log_event(event)
        self.screen.warn(event)

    async def ended(self, state: PipelineState) -> None:
        # A run that was stopped has more pending than at its last update.
        if self._saved_at != state.version or state.stopping:
            await self.checkpoint(state)

    async def checkpoint(self, state: PipelineState) -> None:
        """Weights, trainer state and everything pending, complete or absent."""
        version = state.version
        limit = Limit.of(self.config.timeouts, "training")
        partial = self.folder.checkpoint_dir(version).absolute()
        with self.folder.room_for(partial):
            await call(self.trainer, "save_weights", partial / "weights", limit=limit)
            await call(self.trainer, "save_state", partial / "trainer", limit=limit)
            self.tokenizer.save_pretrained(partial / "weights")
            pending = state.snapshot() | {"seconds": self.seconds}
            (partial / "pipeline.json").write_text(json.dumps(pending), encoding="utf-8")
            if records := list(state.problem_records()):
                await asyncio.to_thread(self.folder.write_problems, records)
            keep = self.config.checkpoint.keep
            await asyncio.to_thread(self.folder.commit_checkpoint, partial, keep)
        self._saved_at = version

    def _rewards(self, groups: list[Group]) -> dict[str, Any]:
        """Means over every completion graded since the last update, filtered groups too."""
        completions = [c for g in groups for c in g.completions]
        verdicts = [v for g in groups for v in g.verdicts]
        n = len(verdicts)
        parts = self.config.verifier.reward.parts
        means = {f"reward_{p}": sum(v.parts[p] for v in verdicts) / n for p in parts}
        thoughts = [thinking_text(c.text) for c in completions]
        encoded = self.tokenizer(thoughts, add_special_tokens=False)["input_ids"]
        return {
            "reward": sum(v.reward for v in verdicts) / n,
            **means,
            "pass_rate": sum(v.verdict == "right" for v in verdicts) / n,
            "format_rate": sum(v.verdict != "malformed" for v in verdicts) / n,
            "language_rate": sum(v.parts["language"] > 0 for v in verdicts) / n,
            "unscorable_rate": sum(v.verdict == "unscorable" for v in verdicts) / n,
            "completion_tokens": sum(len(c.token_ids) for c in completions) / n,
            "thinking_tokens": sum(len(ids) for ids in encoded) / n,
        }

    def _throughput(self, update: Update) -> dict[str, float]:
        """Tokens a second and idle share of each worker since the last update."""
        pool = self.pool.stats()
        now = time.monotonic()
        then, before = self._last
        totals = {
            "generated": self.generators.generated_tokens,
            "generating": self.generators.busy_seconds,
            "without_work": self.generators.seconds_without_work,
            "training": update.busy_seconds,
        }
        self._last = (now, totals)
        passed = now - then
        delta = {key: totals[key] - before[key] for key in totals}
        verdicts, grading = pool.verdicts - self._verified[0], pool.busy_seconds - self._verified[1]
        self._verified = (pool.verdicts, pool.busy_seconds)
        workers = self.config.verifier.workers
        return {
            "generator_tokens_per_second": delta["generated"] / passed,
            "generator_idle_fraction": max(0.0, 1 - delta["generating"] / passed),
            "generator_held_fraction": min(1.0, delta["without_work"] / passed),
            "trainer_tokens_per_second": update.metrics["trained_tokens"] / passed,
            "trainer_idle_fraction": max(0.0, 1 - delta["training"] / passed),
            "verifier_verdicts_per_second": verdicts / passed,
            "verifier_idle_fraction": max(0.0, 1 - grading / (passed * workers)),
        }

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
        """Each token's text; a character that several tokens spell belongs to the last of them."""
        texts, held = [], []
        for token in token_ids:
            held.append(token)
            text = self._piece(token) if len(held) == 1 else str(self.tokenizer.decode(held))
            partial = text.endswith("\N{REPLACEMENT CHARACTER}") and len(held) < 4
            texts.append("" if partial else text)
            held = held if partial else []
        return texts

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = str(self.tokenizer.decode([token]))
        return self._pieces[token]


def _ages(version: int, completions: list[Completion]) -> dict[str, int]:
    """Trained tokens by how many versions old the weights were that sampled them."""
    counts = Counter(version - v for c in completions for v in c.versions)
    return {str(age): counts[age] for age in sorted(counts)}
