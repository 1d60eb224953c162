"""Decode steps of fixed shapes, recorded and replayed.

A CUDA graph replays kernels without Python: every tensor must stay at its address, and no operation
may depend on a value. `make_fx` records a step under the same conditions on any device, so its
replays stand in for a graph's; the graphs themselves are tested on machines with a GPU.
"""

from __future__ import annotations

import gc
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from tests.flash_reference import flash_on_cpu
from tests.generator.slot_models import (
    EOS,
    FAMILIES,
    chosen,
    finish,
    make_model,
    make_requests,
    make_tokenizer,
    reference_logprobs,
    twin,
)
from tramontane.config import GeneratorConfig
from tramontane.generator import Generator
from tramontane.generator.decoders import ArenaDecoder
from tramontane.generator.engine import SlotEngine
from tramontane.generator.graphs import (
    CudaGraphs,
    ValueReadDetector,
    padded_rows,
    recorded_rows,
    run_directly,
)
from tramontane.models import flash
from tramontane.types import Completion, SamplingParams

cuda = pytest.mark.gpu


def traced(step):
    """A recorder for any device: the operations of one step, with every tensor that they read."""
    with ValueReadDetector() as detector:
        step()
    assert not detector.operations
    return make_fx(lambda: step(), tracing_mode="real")()


def mixed(requests: list[Completion]) -> list[Completion]:
    """The same requests with greedy, truncated and plain sampling in turn."""
    kinds = [(0.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.8, 0), (1.3, 1.0, 5), (1.0, 1.0, 0)]
    return [
        replace(r, sampling=SamplingParams(r.sampling.max_tokens, *kinds[i % len(kinds)]))
        for i, r in enumerate(requests)
    ]


def engines(model, slots=16, max_len=130, record=traced):
    return [
        SlotEngine(model, slots, max_len, [EOS], prefill_tokens=64, record=each)
        for each in (None, record)
    ]


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for key, c in got.items():
        assert c.token_ids == expected[key].token_ids
        assert c.versions == expected[key].versions
        assert c.finish_reason == expected[key].finish_reason
        torch.testing.assert_close(
            torch.tensor(c.logprobs), torch.tensor(expected[key].logprobs), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        pytest.param(
            family, kinds, marks=[pytest.mark.slow] * (kinds == "mixed" or family != "qwen3")
        )
        for family in FAMILIES
        for kinds in ("plain", "mixed")
    ],
)
def test_replays_draw_what_lanes_draw(family, kinds):
    requests = make_requests(6, 5, seed=3, tokens=(1, 40))
    if kinds == "mixed":
        requests = mixed(requests)
    lanes, replays = engines(make_model(family))
    for engine in (lanes, replays):
        engine.submit(requests[:3])
        assert not engine.step()
        engine.submit(requests[3:])
    got = finish(replays)
    assert_same(got, finish(lanes))
    assert {c.finish_reason for c in got.values()} == {"stop", "length"}
    assert replays.stats == lanes.stats
    # Few recordings served many steps.
    assert {rows for rows, _, _ in replays._decoder._recorded} >= {4, 16}
    assert len(replays._decoder._recorded) < 16 < replays.stats.decode_steps


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=8))
def test_requests_submitted_at_any_time(events):
    """Recorded steps generate the same tokens as lanes, with empty slots and without."""
    rng = random.Random(0)
    model = make_model("qwen3")
    lanes, replays = engines(model, slots=5, max_len=40, record=run_directly)
    done = [{}, {}]
    for group, (members, steps) in enumerate(events):
        prompt = [rng.randrange(3, 90) for _ in range(rng.randint(1, 15))]
        requests = [
            Completion.requested(
                group, i, prompt, rng.getrandbits(60), SamplingParams(rng.randint(1, 25))
            )
            for i in range(members)
        ]
        for engine, found in zip((lanes, replays), done, strict=True):
            engine.submit(requests)
            for _ in range(steps):
                found |= {(c.group, c.index): c for c in engine.step()}
            assert [r.token_ids for r in engine.pending()] == [r.token_ids for r in lanes.pending()]
    for engine, found in zip((lanes, replays), done, strict=True):
        found |= finish(engine)
    assert_same(done[1], done[0])


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
@pytest.mark.slow
def test_new_weights_reach_recorded_steps(kv_cache):
    """A recorded step reads the weights and their version at their addresses."""
    requests = make_requests(4, 4, seed=8, lengths=(3, 20), tokens=(25, 40))
    new = make_model("llama", seed=1).state_dict()
    found = []
    for record in (None, traced):
        config = GeneratorConfig(kv_cache=kv_cache)
        generator = Generator(make_model("llama"), make_tokenizer(), config, 8, 64)
        generator._engine = SlotEngine(generator.model, 8, 64, record=record)
        generator.submit(requests)
        done = {(c.group, c.index): c for c in generator.step(12)}
        generator.update_weights(7, new)
        done |= finish(generator)
        found.append(done)
    assert_same(found[1], found[0])
    spans = [c.versions for c in found[1].values()]
    assert any(v[0] == 0 and v[-1] == 7 for v in spans)
    assert any(v[0] == 7 for v in spans)


@pytest.mark.slow
def test_interrupted_requests_and_cleared_engines():
    """Pending requests continue in lanes or in another arena; a cleared engine starts anew."""
    requests = make_requests(4, 4, seed=11, tokens=(10, 60))
    lanes, replays = engines(make_model("mistral"))
    lanes.submit(requests)
    whole = finish(lanes)
    replays.submit(requests)
    done = {(c.group, c.index): c for _ in range(20) for c in replays.step()}
    pending = replays.pending()
    replays.clear()
    assert replays.unfinished == 0
    lanes.submit(pending)
    assert_same(done | finish(lanes), whole)
    replays.submit(pending)
    assert_same(done | finish(replays), whole)
    replays.resize(3, 110)
    replays.submit(requests)
    assert_same(finish(replays), whole)


@pytest.mark.parametrize("span", [flash.SPAN, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_flash_attention_is_called_with_the_right_keys(family, span, monkeypatch):
    monkeypatch.setattr(flash, "SPAN", span)
    requests = make_requests(5, 3, seed=6, tokens=(5, 40))
    engine, eager = engines(make_model(family), slots=8, record=run_directly)
    engine.submit(requests)
    want = finish(engine)
    with flash_on_cpu():
        eager.submit(requests)
        assert_same(finish(eager), want)


@given(st.integers(1, 1100), st.integers(1, 1100))
def test_recorded_batches_are_padded_to_few_sizes(rows, slots):
    rows = min(rows, slots)
    size = padded_rows(rows, slots)
    assert size in recorded_rows(slots)
    assert rows <= size <= min(slots, 2 * rows)
    if rows > 16:
        assert size - rows <= size / 3
    if rows > 112:
        assert size - rows <= size / 8


def test_rows_of_recorded_steps():
    assert recorded_rows(1) == [1]
    assert recorded_rows(20) == [1, 2, 4, 8, 16, 20]
    assert recorded_rows(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert recorded_rows(320)[-5:] == [224, 240, 256, 288, 320]
    assert len(recorded_rows(1024)) == 45


def test_a_forward_that_reads_values_is_not_recorded():
    """The rotary positions are stretched once a sequence is longer than any before."""
    model = make_model()
    model.config.rope_parameters = model.config.rope_parameters | {
        "rope_type": "dynamic",
        "factor": 2.0,
    }
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    requests = make_requests(2, 3, seed=1)
    lanes, engine = engines(model)
    for e in (lanes, engine):
        e.submit(requests)
    assert_same(finish(engine), finish(lanes))
    assert engine._decoder._record is run_directly


def test_a_step_that_cannot_be_recorded_runs_directly(caplog):
    """A recording fails as if CUDA refused an operation; the warning is printed once."""
    attempts = []

    def refuse(step):
        step()
        attempts.append(step)
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        except RuntimeError:
            raise RuntimeError("the capture was invalidated")  # noqa: B904

    requests = make_requests(3, 5, seed=2, tokens=(1, 60))
    lanes, engine = engines(make_model(), record=refuse)
    assert engine.needs_fixed_addresses
    for e in (lanes, engine):
        e.submit(requests)
    assert_same(finish(engine), finish(lanes))
    assert len(attempts) == 1
    assert not engine.needs_fixed_addresses
    (warning,) = caplog.messages
    assert "not permitted when stream is capturing. generator.cuda_graphs=false" in warning


class Stream:
    """A stream of CUDA, which knows what is done before its next work begins."""

    made: ClassVar[list[int]] = []  # their priorities

    def __init__(self, device, priority=0):
        self.device, self.before = device, []
        self.made.append(priority)

    def wait_stream(self, other):
        self.before += other.before


class Cuda:
    """`torch.cuda`, as far as recording needs it."""

    def __init__(self, monkeypatch, device):
        self.pools, self.modes, self.replays = [], [], []
        self.current = Stream(device)
        Stream.made.clear()
        cuda = self

        class CUDAGraph:
            def replay(self):
                cuda.replays.append((self, [*cuda.current.before]))
                cuda.current.before.append(self)

        replaced = {
            "CUDAGraph": CUDAGraph,
            "Stream": Stream,
            "current_stream": lambda device: self.current,
            "device": nullcontext,
            "graph": self.graph,
            "graph_pool_handle": lambda: object(),
            "stream": self.stream,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def stream(self, stream):
        previous, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = previous

    @contextmanager
    def graph(self, made, pool, stream, capture_error_mode):
        self.pools.append(pool)
        self.modes.append(capture_error_mode)
        previous, self.current = self.current, stream
        try:
            yield
        except RuntimeError:  # like torch, which then does not restore the stream
            raise RuntimeError("the capture was invalidated")  # noqa: B904
        self.current = previous


def test_graphs_share_one_pool_and_two_streams(monkeypatch):
    """The graphs of an engine share the pool, since one of 1,024 rows fills 1.5 GiB. All engines of
    a device, those of a probe included, share two of torch's 32 streams. Decoding has priority."""
    device, steps = torch.device("cuda:7"), []
    cuda = Cuda(monkeypatch, device)
    engine, probe = CudaGraphs(device), CudaGraphs(device)
    recorded = [each(lambda: steps.append(0)) for each in (engine, engine, probe)]
    for replay in recorded:
        cuda.current.before.append("a token's place")
        replay()
    assert cuda.pools[0] is cuda.pools[1] is not cuda.pools[2]
    assert Stream.made == [-1, -1]
    assert len(steps) == 3 * 4  # three to warm up, and the one that is recorded
    assert set(cuda.modes) == {"thread_local"}  # a trainer may use the GPU meanwhile
    # A replay is in order with what the caller did before, and does after it.
    graphs = [graph for graph, _ in cuda.replays]
    assert len({*graphs}) == 3
    assert all(before.count("a token's place") > n for n, (_, before) in enumerate(cuda.replays))
    assert {*graphs} <= {*cuda.current.before}


def test_a_pool_whose_graphs_are_gone_takes_no_other(monkeypatch):
    device = torch.device("cuda:5")
    cuda = Cuda(monkeypatch, device)
    engine = CudaGraphs(device)
    engine(lambda: None)
    gc.collect()
    engine(lambda: None)
    assert cuda.pools[0] is not cuda.pools[1]


def test_a_failed_recording_leaves_the_callers_stream(monkeypatch):
    """Otherwise the steps that then run directly are on a stream that nobody waits for."""
    device, runs = torch.device("cuda:6"), []
    cuda = Cuda(monkeypatch, device)
    own = cuda.current

    def step():
        runs.append(0)
        if len(runs) == 4:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="invalidated"):
        CudaGraphs(device)(step)
    assert cuda.current is own


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_value_reads_are_detected(mode):
    x, places = torch.arange(6.0), torch.tensor([1, 2])
    with mode(), ValueReadDetector() as detector:
        (x * 2).sum(), x[places], x.argmax(), torch.where(x > 2, x, -x)
        assert not detector.operations
        made = lambda: torch.tensor([1.0], device=x.device)  # noqa: E731
        for read in (lambda: x.max().item(), lambda: bool(x[0]), x.nonzero, lambda: x[x > 2], made):
            detector.operations.clear()
            read()
            assert detector.operations


def test_a_resized_arena_is_freed_before_the_next():
    """A GPU may have no room for two. A cleared one stays where recorded steps know it."""
    _, engine = engines(make_model(), record=run_directly)
    engine.submit(make_requests(2, 4))
    engine.step()
    addresses = [arena.data_ptr() for arena in engine._decoder.cache.arenas]
    engine.clear()
    assert [arena.data_ptr() for arena in engine._decoder.cache.arenas] == addresses
    old = [weakref.ref(tensor) for tensor in engine._decoder.cache.arenas]
    gc.disable()
    try:
        engine.resize(16, 140)
        assert all(tensor() is None for tensor in old)
    finally:
        gc.enable()


def on_gpu(family, dtype, slots=16):
    model = make_model(family, dtype=dtype).to("cuda")
    engine = SlotEngine(model, slots, 130, [EOS], record=CudaGraphs(model.device))
    assert isinstance(engine._decoder, ArenaDecoder)
    return model, engine


@cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_draw_what_lanes_draw_on_a_gpu(family):
    requests = mixed(make_requests(9, 5, seed=3, tokens=(1, 90)))
    model, graphs = on_gpu(family, torch.float32)
    lanes = SlotEngine(model, 16, 130, [EOS])
    lanes.submit(requests)
    whole = finish(lanes)
    graphs.submit(requests)
    assert_same(finish(graphs), whole)
    # Recorded anew: other addresses, and another number of slots.
    graphs.submit(requests)
    done = {(c.group, c.index): c for _ in range(9) for c in graphs.step()}
    pending = graphs.pending()
    graphs.clear()
    graphs.submit(pending)
    assert_same(done | finish(graphs), whole)
    graphs.resize(1, 129)
    graphs.submit(requests)
    assert_same(finish(graphs), whole)


@cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_graphs_on_a_gpu_in_bfloat16(family):
    """Log-probs are as close to a float32 forward as those of transformers' bfloat16 forward."""
    model, graphs = on_gpu(family, torch.bfloat16)
    requests = make_requests(6, 4, seed=5, lengths=(5, 40), tokens=(20, 60))
    graphs.submit(requests)
    exact, plain = twin(model).float().cpu(), twin(model).cpu()
    ours, theirs = [], []
    for c in finish(graphs).values():
        truth = chosen(reference_logprobs(exact, c.prompt_ids, c.token_ids), c.token_ids)
        other = chosen(reference_logprobs(plain, c.prompt_ids, c.token_ids), c.token_ids)
        ours.append((torch.tensor(c.logprobs) - truth).abs())
        theirs.append((other - truth).abs())
    assert torch.cat(ours).mean() < 1.3 * torch.cat(theirs).mean()


@cuda
def test_engines_of_one_process_record_and_replay_on_a_gpu():
    """Two threads, as for two generators of one process, and a probe's engine in between."""
    requests = make_requests(6, 4, seed=5, tokens=(20, 60))
    model, first = on_gpu("llama", torch.float32)
    lanes = SlotEngine(model, 16, 130, [EOS])
    lanes.submit(requests)
    whole = finish(lanes)
    second = SlotEngine(model, 8, 130, [EOS], record=CudaGraphs(model.device))

    def work(engine):
        engine.submit(requests)
        done = {(c.group, c.index): c for _ in range(5) for c in engine.step()}
        probe = SlotEngine(model, 3, 70, record=CudaGraphs(model.device))
        probe.submit(make_requests(1, 3, seed=9))
        finish(probe)
        return done | finish(engine)

    with ThreadPoolExecutor(2) as threads:
        for done in threads.map(work, (first, second)):
            assert_same(done, whole)
