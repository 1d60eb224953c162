"""Weights on their way through the host's memory: one flat buffer, cast before the copy, copied
once."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_cuda import Launches, fake_cuda
from tests.generator.slot_models import make_model
from tramontane.models.host import ALIGNMENT, PASSING_BYTES, HostMemory, flat, pageable
from tramontane.models.staging import SharedMemory, StagedWeights, collect
from tramontane.models.weights import Bucket, CopiedWeights, LocalWeights, Part, move, on_host
from tramontane.placement.ranks import ProcessRanks

cuda = pytest.mark.gpu
PATIENCE = 300.0

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
SHAPES = st.lists(st.integers(0, 5), max_size=3)


@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=8))
def test_tensors_of_one_buffer_have_room_of_their_own(like: list[Any]) -> None:
    sizes: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in like]
    made = flat(tensors, allocate)
    assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in tensors]
    assert len({t.untyped_storage().data_ptr() for t in made if t.numel()}) <= 1
    assert all(t.storage_offset() * t.itemsize % ALIGNMENT == 0 for t in made)
    total = sum(t.nbytes for t in tensors)
    assert len(sizes) == bool(total)
    assert all(total <= size < total + ALIGNMENT * len(like) for size in sizes)
    for number, tensor in enumerate(made):
        tensor.fill_(number % 2)
    assert all(bool((t == n % 2).all()) for n, t in enumerate(made))


def parts(scale: float, device: str = "cpu") -> Bucket:
    """Rows of three weights, in float32; one of them is not contiguous."""
    torch.manual_seed(0)
    values = [torch.randn(6, 4).T, torch.randn(9), torch.tensor(2.5)]
    return [Part.whole([str(n)], (scale * t).to(device)) for n, t in enumerate(values)]


class Crossings(TorchDispatchMode):
    """The bytes and number types that cross between the devices."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[tuple[torch.dtype, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if source.device != out.device:
                self.bytes[source.dtype, out.dtype] += out.nbytes
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_casts_and_each_byte_crosses_once(dtype: torch.dtype) -> None:
    sizes: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return pageable(size)

    with fake_cuda():
        bucket = parts(1.0, "cuda:0")
        with Crossings() as crossings:
            copies = on_host(bucket, dtype, allocate)
        assert all(part.values.device.type == "cpu" for part in copies)
    total = (24 + 9 + 1) * dtype.itemsize
    assert crossings.bytes == {(dtype, dtype): total}
    (size,) = sizes
    assert total <= size < total + 3 * ALIGNMENT


def test_a_fetch_into_host_memory_is_cast_and_checked_on_the_trainers_gpu() -> None:
    with fake_cuda():
        for part in parts(1.0, "cuda:0"):
            target = torch.empty(part.shape, dtype=torch.bfloat16)
            with Crossings() as crossings:
                moved = move(part.values, target)
            assert (moved.device.type, moved.dtype) == ("cuda", torch.bfloat16)
            assert crossings.bytes == {(torch.bfloat16, torch.bfloat16): target.nbytes}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copies_have_the_values_of_a_cast(dtype: torch.dtype) -> None:
    bucket = parts(1.0)
    weights = CopiedWeights(dtype)
    weights.add_all(lambda: iter([bucket, []]))
    (copies, *_) = weights.buckets()
    for part, copy in zip(bucket, copies, strict=True):
        assert copy[:3] == part[:3]
        assert copy.values.dtype == dtype
        assert torch.equal(copy.values, part.values.to(dtype))
        part.values.zero_()  # the trainer's next step
        assert copy.values.any()


class Publisher:
    """Publishes versions from a process of its own, as a trainer on a GPU does."""

    def __init__(self) -> None:
        self.buffers: list[int] = []
        self.memory = HostMemory(self._allocate)

    def _allocate(self, size: int) -> torch.Tensor:
        self.buffers.append(size)
        return pageable(size).share_memory_()

    def publish(self, version: int) -> CopiedWeights:
        weights = CopiedWeights(torch.bfloat16)
        bucket = parts(version)
        weights.add_all(lambda: iter([bucket[:1], bucket[1:]]), self.memory)
        return weights

    def sizes(self) -> list[int]:
        return self.buffers


def values(weights: CopiedWeights) -> list[torch.Tensor]:
    return [part.values for bucket in weights.buckets() for part in bucket]


@pytest.mark.usefixtures("forked_ranks")
def test_two_versions_take_turns_in_memory_that_processes_share() -> None:
    """The last version stays while the next is written, and no buffer is made for a third."""
    handle = ProcessRanks("trainer", Publisher, 1, "cpu")
    published = []
    for version in range(1, 6):
        published.append(values(handle.submit("publish", version).result(PATIENCE)))
        for number in (version - 1, version)[version == 1 :]:
            expected = [part.values.bfloat16() for part in parts(number)]
            assert all(map(torch.equal, published[number - 1], expected))
    # Its memory is that of the fifth: nothing was copied on the way.
    assert all(map(torch.equal, published[0], published[4]))
    # Two buckets in each: of 24 numbers, and of 9 and 1, each from a multiple of 64 bytes on.
    assert handle.submit("sizes").result(PATIENCE) == [48, ALIGNMENT + 2] * 2
    handle.close()


class Runtime:
    """CUDA's functions that pin memory: what is pinned, by its address."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.pinned = code, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.pinned[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        del self.pinned[address]


def test_memory_is_pinned_at_its_own_size_as_long_as_it_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = HostMemory()
    for _ in range(3):
        memory.begin()
        for size in (1_360_001, 3):
            assert memory.take(size).is_shared()
    assert sorted(runtime.pinned.values()) == [3, 3, 1_360_001, 1_360_001]
    passing = [memory.pass_through(size) for size in (5, PASSING_BYTES, 3)]
    assert len({buffer.data_ptr() for buffer in passing}) == 1
    assert [buffer.nbytes for buffer in passing] == [5, PASSING_BYTES, 3]
    assert runtime.pinned[passing[0].data_ptr()] == PASSING_BYTES
    del memory
    assert not runtime.pinned
    runtime.code = 2
    with pytest.raises(RuntimeError, match="cannot pin 5 bytes of host memory .error 2."):
        HostMemory().take(5)


def test_memory_that_another_process_shares_is_pinned_once_and_let_go_with_its_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, kept, pinned = Runtime(), SharedMemory(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    for _ in range(2):  # the second trainer takes the place of one that died
        memory = HostMemory(lambda size: pageable(size).share_memory_())
        for version in range(4):
            weights = CopiedWeights(torch.bfloat16)
            source = partial(iter, [parts(version)])
            weights.add_all(source, memory)
            kept.keep(weights)
            pinned.append(set(runtime.pinned))
    assert [len(addresses) for addresses in pinned] == [1, 2, 2, 2, 2, 2, 2, 2]
    assert pinned[1] == pinned[3]
    assert pinned[5] == pinned[7] != pinned[3]
    ours = CopiedWeights(torch.bfloat16)
    ours.add([*parts(1)])  # of this process alone
    kept.keep(ours)
    assert len(runtime.pinned) == 1


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device, self.waits = device, 0

    def synchronize(self) -> None:
        self.waits += 1


def test_a_version_staged_on_the_host_is_one_pinned_buffer_and_one_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many tensors it has: generation pauses until they are swapped in."""
    current = Stream(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with fake_cuda() as pinned:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
        with torch.device("cuda"):
            model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 3))
        staged, weights = StagedWeights(model, on_host=True), LocalWeights()
        weights.add([Part.whole([n], torch.zeros_like(p)) for n, p in model.named_parameters()])
        with Launches(value=1):  # all of them are finite
            staged.fetch(1, weights)
        with Launches() as swap:
            assert staged.swap(1, in_place=True)
    total = 4 * (10_000 + 100 + 300 + 3)
    (size,) = pinned
    assert total <= size < total + 4 * ALIGNMENT
    assert swap.kernels == {"copy_": 4}
    assert not swap.waits
    assert current.waits == 1


@cuda
def test_on_a_gpu_published_weights_are_in_pinned_memory() -> None:
    memory = HostMemory()
    for version in (1, 2, 3):
        weights = CopiedWeights(torch.bfloat16)
        weights.add_all(lambda v=version: iter([parts(v, "cuda")]), memory)  # type: ignore[misc]
        for copy, part in zip(values(weights), parts(version, "cuda"), strict=True):
            assert copy.is_pinned()
            assert torch.equal(copy, part.values.bfloat16().cpu())


@cuda
@pytest.mark.parametrize("on_host", [False, True])
def test_on_a_gpu_a_version_is_staged_on_either_side(on_host: bool) -> None:
    model, new = make_model().to("cuda"), make_model(seed=1).to("cuda")
    staged, weights = StagedWeights(model, on_host=on_host), LocalWeights()
    state = new.state_dict()  # a tied head twice
    weights.add([Part.whole([n], t) for n, t in state.items()])
    staged.fetch(1, weights)
    assert staged.swap(1, in_place=True)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    spare = {n: torch.empty_like(t) for n, t in state.items()}
    collect(weights, spare)
    assert all(torch.equal(t, state[n]) for n, t in spare.items())
