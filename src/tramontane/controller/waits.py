"""Waits of the pipeline's loops, each with a name and a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tramontane.config import TimeoutsConfig
from tramontane.controller.generators import GeneratorPool
from tramontane.controller.ledger import Ledger
from tramontane.placement import WaitTimeout

T = TypeVar("T")


def in_background(coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """A task to be awaited later. If another error ends the run first, asyncio does not report
    this task's, too, as one that was never retrieved."""
    task = asyncio.create_task(coroutine, name=name)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


class Waits:
    """Waits for conditions on the state that the loops share, and for requests.

    A wait may last `timeouts.batch`, counted from the last update. Time spent waiting for the end
    of an evaluation does not count.

    Raises:
        WaitTimeout: a wait took too long; the message has its name and the run's state.
    """

    def __init__(self, timeouts: TimeoutsConfig, ledger: Ledger, generators: GeneratorPool) -> None:
        self._timeout, self._ledger, self._generators = timeouts.batch, ledger, generators
        # Conditions that tasks wait for, each with the future that ends its wait.
        self._conditions: list[tuple[Callable[[], Any], asyncio.Future[None]]] = []

    async def until(self, condition: Callable[[], Any], name: str) -> None:
        """Wait until `condition()` is true; it is evaluated at each `notify`."""
        while not condition():
            changed = asyncio.get_running_loop().create_future()
            self._conditions.append((condition, changed))
            await self.end_of(changed, name)

    async def end_of(self, awaited: Awaitable[None], name: str) -> None:
        """Wait until `awaited` is done."""
        task, seen = asyncio.ensure_future(awaited), self._ledger.trained_version
        try:
            while not (await asyncio.wait({task}, timeout=self._timeout))[0]:
                before, seen = seen, self._ledger.trained_version
                if seen == before and not self._generators.evaluating:
                    raise self._timed_out(name)
            task.result()
        finally:
            task.cancel()

    def notify(self) -> None:
        """End the waits whose conditions have become true."""
        for condition, changed in self._conditions:
            if not changed.done() and condition():
                changed.set_result(None)
        self._conditions = [wait for wait in self._conditions if not wait[1].done()]

    def _timed_out(self, name: str) -> WaitTimeout:
        ledger = self._ledger
        return WaitTimeout(
            f"waited {self._timeout:g} s (timeouts.batch) for {name}; "
            f"{self._generators.in_flight} completions in flight, {len(ledger.ready)} groups "
            f"graded, {len(ledger.filtered)} filtered since update {ledger.trained_version}"
            + (f" (the last: {ledger.filtered[-1][1]})" if ledger.filtered else "")
        )
