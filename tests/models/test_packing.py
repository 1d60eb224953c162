"""Packed rows: which tokens see which, and how sequences share blocks."""

import pytest
import torch

from tramontane.models.packing import Packing, VarlenLayout, pack, recurring, upload

# (lengths, the sequence that each continues)
LAYOUTS = [
    ([1], [None]),
    ([5, 4, 6], [None, None, None]),
    ([3, 2, 4, 1], [None, 0, 0, None]),
    ([2, 7, 1, 3, 5, 5], [None, None, 0, 1, 1, 1]),
    ([33, 70, 31, 4, 1], [None, None, None, 0, 2]),
    ([70, 2, 70, 3, 80], [None, 0, 0, None, 3]),
]
SPANS = {0: [(0, 2)], 1: [(1, 2), (2, 4)], 2: [(0, 3)]}  # the second layout's, by sequence


def visible(layout, window=None, chunk=None, mutual=None):
    """The places that each place of the row sees, by the definition of causal attention."""
    lengths, continues = layout
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    seen = []
    for i, context in enumerate(continues):
        before = 0 if context is None else lengths[context]
        places = [starts[context] + t for t in range(before)] if before else []
        places += range(starts[i], starts[i] + lengths[i])
        for t in range(before, before + lengths[i]):
            near = [p for p in range(t + 1) if not chunk or p // chunk == t // chunk]
            for start, end in (mutual or {}).get(i, ()):
                if start <= t - before < end:
                    near += range(t + 1, before + end)
            seen.append([places[p] for p in near if not window or t - p < window])
    return seen


def seen_in_blocks(packing, window=None, heads=2):
    """The same, as the blocks' places and masks have it."""
    ids = torch.arange(sum(packing.lengths) * heads).view(-1, heads, 1)
    parts, seen = ids.split(packing.sizes), []
    for part, block in zip(parts, packing.blocks, strict=True):
        keys = part if block.context is None else torch.cat([parts[block.context], part])
        padded = block.key_places(heads).pad(keys)[..., 0].unsqueeze(2)
        mask = block.mask(window)
        assert mask.shape == (block.longest, block.keys)
        assert torch.equal(block.bias(window, torch.float64).exp(), mask.double())
        places = block.query_places(heads)
        assert torch.equal(places.unpad(places.pad(part)), part)
        rows = places.unpad(padded.where(mask, -1))
        for head in range(heads):  # every head sees the same tokens
            own = [sorted((x[x >= 0] // heads).tolist()) for x in rows[:, head]]
            assert all(((x < 0) | (x % heads == head)).all() for x in rows[:, head])
            assert not head or own == seen[-len(own) :]
            seen += [] if head else own
    return seen


@pytest.mark.parametrize("short", [512, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_token_sees_its_sequence_so_far_and_what_it_continues(layout, short, monkeypatch):
    monkeypatch.setattr("tramontane.models.packing.SHORT", short)
    for window in (None, 1, 3):
        assert seen_in_blocks(Packing(*layout), window) == visible(layout, window)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_chunks_divide_a_sequence_with_what_it_continues(layout):
    packing = Packing(*layout)
    for size in (1, 2, 3, 64):
        assert seen_in_blocks(packing.in_chunks(size)) == visible(layout, chunk=size)
    assert packing.in_chunks(2) is packing.in_chunks(2) is not packing.in_chunks(3)


def test_spans_see_each_other_in_both_directions():
    layout = LAYOUTS[1]
    packing = Packing(*layout).seeing([(0, 2), (6, 7), (7, 9), (9, 12)])
    assert packing.mutual == SPANS
    for window in (None, 2):
        assert seen_in_blocks(packing, window) == [
            sorted(x) for x in visible(layout, window, mutual=SPANS)
        ]
    windowed = Packing(*layout).seeing([(0, 2), (6, 7), (7, 9), (9, 12)], in_windows=True)
    assert seen_in_blocks(windowed) == visible(layout)
    assert seen_in_blocks(windowed, 2) == seen_in_blocks(packing, 2)


def test_a_span_of_a_sequence_that_continues_another_counts_from_its_own_start():
    layout = ([3, 5, 5], [None, 0, 0])
    packing = Packing(*layout).seeing([(4, 7)])
    mutual = {1: [(1, 4)]}
    assert packing.mutual == mutual
    assert seen_in_blocks(packing) == [sorted(x) for x in visible(layout, mutual=mutual)]


def blocks(lengths, continues=None):
    packing = Packing(lengths, continues or [None] * len(lengths))
    assert [sum(block.lengths) for block in packing.blocks] == packing.sizes
    return [block.lengths for block in packing.blocks]


def test_neighbors_share_a_block_while_padding_costs_less_than_another_block():
    """Scores of padding, 100² − 73², against 4096 and an eighth of the second's own 73²."""
    assert blocks([100, 73]) == [[100, 73]]
    assert blocks([100, 72]) == [[100], [72]]
    assert blocks([69, 100]) == [[69, 100]]  # now the first one is padded
    assert blocks([68, 100]) == [[68], [100]]
    assert blocks([69, 69, 100]) == [[69, 69], [100]]  # two are
    assert blocks([100, 100, 73]) == [[100, 100, 73]]
    assert blocks([100, 73, 72]) == [[100, 73], [72]]
    assert blocks([10, 64]) == [[10, 64]]
    assert blocks([64, 1, 1]) == [[64, 1, 1]]  # 4095
    assert blocks([64, 0]) == [[64, 0]]  # exactly 4096
    assert blocks([65, 1]) == [[65], [1]]


def test_padding_costs_more_behind_a_longer_context():
    """60 rows more or less, each with scores of the 100 tokens that both continue."""
    assert blocks([100, 60, 30], [None, 0, 0]) == [[100], [60], [30]]
    assert blocks([100, 60, 36], [None, 0, 0]) == [[100], [60, 36]]
    assert blocks([100, 60, 35], [None, 0, 0]) == [[100], [60], [35]]
    assert blocks([100, 33, 60], [None, 0, 0]) == [[100], [33, 60]]
    assert blocks([100, 32, 60], [None, 0, 0]) == [[100], [32], [60]]
    assert blocks([100, 60, 60], [None, 0, 0]) == [[100], [60, 60]]


def test_a_sequence_that_others_continue_or_with_spans_has_a_block_of_its_own():
    assert blocks([5, 5, 5, 5], [None, None, None, 1]) == [[5], [5], [5], [5]]
    assert blocks([5, 5, 5, 5, 5], [None, None, 0, 1, 1]) == [[5], [5], [5], [5, 5]]
    packing = Packing([5, 5, 5, 5], [None] * 4, mutual={1: [(0, 2)]})
    assert packing.sizes == [5, 5, 10]
    assert [list(block.mutual) for block in packing.blocks] == [[], [(0, 2)], []]
    assert packing.blocks[1].mask(None)[0].sum() == 2  # in all layers


def test_short_blocks_are_those_of_few_keys_on_a_cpu_and_are_rounded_up():
    packing = Packing([512, 12, 513, 300, 300, 212, 213], [None] * 5 + [3, 4])
    assert [index for index, _ in packing.short] == [0, 1, 3, 4, 5]
    assert [index for index, _ in packing.long] == [2, 6]  # 213 behind 300
    assert all(block is packing.blocks[i] for i, block in packing.short + packing.long)
    assert [(block.longest, block.keys) for block in packing.blocks] == [
        (512, 512), (32, 32), (513, 513), (320, 320), (320, 320), (224, 544), (213, 513),
    ]  # fmt: skip
    (_, block) = Packing([33, 20], [None, 0]).blocks
    assert (block.longest, block.keys, block.before) == (32, 96, 33)  # 33 + 32, rounded up
    elsewhere = Packing([12], [None], "meta")
    (block,) = elsewhere.blocks
    assert (elsewhere.short, block.longest, block.keys) == ([], 12, 12)
    assert elsewhere.in_chunks(5).device.type == "meta"


def test_what_layers_share_is_made_once():
    packing = Packing([3, 2], [None, 0])
    block = packing.blocks[1]
    assert block.bias(2, torch.float32) is block.bias(2, torch.float32)
    assert block.bias(2, torch.float32) is not block.bias(3, torch.float32)
    assert block.bias(2, torch.bfloat16).dtype == torch.bfloat16
    assert block.query_places(2) is block.query_places(2) is not block.query_places(1)
    assert block.key_places(2) is block.key_places(2) is not block.query_places(2)
    assert packing.varlen is packing.varlen
    assert (packing.exchange, packing.added) == (None, ())
    exchange = object()
    shared = packing.shared_by(exchange)
    assert shared.exchange is exchange and shared.blocks is packing.blocks
    assert packing.exchange is None


def test_padding_repeats_the_last_token_and_can_be_cleared():
    (block,) = Packing([2, 3], [None, None]).blocks
    places = block.query_places(1)
    x = torch.tensor([[1.0, -1], [2, -2], [3, -3], [4, -4], [5, -5]])[:, None]
    padded = places.pad(x)
    assert padded.shape == (block.batch, 1, block.longest, 2) == (2, 1, 32, 2)
    assert padded[:, 0, :4, 0].tolist() == [[1, 2, 2, 2], [3, 4, 5, 5]]
    assert torch.equal(padded[..., 0], -padded[..., 1])
    assert places.clear(padded) is padded
    assert padded[:, 0, :4, 0].tolist() == [[1, 2, 0, 0], [3, 4, 5, 0]]
    assert padded.abs().sum() == 30
    out = torch.zeros(5, 1, 2)
    assert places.unpad(padded, out) is out
    assert torch.equal(out, x)


def test_shared_tokens_come_first_in_each_row_and_are_not_given_back():
    _, block = Packing([2, 1, 2], [None, 0, 0]).blocks
    places = block.key_places(2)
    x = torch.arange(10).view(5, 2, 1)
    padded = places.pad(x)
    assert padded[:, 0, :5, 0].tolist() == [[0, 2, 4, 4, 4], [0, 2, 6, 8, 8]]
    assert padded[:, 1, :5, 0].tolist() == [[1, 3, 5, 5, 5], [1, 3, 7, 9, 9]]
    assert torch.equal(places.unpad(padded), x[2:])
    assert places.clear(padded.clone()).sum() == x[2:].sum()


def test_a_row_and_its_positions():
    row = pack([[5, 6, 7], [8], [9, 10]], continues=[None, None, 0])
    assert row["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 3, 4]]
    assert row["input_ids"].dtype == row["position_ids"].dtype == torch.int64
    assert row["use_cache"] is False
    packing = row["packing"]
    assert (packing.lengths, packing.continues) == ([3, 1, 2], [None, None, 0])
    assert packing.device == torch.device("cpu")
    assert packing.longest == 5
    assert Packing([3, 4, 1], [None, None, 0]).longest == Packing([3, 4], [None, None]).longest == 4
    assert pack([[1, 2], [3]], "meta")["packing"].device.type == "meta"
    assert pack([[1, 2], [3]])["position_ids"].tolist() == [[0, 1, 0]]
    assert pack([[], [1, 2]])["input_ids"].dtype == torch.int64
    ids = torch.ones(2)
    assert upload(ids, torch.device("cpu")) is ids


def test_the_layout_for_kernels_without_padding():
    layout = Packing([3, 2, 4], [None, 0, None]).varlen
    assert layout.keys.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert layout.query_ends.tolist() == [0, 3, 5, 9]
    assert layout.key_ends.tolist() == [0, 3, 8, 12]
    assert layout.query_ends.dtype == layout.key_ends.dtype == torch.int32
    assert (layout.longest_query, layout.longest_key) == (4, 5)
    second = Packing([2, 3, 1], [None, None, 1]).varlen
    assert second.keys.tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5]
    assert Packing([3, 2], [None, None]).varlen.keys is None
    cached = VarlenLayout([1, 2], [None, None], torch.device("cpu"), [10, 3])
    assert cached.keys is None and cached.key_ends.tolist() == [0, 11, 16]
    assert (cached.longest_query, cached.longest_key) == (2, 11)


def test_recurring_sizes():
    """Steps of a 32nd of an octave: 1 up to 63, 2 up to 127, 16 up to 1023."""
    sizes = [recurring(n) for n in (0, 1, 63, 64, 65, 127, 1000, 1023, 5000)]
    assert sizes == [0, 1, 63, 64, 66, 128, 1008, 1024, 5120]
    assert {type(size) for size in sizes} == {int}
    assert [recurring(n, 8) for n in (15, 17, 31, 33)] == [15, 18, 32, 36]
