"""CUDA graphs: a decode step recorded once and replayed as one launch.

A small batch's step on a GPU is hundreds of kernels of a few microseconds each, and Python takes
longer to launch them than they take to run. Replayed, they follow each other without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

_WARM_UP = 3  # runs before recording, in which libraries choose their kernels and take workspaces
_RECORDING = threading.Lock()  # CUDA records one graph at a time in a process


class Recorder(Protocol):
    """Turns a step into one that is quicker to repeat.

    The step takes nothing, reads and writes tensors that stay where they are, and looks at none of
    their values. It may be run any number of times in recording. What is returned does the same as
    the step, and gives tensors that are good until it is called again.
    """

    def __call__(self, step: Callable[[], T]) -> Callable[[], T]: ...


class CudaGraphs:
    """Records steps on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Not one stream for both: a workspace that a library took in warming up is not the graph's.
        self._warm_up, self._capture = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def __call__(self, step: Callable[[], T]) -> Callable[[], T]:
        graph = torch.cuda.CUDAGraph()
        with _RECORDING, torch.cuda.device(self._device):
            here = torch.cuda.current_stream()
            self._warm_up.wait_stream(here)
            with torch.cuda.stream(self._warm_up):
                for _ in range(_WARM_UP):
                    step()
            here.wait_stream(self._warm_up)
            # Other threads of the process may use the GPU meanwhile: a trainer's, say.
            mode = "thread_local"
            with torch.cuda.graph(graph, stream=self._capture, capture_error_mode=mode):
                outputs = step()

        def replay() -> T:
            graph.replay()
            return outputs

        return replay


class Looks(TorchDispatchMode):
    """Notes operations that look at tensors' values, or take them to the CPU: a graph would keep
    what was seen once, and CUDA refuses to record it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if func is torch.ops.aten.index.Tensor:  # by numbers it does not
            tags = {i for i in args[1] if i is not None and i.dtype == torch.bool}
        out = func(*args, **kwargs)
        given = args[0] if args and isinstance(args[0], torch.Tensor) else None
        leaves = given is not None and isinstance(out, torch.Tensor) and out.device != given.device
        # In inference mode `bool(tensor)` comes here as one operation, which has no tag.
        if tags or leaves or isinstance(out, bool | int | float):
            self.seen.append(str(func))
        return out


def bucket(rows: int, slots: int) -> int:
    """For how many rows the step is recorded that serves `rows`: a power of two, or all slots."""
    return min(slots, 1 << (rows - 1).bit_length())
