"""Teachers: workers that score each batch before it is trained on, while the batch before it is.

A batch that is being scored is still in the ledger's snapshot as groups, so a resumed run asks the
teachers again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

from tramontane.batches import Batch, TrainSequence
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
        shares: defaultdict[tuple[str, int], list[TrainSequence]] = defaultdict(list)
        made, temperature = batch.train_batch(), batch.settings.temperature
        for number, (group, sequences) in enumerate(zip(batch.groups, made.groups, strict=True)):
            model = self._teacher.domains.get(group.problem.domain, self._teacher.model)
            shares[model, number % self._teacher.workers] += sequences
        await asyncio.gather(*(self._ask(key, s, temperature) for key, s in shares.items()))
        batch.scores = [s.teacher for s in made.sequences if s.teacher is not None]

    async def _ask(
        self, key: tuple[str, int], share: Sequence[TrainSequence], temperature: float
    ) -> None:
        """Have a worker score its share."""
        start, limit = (Limit.of(self._config.timeouts, key) for key in ("start", "scoring"))
        losses = 0
        while True:
            handle = self._handles[key]
            try:
                await started(handle, start)
                scores = await call(handle, "score", share, temperature, limit=limit)
                break
            except WorkerLost as lost:
                losses += 1
                if self._config.placement.kind == "thread" or losses == MAX_TRIES:
                    raise
                self._replaced(lost)
                handle.close()
                self._handles[key] = self._make(handle.name, key[0])
        for sequence, found in zip(share, scores, strict=True):
            sequence.teacher = found

    def __enter__(self) -> Teachers:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            handle.close()
