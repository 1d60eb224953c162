"""Sequences that end, wait, and go on: with their keys and values kept, or prefilled again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generator.slot_models import EOS, make_model, make_prompt
from tramontane.generator import arena, cache
from tramontane.generator.engine import SlotEngine
from tramontane.generator.graphs import run_directly
from tramontane.generator.lanes import Prefix
from tramontane.generator.parking import Parking
from tramontane.tokens import INSERTED, floats, ints
from tramontane.types import Completion, SamplingParams

MAX_LEN = 120


@pytest.fixture(params=["shared", "copied", "arena"])
def layout(request, monkeypatch):
    """All layouts of keys and values."""
    monkeypatch.setattr(cache, "SHARING_SLOTS", 1 if request.param == "shared" else 1000)
    monkeypatch.setattr(arena, "_SHORTEST", 16)
    return request.param


def make_engine(model, layout, slots=8, **options) -> SlotEngine:
    record = run_directly if layout == "arena" else None
    return SlotEngine(model, slots, MAX_LEN, [EOS], record=record, **options)


def going_on(request: Completion, completion: Completion, put: list[int]) -> Completion:
    """What follows a turn, behind the tokens that were put in."""
    return replace(
        request,
        token_ids=completion.token_ids + ints(put),
        logprobs=completion.logprobs + floats([0.0] * len(put)),
        versions=completion.versions + ints([INSERTED] * len(put)),
        sampling=replace(request.sampling, max_tokens=len(completion.token_ids) + len(put) + 5),
    )


def converse(engine, temperature=1.0, keep_kv=True, turns=3, groups=2, between=lambda turn: None):
    """Conversations that take turns in groups of two; returns all tokens and log-probs."""
    rng = random.Random(5)
    requests = []
    for group in range(groups):
        prompt = make_prompt(rng, rng.randint(1, 20))
        sampling = SamplingParams(rng.randint(3, 6), temperature)
        requests += [
            Completion.requested(group, i, prompt, 7 * group + i, sampling) for i in range(2)
        ]
    requests = [replace(r, keep_kv=keep_kv) for r in requests]
    for turn in range(turns):
        engine.submit(requests)
        ended = {}
        while engine.unfinished:
            ended |= {(c.group, c.index): c for c in engine.step()}
        between(turn)
        requests = [
            going_on(r, ended[r.group, r.index], make_prompt(rng, rng.randint(0, 7)))
            for r in requests
        ]
    return ended


@pytest.mark.parametrize(("family", "temperature"), [("llama", 0.0), ("mistral", 0.7)])
def test_parked_conversations_are_those_prefilled_again(family, temperature, layout):
    model = make_model(family)
    engine, other = make_engine(model, layout), make_engine(model, layout)
    kept = converse(engine, temperature)
    again = converse(other, temperature, keep_kv=False)
    for key, completion in kept.items():
        assert completion.token_ids == again[key].token_ids
        logprobs = torch.tensor([completion.logprobs.tolist(), again[key].logprobs.tolist()])
        torch.testing.assert_close(logprobs[0], logprobs[1], atol=1e-4, rtol=0)
    saved = engine.stats.parked_tokens
    assert other.stats.parked_tokens == 0 < saved
    assert engine.stats.prefill_tokens + saved == other.stats.prefill_tokens
    # Nothing but what was put in, and the token before it, is prefilled behind the first turn.
    assert engine.stats.prefill_tokens < other.stats.prefill_tokens / 2


@pytest.mark.parametrize("slots", [1, 3])
def test_what_waits_for_a_slot_comes_first(slots, layout):
    """Conversations beyond the room are prefilled again, and sample the same."""
    model = make_model()
    engine = make_engine(model, layout, slots)
    kept = converse(engine)
    again = converse(make_engine(model, layout), keep_kv=False)
    assert {k: c.token_ids for k, c in kept.items()} == {k: c.token_ids for k, c in again.items()}
    assert slots == 1 or engine.stats.parked_tokens > 0


def test_memory_is_shared_with_what_is_parked(layout):
    model = make_model()
    small = make_engine(model, layout, kv_bytes=1500 * 256)
    kept = converse(small)
    again = converse(make_engine(model, layout), keep_kv=False)
    assert {k: c.token_ids for k, c in kept.items()} == {k: c.token_ids for k, c in again.items()}
    assert small.cache_bytes <= small._kv_bytes


def test_recompute_uses_no_keys_of_earlier_weights(layout):
    """Parked conversations go on under the new weights alone, if the caches are recomputed, and on
    their old keys and values if these are kept."""
    errors, parked = zip(
        *(errors_after_an_update(layout, again) for again in (False, True)), strict=True
    )
    assert errors[1] < 1e-4 < 1e-2 < errors[0]
    assert parked[1] == 0 < parked[0]


def errors_after_an_update(layout, recompute):
    """The largest difference between log-probs under new weights and those of a plain forward, and
    the number of parked tokens used."""
    model, newer = make_model(), make_model(seed=1)
    engine = make_engine(model, layout)

    def update(turn):
        if turn == 0:
            model.load_state_dict(newer.state_dict())
            engine.version = 1
            if recompute:
                engine.recompute()

    errors = []
    for c in converse(engine, turns=2, between=update).values():
        with torch.no_grad():
            logits = newer(torch.tensor([[*c.prompt_ids, *c.token_ids]])).logits[0].float()
        rows = torch.log_softmax(logits[len(c.prompt_ids) - 1 : -1], -1)
        for place, (token, version) in enumerate(zip(c.token_ids, c.versions, strict=True)):
            if version == 1:
                errors.append(abs(float(rows[place, token]) - c.logprobs[place]))
    return max(errors), engine.stats.parked_tokens


def test_a_group_that_is_dropped_and_one_that_begins_again_use_nothing(layout):
    model = make_model()
    engine = make_engine(model, layout)
    first = converse(engine, turns=1)
    assert len(engine._parking) == len(first)
    engine.cancel(0)
    assert len(engine._parking) == len(first) - 2
    again = converse(engine, turns=1)  # the same prompts, from the start
    assert {k: c.token_ids for k, c in again.items()} == {k: c.token_ids for k, c in first.items()}
    assert engine.stats.parked_tokens == 0
    engine.clear()
    assert len(engine._parking) == 0
    converse(engine, turns=2)
    assert engine.stats.parked_tokens > 0


class Held:
    """Records what is parked."""

    nbytes = 0

    def __init__(self):
        self.keys = []

    def park(self, key, slot, length):
        self.keys.append(key)

    def parked(self, key, length):
        return Prefix(length, [])

    def drop(self, key):
        self.keys.remove(key)


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), max_size=30))
@settings(max_examples=60, deadline=None)
def test_the_least_recently_parked_go_first(slots, events):
    """Of what was parked or asked for, exactly the newest stay, as many as have room."""
    held, order = Held(), []
    parking = Parking(held, slots, None)
    for number, live in events:
        key = (number, 0)
        ended = Completion(*key, [3, 4], ints([5]), floats([0.0]), ints([0]), "stop")
        if key in order:
            parking.touch(
                Completion.requested(*key, [3, 4], 0, SamplingParams(9), token_ids=ints([5, 6]))
            )
            order.remove(key)
        else:
            parking.keep(0, ended)
        order.append(key)
        parking.trim(live)
        order = order[max(0, len(order) - max(0, slots - live)) :]
        assert sorted(held.keys) == sorted(order) and len(parking) == len(order)
    for key in order:
        context = parking.context(
            Completion.requested(*key, [3, 4], 0, SamplingParams(9), token_ids=ints([5, 6]))
        )
        assert (context.tokens, context.known) == ([3, 4, 5], 2)
        assert context.take().length == 2 and key not in held.keys
    assert not held.keys
