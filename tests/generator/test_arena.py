"""The arena: keys and values of many sequences in one tensor, as much as is live."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.generator.slot_models import (
    EOS,
    FAMILIES,
    finish,
    make_model,
    make_requests,
    make_tokenizer,
)
from tests.generator.test_graphs import assert_same, traced
from tests.generator.test_slot_cache import SHAPES, assert_equal, make_layout, written
from tramontane.config import GeneratorConfig
from tramontane.errors import InputError
from tramontane.generator import Generator, arena
from tramontane.generator.arena import ArenaCache, arena_size, extent_capacities
from tramontane.generator.engine import SlotEngine
from tramontane.generator.graphs import run_directly
from tramontane.generator.lanes import Prefix
from tramontane.types import Completion, SamplingParams


@pytest.fixture(autouse=True)
def short_extents(monkeypatch):
    """Extents as short as the tests' sequences, so that these outgrow them."""
    monkeypatch.setattr(arena, "_SHORTEST", 16)
    monkeypatch.setattr(arena, "_CHUNK", 48)


def token_bytes(model) -> int:
    """Bytes of a position in the tests' models."""
    heads, head_dim, layers = 2, getattr(model.config, "head_dim", None) or 8, 2
    return 2 * layers * heads * head_dim * 4


def limited(model, positions: int, slots: int = 16, max_len: int = 130, record=run_directly):
    """An engine whose arena has this number of positions."""
    limit = positions * token_bytes(model)
    return SlotEngine(model, slots, max_len, [EOS], kv_bytes=limit, record=record)


def unlimited(model, slots: int = 16, max_len: int = 130):
    return SlotEngine(model, slots, max_len, [EOS])


def test_a_cache_that_is_too_small_says_how_much_it_takes():
    model = make_model()
    positions = extent_capacities(60_000)[-1] + 1
    taken, there = (n * token_bytes(model) / 2**20 for n in (positions, positions // 3))
    with pytest.raises(InputError, match=f"take {taken:,.1f} MiB, and there are {there:,.1f} MiB"):
        limited(model, positions // 3, max_len=60_000)


# --- the cache


def stored(cache: ArenaCache, row: int, length: int) -> Prefix:
    first = int(cache.starts[row])
    return Prefix(length, [a[:, first : first + length].transpose(1, 2) for a in cache.arenas])


def check(cache: ArenaCache, lengths: dict[int, int]) -> None:
    """Every sequence's keys and values are where its row begins, and no two overlap."""
    cache.assign_rows(min(8, len(lengths) + 2))
    slots, starts, room = cache.slots, cache.starts.tolist(), cache.room.tolist()
    assert len(set(slots)) == len(slots)
    assert slots[: len(lengths)] == sorted(lengths, key=slots.index)
    for row in range(len(slots)):
        assert starts[row] + room[row] <= starts[row + 1]
    assert starts[len(slots)] <= cache.arenas[0].shape[1]
    for row, slot in enumerate(slots[: len(lengths)]):
        assert lengths[slot] < room[row]
        assert_equal(stored(cache, row, lengths[slot]), written(slot, lengths[slot]))
    used = sum(room[: len(lengths)])
    assert cache.free == cache.arenas[0].shape[1] - 8 - used


def decode_one(cache: ArenaCache, lengths: dict[int, int]) -> None:
    """One token for every row, by the calls that a model and the engine make."""
    cache.assign_rows(8)
    room = cache.room.tolist()
    rows = torch.tensor([lengths.get(slot, 0) for slot in cache.slots])
    cache.begin(rows)
    for layer, (heads, d) in enumerate(SHAPES):
        new = (rows + 1000 * torch.tensor(cache.slots)).float()
        new = new[:, None, None, None].expand(-1, heads, 1, d)
        cache.write(layer, new, new)
    for row, slot in enumerate(list(cache.slots)):
        if slot in lengths:
            lengths[slot] += 1
            if lengths[slot] == 200 or (lengths[slot] >= room[row] and not cache.grow(slot)):
                cache.release([slot])
                del lengths[slot]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(209, 900),
    st.lists(
        st.one_of(
            st.tuples(st.just("arrive"), st.integers(0, 150)),
            st.tuples(st.just("leave"), st.integers(0, 7)),
            st.tuples(st.just("step"), st.integers(1, 40)),
        ),
        max_size=15,
    ),
)
@example(209, [("arrive", 0), ("step", 200)])
@example(400, [("arrive", 100), ("arrive", 90), ("leave", 0), ("step", 60), ("arrive", 5)])
def test_sequences_keep_their_keys_wherever_they_move(positions, events):
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr(arena, "_SHORTEST", 16)
        patch.setattr(arena, "_CHUNK", 48)
        size = arena_size(8, 200, positions + 8)
        cache = ArenaCache(make_layout(), size._replace(slots=8, positions=positions + 8), 200)
        lengths: dict[int, int] = {}
        for kind, n in events:
            if kind == "arrive" and len(lengths) < 8:
                slot = next(s for s in range(8) if s not in lengths)
                admissible = cache.count_admissible([n])
                assert admissible or lengths or n > 200
                if admissible:
                    cache.admit([slot], None, written(slot, n))
                    lengths[slot] = n
            elif kind == "leave" and lengths:
                slot = list(lengths)[n % len(lengths)]
                cache.release([slot])
                del lengths[slot]
            elif kind == "step":
                for _ in range(n):
                    decode_one(cache, lengths)
            check(cache, lengths)


@given(
    st.integers(1, 300),
    st.integers(1, 40_000),
    st.one_of(st.none(), st.integers(0, 2_000_000)),
)
def test_an_arena_is_within_its_limit_and_holds_the_longest_sequence(slots, max_len, limit):
    size = arena_size(slots, max_len, limit)
    longest = extent_capacities(max_len)[-1]
    assert longest >= max_len
    if size.slots:
        assert size.slots <= slots
        assert size.positions - size.slots >= longest
        assert limit is None or size.positions <= limit
        assert size.positions <= (slots + 1) * (longest + 1)
    else:
        assert limit <= longest


def test_extents_are_at_most_a_quarter_longer_than_needed():
    capacities = extent_capacities(20_000)
    for shorter, longer in pairwise(capacities):
        assert longer <= shorter * 1.25 + 32


# --- engines of limited memory


@pytest.mark.parametrize("family", FAMILIES)
def test_short_memory_changes_no_token(family):
    """Sequences that return to the queue are prefilled again, and draw the same tokens."""
    model = make_model(family)
    requests = make_requests(6, 5, seed=3, tokens=(1, 70))
    plenty, little = unlimited(model), limited(model, 480)
    for engine in (plenty, little):
        engine.submit(requests)
    assert_same(finish(little), finish(plenty))
    assert little.stats.preemptions > 3
    assert little.stats.generated_tokens == plenty.stats.generated_tokens
    assert little.cache_bytes <= 480 * token_bytes(model)


def test_recorded_steps_find_sequences_that_moved(monkeypatch):
    """Few recordings serve rows whose slots and extents change."""
    longest = property(lambda cache: cache.capacities[-1])
    monkeypatch.setattr(ArenaCache, "span", longest)
    model = make_model("qwen3")
    requests = make_requests(3, 3, seed=3, lengths=(1, 20), tokens=(20, 50))
    replays = limited(model, 150, slots=4, max_len=80, record=traced)
    replays.submit(requests)
    assert_same(finish(replays), finish_of(model, requests))
    assert replays.stats.preemptions
    assert len(replays._decoder._recorded) <= 3


def test_an_arena_for_one_sequence_finishes_many():
    """The least memory: one sequence at its longest. Nothing waits for ever."""
    model = make_model()
    sampling = SamplingParams(100)
    requests = [Completion.requested(i, 0, [5, 7 + i] * 10, i, sampling) for i in range(6)]
    least = extent_capacities(130)[-1] + 1
    plenty, little = unlimited(model), limited(model, least)
    assert little.slots >= 1
    for engine in (plenty, little):
        engine.submit(requests)
    assert_same(finish(little), finish(plenty))
    with pytest.raises(InputError, match=r"one sequence of 130 tokens take .*kv_cache_mib"):
        limited(model, least - 1)
    little.resize(4, 100)
    with pytest.raises(InputError, match="one sequence of 300 tokens"):
        little.resize(4, 300)
    assert little.max_len == 100


def test_a_long_sequence_does_not_size_the_others():
    """With room for 4 sequences at their longest, 16 short ones are decoded at once."""
    model = make_model()
    engine = limited(model, 4 * 256, max_len=250)
    assert engine.slots == 16
    engine.submit([Completion.requested(i, 0, [5, 9], i, SamplingParams(30)) for i in range(20)])
    engine.step()
    assert engine.decoding == 16
    assert engine.stats.preemptions == 0


def test_sequences_take_turns_in_the_order_of_submission(monkeypatch):
    """The earliest unfinished sequence is always in flight, and none overtakes in the queue."""
    model = make_model()
    engine = limited(model, 400)
    requests = make_requests(30, 1, seed=5, lengths=(1, 10), tokens=(20, 90))
    engine.submit(requests)
    evict, evicted = engine._decoder.evict, []
    monkeypatch.setattr(engine._decoder, "evict", lambda slot: evicted.append(evict(slot)))
    while engine.unfinished:
        engine.step()
        waiting = [flight.serial for flight in engine._waiting]
        flying = [flight.serial for flight in engine._flights.values()]
        assert waiting == sorted(waiting)
        if waiting and flying:
            assert max(flying) < min(waiting)
    assert engine.stats.preemptions == len(evicted) > 3


def test_a_prefix_is_kept_until_its_last_sequence_is_admitted():
    """Also when several members of a group, alike so far, return to the queue."""
    model = make_model()
    engine = limited(model, 400)
    greedy = SamplingParams(80, temperature=0.0)
    engine.submit(
        [Completion.requested(i, j, [5, 7 + i] * 10, i, greedy) for i in range(4) for j in range(4)]
    )
    while engine.unfinished:
        engine.step()
        waiting = Counter(flight.key for flight in engine._waiting)
        assert engine._prefixes.waiting == waiting
        assert engine._prefixes.computed.keys() <= waiting.keys()
    assert engine.stats.preemptions > 3


def test_all_tokens_are_reported_while_sequences_come_and_go():
    """The growth that a generator reports adds up to each completion, preempted or not; so does
    the state that a replacement would continue from."""
    model = make_model("qwen3")
    engine, rng = limited(model, 400), random.Random(0)
    requests = make_requests(8, 3, seed=9, tokens=(10, 90))
    known = {(r.group, r.index): [[], [], []] for r in requests}
    whole = finish_of(model, requests)
    engine.submit(requests)
    while engine.unfinished:
        done = [c for _ in range(rng.randint(1, 9)) for c in engine.step()]
        growth = engine.take_growth()
        for c in done:
            columns = known.pop((c.group, c.index))
            whole_columns = c.token_ids, c.logprobs, c.versions
            for before, values in zip(columns, whole_columns, strict=True):
                assert before == values.tolist()[: len(before)]
            assert c.token_ids == whole[c.group, c.index].token_ids
        gained = growth.token_ids, growth.logprobs, growth.versions
        for key, new in growth.places():  # of unfinished requests only
            for values, more in zip(known[key], gained, strict=True):
                values += more[new].tolist()
        pending = {(r.group, r.index): r for r in engine.pending()}
        assert pending.keys() == known.keys()
        for key, request in pending.items():
            assert request.token_ids.tolist() == known[key][0]
            assert request.logprobs.tolist() == known[key][1]
    assert engine.stats.preemptions > 3
    assert not known


def finish_of(model, requests):
    engine = unlimited(model)
    engine.submit(requests)
    return finish(engine)


def test_pending_sequences_continue_in_another_engine():
    model = make_model("mistral")
    requests = make_requests(6, 4, seed=11, tokens=(10, 60))
    little = limited(model, 400)
    little.submit(requests)
    done = {(c.group, c.index): c for _ in range(45) for c in little.step()}
    assert little.stats.preemptions
    other = limited(model, 300)
    other.submit(little.pending())
    assert_same(done | finish(other), finish_of(model, requests))


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_new_weights_reach_sequences_that_wait(kv_cache):
    """Every token of a version is drawn under the weights of this version. Nothing else can be
    asked of `keep`, which mixes keys of both; `recompute` is exact."""
    requests = make_requests(6, 4, seed=8, lengths=(3, 20), tokens=(25, 80))
    new = make_model("llama", seed=1).state_dict()
    found = []
    for positions in (480, None):
        model = make_model("llama")
        generator = Generator(model, make_tokenizer(), GeneratorConfig(kv_cache=kv_cache), 16, 130)
        generator._engine = limited(model, positions) if positions else unlimited(model)
        generator.submit(requests)
        done = {(c.group, c.index): c for c in generator.step(30)}
        generator.update_weights(7, new)
        done |= finish(generator)
        found.append(done)
        assert bool(generator.stats()["preemptions"]) == bool(positions)
    little, plenty = found
    assert little.keys() == plenty.keys()
    assert {v for c in little.values() for v in c.versions} == {0, 7}
    for c in little.values():
        assert c.versions.tolist() == sorted(c.versions)
    whole = {k for k, c in plenty.items() if set(c.versions) == {0}}
    assert_same(
        {k: c for k, c in little.items() if k in whole and set(c.versions) == {0}},
        {k: c for k, c in plenty.items() if k in whole and set(little[k].versions) == {0}},
    )


def test_memory_is_shared_by_the_workers():
    """`kv_cache_mib` is the limit of all generators together."""
    model = make_model()
    config = GeneratorConfig(kv_cache_mib=3, workers=3)
    generator = Generator(model, make_tokenizer(), config, 2000, 250)
    assert generator.stats()["cache_bytes"] == 0  # lanes
    engine = generator._engine
    assert engine.slots < 2000
    assert SlotEngine(model, 2000, 250, kv_bytes=None).slots == 2000
    sampling = SamplingParams(200)
    requests = [
        Completion.requested(i, 0, [3] * 50, i, replace(sampling)) for i in range(2 * engine.slots)
    ]
    generator.submit(requests)
    assert len(finish(generator)) == len(requests)
    assert 0 < generator.stats()["cache_bytes"] <= 2**20
