"""Microbatches computed side by side on a CPU, a thread each.

Each thread has a *replica*: a model that shares the weights and has gradients of its own. So no
thread waits for another before the end of a minibatch, unlike threads inside a matrix product, and
a core that generators leave free is used. A microbatch's replica and the order of all sums are
fixed, so the same batch gives the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from tramontane.trainer import precision

T = TypeVar("T")


class Replicas:
    """Replicas of one model and their threads.

    Args:
        master: the model with the float32 weights.
        working: the model that computes for `master`, which is the first replica.
        count: number of replicas. Each further one takes memory for float32 gradients.
    """

    def __init__(self, master: PreTrainedModel, working: PreTrainedModel, count: int) -> None:
        self.models = [working]
        self._masters = [master]
        for _ in range(count - 1):
            sharing = _sharing_copy(master)
            self._masters.append(sharing)
            if working is master:
                self.models.append(sharing)
            else:
                self.models.append(_sharing_copy(working))
                precision.collect_gradients(sharing, self.models[-1])
        self._threads: ThreadPoolExecutor | None = None
        if count > 1:
            torch.set_num_threads(1)  # in each thread: the replicas use the cores
            self._threads = ThreadPoolExecutor(
                count, "replica", initializer=torch.set_num_threads, initargs=(1,)
            )

    def map(self, compute: Callable[[PreTrainedModel, int], T], count: int) -> list[T]:
        """Return `compute(replica, index)` for each index below `count`.

        Replica r takes the indices r, r + replicas, …, one after the other.
        """

        def share(replica: int) -> list[T]:
            indices = range(replica, count, len(self.models))
            return [compute(self.models[replica], index) for index in indices]

        if self._threads is None:
            return share(0)
        shares = list(self._threads.map(share, range(len(self.models))))
        return [shares[i % len(shares)][i // len(shares)] for i in range(count)]

    def sum_gradients(self) -> None:
        """Add the gradients of all replicas to the master's."""
        first, *others = (list(master.parameters()) for master in self._masters)
        for parameters in others:
            for p, other in zip(first, parameters, strict=True):
                if other.grad is not None:
                    p.grad = other.grad if p.grad is None else p.grad.add_(other.grad)
                    other.grad = None


def _sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules; the copy's parameters share the memory of the model's."""
    parameters = {
        id(p): torch.nn.Parameter(p.data, requires_grad=p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, parameters)
