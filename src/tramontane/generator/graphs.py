"""CUDA graphs: a decode step recorded once and replayed as one launch.

On a GPU a small batch's step is hundreds of kernels of a few microseconds each, and launching them
from Python takes longer than running them. A replayed graph runs them back to back without Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

_WARM_UP = 3  # runs before recording, for libraries to choose kernels and allocate workspaces
_RECORDING = threading.Lock()  # CUDA records one graph at a time in a process


class StepRecorder(Protocol):
    """Turns a step into a function that is faster to repeat.

    The step takes no arguments, reads and writes tensors at fixed addresses, and reads none of
    their values in Python. Recording may run the step any number of times. The returned function is
    equivalent to the step; its result is valid until its next call.
    """

    def __call__(self, step: Callable[[], T]) -> Callable[[], T]: ...


def run_directly(step: Callable[[], T]) -> Callable[[], T]:
    """A `StepRecorder` that does not record."""
    return step


class CudaGraphs:
    """Records steps on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Two streams: workspaces that a library allocates in the warm-up are not the graph's.
        self._warm_up, self._capture = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def __call__(self, step: Callable[[], T]) -> Callable[[], T]:
        graph = torch.cuda.CUDAGraph()
        with _RECORDING, torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._warm_up.wait_stream(current)
            with torch.cuda.stream(self._warm_up):
                for _ in range(_WARM_UP):
                    step()
            current.wait_stream(self._warm_up)
            # Other threads of the process, e.g. a trainer's, may use the GPU meanwhile.
            mode = "thread_local"
            with torch.cuda.graph(graph, stream=self._capture, capture_error_mode=mode):
                outputs = step()

        def replay() -> T:
            graph.replay()
            return outputs

        return replay


class ValueReadDetector(TorchDispatchMode):
    """Context manager that notes operations which read values of tensors or move tensors between
    devices. A graph would replay the values read in recording, and CUDA refuses to record moves.

    Attributes:
        operations: names of the operations noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if func is torch.ops.aten.index.Tensor:  # reads values for boolean indices only
            tags = {i for i in args[1] if i is not None and i.dtype == torch.bool}
        out = func(*args, **kwargs)
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        moved = source is not None and isinstance(out, torch.Tensor) and out.device != source.device
        # In inference mode `bool(tensor)` arrives here as one operation, which has no tag.
        if tags or moved or isinstance(out, bool | int | float):
            self.operations.append(str(func))
        return out


def padded_rows(rows: int, slots: int) -> int:
    """Rows of the recorded step that serves `rows`: the next power of two, or all slots."""
    return min(slots, 1 << (rows - 1).bit_length())
