"""Teachers: workers that score each batch before it is trained on, while the batch before it is.

A batch that is being scored is still in the ledger's snapshot as groups, so a resumed run asks the
teachers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tramontane.batches import Batch, TeacherScores, TrainSequence
from tramontane.config import Config, TeacherConfig
from tramontane.placement.handle import Handle, Limit, WorkerLost, call, started

MAX_TRIES = 5  # attempts at one share of a batch before it fails


class Teachers:
    """The workers of a run's teachers, `teacher.workers` of each; the groups of a batch go to the
    teacher of their domain, shared equally among its workers.

    Args:
        make: starts a worker, by its name and the model.
        config: `teacher`, `placement` and `timeouts` are read.
        replaced: called with each loss before the replacement starts.
    """

    def __init__(
        self,
        make: Callable[[str, str], Handle],
        config: Config,
        replaced: Callable[[WorkerLost], None],
    ) -> None:
        assert config.teacher is not None
        self._make, self._replaced, self._config = make, replaced, config
        self._teacher: TeacherConfig = config.teacher
        workers = range(self._teacher.workers)
        models = enumerate(self._teacher.models)
        self._handles = {
            (model, number): make(f"teacher {n * len(workers) + number}", model)
            for n, model in models
            for number in workers
        }

    async def started(self) -> None:
        """Wait until all workers can be called."""
        limit = Limit.of(self._config.timeouts, "start")
        await asyncio.gather(*(started(handle, limit) for handle in self._handles.values()))

    async def score(self, batch: Batch) -> None:
        """Have every sequence of a batch scored. Waits for the slowest worker.

        Raises:
            WorkerLost: a worker was lost `MAX_TRIES` times with the same share, or cannot be
                replaced, since it is a thread.
        """
        shares: dict[tuple[str, int], list[TrainSequence]] = {key: [] for key in self._handles}
        groups = batch.train_batch().groups
        for number, (group, sequences) in enumerate(zip(batch.groups, groups, strict=True)):
            model = self._teacher.domains.get(group.problem.domain, self._teacher.model)
            shares[model, number % self._teacher.workers] += sequences
        temperature = batch.settings.temperature
        asked = {key: share for key, share in shares.items() if share}
        found = await asyncio.gather(*(self._ask(k, s, temperature) for k, s in asked.items()))
        by_sequence: dict[int, TeacherScores] = {}
        for share, scores in zip(asked.values(), found, strict=True):
            by_sequence |= zip(map(id, share), scores, strict=True)
        batch.scores = [by_sequence[id(s)] for sequences in groups for s in sequences]

    async def _ask(
        self, key: tuple[str, int], share: Sequence[TrainSequence], temperature: float
    ) -> list[TeacherScores]:
        timeouts = self._config.timeouts
        for attempt in range(1, MAX_TRIES + 1):
            handle = self._handles[key]
            try:
                await started(handle, Limit.of(timeouts, "start"))
                limit = Limit.of(timeouts, "scoring")
                scores: list[TeacherScores] = await call(
                    handle, "score", share, temperature, limit=limit
                )
                return scores
            except WorkerLost as lost:
                if self._config.placement.kind == "thread" or attempt == MAX_TRIES:
                    raise
                self._replaced(lost)
                handle.close()
                self._handles[key] = self._make(handle.name, key[0])
        raise AssertionError  # the last attempt returns or raises

    def __enter__(self) -> Teachers:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for handle in self._handles.values():
                stack.callback(handle.close)
