"""The generator worker: loading, text, snapshots, the parity probe, counts, refused models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
)

from tests.generator.slot_models import (
    EOS,
    LAYERS,
    VOCAB,
    finish,
    make_model,
    make_requests,
    make_tokenizer,
    plain_logprobs,
    twin,
)
from tramontane.config import GeneratorConfig
from tramontane.errors import InputError
from tramontane.generator import Generator, SlotEngine
from tramontane.generator.cache import max_positions
from tramontane.models.loading import load_model
from tramontane.types import Completion, SamplingParams


def make_generator(model=None, slots=8, **config) -> Generator:
    return Generator(
        model or make_model(), make_tokenizer(), GeneratorConfig(**config), slots, max_len=100
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_from_a_checkpoint(tmp_path, dtype):
    model = make_model("mistral", tied=False)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    generator = Generator.load(str(tmp_path), GeneratorConfig(dtype=dtype), 4, 60)
    assert next(generator.model.parameters()).dtype == getattr(torch, dtype)
    generator.submit(make_requests(3, 2, lengths=(5, 9), tokens=(20, 20)))
    exact = twin(load_model(str(tmp_path)).to(getattr(torch, dtype)).float())
    done = finish(generator).values()
    for c, expected in zip(done, plain_logprobs(exact, done), strict=True):
        torch.testing.assert_close(
            torch.tensor(c.logprobs),
            expected,
            atol=1e-4 if dtype == "float32" else 0.6,
            rtol=0,
        )


def test_text_has_the_generated_tokens_without_special_ones():
    generator = make_generator()
    generator.submit(make_requests(10, 3, seed=6, tokens=(30, 50)))
    done = finish(generator)
    assert any(c.finish_reason == "stop" for c in done.values())
    for c in done.values():
        assert c.text == " ".join(f"w{t}" for t in c.token_ids if t > 2)


def test_any_eos_id_stops():
    """EOS tokens of the tokenizer and all of the generation config."""
    model = make_model()
    model.generation_config.eos_token_id = [50, 51]
    generator = make_generator(model)
    generator.submit(make_requests(20, 3, seed=8, tokens=(50, 50)))
    ends = {c.token_ids[-1] for c in finish(generator).values() if c.finish_reason == "stop"}
    assert ends == {EOS, 50, 51}


def test_step_runs_the_configured_steps_and_returns_at_once_when_idle():
    generator = make_generator(steps_per_call=5)
    assert generator.step() == []
    assert generator.stats()["decode_steps"] == 0
    generator.submit([Completion.requested(0, 0, [5, 6], 3, SamplingParams(12, temperature=0))])
    generator.step()
    assert len(generator.pending()[0].token_ids) == 5
    generator.step(100)
    assert generator.stats()["decode_steps"] <= 12
    assert generator.pending() == []


def test_pending_survives_the_generator():
    """A snapshot handed to a new generator continues to the same completions."""
    requests = make_requests(5, 4, seed=14, tokens=(10, 40))
    whole = make_generator()
    whole.submit(requests)
    expected = finish(whole)

    first = make_generator()
    first.submit(requests)
    done = {(c.group, c.index): c for c in first.step(9)}
    snapshot = first.pending()
    assert len(snapshot) + len(done) == len(requests)
    assert any(r.token_ids for r in snapshot)
    assert any(not r.token_ids for r in snapshot)
    second = make_generator()
    second.submit(snapshot)
    done |= finish(second)
    assert {k: c.token_ids for k, c in done.items()} == {
        k: c.token_ids for k, c in expected.items()
    }
    assert {k: c.text for k, c in done.items()} == {k: c.text for k, c in expected.items()}


def test_a_poll_reports_each_new_token_once():
    """Tokens that a continued request came with are known to the caller: `poll` leaves them out.
    Known and reported tokens together are the beginning of the completion."""
    requests = make_requests(5, 4, seed=14, tokens=(10, 40))
    first = make_generator()
    first.submit(requests)
    first.step(9)
    snapshot = first.pending()
    second = make_generator(steps_per_call=3)
    known = {(r.group, r.index): replace(r, token_ids=[*r.token_ids]) for r in snapshot}
    assert any(r.token_ids for r in snapshot)
    submitted, finished, reported = snapshot, 0, 0
    while finished < len(snapshot):
        progress = second.poll(submitted)
        submitted = []
        grown = progress.grown
        for key, new in grown.places():
            request = known[key]
            request.token_ids = request.token_ids + grown.token_ids[new]
            request.logprobs = request.logprobs + grown.logprobs[new]
            request.versions = request.versions + grown.versions[new]
        reported += len(grown.token_ids)
        for c in progress.completions:
            request = known[c.group, c.index]
            assert c.token_ids[: len(request.token_ids)] == request.token_ids
            assert c.logprobs[: len(request.logprobs)] == request.logprobs
            assert len(request.token_ids) == len(request.versions)
            assert 0 < len(c.token_ids) - len(request.token_ids) <= 3
        finished += len(progress.completions)
        # Every unfinished request is known to its newest token.
        for request in second.pending():
            assert known[request.group, request.index].token_ids == request.token_ids
    assert reported > 0


def test_a_generator_is_as_new_after_cancel_all():
    generator = make_generator()
    requests = make_requests(4, 4, seed=2, tokens=(5, 30))
    generator.submit(requests)
    generator.step(7)
    generator.cancel_all()
    assert generator.pending() == []
    assert generator.step() == []
    assert generator.stats()["decoding"] == 0
    generator.submit(requests)
    again = finish(generator)
    fresh = make_generator()
    fresh.submit(requests)
    assert {k: c.token_ids for k, c in again.items()} == {
        k: c.token_ids for k, c in finish(fresh).items()
    }


def test_a_resized_generator_is_as_new_and_has_freed_its_memory():
    generator = make_generator(slots=12)
    generator.update_weights(3, twin(generator.model).state_dict())
    generator.submit(make_requests(3, 4, seed=2, tokens=(5, 30)))
    generator.step(7)
    with pytest.raises(RuntimeError, match=f"{len(generator.pending())} sequences unfinished"):
        generator.resize(4, 60)
    finish(generator)
    assert generator.stats()["cache_bytes"] > 0
    generator.resize(4, 60)
    assert generator.stats()["cache_bytes"] == 0
    assert generator.version == 3
    requests = make_requests(3, 4, seed=6, lengths=(1, 20))
    with pytest.raises(InputError, match="do not fit the generator's slots of 60"):
        generator.submit([Completion.requested(9, 0, [5] * 21, 0, SamplingParams(40))])
    generator.submit(requests)
    again = finish(generator)
    fresh = Generator(twin(generator.model, "slots"), make_tokenizer(), GeneratorConfig(), 4, 60)
    fresh.submit(requests)
    assert {k: c.token_ids for k, c in again.items()} == {
        k: c.token_ids for k, c in finish(fresh).items()
    }
    assert generator.stats()["cache_bytes"] == fresh.stats()["cache_bytes"]


@pytest.mark.parametrize("slots", [8, 64])
def test_lanes_never_exceed_max_positions(slots):
    """Holds for continued sequences too, all of whose cached positions are a prefix."""
    generator = make_generator(slots=slots)
    for long in (60, 5, 30, 90):
        tokens = [7] * (long - 1)
        floats, versions = [0.0] * len(tokens), [0] * len(tokens)
        sampling = SamplingParams(98)
        generator.submit(
            [
                Completion.requested(
                    i,
                    0,
                    [5, i + 3],
                    i,
                    sampling,
                    token_ids=[*tokens],
                    logprobs=[*floats],
                    versions=[*versions],
                )
                for i in range(slots)
            ]
        )
        finish(generator)
    taken = generator.stats()["cache_bytes"] / (2 * LAYERS * 2 * 8 * 4)
    assert slots * 112 <= taken <= max_positions(slots, 100)


def test_a_probe_is_exact_and_changes_nothing_in_flight():
    model = make_model("qwen3")
    plain = twin(model)
    requests = make_requests(4, 4, seed=3, tokens=(20, 40))
    reference_run = make_generator(twin(model))
    reference_run.update_weights(4, model.state_dict())
    reference_run.submit(requests)
    expected = finish(reference_run)

    generator = make_generator(model)
    generator.update_weights(4, model.state_dict())
    generator.submit(requests)
    done = {(c.group, c.index): c for c in generator.step(5)}
    before = generator.stats()
    prompts = [[5, 6, 7], [8] * 30, [9]]
    probes = generator.probe(prompts, tokens=25, seed=1, temperature=0.8)
    after = generator.stats()
    assert {k: v for k, v in after.items() if k != "busy_seconds"} == {
        k: v for k, v in before.items() if k != "busy_seconds"
    }
    done |= finish(generator)
    assert {k: c.token_ids for k, c in done.items()} == {
        k: c.token_ids for k, c in expected.items()
    }
    assert [c.prompt_ids for c in probes] == prompts
    for c, expected in zip(probes, plain_logprobs(plain, probes, 0.8), strict=True):
        assert len(c.token_ids) == 25
        assert c.versions.tolist() == [4] * 25
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)


def test_stats_add_up():
    generator = make_generator(slots=6)
    requests = make_requests(4, 5, seed=5, tokens=(3, 20))
    generator.submit(requests)
    done = {(c.group, c.index): c for c in generator.step(1)}
    assert generator.stats()["decoding"] == 6 - len(done)
    done |= finish(generator)
    stats = generator.stats()
    generated = sum(len(c.token_ids) for c in done.values())
    assert stats["generated_tokens"] == stats["live_slot_steps"] == generated
    assert stats["slot_steps"] == 6 * stats["decode_steps"]
    assert stats["utilization"] == generated / stats["slot_steps"]
    assert stats["prefill_tokens"] == sum(len(requests[i].prompt_ids) - 1 for i in (0, 5, 10, 15))
    assert stats["decoding"] == 0
    assert stats["busy_seconds"] > 0
    heads, head_dim = 2, 8
    positions = stats["cache_bytes"] / (2 * LAYERS * heads * head_dim * 4)
    assert 0 < positions <= 6 * (64 + 112)


@pytest.mark.parametrize("eos", [VOCAB, -1])
def test_eos_outside_the_vocabulary_is_refused(eos):
    with pytest.raises(InputError, match="EOS"):
        SlotEngine(make_model(), 2, 60, eos_ids=[eos])


def test_architectures_beyond_the_three_families():
    """Learned positions (GPT-2); layers with and without a window, one key-value head (Gemma 3)."""
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.25
        )
    )
    gemma3 = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention"],
            initializer_range=0.25,
        )
    )
    for model in (gpt2, gemma3):
        plain = twin(model).eval().requires_grad_(False)
        engine = SlotEngine(model, slots=3, max_len=40)
        engine.submit(make_requests(3, 2, seed=1, lengths=(1, 20), tokens=(10, 20)))
        done = finish(engine).values()
        for c, expected in zip(done, plain_logprobs(plain, done), strict=True):
            torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)


def test_unsuitable_models_are_refused_at_construction():
    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(InputError, match="attention interface"):
        SlotEngine(bloom, 2, 60)
    model = make_model()
    model.config.layer_types = ["hashed_attention", "full_attention"]
    with pytest.raises(InputError, match="layers of kind hashed_attention"):
        SlotEngine(model, 2, 60)
