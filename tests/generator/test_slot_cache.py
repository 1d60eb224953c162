"""The lanes' bookkeeping: whatever comes, grows and goes, everyone keeps their own keys, and finds
those of the prefix that they came with."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tramontane.generator.cache import PrefixPart, SlotCache, UnsharedPart
from tramontane.generator.lanes import Lane, Layout, PackedCache, Prefix

SHAPES = ((2, 3), (1, 5))  # (heads, head size) of layer 0 and of layer 1


def make_layout() -> Layout:
    example = PackedCache()
    for layer, (heads, d) in enumerate(SHAPES):
        example.update(torch.zeros(1, heads, 1, d), torch.zeros(1, heads, 1, d), layer)
    return Layout(example)


def written(row: int, length: int) -> Prefix:
    """Keys and values that say whose they are and at which position."""
    planes = []
    for heads, d in SHAPES:
        position = torch.arange(length).float()[None, None, :, None].expand(2, heads, -1, d)
        planes.append(position + 1000 * row)
    return Prefix(length, planes)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("come"),
                st.lists(
                    st.tuples(st.integers(0, 150), st.integers(1, 20)), min_size=1, max_size=6
                ),
            ),
            st.tuples(st.just("go"), st.lists(st.integers(0, 47), min_size=1, max_size=9)),
            st.tuples(st.just("step"), st.integers(1, 40)),
        ),
        max_size=20,
    )
)
@example([("come", [(5, 1), (5, 3), (50, 20)]), ("step", 35), ("go", [1, 2]), ("come", [(50, 3)])])
@example([("come", [(5, 32)]), ("go", list(range(16, 32))), ("go", list(range(16)))])
def test_everyone_keeps_their_own_keys(events):
    slots, max_len = 48, 200
    cache = SlotCache(make_layout(), slots, max_len)
    lengths: dict[int, int] = {}  # of each row's own positions
    prefixes: dict[int, int] = {}  # the length of each row's prefix, which is also its key
    next_row = 0
    for kind, n in events:
        if kind == "come":
            for prefix, members in n:
                rows = list(range(next_row, next_row + min(members, slots - len(lengths))))
                cache.admit(rows, prefix, written(prefix, prefix))
                lengths |= dict.fromkeys(rows, 0)
                prefixes |= dict.fromkeys(rows, prefix)
                next_row += len(rows)
        elif kind == "go":
            leave(cache, {b for b in n if b < len(lengths)}, lengths)
        elif kind == "step":
            for _ in range(n):
                decode_one(cache, lengths)
        check(cache, lengths, prefixes)


def check(cache: SlotCache, lengths: dict[int, int], prefixes: dict[int, int]) -> None:
    assert sorted(cache.slots) == sorted(lengths)
    for lane in cache.lanes:
        for place, row in enumerate(lane.owners):
            assert lengths[row] < lane.capacity
            assert_equal(read(lane, place, lengths[row]), written(row, lengths[row]))
            assert all(s[:, place].isfinite().all() for s in lane.stacks)
    members = []
    for lane in cache.prefixes:
        for place, block in enumerate(lane.owners):
            assert 0 < len(block.members) <= 16
            assert {prefixes[row] for row in block.members} == {block.length}
            assert_equal(read(lane, place, block.length), written(block.length, block.length))
            assert all(s[:, place].isfinite().all() for s in lane.stacks)
            members += block.members
    assert sorted(members) == sorted(lengths)
    if lengths:
        # What attention takes for each seat, and where each row of the batch then looks for it.
        step = cache.begin(torch.tensor([lengths[r] for r in cache.slots]))
        query = torch.tensor(cache.slots).float()[:, None, None, None]
        seated = torch.cat([part.queries(query).flatten(0, 1) for part in step.prefixes])
        assert torch.equal(seated[step.members], query[:, 0])


def read(lane: Lane, place: int, length: int) -> Prefix:
    """The first `length` positions of an entry."""
    return Prefix(length, [stack[:, place, :, :length] for stack in lane.stacks])


def assert_equal(found: Prefix, expected: Prefix) -> None:
    for plane, other in zip(found.planes, expected.planes, strict=True):
        assert torch.equal(plane, other)


def leave(cache: SlotCache, gone: set[int], lengths: dict[int, int]) -> None:
    rows = cache.slots
    cache.end(gone, [])
    for b in gone:
        del lengths[rows[b]]


def decode_one(cache: SlotCache, lengths: dict[int, int]) -> None:
    """One token for everyone, by the calls that a model and the engine make."""
    rows = cache.slots
    if not rows:
        return
    cache.begin(torch.tensor([lengths[r] for r in rows]))
    for layer, (heads, d) in enumerate(SHAPES):
        new = torch.tensor([float(lengths[r] + 1000 * r) for r in rows])
        new = new[:, None, None, None].expand(-1, heads, 1, d)
        cache.update(new, new, layer)
    for row in rows:
        lengths[row] += 1
    full = [b for b, row in enumerate(rows) if lengths[row] >= cache.capacities[b]]
    gone = [b for b, row in enumerate(rows) if lengths[row] == 200]
    cache.end(gone, full)
    for b in gone:
        del lengths[rows[b]]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 31)), min_size=1, max_size=5),
    st.one_of(st.none(), st.integers(1, 70)),
)
def test_bias_shows_a_token_itself_its_past_and_no_more_than_the_window(sequences, window):
    """Of its own positions and of its prefix: together, the last `window` of all."""
    cache = SlotCache(make_layout(), 48, 64)
    for row, (prefix, _) in enumerate(sequences):
        cache.admit([row], row, written(row, prefix))
    step = cache.begin(torch.tensor([own for _, own in sequences]))
    seen: dict[int, list[int]] = {row: [] for row in range(len(sequences))}
    (part,) = step.unshared
    for row, (prefix, _) in enumerate(sequences):
        seen[row] += [prefix + p for p in visible(part, row, window)]
    for shared in step.prefixes:
        for place, block in enumerate(shared.lane.owners):
            seen[block.members[0]] += visible(shared, place, window)
    for row, (prefix, own) in enumerate(sequences):
        newest = prefix + own
        first = 0 if window is None else max(0, newest - window + 1)
        assert sorted(seen[row]) == list(range(first, newest + 1))


def visible(part: UnsharedPart | PrefixPart, entry: int, window: int | None) -> list[int]:
    bias = part.bias(window)[entry, 0, 0]
    assert ((bias == 0) | (bias < -1e30)).all()
    return (bias == 0).nonzero()[:, 0].tolist()
