"""The calls of torch's flash attention.

On a CPU its operators are those of `tests.flash_reference`; on fake CUDA tensors they have shapes;
tests marked `gpu` compute values.
"""

from __future__ import annotations

import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from tests.fake_cuda import Launches, fake_cuda
from tests.flash_reference import flash_on_cpu
from tramontane.config import TrainerConfig
from tramontane.errors import InputError
from tramontane.models import flash, packing
from tramontane.models.attention import packed_attention
from tramontane.models.loading import load_model
from tramontane.trainer.trainer import Trainer

ROOT = Path(__file__).parents[2]
FIRST, FUTURE = "2.11", "2.16"  # the kernel's arguments are known from the one to below the other
ARGUMENTS = {
    "forward": "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
    "return_debug_mask scale window_size_left window_size_right seqused_k",
    "backward": "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p "
    "is_causal rng_state unused scale window_size_left window_size_right",
}
RESULTS = {
    "forward": ["output", "softmax_logsumexp", "rng_state", "unused", "debug_attn_mask"],
    "backward": ["", "", ""],
}


def test_only_known_releases_of_torch_are_installed():
    dependency = f'"torch>={FIRST},<{FUTURE}"'
    assert dependency in (ROOT / "pyproject.toml").read_text(), (
        f"pyproject.toml does not have {dependency}, the releases that this file knows. Before you "
        f"change both: compare `torch.ops.aten._flash_attention_forward.default._schema` and "
        f"`_backward` of the new release with ARGUMENTS here, read its `mha_varlen_fwd` "
        f"(flash_attn/flash_api.cpp) for `seqused_k`, rows without keys and the layout of the "
        f"log-sum-exp, and run the tests marked gpu"
    )
    installed = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    assert (2, 11) <= installed < (2, 16)


def test_one_file_calls_the_kernel():
    kernel = re.compile(r"varlen_attn|attention\.varlen|_flash_attention_")
    files = (ROOT / "src").rglob("*.py")
    assert [file.name for file in files if kernel.search(file.read_text())] == ["flash.py"]


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_the_kernel_takes_the_arguments_that_are_passed(name):
    schema = getattr(torch.ops.aten, f"_flash_attention_{name}").default._schema
    names = ARGUMENTS[name].split()
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert positional == names[: len(positional)]
    assert {*names} <= {argument.name for argument in schema.arguments}
    added = [argument for argument in schema.arguments if argument.name not in names]
    assert all(argument.has_default_value() for argument in added)
    assert [result.name for result in schema.returns] == RESULTS[name]


@st.composite
def families(draw):
    """Lengths, and the sequence that each continues: prompts with completions, in order."""
    lengths, continues = [], []
    for _ in range(draw(st.integers(1, 3))):
        parent = len(lengths)
        members = draw(st.lists(st.integers(1, 9), max_size=4))
        lengths += [draw(st.integers(1, 9)), *members]
        continues += [None, *[parent] * len(members)]
    return lengths, continues


def inputs(tokens, heads, d=8, **options):
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(1, heads[0], tokens, d)] + [(1, heads[1], tokens, d)] * 2
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return [x.to(**options).requires_grad_() for x in tensors]


def attention_and_gradients(tensors, lengths, continues, window):
    row = packing.Packing(lengths, continues, tensors[0].device)
    out, _ = packed_attention(nn.Identity(), *tensors, None, packing=row, sliding_window=window)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    return out, torch.autograd.grad((out.float() * weights).sum(), tensors)


@given(families(), st.sampled_from([None, 1, 3]), st.sampled_from([(4, 2), (2, 2), (3, 1)]))
def test_packed_rows_equal_plain_products(family, window, heads):
    tensors = inputs(sum(family[0]), heads)
    want = attention_and_gradients(tensors, *family, window)
    with flash_on_cpu():
        got = attention_and_gradients(tensors, *family, window)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def cached(lengths, heads=(4, 2), d=8, gap=3):
    """Queries, keys, values, and where each row's keys are: in reverse order, with gaps."""
    generator = torch.Generator().manual_seed(sum(lengths))
    positions = sum(lengths) + gap * len(lengths)
    query = torch.randn(len(lengths), heads[0], d, generator=generator)
    keys, values = (torch.randn(positions, heads[1], d, generator=generator) for _ in range(2))
    ends = torch.tensor(lengths).add(gap).flip(0).cumsum(0).flip(0)
    starts = torch.cat([ends - torch.tensor(lengths) - gap, torch.tensor([positions])]).int()
    return query, keys, values, starts, torch.tensor(lengths, dtype=torch.int32)


def plain(query, keys, values, starts, used, scale, window=None):
    """Each row's attention on its own."""
    rows = []
    for q, start, n in zip(query, starts.tolist(), used.tolist(), strict=False):
        seen = slice(start + max(0, n - (window or n)), start + n)
        k, v = (x[seen].repeat_interleave(len(q) // x.shape[1], 1) for x in (keys, values))
        weights = torch.softmax(torch.einsum("hd,khd->hk", q, k) * scale, -1)
        rows.append(torch.einsum("hk,khd->hd", weights, v))
    return torch.stack(rows)


def counted(used, longest):
    numbers = len(used) * flash.spans(longest) + 1
    return torch.arange(numbers, dtype=torch.int32, device=used.device)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 45),
    st.sampled_from([None, 4]),
    st.sampled_from([(4, 2), (2, 2)]),
)
def test_rows_split_into_spans_equal_whole_ones(lengths, span, window, heads):
    rows = cached(lengths, heads)
    query, keys, values, starts, used = rows
    with flash_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "SPAN", span)
        step = flash.CachedKeys(counted(used, max(lengths) + 2), starts, used, max(lengths) + 2)
        got = step.attend(query, keys, values, 0.3, window)
    torch.testing.assert_close(got[0], plain(*rows, 0.3, window), atol=1e-5, rtol=1e-5)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any))
def test_spans_are_merged_by_their_share_of_the_denominator(counts):
    """With equal scores a span weighs as much as it has keys: the result is their mean."""
    spans = len(counts)
    n = torch.tensor(counts, dtype=torch.float32)
    out = torch.arange(1.0, spans + 1)[:, None, None, None].repeat(1, 2, 3, 4)
    merged = flash.merge(out, n.log()[None, :, None].repeat(3, 1, 2) + 70)
    mean = (n @ torch.arange(1.0, spans + 1) / n.sum()).item()
    torch.testing.assert_close(merged, torch.full((2, 3, 4), mean))


def test_no_block_of_a_long_sequence_reads_more_than_a_span():
    """One of 32,768 tokens among 64 rows: what the kernel is told does not depend on the values."""
    used = torch.full((64,), 2000, dtype=torch.int32)
    used[7] = 32768
    starts = torch.cat([torch.zeros(1), used.cumsum(0)]).int()
    rows = flash.CachedKeys(counted(used, 40_000), starts, used, 40_000)._parts
    assert rows.longest == flash.SPAN
    assert len(rows.used) == 64 * 10
    assert rows.used.max() == flash.SPAN
    assert rows.used.view(10, 64).sum(0).tolist() == used.tolist()
    assert rows.starts[:-1].view(10, 64)[:8, 7].diff().unique().tolist() == [flash.SPAN]


class Context:
    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [(12, 2), (4, 4)])
def test_fake_cuda_tensors_have_the_shapes_of_float32(heads, window):
    lengths, continues = (40, 7, 19, 1), (None, 0, 0, None)
    want, _ = attention_and_gradients(inputs(67, heads, 64), lengths, continues, window)
    with fake_cuda():
        tensors = inputs(67, heads, 64, device="cuda:0", dtype=torch.bfloat16)
        row = packing.Packing(lengths, continues, "cuda:0")
        with Launches() as launches:
            out, _ = packed_attention(
                nn.Identity(), *tensors, None, packing=row, sliding_window=window
            )
        # Autograd has a thread for each GPU, so without one it does not run.
        context, (q, k, v) = Context(), (x[0].transpose(0, 1) for x in tensors)
        seen = q, k[row.varlen.keys], v[row.varlen.keys]
        rows = flash._PackedAttention.forward(context, *seen, row.varlen, 0.125, window)
        grads = flash._PackedAttention.backward(context, torch.ones_like(rows))[:3]
    assert launches.kernels["_flash_attention_forward"] == 1
    assert out.shape == want.shape
    assert [grad.shape for grad in grads] == [x.shape for x in seen]
    for tensor in (out, *grads):
        assert (tensor.device.type, tensor.dtype) == ("cuda", torch.bfloat16)


@pytest.mark.parametrize(("longest", "window"), [(3000, None), (40_000, None), (40_000, 1024)])
def test_a_decode_step_launches_few_kernels_and_waits_for_none(longest, window):
    with fake_cuda():
        query = torch.empty(64, 12, 128, device="cuda", dtype=torch.bfloat16)
        keys, values = (
            torch.empty(200_000, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        assert flash.supports(keys, values)
        starts = torch.zeros(65, device="cuda", dtype=torch.int32)
        used = torch.ones(64, device="cuda", dtype=torch.int32)
        numbers = counted(used, longest)
        with Launches() as step:
            rows = flash.CachedKeys(numbers, starts, used, longest)
        with Launches() as layer:
            out, _ = rows.attend(query, keys, values, 0.1, window)
        assert out.shape == query.shape
        assert out.is_contiguous()
        assert (out.device, out.dtype) == (query.device, query.dtype)
    assert not step.waits + layer.waits
    split = longest > flash.SPAN and window is None
    assert layer.kernels.total() == (6 if split else 1), layer.kernels
    assert step.kernels.total() <= (7 if longest > flash.SPAN else 0), step.kernels


@pytest.mark.parametrize(
    ("dtype", "sizes", "supported"),
    [
        (torch.bfloat16, (64, 64), True),
        (torch.float16, (256, 256), True),
        (torch.float32, (64, 64), False),
        (torch.bfloat16, (192, 128), False),  # multi-head latent attention
        (torch.bfloat16, (60, 60), False),
        (torch.bfloat16, (264, 264), False),
    ],
)
def test_other_shapes_and_number_types_are_not_given_to_the_kernel(dtype, sizes, supported):
    assert not flash.supports(*(torch.empty(3, 2, d, dtype=dtype) for d in sizes))
    with fake_cuda():
        tensors = [torch.empty(3, 2, d, dtype=dtype, device="cuda") for d in sizes]
        assert flash.supports(*tensors) is supported


def test_flash_attention_3_is_refused_where_it_computes_nothing(monkeypatch):
    config = TrainerConfig(device="cpu", attention_kernel="fa3")
    with pytest.raises(InputError, match=r"attention_kernel: .* on cpu; leave the key out"):
        Trainer(load_model("tiny", torch.float32, "cpu"), config, 1)
    with fake_cuda():
        with pytest.raises(InputError, match=r"not torch\.float32 on cuda"):
            flash.use_fa3(torch.device("cuda"), torch.float32)
        with pytest.raises(
            InputError, match="not installed: No module named 'flash_attn_interface'"
        ):
            flash.use_fa3(torch.device("cuda"), torch.bfloat16)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (10, 0))
        with pytest.raises(InputError, match=r"capability 9, not 10\.0"):
            flash.use_fa3(torch.device("cuda"), torch.bfloat16)
    assert current_flash_attention_impl() is None


def test_flash_attention_3_replaces_the_operators_that_are_called(monkeypatch):
    """Its package is a stand-in with operators that take nothing: only torch's dispatcher is looked
    at."""
    package = ModuleType("flash_attn_interface")
    package.__spec__ = ModuleSpec(package.__name__, None)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    library = torch.library.Library("flash_attn_3", "DEF")
    for name in ("fwd", "bwd"):
        library.define(f"{name}() -> Tensor")
    with fake_cuda():
        flash.use_fa3(torch.device("cuda"), torch.bfloat16)
    try:
        for operator in (flash._forward, flash._backward):
            kernels = torch._C._dispatch_dump(operator.name().removesuffix(".default"))
            assert re.search(r"\nCUDA: registered at \S+_fa3\.py", kernels)
    finally:
        restore_flash_attention_impl()
        library._destroy()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize("heads", [(12, 2), (4, 4)])
@pytest.mark.parametrize("d", [64, 128])
def test_a_gpu_computes_packed_rows_and_gradients(heads, window, d):
    lengths, continues = (400, 7, 190, 1, 23, 64), (None, 0, 0, 0, None, 4)
    results = [
        attention_and_gradients(
            inputs(sum(lengths), heads, d, **options), lengths, continues, window
        )
        for options in ({}, {"device": "cuda", "dtype": torch.bfloat16})
    ]
    for want, got in zip(*((out, *grads) for out, grads in results), strict=True):
        error = (got.float().cpu() - want).abs().max() / want.abs().max()
        assert error < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("span", [100, 512, 4096])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("heads", [(12, 2), (4, 4)])
@pytest.mark.parametrize("rows", [3, 80])
def test_a_gpu_decodes_in_spans_and_in_a_graph(rows, heads, window, span, monkeypatch):
    """Lengths change between replays; most rows of most spans have no keys."""
    monkeypatch.setattr(flash, "SPAN", span)
    lengths = [1, 700, 1100, *[1 + 37 * row % 300 for row in range(rows - 3)]]
    exact = cached(lengths, heads, 64)
    query, keys, values = (x.to("cuda", torch.bfloat16) for x in exact[:3])
    starts, used = (x.cuda() for x in exact[3:])
    numbers = counted(used, 1200)

    def step():
        return flash.CachedKeys(numbers, starts, used, 1200).attend(
            query, keys, values, 0.1, window
        )[0]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for shorter in (0, 30, 101):
        lengths_now = (exact[4] - shorter).clamp(min=1)
        used.copy_(lengths_now)
        graph.replay()
        rounded = [x.float().cpu() for x in (query, keys, values)]
        want = plain(*rounded, exact[3], lengths_now, 0.1, window)
        torch.testing.assert_close(out.float().cpu(), want, atol=2e-2, rtol=2e-2)
