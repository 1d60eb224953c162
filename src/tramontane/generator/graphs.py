"""CUDA graphs: a decode step recorded once and replayed as one launch.

On a GPU a small batch's step is hundreds of kernels of a few microseconds each, and launching them
from Python takes longer than running them. A replayed graph runs them back to back without Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

_WARM_UP = 3  # runs before recording, for libraries to choose kernels and allocate workspaces
_RECORDING = threading.Lock()  # CUDA records one graph at a time in a process


class StepRecorder(Protocol):
    """Turns a step into a function that is faster to repeat.

    The step takes no arguments, reads and writes tensors at fixed addresses, and reads none of
    their values in Python. Recording may run the step any number of times. The returned function is
    equivalent to the step; its result is valid until the next call of any function that the same
    recorder made.
    """

    def __call__(self, step: Callable[[], T]) -> Callable[[], T]: ...


def run_directly(step: Callable[[], T]) -> Callable[[], T]:
    """A `StepRecorder` that does not record."""
    return step


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The device's streams for running and for recording steps, made once, since torch has only 32
    per device and reuses them. Their kernels go before those of a trainer on the same GPU."""
    # Two streams: workspaces that a library allocates in the warm-up are not the graph's.
    return torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)


class CudaGraphs:
    """Records steps on one CUDA device. Its graphs share one pool of memory, so only one of them
    may be replaying, and the largest is best recorded first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def __call__(self, step: Callable[[], T]) -> Callable[[], T]:
        if not self._graphs:  # torch takes no graph into a pool whose graphs are all gone
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        running, recording = _streams(self._device)
        # After a failed recording torch leaves its stream the current one.
        current = torch.cuda.stream(torch.cuda.current_stream(self._device))
        with _RECORDING, torch.cuda.device(self._device), current:
            self._on(running, lambda: [step() for _ in range(_WARM_UP)])
            # Other threads of the process, e.g. a trainer's, may use the GPU meanwhile.
            mode = "thread_local"
            with torch.cuda.graph(graph, self._pool, recording, capture_error_mode=mode):
                outputs = step()
        self._graphs.add(graph)

        def replay() -> T:
            self._on(running, graph.replay)
            return outputs

        return replay

    @staticmethod
    def _on(stream: torch.cuda.Stream, work: Callable[[], object]) -> None:
        """Run `work` on a stream, in order with the current stream's work."""
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            work()
        current.wait_stream(stream)


class ValueReadDetector(TorchDispatchMode):
    """Context manager that notes operations which read values of tensors, move tensors between
    devices or make tensors from Python values. A graph would replay the values read while it was
    recorded, and CUDA refuses to record moves.

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
        # `torch.tensor(..., device=...)`, whose copy to the device does not arrive here.
        made = func is torch.ops.aten.lift_fresh.default
        # In inference mode `bool(tensor)` arrives here as one operation, which has no tag.
        if tags or moved or made or isinstance(out, bool | int | float):
            self.operations.append(str(func))
        return out


def recorded_rows(slots: int) -> list[int]:
    """Numbers of rows for which steps are recorded: 1, 2, 4, 8, 16, 24, 32, then multiples of 16 up
    to 256, multiples of 32 after that, and all slots. Filler is at most a third of a step's rows
    from 17 rows on, and at most an eighth from 113 rows on."""
    sizes = [1, 2, 4, 8, 16, 24, *range(32, 256, 16), *range(256, slots, 32)]
    return [*(rows for rows in sizes if rows < slots), slots]


def padded_rows(rows: int, slots: int) -> int:
    """Rows of the recorded step that serves `rows`."""
    return next(size for size in recorded_rows(slots) if size >= rows)
