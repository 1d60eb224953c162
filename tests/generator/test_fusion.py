"""Merged products and compiled blocks compute what the plain model computes."""

from __future__ import annotations

import operator
import shutil
from collections import Counter
from functools import partial

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from transformers import AutoModelForCausalLM, Phi3Config

from tests.generator.slot_models import finish, make_requests, make_tokenizer
from tests.generator.test_graphs import assert_same
from tests.generator.test_on_a_gpu import ARCHITECTURES, SIZES
from tramontane.config import GeneratorConfig
from tramontane.generator import Generator, fusion
from tramontane.generator.attention import forward_over
from tramontane.generator.engine import SlotEngine
from tramontane.generator.graphs import CudaGraphs, run_directly
from tramontane.generator.lanes import RecordedCache
from tramontane.generator.memory import CudaMemory
from tramontane.generator.sampling import DrawPlan, draw
from tramontane.models.attention import packed_attention
from tramontane.models.compiling import compiled
from tramontane.models.latent import UpProjection
from tramontane.models.packing import Packing
from tramontane.types import SamplingParams

cuda = pytest.mark.gpu
aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
ATTENTION = torch.ops.tramontane.write_and_attend.default
WRITE_AND_ATTENTION = 2  # its kernels
# Kernels of a step that are not compiled: embeddings and head, places in the arena, writes of the
# slots' state.
EAGER = 13


def make(name: str, seed: int = 0, **sizes):
    torch.manual_seed(seed)
    made = (ARCHITECTURES | {"phi3": Phi3Config})[name]
    head = {"head_dim": 16} if name in ("qwen3", "gemma3") else {}
    config = made(**SIZES | head | {"initializer_range": 0.25} | sizes)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def completions(model, requests):
    engine = SlotEngine(model, 8, 130, [2], record=run_directly)
    engine.submit(requests)
    return finish(engine)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_merged_products_give_the_values_of_single_ones(name):
    requests = make_requests(3, 3, seed=4, tokens=(1, 30), temperature=0.7)
    model = make(name)
    plain, state = completions(model, requests), model.state_dict()
    fusion.merge_products(model)
    assert fusion.is_merged(model)
    merged = model.state_dict()
    assert list(merged) == list(state)
    assert all(torch.equal(merged[key], state[key]) for key in state)
    attention = model.model.layers[1].self_attn
    assert attention.q_proj.weight.data_ptr() + attention.q_proj.weight.nbytes == (
        attention.k_proj.weight.data_ptr()
    )
    assert_same(completions(model, requests), plain)


def test_a_model_without_such_layers_stays_as_it_is():
    """Phi-3 has merged layers of its own."""
    model = make("phi3")
    before = completions(model, make_requests(2, 2))
    fusion.merge_products(model)
    assert not fusion.is_merged(model)
    assert_same(completions(model, make_requests(2, 2)), before)


def test_without_the_headers_of_python_products_are_merged_and_nothing_is_compiled(
    monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # Triton is there
    monkeypatch.setattr("shutil.which", lambda name: name)  # so is a compiler
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    model = make("llama")
    fusion.fuse(model)
    assert fusion.is_merged(model)
    assert fusion.compiled_like(model, len) is len
    (said,) = caplog.messages
    assert "three times as many kernels" in said
    assert "no Python.h" in said


def test_new_weights_reach_the_products():
    """By the generator's swap, which must copy in place: exchanged tensors would be no views."""
    requests = make_requests(3, 3, seed=8, tokens=(20, 40))
    new, found = make("qwen2", seed=1).state_dict(), []
    for merge in (False, True):
        model = make("qwen2")
        if merge:
            fusion.merge_products(model)
        generator = Generator(model, make_tokenizer(), GeneratorConfig(), 8, 64)
        assert generator._engine.needs_fixed_addresses == merge
        generator.submit(requests)
        done = {(c.group, c.index): c for c in generator.step(6)}
        generator.update_weights(3, new)
        found.append(done | finish(generator))
    assert_same(found[1], found[0])
    assert any(c.versions[0] == 0 and c.versions[-1] == 3 for c in found[1].values())


@pytest.mark.parametrize("d_value", [8, 16])
def test_the_operation_in_a_block_writes_keys_and_values_and_attends(d_value):
    """The heads of all three in one tensor, or apart if their sizes differ."""
    q, k, v = (torch.randn(1, heads, 9, d) for heads, d in ((4, 8), (2, 8), (2, d_value)))
    packing = Packing([4, 5], [None, 0], "cpu")
    expected, _ = packed_attention(torch.nn.Identity(), q, k, v, None, 0.3, packing=packing)
    parts, cache = [x.transpose(1, 2) for x in (q, k, v)], RecordedCache()
    if d_value == 8:
        parts = [torch.cat(parts, 2)]
    with forward_over(cache, packing=packing):
        arguments = parts, 2, 0.3, None, None, None
        torch.testing.assert_close(ATTENTION(*arguments), expected)
        torch.library.opcheck(ATTENTION, arguments, test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(cache.recorded[0, 0], k)
    assert torch.equal(cache.recorded[0, 1], v)


def test_the_operation_in_a_block_attends_to_latents():
    query, latents = torch.randn(1, 4, 9, 8), torch.randn(1, 1, 9, 5 + 3)
    weight = torch.randn(4 * (5 + 6), 5)  # keys of 5 + 3 numbers, values of 6
    packing, cache = Packing([4, 5], [None, 0], "cpu"), RecordedCache()
    keys, values = UpProjection.of(weight, query, latents).expand(latents)
    assert keys.shape == (1, 4, 9, 8)
    assert values.shape == (1, 4, 9, 6)
    expected, _ = packed_attention(
        torch.nn.Identity(), query, keys, values, None, 0.3, packing=packing
    )
    parts = [*(x.transpose(1, 2) for x in (query, latents, latents)), weight]
    with forward_over(cache, packing=packing):
        arguments = parts, 1, 0.3, None, None, None
        torch.testing.assert_close(ATTENTION(*arguments), expected)
        torch.library.opcheck(ATTENTION, arguments, test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(cache.recorded[0, 0], latents)


class _Fusible(OperatorSupportBase):
    """Everything that a compiler fuses: all but matrix products and attention."""

    def is_node_supported(self, submodules, node) -> bool:
        is_operation = node.op == "call_function" and node.target is not operator.getitem
        return is_operation and node.target not in PRODUCTS | {ATTENTION}


class CountedKernels:
    """A backend of torch.compile that runs the operations as they are, and counts the kernels of a
    compiler that makes one of all that lies between matrix products."""

    def __init__(self) -> None:
        self.graphs, self.launched = 0, 0
        self.backend = aot_autograd(fw_compiler=self._count, decompositions=select_decomp_table())

    def _count(self, graph: torch.fx.GraphModule, inputs):
        targets = Counter(n.target for n in graph.graph.nodes if n.op == "call_function")
        launched = sum(targets[product] for product in PRODUCTS)
        launched += WRITE_AND_ATTENTION * targets[ATTENTION]
        parts = CapabilityBasedPartitioner(graph, _Fusible(), True).propose_partitions()
        launched += sum(any(_computes(node) for node in part.nodes) for part in parts)
        self.graphs += 1

        def run(*args):
            self.launched += launched
            return graph.forward(*args)

        return make_boxed_func(run)


def _computes(node) -> bool:
    is_operation = isinstance(node.target, torch._ops.OpOverload) and not node.target.is_view
    return is_operation and isinstance(node.meta["val"], torch.Tensor)


@pytest.mark.slow
def test_a_block_is_one_graph_for_all_layers_and_rows(monkeypatch):
    """For prefills, for steps of several rows, and of one row; also if the compiled model is
    examined again, as by a probe. A step of 28 layers is about 320 kernels in place of 1,100."""
    layers = 9  # the compiler gives up on a function after eight versions
    requests = make_requests(3, 2, seed=4, tokens=(5, 20), temperature=0.7)
    plain = completions(make("qwen2", num_hidden_layers=layers), requests)
    model, counted = make("qwen2", num_hidden_layers=layers), CountedKernels()
    compile_counted = partial(torch.compile, dynamic=True, backend=counted.backend)
    monkeypatch.setattr(fusion, "compiled", compile_counted)
    fusion.merge_products(model)
    torch._dynamo.reset()
    fusion.compile_blocks(model, counted.backend)
    assert_same(completions(model, requests), plain)
    parts = 6  # a block, rotary embeddings, last norm; the sampler, what a step reads and writes
    assert parts <= counted.graphs <= 3 * parts
    launched = []
    for count in (layers, layers - 2):
        model.config.num_hidden_layers = count
        engine = SlotEngine(model, 8, 130, record=run_directly)
        engine.submit(make_requests(2, 3, seed=5, tokens=(20, 30)))
        engine.step()
        counted.launched = 0
        engine.step()
        launched.append(counted.launched)
    layer = (launched[0] - launched[1]) / 2
    outside = launched[0] - layers * layer + EAGER
    assert layer == 11
    assert 28 * layer + outside < 330


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokens"), [("llama", (5, 20)), ("qwen3", (12, 12))], ids=["llama", "qwen3"]
)
def test_compiled_steps_draw_what_plain_ones_draw(name, tokens):
    """Through Inductor, whose kernels for a CPU are C++. A last row alone is a graph of its own,
    which is compiled where completions differ in length."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    requests = make_requests(3, 2, seed=4, tokens=tokens, temperature=0.7)
    plain, model = completions(make(name), requests), make(name)
    fusion.merge_products(model)
    torch._dynamo.reset()
    fusion.compile_blocks(model)
    assert_same(completions(model, requests), plain)


@cuda
@pytest.mark.parametrize("rows", [1, 110])
def test_compiled_draws_from_a_large_vocabulary_on_a_gpu(rows):
    """For which the compiler sums a row in several blocks of threads."""
    torch.manual_seed(0)
    logits = torch.randn(rows, 151936, device="cuda")
    uniform = torch.rand(rows, dtype=torch.float64, device="cuda")
    temperature, top_p = (torch.full([rows], x, device="cuda") for x in (0.8, 0.9))
    top_k = torch.zeros(rows, dtype=torch.int64, device="cuda")
    for truncated in (0.9, 1.0):
        plan = DrawPlan.of([SamplingParams(1, top_p=truncated)], static_shapes=True)
        columns = logits, uniform, temperature, top_p, top_k, plan
        drawn, expected = compiled(draw)(*columns), draw(*columns)
        (token, logprob, _), (wanted, of_wanted, _) = drawn, expected
        assert (token == wanted).float().mean() > 0.98  # sums differ in their order
        torch.testing.assert_close(logprob[token == wanted], of_wanted[token == wanted])


@cuda
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fused_and_recorded_steps_on_a_gpu(name):
    """In float32, against the plain model; and in bfloat16, with the memory that is measured."""
    requests = make_requests(6, 3, seed=4, tokens=(1, 60), temperature=0.7)
    model = make(name).to("cuda")
    plain = completions(model, requests)
    fusion.fuse(model)
    engine = SlotEngine(model, 8, 130, [2], record=CudaGraphs(model.device))
    engine.submit(requests)
    assert_same(finish(engine), plain)
    half = make(name).to("cuda", torch.bfloat16)
    weights = half.get_memory_footprint()
    fusion.fuse(half)
    memory = CudaMemory(half.device, 0.5, 2 * weights, lambda: weights)
    engine = SlotEngine(half, 64, 130, [2], record=CudaGraphs(half.device), memory=memory)
    assert len(engine._decoder._recorded) == 2 * 9
    engine.submit(make_requests(20, 4, seed=5, tokens=(10, 60), top_p=0.9))
    assert len(finish(engine)) == 80
    assert len(engine._decoder._recorded) == 2 * 9
    assert engine.needs_fixed_addresses
