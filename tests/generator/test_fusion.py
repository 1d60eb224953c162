"""Merged products and compiled blocks compute what the plain model computes."""

from __future__ import annotations

import operator
import shutil
from collections import Counter

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from transformers import AutoModelForCausalLM, Phi3Config

from tests.generator.slot_models import finish, make_requests, make_tokenizer
from tests.generator.test_graphs import assert_same, cuda
from tests.generator.test_on_a_gpu import ARCHITECTURES, OUTSIDE, SIZES
from tramontane.config import GeneratorConfig
from tramontane.generator import Generator, fusion
from tramontane.generator.engine import SlotEngine
from tramontane.generator.graphs import CudaGraphs, run_directly
from tramontane.generator.memory import CudaMemory

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
WRITE_AND_ATTENTION = 2  # kernels of a layer that stay outside of the compiled parts


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
    assert "twice as many kernels" in said
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


class _Fusible(OperatorSupportBase):
    """Everything that a compiler fuses: all but matrix products."""

    def is_node_supported(self, submodules, node) -> bool:
        is_operation = node.op == "call_function" and node.target is not operator.getitem
        return is_operation and node.target not in PRODUCTS


class CountedKernels:
    """A backend of torch.compile that runs the operations as they are, and counts the kernels of a
    compiler that makes one of all that lies between matrix products."""

    def __init__(self) -> None:
        self.graphs, self.launched = 0, 0
        self.backend = aot_autograd(fw_compiler=self._count, decompositions=select_decomp_table())

    def _count(self, graph: torch.fx.GraphModule, inputs):
        targets = Counter(n.target for n in graph.graph.nodes if n.op == "call_function")
        products = sum(targets[product] for product in PRODUCTS)
        parts = CapabilityBasedPartitioner(graph, _Fusible(), True).propose_partitions()
        computed = [part for part in parts if not all(_is_view(node) for node in part.nodes)]
        self.graphs += 1

        def run(*args):
            self.launched += products + len(computed)
            return graph.forward(*args)

        return make_boxed_func(run)


def _is_view(node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


@pytest.mark.slow
def test_blocks_are_compiled_once_for_all_layers_and_rows():
    """Graphs: five parts of a block, for prefills, for steps of several rows, and of one row, and
    two of a step beyond its blocks; also if the compiled model is examined again, as by a probe. A
    step of 28 layers is fewer than 500 kernels in place of 1,200."""
    layers = 9  # the compiler gives up on a function after eight versions
    requests = make_requests(3, 2, seed=4, tokens=(5, 20), temperature=0.7)
    plain = completions(make("llama", num_hidden_layers=layers), requests)
    model, counted = make("llama", num_hidden_layers=layers), CountedKernels()
    fusion.merge_products(model)
    torch._dynamo.reset()
    fusion.compile_blocks(model, counted.backend)
    assert_same(completions(model, requests), plain)
    engine = SlotEngine(model, 8, 130, record=run_directly)
    engine.submit(make_requests(2, 3, seed=5, tokens=(20, 30)))
    engine.step()
    counted.launched = 0
    engine.step()
    layer = counted.launched / layers
    assert 4 < layer
    assert 28 * (layer + WRITE_AND_ATTENTION) + OUTSIDE < 500
    assert 10 <= counted.graphs <= 17


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_compiled_steps_draw_what_plain_ones_draw(name):
    """Through Inductor, whose kernels for a CPU are C++."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    requests = make_requests(3, 2, seed=4, tokens=(5, 20), temperature=0.7)
    plain, model = completions(make(name), requests), make(name)
    fusion.merge_products(model)
    torch._dynamo.reset()
    fusion.compile_blocks(model)
    assert_same(completions(model, requests), plain)


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
