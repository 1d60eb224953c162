"""The lanes' bookkeeping: whatever comes, grows and goes, everyone keeps their own keys."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tramontane.generator.cache import Layout, PackedCache, Prefix, SlotCache

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
            st.tuples(st.just("come"), st.lists(st.integers(0, 150), min_size=1, max_size=6)),
            st.tuples(st.just("go"), st.lists(st.integers(0, 7), min_size=1, max_size=5)),
            st.tuples(st.just("step"), st.integers(1, 30)),
        ),
        max_size=20,
    )
)
@example([("come", [5, 5, 5, 50]), ("go", [1, 2])])
def test_everyone_keeps_their_own_keys(events):
    slots, max_len = 8, 200
    cache = SlotCache(make_layout(), slots, max_len)
    lengths: dict[int, int] = {}
    next_row = 0
    for kind, n in events:
        if kind == "come":
            for length in n[: slots - len(lengths)]:
                cache.lane_for(length).append([next_row], written(next_row, length))
                lengths[next_row] = length
                next_row += 1
        elif kind == "go":
            leave(cache, {b for b in n if b < len(lengths)}, lengths)
        elif kind == "step":
            for _ in range(n):
                decode_one(cache, lengths)
        assert sorted(cache.rows) == sorted(lengths)
        for lane in cache.lanes:
            for place, row in enumerate(lane.rows):
                assert lengths[row] < lane.capacity
                for plane, expected in zip(
                    lane.read(place, lengths[row]).planes,
                    written(row, lengths[row]).planes,
                    strict=True,
                ):
                    assert torch.equal(plane, expected)
                assert all(s[:, place].isfinite().all() for s in lane.stacks)


def leave(cache: SlotCache, gone: set[int], lengths: dict[int, int]) -> None:
    rows = cache.rows
    cache.end([lengths[r] for r in rows], sorted(gone), [])
    for b in gone:
        del lengths[rows[b]]


def decode_one(cache: SlotCache, lengths: dict[int, int]) -> None:
    """One token for everyone, by the calls that a model and the engine make."""
    rows = cache.rows
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
    cache.end([lengths[r] for r in rows], gone, full)
    for b in gone:
        del lengths[rows[b]]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 63), min_size=1, max_size=5),
    st.one_of(st.none(), st.integers(1, 70)),
)
def test_bias_shows_a_token_itself_its_past_and_no_more_than_the_window(lengths, window):
    cache = SlotCache(make_layout(), 5, 64)
    for row, n in enumerate(lengths):
        cache.lane_for(n).append([row], written(row, n))
    step = cache.begin(torch.tensor(lengths))
    (segment,) = step.segments
    bias = segment.bias(window)
    assert bias.shape == (len(lengths), 1, 1, 64)
    for b, n in enumerate(lengths):
        seen = (bias[b, 0, 0] == 0).nonzero()[:, 0].tolist()
        assert seen == list(range(0 if window is None else max(0, n - window + 1), n + 1))
        assert bias[b, 0, 0].isneginf().sum() == 64 - len(seen)
