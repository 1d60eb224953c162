"""Bookkeeping of the lanes: while sequences arrive, grow and leave, each keeps its own keys, and
finds those of the prefix that it was admitted with."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tramontane.generator.cache import PrefixPart, SlotCache, UnsharedPart
from tramontane.generator.lanes import Lane, Layout, Prefix, RecordedCache

SHAPES = ((2, 3), (1, 5))  # (heads, head size) of layer 0 and of layer 1


def make_layout() -> Layout:
    example = RecordedCache()
    for layer, (heads, d) in enumerate(SHAPES):
        example.write(layer, torch.zeros(1, heads, 1, d), torch.zeros(1, heads, 1, d))
    return Layout(example)


def written(slot: int, length: int) -> Prefix:
    """Keys and values that encode their owner and position."""
    planes = []
    for heads, d in SHAPES:
        position = torch.arange(length).float()[None, None, :, None].expand(2, heads, -1, d)
        planes.append(position + 1000 * slot)
    return Prefix(length, planes)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("arrive"),
                st.lists(
                    st.tuples(st.integers(0, 150), st.integers(1, 20)), min_size=1, max_size=6
                ),
            ),
            st.tuples(st.just("leave"), st.lists(st.integers(0, 47), min_size=1, max_size=9)),
            st.tuples(st.just("step"), st.integers(1, 40)),
        ),
        max_size=20,
    )
)
@example(
    [("arrive", [(5, 1), (5, 3), (50, 20)]), ("step", 35), ("leave", [1, 2]), ("arrive", [(50, 3)])]
)
@example([("arrive", [(5, 32)]), ("leave", list(range(16, 32))), ("leave", list(range(16)))])
def test_sequences_keep_their_keys(events):
    slots, max_len = 48, 200
    cache = SlotCache(make_layout(), slots, max_len)
    lengths: dict[int, int] = {}  # unshared positions of each slot
    prefixes: dict[int, int] = {}  # by slot: length of the prefix, which is also its key
    next_slot = 0
    for kind, n in events:
        if kind == "arrive":
            for prefix, members in n:
                arriving = list(range(next_slot, next_slot + min(members, slots - len(lengths))))
                cache.admit(arriving, prefix, written(prefix, prefix))
                lengths |= dict.fromkeys(arriving, 0)
                prefixes |= dict.fromkeys(arriving, prefix)
                next_slot += len(arriving)
        elif kind == "leave":
            leave(cache, {b for b in n if b < len(lengths)}, lengths)
        elif kind == "step":
            for _ in range(n):
                decode_one(cache, lengths)
        check(cache, lengths, prefixes)


def check(cache: SlotCache, lengths: dict[int, int], prefixes: dict[int, int]) -> None:
    assert sorted(cache.slots) == sorted(lengths)
    for lane in cache.lanes:
        assert all(lengths[slot] < lane.capacity for slot in lane.owners)
        assert_holds(lane, [(slot, lengths[slot]) for slot in lane.owners])
    members = []
    for lane in cache.prefixes:
        for block in lane.owners:
            assert 0 < len(block.members) <= 16
            assert {prefixes[slot] for slot in block.members} == {block.length}
            members += block.members
        assert_holds(lane, [(block.length, block.length) for block in lane.owners])
    assert sorted(members) == sorted(lengths)
    if lengths:
        # Attention takes one query per member, and each row then finds its output among the
        # members.
        step = cache.begin(torch.tensor([lengths[slot] for slot in cache.slots]))
        query = torch.tensor(cache.slots).float()[:, None, None, None]
        by_member = torch.cat([part.queries(query).flatten(0, 1) for part in step.prefixes])
        assert torch.equal(by_member[step.members], query[:, 0])


def assert_holds(lane: Lane, entries: list[tuple[int, int]]) -> None:
    """The entries of a lane have the keys and values of their owners (owner, length), and numbers
    behind them."""
    if not entries:
        return
    owners, lengths = torch.tensor(entries).T
    position = torch.arange(lane.capacity)
    inside = (position < lengths[:, None])[None, :, None, :, None]
    expected = (position + 1000 * owners[:, None]).float()[None, :, None, :, None]
    for stack in lane.stacks:
        found = stack[:, : len(entries)]
        assert found.isfinite().all()
        assert torch.where(inside, found == expected, True).all()


def assert_equal(found: Prefix, expected: Prefix) -> None:
    for plane, other in zip(found.planes, expected.planes, strict=True):
        assert torch.equal(plane, other)


def leave(cache: SlotCache, finished: set[int], lengths: dict[int, int]) -> None:
    slots = cache.slots
    cache.end(finished, [])
    for b in finished:
        del lengths[slots[b]]


def decode_one(cache: SlotCache, lengths: dict[int, int]) -> None:
    """One token for every sequence, by the calls that a model and the engine make."""
    slots = cache.slots
    if not slots:
        return
    cache.begin(torch.tensor([lengths[slot] for slot in slots]))
    for layer, (heads, d) in enumerate(SHAPES):
        new = torch.tensor([float(lengths[slot] + 1000 * slot) for slot in slots])
        new = new[:, None, None, None].expand(-1, heads, 1, d)
        cache.write(layer, new, new)
    for slot in slots:
        lengths[slot] += 1
    full = [b for b, slot in enumerate(slots) if lengths[slot] >= cache.capacities[b]]
    finished = [b for b, slot in enumerate(slots) if lengths[slot] == 200]
    cache.end(finished, full)
    for b in finished:
        del lengths[slots[b]]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 31)), min_size=1, max_size=5),
    st.one_of(st.none(), st.integers(1, 70)),
    st.booleans(),
)
def test_a_token_sees_itself_and_the_window_before_it(sequences, size, in_chunks):
    """The last `size` positions of unshared part and prefix together, or those of its chunk."""
    reach = (None, size) if in_chunks else (size, None)
    cache = SlotCache(make_layout(), 48, 64)
    for slot, (prefix, _) in enumerate(sequences):
        cache.admit([slot], slot, written(slot, prefix))
    step = cache.begin(torch.tensor([unshared for _, unshared in sequences]))
    seen: dict[int, list[int]] = {slot: [] for slot in range(len(sequences))}
    (part,) = step.unshared
    for slot, (prefix, _) in enumerate(sequences):
        seen[slot] += [prefix + p for p in visible(part, slot, reach)]
    for shared in step.prefixes:
        for place, block in enumerate(shared.lane.owners):
            seen[block.members[0]] += visible(shared, place, reach)
    for slot, (prefix, unshared) in enumerate(sequences):
        newest = prefix + unshared
        first = max(0, newest - size + 1) if size else 0
        if size and in_chunks:
            first = newest // size * size
        assert sorted(seen[slot]) == list(range(first, newest + 1))


def visible(
    part: UnsharedPart | PrefixPart, entry: int, reach: tuple[int | None, int | None]
) -> list[int]:
    bias = part.bias(*reach)[entry, 0, 0]
    assert ((bias == 0) | (bias < -1e30)).all()
    return (bias == 0).nonzero()[:, 0].tolist()
