"""Teachers: workers that score each batch before it is trained on, while the batch before it is.

A batch that is being scored is still in the ledger's snapshot as groups, so a resumed run asks the
teachers again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

from tramontane.batches import Batch, TrainBatch, TrainSequence
from tramontane.config import Config
from tramontane.controller.workers import WorkerPool
from tramontane.placement.handle import Handle, Limit, WorkerLost, started


class Teachers:
    """The workers of a run's teachers, `teacher.workers` of each; the groups of a batch go to the
    teacher of their domain, shared equally among its workers.

    Args:
        make: starts a worker, by its name and the model.
        config: `teacher`, `trainer.objective`, `placement` and `timeouts` are read.
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
        self._start, self._limit = (Limit.of(config.timeouts, key) for key in ("start", "scoring"))
        self._every = "distill" not in config.trainer.objective.add
        losable = None if config.placement.kind == "thread" else replaced

        def pool(first: int, model: str) -> WorkerPool:
            def worker(number: int) -> Handle:
                return make(f"teacher {first + number}", model)

            return WorkerPool(worker, teacher.workers, self._start, losable)

        self._pools = {m: pool(n * teacher.workers, m) for n, m in enumerate(teacher.models)}

    async def started(self) -> None:
        """Wait until all workers can be called."""
        handles = [handle for pool in self._pools.values() for handle in pool.handles]
        await asyncio.gather(*(started(handle, self._start) for handle in handles))

    async def score(self, batch: Batch, made: TrainBatch) -> None:
        """Have the sequences `made` of a batch scored, except for trajectories that the term
        `distill` leaves out. Waits for the slowest worker.

        Raises:
            WorkerLost: see `WorkerPool`.
        """
        shares: defaultdict[tuple[str, int], list[TrainSequence]] = defaultdict(list)
        for number, (group, sequences) in enumerate(zip(batch.groups, made.groups, strict=True)):
            if self._every or group.sampled:
                model = self._teacher.domains.get(group.problem.domain, self._teacher.model)
                shares[model, number % self._teacher.workers] += sequences
        asked = batch.settings.temperature
        calls = [
            self._pools[model].submit(self._limit, "score", share, asked)
            for (model, _), share in shares.items()
        ]
        found = await asyncio.gather(*map(asyncio.wrap_future, calls))
        for share, scores in zip(shares.values(), found, strict=True):
            for sequence, given in zip(share, scores, strict=True):
                sequence.teacher = given

    def __enter__(self) -> Teachers:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()
