"""Teachers: workers that score each batch while the trainer works on the previous one.

A batch that is being scored is still in the ledger's snapshot as groups, so a resumed run asks the
teachers again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

from tramontane.batches import Batch, TrainBatch, TrainSequence
from tramontane.config import Config
from tramontane.placement.handle import Handle, Limit, WorkerLost, call, started

MAX_TRIES = 5  # attempts at one share of a batch before it fails


class Teachers:
    """The workers of a run's teachers, `teacher.workers` of each; the groups of a batch go to the
    teacher of their domain, or of their stage, shared equally among its workers.

    Args:
        make: starts a worker with a given name and model.
        config: `teacher`, `stages`, `trainer.objective`, `placement` and `timeouts` are read.
        replaced: called with each loss before the replacement starts.
    """

    def __init__(
        self,
        make: Callable[[str, str], Handle],
        config: Config,
        replaced: Callable[[WorkerLost], None],
    ) -> None:
        assert config.teacher is not None
        self._teacher = teacher = config.teacher
        self._make, self._replaced = make, replaced
        self._start, self._limit = (Limit.of(config.timeouts, key) for key in ("start", "scoring"))
        self._every = "distill" not in config.trainer.objective.add
        self._tries = MAX_TRIES if config.teachers_are_apart else 1
        self._general = {stage.name: stage.teacher or teacher.model for stage in config.stages}
        self._handles = {
            (model, number): make(f"teacher {n * teacher.workers + number}", model)
            for n, model in enumerate(config.teachers)
            for number in range(teacher.workers)
        }

    async def started(self) -> None:
        """Wait until all workers can be called."""
        await asyncio.gather(*(started(h, self._start) for h in self._handles.values()))

    async def score(self, batch: Batch, made: TrainBatch) -> None:
        """Have the sequences `made` of a batch scored, except for trajectories that the term
        `distill` skips. Waits for the slowest worker.

        Raises:
            WorkerLost: a worker was lost `MAX_TRIES` times with the same share, or cannot be
                replaced, since it is a thread.
        """
        general = self._general.get(batch.settings.stage, self._teacher.model)
        shares: defaultdict[tuple[str, int], list[TrainSequence]] = defaultdict(list)
        for number, (group, sequences) in enumerate(zip(batch.groups, made.groups, strict=True)):
            if self._every or group.sampled:
                model = self._teacher.domains.get(group.problem.domain, general)
                shares[model, number % self._teacher.workers] += sequences
        temperature = batch.settings.temperature
        await asyncio.gather(*(self._ask(key, s, temperature) for key, s in shares.items()))

    async def _ask(
        self, key: tuple[str, int], share: Sequence[TrainSequence], temperature: float
    ) -> None:
        for left in reversed(range(self._tries)):
            handle = self._handles[key]
            try:
                await started(handle, self._start)
                scores = await call(handle, "score", share, temperature, limit=self._limit)
                break
            except WorkerLost as lost:
                if not left:
                    raise
                self._replaced(lost)
                handle.close()
                self._handles[key] = self._make(handle.name, key[0])
        for sequence, scored in zip(share, scores, strict=True):
            sequence.teacher = scored

    def __enter__(self) -> Teachers:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            handle.close()
