"""The memory that a process has in use, from malloc's own accounting."""

import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SAMPLE_SECONDS = 0.0005
SMALL = 4096  # bytes of a tensor that is counted with the next larger one


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_mallinfo2 = ctypes.CDLL(None).mallinfo2
_mallinfo2.restype = _Mallinfo


def in_use() -> int:
    """Bytes that all threads of this process hold from malloc; mapped files are not among them."""
    info = _mallinfo2()
    return int(info.uordblks + info.hblkhd)


@cache
def _allocates(func: Any) -> bool:
    """False for operations whose results are all views of their arguments, or the arguments."""
    return any(result.alias_info is None for result in func._schema.returns)


class Peak(TorchDispatchMode):
    """Bytes in use above the level at the start: the highest after any operation of this thread
    that makes a tensor, or of a sample by the clock, for what other threads do; and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.highest, self.at_end = in_use(), 0, 0

    def sample(self) -> None:
        self.highest = max(self.highest, in_use() - self.start)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        small = isinstance(result, torch.Tensor) and result.nbytes < SMALL
        if _allocates(func) and not small:
            self.sample()
        return result


@contextmanager
def measured() -> Iterator[Peak]:
    gc.collect()
    peak, ended = Peak(), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            time.sleep(SAMPLE_SECONDS)  # less work than to wait for the event
            peak.sample()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with peak:
            yield peak
    finally:  # the process of an error could not end
        ended.set()
        watcher.join()
    gc.collect()
    peak.at_end = in_use() - peak.start
