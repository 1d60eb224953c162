"""The engine on CUDA tensors without values, and its memory on a simulated allocator."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from tests.fake_cuda import Allocator, Launches, fake_cuda
from tests.generator.slot_models import make_requests, make_tokenizer
from tramontane.errors import InputError
from tramontane.generator.decoders import SlotState
from tramontane.generator.endings import Detokenizer, StopTexts
from tramontane.generator.engine import SlotEngine
from tramontane.generator.forward import examine_model, prefill
from tramontane.generator.fusion import merge_products
from tramontane.generator.graphs import recorded_rows, run_directly
from tramontane.generator.memory import DRIVER_BYTES, allowance, cache_room
from tramontane.generator.parking import Context
from tramontane.generator.sampling import DRAWN_ENTRIES, SORTED_BYTES
from tramontane.models import flash
from tramontane.types import Completion, ResponseText, SamplingParams

MIB, GIB = 2**20, 2**30
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
ARCHITECTURES = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3": Gemma3TextConfig,
    "smollm3": SmolLM3Config,
}
# Kernels of a decode step: of a layer, and outside of the layers, with two that subtract the
# largest logit before a temperature divides them, and two that tell logits that are not finite.
LAYER, OUTSIDE = 37, 81


def on_gpu(name: str = "llama", **sizes):
    head = {"head_dim": 16} if name in ("qwen3", "gemma3") else {}
    with torch.device("cuda"):
        config = ARCHITECTURES[name](**SIZES | head | sizes)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


STOPS = StopTexts(Detokenizer(make_tokenizer(), ResponseText()), ["stop"], SIZES["vocab_size"])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_step_mixes_no_devices_and_waits_once(name, monkeypatch):
    """From the start to the end; a step's wait is for the flags of finished sequences. The first
    step admits and prefills, the third admits a sequence that has tokens already, and the fourth
    copies keys and values, as for heads that the kernel does not take."""
    begun = Completion.requested(
        9, 0, [5, 6, 7], seed=1, sampling=SamplingParams(9), token_ids=array("i", [8])
    )
    begun.logprobs.append(-1)
    begun.versions.append(0)
    with fake_cuda():
        model = on_gpu(name)
        merge_products(model)
        engine = SlotEngine(model, 8, 600, [2], record=run_directly, stop_texts=STOPS)
        assert engine.cache_bytes
        engine.submit(make_requests(3, 2, temperature=0.7, top_p=0.9))
        for number in range(4):
            if number == 2:
                engine.submit([begun])
            with Launches() as launches, monkeypatch.context() as patched:
                if number == 3:
                    patched.setattr(flash, "supports", lambda key, value: False)
                engine.step()
            assert launches.waits == ["_to_copy between CPU and GPU"]
        # Fake tensors cannot be read: the call ends after its one copy.
        with Launches() as launches, pytest.raises(RuntimeError, match="numpy"):
            engine.take_growth()
        assert launches.waits == ["copy_ between CPU and GPU"]
        decoder = engine._decoder
        assert all(decoder.grow(slot) for slot in engine._flights)
        with Launches() as launches:
            engine.cancel(0)
            decoder.cache._compact()
        assert not launches.waits


def test_a_step_has_few_kernels():
    """Bounds that a change cannot raise unseen; the compiled blocks have a third of them
    (`test_fusion`)."""
    counts = []
    for layers in (2, 4):
        with fake_cuda():
            model = on_gpu(num_hidden_layers=layers)
            merge_products(model)
            engine = SlotEngine(model, 8, 130, [2], record=run_directly)
            engine.submit(make_requests(3, 2, temperature=0.7))
            with Launches():
                engine.step()
            with Launches() as launches:
                engine.step()
            counts.append(launches.kernels.total())
    layer = (counts[1] - counts[0]) // 2
    assert layer <= LAYER
    assert counts[0] - 2 * layer <= OUTSIDE


def test_an_admission_is_one_copy_and_the_tokens_it_has():
    with fake_cuda():
        engine = SlotEngine(on_gpu(), 8, 130, [2], record=run_directly)
        state = engine._decoder.state
        with Launches() as launches:
            state.write([1, 4, 7], make_requests(1, 3))
    assert launches.kernels == {"_to_copy": 1, "index_copy_": 2}
    assert not launches.waits


def test_all_steps_are_recorded_before_the_first():
    """The largest first, which fills the pool. To record waits for all work on the GPU, a
    trainer's too, so nothing is recorded once sequences decode."""
    recorded = []

    def record(step):
        recorded.append(step)
        return step

    with fake_cuda():
        engine = SlotEngine(on_gpu(), 8, 130, [2], record=record)
        rows = [shape.rows for shape in engine._decoder.shapes()]
        assert rows == sorted([*recorded_rows(8)] * 2, reverse=True)
        assert len(recorded) == len(rows)
        engine.submit(make_requests(2, 2) + make_requests(1, 2, top_p=0.9))
        with Launches():
            for _ in range(2):
                engine.step()
    assert len(recorded) == len(rows)


def test_a_sequence_is_one_copy_into_pinned_memory():
    with fake_cuda():
        state = SlotState(4, 130, torch.device("cuda"))
        # Without values, it ends after the copy.
        with Launches() as launches, pytest.raises(RuntimeError, match="numpy"):
            state.read(2, 30)
    assert launches.kernels == {"copy_": 1}
    assert len(launches.pinned) == 1


def test_a_conversation_continues_without_a_wait():
    with fake_cuda(), torch.inference_mode():
        model = on_gpu()
        layout, _ = examine_model(model, 130)
        (known,) = prefill(model, layout, [Context([5] * 9)], 64)
        with Launches() as launches:
            continued = [Context([5] * 20, 9, lambda: known), Context([6] * 7)]
            made = list(prefill(model, layout, continued, 64))
    assert [prefix.length for prefix in made] == [20, 7]
    assert not launches.waits


def test_keys_and_values_of_a_prefill_exist_once():
    """The peak is that of its activations and of one copy, whatever the number of layers."""
    layers, tokens = 16, 4096
    with fake_cuda(), torch.inference_mode(), Allocator(8 * GIB) as allocator:
        model = on_gpu(num_hidden_layers=layers, num_key_value_heads=4, intermediate_size=64)
        layout, _ = examine_model(model, tokens)
        kept, context = [], Context([0] * tokens)
        peak = allocator.peak(lambda: kept.extend(prefill(model, layout, [context], tokens)))
    stacked = layout.token_bytes * tokens
    assert stacked <= peak < 1.4 * stacked


# --- memory


def test_the_allowance_is_what_is_free_and_within_the_share():
    card, weights = 80 * GIB, 3 * GIB
    share = 72 * GIB
    # Alone: weights in use are loaded, the next version is still to come.
    assert allowance(76 * GIB, share, 2 * weights, weights) == 66 * GIB
    # Both are loaded.
    assert allowance(73 * GIB, share, 2 * weights, 0) == 66 * GIB
    # Another process has taken most of the card.
    assert allowance(20 * GIB, share, 2 * weights, weights) == 17 * GIB
    assert allowance(2 * GIB, share, 2 * weights, weights) == 0
    assert card > share


class Counted:
    """A `CudaMemory` by numbers alone."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used, self.others = capacity, 0, 0

    def take(self, size: int) -> None:
        self.used += size
        assert self.used <= self.capacity

    def free(self) -> int:
        return self.capacity - self.used - self.others

    def held(self) -> int:
        return self.used

    allowance = free

    def peak(self, work) -> int:
        return work()


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=4),
    st.integers(0, 300),
    st.integers(0, 9),
    st.integers(0, 30),
)
def test_cache_work_and_recordings_fit_together(peaks, pool, each, number):
    """Whatever the sizes: the first recording takes the pool, each takes something of its own."""
    memory = Counted(10_000)
    sizes = [pool + each] + [each] * (number - 1) if number else []

    def recordings(of):
        return [lambda size=size: of.take(size) for size in sizes]

    room = cache_room(memory, [lambda p=p: p for p in peaks], recordings(memory))
    memory = Counted(10_000)
    memory.take(room)
    for record in recordings(memory):
        record()
    assert memory.free() == max(peaks)


def test_what_other_processes_take_meanwhile_is_not_a_recordings():
    """Eight runs that started at once on a GPU had counted each other's weights 16 times."""
    memory = Counted(80 * GIB)

    def record():
        memory.take(10 * MIB)
        memory.others += 3 * GIB

    room = cache_room(memory, [lambda: MIB], [record] * 18)
    assert room == 80 * GIB - MIB - 18 * (10 * MIB + DRIVER_BYTES)


def large_engine(allocator, slots=1024, max_len=4096, layers=1):
    """An engine with a vocabulary of 152k, whose recordings take memory as CUDA graphs do."""
    pool = []

    def record(step):
        if len(pool) < 2:
            kept = allocator.peak(step) if not pool else 0
            pool.append(torch.empty(kept + 8 * MIB, dtype=torch.uint8, device="cuda"))
        return step

    with torch.device("cuda"):
        sizes = {"vocab_size": 151_936, "hidden_size": 256, "tie_word_embeddings": True}
        sizes |= {"max_position_embeddings": 2**21}
        model = AutoModelForCausalLM.from_config(
            Qwen2Config(**SIZES | sizes | {"num_hidden_layers": layers}), dtype=torch.bfloat16
        )
    return SlotEngine(model, slots, max_len, [2], record=record, memory=allocator)


def test_a_large_step_takes_what_the_formula_says():
    """1,024 rows and a vocabulary of 151,936: logits in bfloat16, and a part of them in float32.
    All of them took 6.8 GiB with top-p. The arena leaves that room, which no prefill needs."""
    with fake_cuda(), torch.inference_mode(), Allocator(3 * GIB) as allocator:
        engine = large_engine(allocator)
        peak = allocator.peak(engine._decoder.run_largest)
    logits = 1024 * 151_936 * 2
    assert 0.5 * DRAWN_ENTRIES * SORTED_BYTES < peak - logits < DRAWN_ENTRIES * SORTED_BYTES
    assert peak < 1.1 * GIB


def test_the_arena_takes_what_everything_else_leaves():
    """On an allocator that fails as a GPU's does."""
    with fake_cuda(), torch.inference_mode(), Allocator(3 * GIB) as allocator:
        engine = large_engine(allocator, slots=256, max_len=65_536)
        assert 0.5 * GIB < engine.cache_bytes < 3 * GIB
        assert engine.cache_bytes >= engine._decoder.cache.capacities[-1] * engine._token_bytes
        prompt = [3] * 65_000
        engine.submit(
            [Completion.requested(0, 0, prompt, seed=0, sampling=SamplingParams(20, top_p=0.9))]
        )
        engine.submit(
            [
                Completion.requested(i, 0, prompt[:4096], seed=i, sampling=SamplingParams(20))
                for i in (1, 2)
            ]
        )
        with Launches():
            for _ in range(3):
                engine.step()
        assert engine.decoding == 3
        assert allocator.highest > 0.7 * allocator.capacity


@pytest.mark.parametrize(
    ("slots", "max_len", "message"),
    [
        (2, 300_000, r"one sequence of 300,000 tokens take [\d,.]+ MiB, and there are"),
        (64, 2_000_000, "prefills of 2,000,000 tokens and decode steps of 64 rows do not fit"),
    ],
)
def test_a_gpu_without_room_for_a_sequence_is_refused(slots, max_len, message):
    with (
        fake_cuda(),
        torch.inference_mode(),
        Allocator(GIB * 11 // 8) as allocator,
        pytest.raises(InputError, match=message) as caught,
    ):
        large_engine(allocator, slots, max_len)
    for key in ("gpu_memory_utilization", "prefill_tokens", "slots", "staging"):
        assert f"generator.{key}" in str(caught.value)
