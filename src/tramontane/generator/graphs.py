"""CUDA graphs: a decode step recorded once and replayed as one launch.

A small batch's step on a GPU is hundreds of kernels of a few microseconds each, and Python takes
longer to launch them than they take to run. Replayed, they follow each other without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from transformers import PreTrainedModel

T = TypeVar("T")

_WARM_UP = 3  # runs before recording, in which libraries choose their kernels and take workspaces


class Recorder(Protocol):
    """Turns a step into one that is quicker to repeat.

    The step takes nothing, reads and writes tensors that stay where they are, and looks at none of
    their values. It may be run any number of times in recording. What is returned does the same as
    the step, and gives tensors that are good until it is called again.
    """

    def __call__(self, step: Callable[[], T]) -> Callable[[], T]: ...


class CudaGraphs:
    """Records steps on the current CUDA device; all of them share one pool of memory, since none
    runs beside another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], T]) -> Callable[[], T]:
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                step()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the GPU meanwhile: a trainer's, in one process.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = step()

        def replay() -> T:
            graph.replay()
            return outputs

        return replay


def recorder(model: PreTrainedModel, wanted: bool) -> Recorder | None:
    """CUDA graphs where they are `wanted` and possible: on a GPU, and with a forward that looks at
    no tensor's values, as transformers says of each architecture."""
    fits: Any = model._can_compile_fullgraph
    return CudaGraphs() if wanted and model.device.type == "cuda" and fits else None


def bucket(rows: int, slots: int) -> int:
    """For how many rows the step is recorded that serves `rows`: a power of two, or all slots."""
    return min(slots, 1 << (rows - 1).bit_length())
