"""The models that run forward and backward passes for the float32 weights: a bfloat16 copy, and
replicas for threads.

In bfloat16 the whole forward runs in bfloat16, as in the generator, without autocast's casts at
every matrix product. Gradients of microbatches are summed in float32.

On a CPU, microbatches may be computed side by side, a thread each. Each thread has a *replica*: a
model that shares the weights and has gradients of its own. So no thread waits for another before
the end of a minibatch, unlike threads inside a matrix product. Next to generators, all threads but
the first run at the lowest priority, so they use cores only while generators leave them idle.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from tramontane.trainer import sharding

LOWEST_PRIORITY = 19  # a nice value: 1.5 % of a core that another thread wants

T = TypeVar("T")


def to_bfloat16(model: PreTrainedModel) -> None:
    """Cast the weights in place; buffers (rotary frequencies) stay float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()


def working_model(master: PreTrainedModel, dtype: str) -> PreTrainedModel:
    """Return the model that runs forward and backward passes for `master`.

    In float32, and under FSDP (which casts itself), it is `master`. Otherwise it is a bfloat16
    copy, whose gradients are added to the master's and which `refresh` updates. Frozen parameters
    are those of `master`, not copies.
    """
    if dtype == "float32" or sharding.ranks() > 1:
        return master
    working = copy.deepcopy(master, {id(p): p for p in master.parameters() if not p.requires_grad})
    to_bfloat16(working)
    collect_gradients(master, working)
    return working


def collect_gradients(master: PreTrainedModel, working: PreTrainedModel) -> None:
    """Add each gradient of the bfloat16 copy to the master's in float32, once it is computed."""
    for exact, rough in zip(trained(master), trained(working), strict=True):
        rough.register_post_accumulate_grad_hook(partial(_move_gradient, exact))


def _move_gradient(exact: torch.nn.Parameter, rough: torch.Tensor) -> None:
    assert rough.grad is not None
    exact.grad = rough.grad.float() if exact.grad is None else exact.grad.add_(rough.grad)
    rough.grad = None


@torch.no_grad()
def refresh(working: PreTrainedModel, master: PreTrainedModel) -> None:
    """Copy the master's weights after an update."""
    if working is not master:
        torch._foreach_copy_([*trained(working)], [*trained(master)])


def trained(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """The parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Replicas:
    """Replicas of one model and their threads.

    Args:
        master: the model with the float32 weights.
        working: `working_model` of `master`; it is the first replica.
        count: number of replicas. Each further one takes memory for float32 gradients.
        alone: no generator shares the cores.
    """

    def __init__(
        self, master: PreTrainedModel, working: PreTrainedModel, count: int, alone: bool = False
    ) -> None:
        self.models = [working]
        self._masters = [master]
        for _ in range(count - 1):
            sharing = _sharing_copy(master)
            self._masters.append(sharing)
            if working is master:
                self.models.append(sharing)
            else:
                self.models.append(_sharing_copy(working))
                collect_gradients(sharing, self.models[-1])
        self._threads: ThreadPoolExecutor | None = None
        if count > 1:
            start = partial(_start_thread, alone)
            self._threads = ThreadPoolExecutor(count - 1, "replica", initializer=start)

    def map(
        self, compute: Callable[[PreTrainedModel, int], T], count: int, *, repeatable: bool
    ) -> list[T]:
        """Return `compute(replica, index)` for each index below `count`.

        Args:
            compute: called once for each index, by one thread at a time for each replica.
            count: number of calls.
            repeatable: replica r takes the indices r, r + replicas, …, in order, so that the order
                of all sums is fixed and the same batch gives the same bits. Otherwise each replica
                takes the next index as it becomes free.
        """
        found: dict[int, T] = {}
        replicas = len(self.models)
        left: SimpleQueue[int | None] = SimpleQueue()
        for index in [*range(count), *[None] * replicas]:
            left.put(index)

        def work(replica: int) -> None:
            fixed = range(replica, count, replicas)
            for index in fixed if repeatable else iter(left.get, None):
                found[index] = compute(self.models[replica], index)

        if self._threads is None:
            work(0)
        else:
            torch.set_num_threads(1)  # in this thread, as in the others: the replicas use the cores
            others = self._threads.map(work, range(1, replicas))
            work(0)
            list(others)  # waits, and raises their errors
        return [found[index] for index in range(count)]

    def sum_gradients(self) -> None:
        """Add the gradients of all replicas to the master's."""
        first, *others = (list(master.parameters()) for master in self._masters)
        for parameters in others:
            for p, other in zip(first, parameters, strict=True):
                if other.grad is not None:
                    p.grad = other.grad if p.grad is None else p.grad.add_(other.grad)
                    other.grad = None


def _start_thread(alone: bool) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux" and not alone:  # elsewhere, a thread has no priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)


def _sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules; the copy's parameters share the memory of the model's."""
    parameters = {
        id(p): torch.nn.Parameter(p.data, requires_grad=p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, parameters)
