"""Memory of a generator on a GPU: measures how much is left for keys and values before they are
allocated, in the same order as vLLM and nano-vllm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

# The driver's part of a recording, which torch's allocator does not count, at most. What is missing
# beyond it was taken by another process.
DRIVER_BYTES = 64 << 20


class CudaMemory:
    """The allocator of a generator's CUDA device.

    Args:
        device: the device.
        share: share of the device that the generator may take in all.
        weights: see `allowance`.
        pending: returns the present value; see `allowance`.
    """

    def __init__(
        self, device: torch.device, share: float, weights: int, pending: Callable[[], int]
    ) -> None:
        self._device, self._share, self._weights, self._pending = device, share, weights, pending

    def free(self) -> int:
        """Bytes that can be allocated."""
        torch.cuda.empty_cache()  # what torch keeps may be in pieces
        return int(torch.cuda.mem_get_info(self._device)[0])

    def held(self) -> int:
        """Bytes that this process holds through torch."""
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved(self._device))

    def allowance(self) -> int:
        """Bytes of the free ones that the generator may allocate for anything but weights."""
        limit = int(self._share * torch.cuda.mem_get_info(self._device)[1])
        return allowance(self.free(), limit, self._weights, self._pending())

    def peak(self, work: Callable[[], object]) -> int:
        """Run `work`; returns the most bytes allocated at once, beyond those before it."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        return int(torch.cuda.max_memory_allocated(self._device) - before)


def allowance(free: int, limit: int, weights: int, pending: int) -> int:
    """Bytes that a generator may still allocate for anything but weights.

    Args:
        free: bytes that are free on the device.
        limit: bytes of the device that the generator may take in all.
        weights: bytes of its weights: the version in use, and the next one if that is received on
            the device.
        pending: bytes of these that are not allocated yet.
    """
    return max(0, min(free - pending, limit - weights))


def cache_room(
    memory: CudaMemory,
    works: Iterable[Callable[[], object]],
    recordings: Sequence[Callable[[], object]],
) -> int:
    """Bytes that are left for keys and values besides everything else.

    Measures first the peak of the largest work, then what recordings keep. Two recordings are made,
    since all share one pool of memory: the first and largest takes the pool, and the second shows
    what each further one adds.

    Args:
        memory: the allocator; weights are loaded, keys and values not yet allocated.
        works: prefills and steps of the largest sizes, which run one at a time.
        recordings: make the recordings, the largest first.
    """
    allowed = memory.allowance()
    peak = max(memory.peak(work) for work in works)
    kept = []
    for record in recordings[:2]:
        free, held = memory.free(), memory.held()
        record()
        lost, own = free - memory.free(), max(0, memory.held() - held)
        kept.append(min(max(lost, own), own + DRIVER_BYTES))
    recorded = sum(kept) + max(0, len(recordings) - 2) * kept[-1] if kept else 0
    return max(0, allowed - peak - recorded)
