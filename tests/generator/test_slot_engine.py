"""The slot engine against transformers' own forward and `generate`."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.generator.slot_models import (
    EOS,
    FAMILIES,
    VOCAB,
    chosen,
    finish,
    make_model,
    make_prompt,
    make_requests,
    plain_logprobs,
    reference_logprobs,
    twin,
)
from tramontane.errors import InputError
from tramontane.generator import cache
from tramontane.generator.engine import SlotEngine
from tramontane.generator.graphs import run_directly
from tramontane.models.packing import recurring
from tramontane.tokens import Growth
from tramontane.types import Completion, SamplingParams


@pytest.fixture(autouse=True, params=["prefixes shared", "prefixes copied"])
def layout(request, monkeypatch):
    """Both layouts of keys and values; the number of slots decides between them in use."""
    monkeypatch.setattr(cache, "SHARING_SLOTS", 1 if request.param == "prefixes shared" else 1000)


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", True), ("llama", False), ("mistral", True), ("qwen3", False)]
)
def test_greedy_equals_generate(family, tied):
    model = make_model(family, tied)
    plain = twin(model, "sdpa")
    rng = random.Random(1)
    prompts = [make_prompt(rng, n) for n in (7, 1, 30, 12, 58)]
    engine = SlotEngine(model, slots=3, max_len=100, eos_ids=[EOS])
    params = SamplingParams(40, temperature=0.0)
    engine.submit([Completion.requested(i, 0, p, i, params) for i, p in enumerate(prompts)])
    done = finish(engine)
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    generated = plain.generate(
        padded, attention_mask=(padded != 0).long(), max_new_tokens=40, do_sample=False
    )[:, longest:].tolist()
    for i, (prompt, expected) in enumerate(zip(prompts, generated, strict=True)):
        if EOS in expected:
            del expected[expected.index(EOS) + 1 :]
        c = done[i, 0]
        assert c.token_ids.tolist() == expected
        assert c.finish_reason == ("stop" if expected[-1] == EOS else "length")
        expected_logprobs = chosen(reference_logprobs(plain, prompt, expected), expected)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected_logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "temperature"), [("llama", 1.0), ("llama", 0.6), ("mistral", 1.0), ("qwen3", 0.6)]
)
def test_sampled_logprobs_with_refills_and_mixed_lengths(family, temperature):
    model = make_model(family, tied=family != "llama")
    plain = twin(model)
    requests = make_requests(7, 5, seed=3, tokens=(1, 90), temperature=temperature)
    engine = SlotEngine(model, slots=16, max_len=130, eos_ids=[EOS], prefill_tokens=64)
    engine.submit(requests)
    done = finish(engine)
    assert len(done) == len(requests)
    found = [done[r.group, r.index] for r in requests]
    expected = plain_logprobs(plain, found, temperature)
    for r, c, reference in zip(requests, found, expected, strict=True):
        assert c.prompt_ids == r.prompt_ids
        torch.testing.assert_close(torch.tensor(c.logprobs), reference, atol=1e-4, rtol=0)
        stopped = c.token_ids[-1] == EOS
        assert c.finish_reason == ("stop" if stopped else "length")
        assert EOS not in c.token_ids[:-1]
        assert stopped or len(c.token_ids) == r.sampling.max_tokens
    # The test requires both finish reasons, outgrown lanes and refilled slots.
    assert {c.finish_reason for c in done.values()} == {"stop", "length"}
    assert max(len(c.prompt_ids) + len(c.token_ids) for c in done.values()) > 96
    assert engine.stats.live_slot_steps < engine.stats.slot_steps


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logprobs(family):
    """Log-probs are within 0.05 on average and 0.6 at most of a float32 forward of the same rounded
    weights (these models' logits reach ±20), and no further than transformers' own bfloat16
    forward."""
    model = make_model(family, dtype=torch.bfloat16)
    rounded = twin(model)
    exact = twin(model).float()
    requests = make_requests(6, 4, seed=5, lengths=(5, 40), tokens=(15, 40))
    engine = SlotEngine(model, slots=16, max_len=100)
    engine.submit(requests)
    done = finish(engine).values()
    truth, plain = (torch.cat(plain_logprobs(m, done)) for m in (exact, rounded))
    error = (torch.cat([torch.tensor(c.logprobs) for c in done]) - truth).abs()
    yardstick = (plain - truth).abs()
    assert error.mean() < 0.05
    assert error.max() < 0.6
    assert error.mean() < 1.3 * yardstick.mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_shapes_come_again_and_filler_changes_nothing(family):
    model = make_model(family, dtype=torch.bfloat16)
    exact = twin(model).float()
    seen = []
    model.model.layers[1].mlp.register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0][..., 0].numel())
    )
    engine = SlotEngine(model, slots=40, max_len=100)
    seen.clear()
    engine.submit(make_requests(6, 7, seed=5, lengths=(5, 40), tokens=(10, 40)))
    done, live = [], set()
    while engine.pending():
        live.add(min(40, len(engine.pending())))
        done += engine.step()
    truth = torch.cat(plain_logprobs(exact, done))
    errors = (torch.cat([torch.tensor(c.logprobs) for c in done]) - truth).abs()
    assert errors.mean() < 0.05 and errors.max() < 0.6
    assert {recurring(n, 8) for n in seen} == set(seen)
    assert {n for n in live if recurring(n, 8) != n}  # steps that needed filler


@given(st.integers(0, 10**6), st.sampled_from([1, 8, 32]))
def test_sizes_that_come_again(n, per_octave):
    size = recurring(n, per_octave)
    assert n <= size <= n * (1 + 1 / per_octave)
    assert recurring(size, per_octave) == size
    octave = range(1 << 9, 1 << 10)
    assert len({recurring(m, per_octave) for m in octave}) <= 2 * per_octave


def test_request_does_not_depend_on_its_neighbors():
    model = make_model("qwen3")
    crowd = make_requests(17, 3, seed=7, temperature=0.9)
    selected = [crowd[0], crowd[25], crowd[50]]
    engine = SlotEngine(model, slots=20, max_len=80, eos_ids=[EOS])
    engine.submit(crowd)
    together = finish(engine)
    for request in selected:
        engine = SlotEngine(model, slots=1, max_len=80, eos_ids=[EOS])
        engine.submit([request])
        alone = finish(engine)[request.group, request.index]
        assert alone.token_ids == together[request.group, request.index].token_ids


def test_interrupted_requests_continue_to_the_same_tokens():
    model = make_model("mistral")
    requests = make_requests(6, 4, seed=11, tokens=(10, 60))
    engine = SlotEngine(model, slots=9, max_len=100, eos_ids=[EOS])
    engine.version = 3
    engine.submit(requests)
    whole = finish(engine)

    engine = SlotEngine(model, slots=9, max_len=100, eos_ids=[EOS])
    engine.version = 3
    engine.submit(requests)
    done = {}
    while engine.unfinished:
        for _ in range(7):
            done |= {(c.group, c.index): c for c in engine.step()}
        pending = engine.pending()
        assert [(r.group, r.index) for r in pending] == [
            (r.group, r.index) for r in requests if (r.group, r.index) not in done
        ]
        engine = SlotEngine(model, slots=9, max_len=100, eos_ids=[EOS])
        engine.version = 3
        engine.submit(pending)
    assert done.keys() == whole.keys()
    for key, c in done.items():
        assert c.token_ids == whole[key].token_ids
        assert c.versions.tolist() == [3] * len(c.token_ids)
        torch.testing.assert_close(
            torch.tensor(c.logprobs), torch.tensor(whole[key].logprobs), atol=1e-4, rtol=0
        )


def test_group_prompt_is_prefilled_once():
    """A prompt without its last token is prefilled once per group, though the second group's
    members are admitted over many steps."""
    model = make_model()
    requests = make_requests(2, 16, seed=2, lengths=(20, 30), tokens=(3, 12))
    engine = SlotEngine(model, slots=20, max_len=50)
    engine.submit(requests)
    engine.step()
    assert len(engine._prefixes.computed) == 1  # the first group is all admitted, the second is not
    finish(engine)
    assert not engine._prefixes.computed
    prompts = [requests[0].prompt_ids, requests[16].prompt_ids]
    assert engine.stats.prefill_tokens == sum(len(p) - 1 for p in prompts)
    assert engine.stats.generated_tokens == sum(r.sampling.max_tokens for r in requests)


@pytest.mark.parametrize(
    ("slots", "recorder", "expected"),
    [
        (7, None, [50, 60, 50, 10]),
        (2, None, [50, 60, 25, 25, 10]),
        (2, run_directly, [50, 60, 25, 35]),
    ],
)
def test_prefills_are_packed_up_to_a_number_of_tokens(slots, recorder, expected):
    """In the order of submission; a longer context has a forward to itself. On a GPU, waiting
    prompts are prefilled with those that are admitted."""
    model = make_model()
    forwards = []

    def record(module, args, inputs):
        if "logits_to_keep" in inputs:  # a prefill, which has no use for logits
            forwards.append(inputs["input_ids"].numel())

    rng = random.Random(0)
    contexts = [20, 30, 60, 25, 25, 0, 10]  # tokens of the prompts without their last one
    prompts = [make_prompt(rng, n + 1) for n in contexts]
    engine = SlotEngine(model, slots, max_len=80, prefill_tokens=50, record=recorder)
    model.register_forward_pre_hook(record, with_kwargs=True)
    engine.submit(
        [Completion.requested(i, 0, p, i, SamplingParams(2)) for i, p in enumerate(prompts)]
    )
    finish(engine)
    assert forwards == expected


def test_slots_are_refilled_at_once():
    model = make_model()
    requests = make_requests(10, 4, seed=4, tokens=(2, 30))
    engine = SlotEngine(model, slots=8, max_len=80)
    engine.submit(requests)
    while engine.unfinished > engine.slots:
        engine.step()
        # The next step fills the slots that a step frees: no slot idles while requests wait.
        assert engine.stats.live_slot_steps == engine.stats.slot_steps


def test_growth_is_what_each_sequence_gained_since_its_admission_or_the_last_call():
    """Put together, the growth of a sequence is its tokens, and each token is reported once: over
    refilled slots, sequences that begin with tokens, and calls after different numbers of steps."""
    engine = SlotEngine(make_model(), slots=3, max_len=80, eos_ids=[EOS])
    requests = make_requests(5, 2, seed=6, tokens=(12, 40))
    requests[1] = replace(requests[1], token_ids=[7, 8], logprobs=[-0.5, -1.5], versions=[0, 4])
    engine.submit(requests)
    assert engine.take_growth() == Growth()  # nothing is admitted yet
    reported = {(r.group, r.index): (r.token_ids, r.logprobs, r.versions) for r in requests}
    sizes, done = set(), {}
    for calls in range(1, 200):
        for _ in range((1, 5, 3, 9)[calls % 4]):
            engine.version += 1
            done |= {(c.group, c.index): c for c in engine.step()}
        flights = engine.pending()[: engine.decoding]
        grown = engine.take_growth()
        assert engine.take_growth() == Growth()
        places = dict(grown.places())
        assert places.keys() == {(r.group, r.index) for r in flights}
        sizes.add(frozenset(grown.counts))
        for key, new in places.items():
            more = grown.token_ids[new], grown.logprobs[new], grown.versions[new]
            reported[key] = tuple(a + b for a, b in zip(reported[key], more, strict=True))
        for r in flights:
            assert reported[r.group, r.index] == (r.token_ids, r.logprobs, r.versions)
        if not engine.unfinished:
            break
    assert len(done) == len(requests)
    for key, c in done.items():  # what came in a completion's last steps comes with the completion
        assert c.token_ids[: len(reported[key][0])] == reported[key][0]
    assert {len(s) for s in sizes} >= {0, 1, 2}  # the test requires unequal growth in one call


def test_resize_changes_slots_and_length_of_an_idle_engine():
    engine = SlotEngine(make_model(), slots=2, max_len=60, eos_ids=[EOS])
    before = engine.cache_bytes
    requests = make_requests(2, 4, seed=8, lengths=(5, 20), tokens=(10, 30))
    engine.submit(requests)
    engine.step()
    with pytest.raises(RuntimeError, match="^resize with 8 sequences unfinished$"):
        engine.resize(5, 120)
    assert (engine.slots, engine.max_len, engine.unfinished) == (2, 60, 8)
    expected = finish(engine)
    engine.resize(5, 120)
    assert engine.cache_bytes >= before
    engine.submit([*requests, Completion.requested(9, 0, [5] * 20, 0, SamplingParams(100))])
    engine.step()
    assert engine.decoding == 5
    done = finish(engine)
    assert len(done) == 9
    assert all(done[key].token_ids == c.token_ids for key, c in expected.items())
    with pytest.raises(InputError, match="generator's slots of 120"):
        engine.submit([Completion.requested(0, 0, [5] * 21, 0, SamplingParams(100))])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "empty prompt"),
        ({"prompt_ids": [5, VOCAB]}, "vocabulary"),
        ({"prompt_ids": [5] * 41}, "41 prompt tokens"),
        ({"token_ids": [4] * 20, "logprobs": [0.0] * 20, "versions": [0] * 20}, "nothing to"),
        ({"token_ids": [4]}, "log-prob and a version"),
        ({"sampling": SamplingParams(5, temperature=-1)}, "temperature"),
        ({"sampling": SamplingParams(5, top_p=0)}, "top_p"),
    ],
)
def test_one_impossible_request_refuses_the_whole_call(change, message):
    engine = SlotEngine(make_model(), slots=2, max_len=60)
    good = Completion.requested(0, 0, [5, 6], 0, SamplingParams(20))
    with pytest.raises(InputError, match=message):
        engine.submit([good, replace(good, **change)])
    assert engine.unfinished == 0


def test_only_tokens_of_the_vocabulary_end_a_completion():
    model = make_model()
    vocab = model.config.vocab_size
    SlotEngine(model, slots=2, max_len=60, eos_ids=[0, vocab - 1])
    for outside in (-1, vocab):
        with pytest.raises(InputError, match=rf"EOS or stop tokens \[{outside}\]"):
            SlotEngine(model, slots=2, max_len=60, eos_ids=[EOS, outside])


def test_the_context_of_the_model_is_a_limit():
    engine = SlotEngine(make_model(), slots=2, max_len=1000)
    with pytest.raises(InputError, match="the model's context of 256"):
        engine.submit([Completion.requested(0, 0, [5] * 200, 0, SamplingParams(57))])


def test_longest_request_fits():
    """Prompt and completion fill a slot to its last position."""
    model = make_model()
    engine = SlotEngine(model, slots=2, max_len=256)
    request = Completion.requested(0, 0, [5, 6, 7], 1, SamplingParams(253))
    engine.submit([request])
    c = finish(engine)[0, 0]
    reference = reference_logprobs(twin(model), c.prompt_ids, c.token_ids)
    assert len(c.token_ids) == 253
    torch.testing.assert_close(
        torch.tensor(c.logprobs), chosen(reference, c.token_ids), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("steps", [0, 5])
def test_a_cancelled_group_changes_no_other(steps):
    model, rng = make_model("llama", True), random.Random(3)
    prompts = [make_prompt(rng, n) for n in (9, 4, 12)]
    params = SamplingParams(20)
    requests = [
        Completion.requested(g, i, p, 7 * g + i, params)
        for g, p in enumerate(prompts)
        for i in (0, 1)
    ]
    engine = SlotEngine(model, slots=3, max_len=60, eos_ids=[EOS])
    engine.submit([r for r in requests if r.group != 1])
    expected = finish(engine)
    engine.submit(requests)
    done = [completion for _ in range(steps) for completion in engine.step()]
    engine.cancel(1)
    found = {(c.group, c.index): c for c in done if c.group != 1} | finish(engine)
    assert found.keys() == expected.keys()
    for key, completion in expected.items():
        assert found[key].token_ids == completion.token_ids
    assert not engine.unfinished and not engine._prefixes.waiting and not engine._prefixes.computed


@pytest.mark.parametrize("recorder", [None, run_directly])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("version", "named"), [(0, "generator.dtype"), (3, "under the weights of update 3")]
)
def test_logits_that_are_not_finite_are_named(recorder, top_p, temperature, version, named):
    model = make_model()
    with torch.no_grad():  # finite, as large steps leave them; scores are beyond float32
        for weight in model.parameters():
            weight.fill_(1e15)
    engine = SlotEngine(model, slots=3, max_len=100, eos_ids=[EOS], record=recorder)
    engine.version = version
    params = SamplingParams(40, temperature=temperature, top_p=top_p)
    engine.submit([Completion.requested(0, i, [1, 2, 3], i, params) for i in range(2)])
    with pytest.raises(InputError, match=re.escape(named)):
        engine.step()
