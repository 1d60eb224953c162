"""The number of unfinished requests of each generator."""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class Loads:
    """Unfinished requests of each generator: finds the sums and the least loaded generator without
    a scan.

    Attributes:
        total: unfinished requests of all generators.
        evaluating: how many of these belong to an evaluation.
    """

    def __init__(self, generators: int) -> None:
        self.total = self.evaluating = 0
        self._loads = [(0, 0)] * generators
        self._heap = [(0, number) for number in range(generators)]  # (requests, generator)

    def note(self, number: int, requests: int, evaluating: int) -> None:
        """Set the current load of generator `number`."""
        before = self._loads[number]
        self.total += requests - before[0]
        self.evaluating += evaluating - before[1]
        self._loads[number] = requests, evaluating
        if len(self._heap) > 4 * len(self._loads):  # outdated entries
            self._heap = [(load, n) for n, (load, _) in enumerate(self._loads)]
            heapify(self._heap)
        else:
            heappush(self._heap, (requests, number))

    def least(self) -> int:
        """The generator with the fewest requests; of several, the first."""
        while self._heap[0][0] != self._loads[self._heap[0][1]][0]:
            heappop(self._heap)
        return self._heap[0][1]
