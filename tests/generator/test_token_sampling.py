"""Random numbers and draws: the right distribution, independent of other requests."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tramontane.generator import sampling
from tramontane.generator.sampling import (
    DrawPlan,
    _draw_truncated,
    invert,
    sample,
    streams,
    uniforms,
)
from tramontane.types import SamplingParams


def draw(logits, n, temperature=1.0, top_p=1.0, top_k=0, seed=0):
    """`n` draws from one distribution."""
    return sample(
        logits.expand(n, -1).clone(),
        uniforms(streams([seed]).expand(n), torch.arange(n)),
        torch.full((n,), float(temperature)),
        torch.full((n,), float(top_p)),
        torch.full((n,), top_k),
    )


def assert_frequencies(tokens, probs, significance=4.5):
    """Pearson's chi-square of the drawn tokens, as a z-score (Wilson-Hilferty)."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0].double() * len(tokens)
    assert expected.min() > 5
    chi2 = float(((counts[probs > 0] - expected) ** 2 / expected).sum())
    k = len(expected) - 1
    z = ((chi2 / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    assert abs(z) < significance


def test_known_values_of_splitmix64():
    """The first outputs for state 1234567, as in the generator's published test vectors."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    got = uniforms(torch.full((3,), 1234567), torch.arange(3))
    assert got.tolist() == [(x >> 11) / 2**53 for x in expected]


def test_a_stream_begins_with_the_first_output_of_its_seed():
    """So that neighboring seeds have unrelated streams."""
    first = {0: 0xE220A8397B1DCDAF, 1234567: 6457827717110365317}
    got = streams(list(first))
    assert [s % 2**64 for s in got.tolist()] == list(first.values())


@pytest.mark.parametrize("varied", ["positions of a seed", "seeds at a position", "both"])
def test_uniforms_are_uniform(varied):
    n = 64_000
    if varied == "positions of a seed":
        u = uniforms(streams([42]).expand(n), torch.arange(n))
    elif varied == "seeds at a position":
        u = uniforms(streams(list(range(n))), torch.zeros(n, dtype=torch.int64))
    else:
        u = uniforms(
            streams(list(range(250))).repeat(256), torch.arange(256).repeat_interleave(250)
        )
    assert (u >= 0).all()
    assert (u < 1).all()
    assert len(u.unique()) == n
    assert_frequencies((u * 64).long(), torch.full((64,), 1 / 64))
    # Neighbors are independent.
    pairs = (u[:-1] * 8).long() * 8 + (u[1:] * 8).long()
    assert_frequencies(pairs, torch.full((64,), 1 / 64))


@given(st.integers(-(2**80), 2**80), st.integers(0, 10**6))
def test_uniform_is_a_function_of_seed_and_position(seed, position):
    u = uniforms(streams([seed, 5]), torch.tensor([position, 7]))
    assert u[0] == uniforms(streams([seed]), torch.tensor([position]))[0]
    assert u[0] != uniforms(streams([seed]), torch.tensor([position + 1]))[0]
    assert u[0] != uniforms(streams([seed + 1]), torch.tensor([position]))[0]


@given(
    st.lists(st.sampled_from([0.0, 1e-12, 1e-6, 0.1, 1.0, 7.0]), min_size=1, max_size=200),
    st.floats(0, 1, exclude_max=True),
)
def test_invert_finds_the_token_at_that_mass(weights, u):
    mass = torch.tensor(weights)
    if mass.sum() == 0:
        return
    token = int(invert(mass[None], torch.tensor([u], dtype=torch.float64))[0])
    edges = np.cumsum(mass.double().numpy())
    slack = 1e-6 * edges[-1]  # float32 sums of blocks
    assert weights[token] > 0
    assert edges[token] >= u * edges[-1] - slack
    assert (edges[token - 1] if token else 0) <= u * edges[-1] + slack


def exact_masses(vocab: int, seed: int) -> torch.Tensor:
    """[vocab] integers that sum to 2^16, so that sums and uniforms at the edges are exact. Two
    thirds of the tokens have no mass, among them whole blocks of 64 and runs at both ends."""
    generator = torch.Generator().manual_seed(seed)
    masses = torch.randint(1, 20, (vocab,), generator=generator)
    masses[torch.rand(vocab, generator=generator) < 0.5] = 0
    for first, last in ((0, 3), (128, 256), (vocab - 5, vocab))[: seed + 1]:
        masses[first:last] = 0
    heaviest = int(masses.argmax())
    masses[heaviest] += 2**16 - int(masses.sum())
    return masses.float()


# Vocabularies in blocks of 64 tokens, with and without a last block that is not full.
@pytest.mark.parametrize("vocab", [513, 575, 576, 577, 1000, 1024, 2049])
def test_invert_of_a_large_vocabulary_is_the_exact_inverse(vocab):
    """Every token of every row owns precisely the uniforms from its lower to its upper edge."""
    rows, uniform, expected = [], [], []
    for seed in range(3):
        masses = exact_masses(vocab, seed)
        edges = masses.double().cumsum(0) / 2**16
        tokens = masses.nonzero()[:, 0]
        lower, upper = edges[tokens] - masses[tokens] / 2**16, edges[tokens]
        for u in (lower, (lower + upper) / 2, upper - 2**-40):
            rows.append(masses.expand(len(tokens), -1))
            uniform.append(u)
            expected.append(tokens)
    drawn = invert(torch.cat(rows), torch.cat(uniform))
    assert torch.equal(drawn, torch.cat(expected))
    # Rows in another order: none depends on its neighbors.
    order = torch.randperm(len(drawn), generator=torch.Generator().manual_seed(0))
    shuffled = invert(torch.cat(rows)[order], torch.cat(uniform)[order])
    assert torch.equal(shuffled, drawn[order])


def test_invert_draws_no_token_without_mass():
    """Rounding draws no such token either: masses span 26 orders of magnitude, and the first and
    last tokens of each block have no mass."""
    generator = torch.Generator().manual_seed(0)
    masses = torch.exp(torch.randn(200, 1000, generator=generator) * 15).clamp(1e-13, 1e13)
    masses[:, ::64] = masses[:, 1::64] = masses[:, 63::64] = masses[:, 990:] = 0
    edges = masses.double().cumsum(1)
    for column in range(63, 960, 64):
        edge = (edges[:, column] / edges[:, -1]).clamp_max(1 - 2**-53)
        for u in (edge, (edge - 2**-53).clamp_min(0), (edge + 2**-53).clamp_max(1 - 2**-53)):
            drawn = invert(masses, u)
            assert (masses.gather(1, drawn[:, None]) > 0).all()


@pytest.mark.parametrize("vocab", [300, 600, 640])
def test_invert_at_the_ends(vocab):
    masses = torch.zeros(1, vocab)
    masses[0, [70, 200, vocab - 30]] = torch.tensor([0.3, 0.5, 0.2])
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert invert(masses.expand(2, -1), ends).tolist() == [70, vocab - 30]


@pytest.mark.parametrize("vocab", [642, 700, 704])
def test_invert_stays_inside_a_block_whose_sum_was_rounded_up(vocab):
    """1 and 0.75 · 2^-23 sum to 1 + 2^-23 in float32: more than the block's tokens have. The last
    of them is drawn at the upper end, not a later token or one past the vocabulary."""
    masses = torch.zeros(1, vocab)
    masses[0, 640], masses[0, 641] = 1.0, 0.75 * 2**-23
    assert masses[0, 640:642].sum() == 1 + 2**-23
    assert invert(masses, torch.tensor([1 - 2**-53], dtype=torch.float64)).tolist() == [641]


def test_invert_stays_inside_a_block_whose_lower_edge_was_rounded_up():
    """0.75 · 2^-28 and 2^24 sum to 2^24 + 2^-28 in float64, so the second block seems to begin at
    2^-28. A target in between belongs to it, and is not drawn as its first token, of mass 0."""
    masses = torch.zeros(1, 600)
    masses[0, 5], masses[0, 70] = 0.75 * 2**-28, 2.0**24
    uniform = torch.tensor([0.8 * 2**-52], dtype=torch.float64)
    assert invert(masses, uniform).tolist() == [70]


def test_rare_tokens_of_a_large_vocabulary_keep_their_probabilities():
    """Ten tokens of 2^-40 after one of 1, in blocks of their own: float32 sums would lose them."""
    rare = torch.arange(100, 1100, 100)
    masses = torch.zeros(1, 1200)
    masses[0, 0], masses[0, rare] = 1.0, 2.0**-40
    total = 1 + 10 * 2.0**-40
    uniform = (1 + (torch.arange(10).double() + 0.5) * 2.0**-40) / total
    assert invert(masses.expand(10, -1), uniform).tolist() == rare.tolist()


def test_rare_tokens_of_a_small_vocabulary_keep_their_probabilities():
    """Each has a share of 1e-9, less than the precision of a float32 sum."""
    masses = torch.tensor([[1.0, 1e-9, 1e-9, 1e-9]])
    total = masses.double().sum()
    uniform = 1 - (torch.tensor([2.5, 1.5, 0.5], dtype=torch.float64) * 1e-9) / total
    assert invert(masses.expand(3, -1), uniform).tolist() == [1, 2, 3]


@given(st.floats(2.0**-20, 2.0**20, width=32))
def test_the_largest_uniform_draws_the_last_token_with_mass(mass):
    masses = torch.tensor([[1.0, mass, 0.0]])
    assert invert(masses, torch.tensor([1 - 2**-53], dtype=torch.float64)).tolist() == [1]


def test_rare_tokens_after_a_likely_one_of_their_block_keep_their_probabilities():
    """62 tokens of 2^-24 after one of 1: a running float32 sum would stay at 1."""
    masses = torch.zeros(1, 1200)
    masses[0, 64], masses[0, 65:127], masses[0, 1000] = 1.0, 2.0**-24, 2.0**20
    ranks = torch.arange(1, 30).double()
    uniform = (1 + (ranks - 0.5) * 2.0**-24) / (2.0**20 + 1 + 62 * 2.0**-24)
    assert invert(masses.expand(29, -1), uniform).tolist() == list(range(65, 94))


def test_top_p_and_top_k_in_a_large_vocabulary():
    """The same draws with shapes that depend on values and with fixed ones."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(400, 1000, generator=generator) * 3
    uniform = torch.rand(400, generator=generator).double()
    top_p = torch.tensor([0.5, 1.0, 0.9, 1.0]).repeat(100)
    top_k = torch.tensor([0, 7, 30, 0]).repeat(100)
    results = [
        sample(
            logits,
            uniform,
            torch.ones(400),
            top_p,
            top_k,
            DrawPlan(recorded=50, static_shapes=static),
        )
        for static in (False, True)
    ]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    for row, token in enumerate(results[0][0].tolist()):
        probs, ids = logits[row].softmax(-1).double().sort(descending=True)
        k = int(top_k[row]) or 1000
        kept = probs[:k]
        if top_p[row] < 1:
            kept = kept[kept.cumsum(0) - kept < float(top_p[row]) * kept.sum()]
        edges = kept.cumsum(0) / kept.sum()
        place = ids[: len(kept)].tolist().index(token)
        if top_k[row] or top_p[row] < 1:  # drawn from the sorted tokens, by the same uniform
            below = edges[place - 1] if place else 0.0
            assert below - 1e-6 <= uniform[row] <= edges[place] + 1e-6
            share = float(kept[place] / kept.sum())
            assert results[0].logprobs[row].exp() == pytest.approx(share, abs=1e-6)
            recorded = [*ids[: len(kept)][:50].tolist(), *[-1] * 50][:50]
            assert results[0].allowed[row].tolist() == recorded
        else:
            assert (results[0].allowed[row] == -1).all()


def test_rows_are_drawn_in_parts(monkeypatch):
    """The same draws, and no part has more logits than are allowed."""
    logits = torch.randn(50, 700, generator=torch.Generator().manual_seed(4)).bfloat16()
    uniform = torch.rand(50, generator=torch.Generator().manual_seed(5)).double()
    temperature = torch.linspace(0, 2, 50)
    columns = uniform, temperature, torch.full((50,), 0.9), torch.arange(50)
    whole = sample(logits, *columns)
    monkeypatch.setattr(sampling, "DRAWN_ENTRIES", 9 * 700 + 5)
    sizes = []

    def noted(part, *rest):
        sizes.append(len(part))
        return sampling.draw(part, *rest)

    for one, other in zip(sample(logits, *columns, draw=noted), whole, strict=True):
        assert torch.equal(one, other)
    assert sizes == [9] * 5 + [5]


@pytest.mark.parametrize(("vocab", "temperature"), [(90, 1.0), (90, 0.5), (90, 2.0), (700, 1.0)])
def test_draws_follow_the_softmax(vocab, temperature):
    draws = 200_000 if vocab == 90 else 60_000
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(0))
    logits = torch.linspace(-1.5, 1.5, vocab)[order]
    tokens, logprobs, _ = draw(logits, draws, temperature)
    expected = torch.log_softmax(logits / temperature, -1)
    assert_frequencies(tokens, expected.exp())
    torch.testing.assert_close(logprobs, expected[tokens], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (0.69, 0, [0, 1]),
        (0.71, 0, [0, 1, 2]),
        (1.0, 3, [0, 1, 2]),
        (1.0, 1, [0]),
        (0.01, 0, [0]),
        (0.75, 3, [0, 1]),  # three quarters of what top-k leaves, 0.675 of 0.9
        (1.0, 9, [0, 1, 2, 3]),
    ],
)
def test_top_p_and_top_k_keep_their_sets(top_p, top_k, kept):
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    order = torch.tensor([2, 0, 3, 1])
    logits = torch.empty(4)
    logits[order] = probs.log()
    tokens, logprobs, _ = draw(logits, 20_000, top_p=top_p, top_k=top_k)
    expected = torch.zeros(4)
    expected[order[kept]] = probs[kept] / probs[kept].sum()
    assert set(tokens.tolist()) == set(order[kept].tolist())
    if len(kept) > 1:
        assert_frequencies(tokens, expected)
    # Log-probs are of the distribution that was drawn from.
    torch.testing.assert_close(logprobs, expected[tokens].log(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("sampling", "plan"),
    [
        ({}, (False, False, False)),
        ({"temperature": 0.5}, (True, False, False)),
        ({"top_p": 0.9}, (False, True, False)),
        ({"top_k": 1}, (False, True, False)),
        ({"temperature": 0.5, "top_k": 3}, (True, True, False)),
        ({"temperature": 0.0, "top_p": 0.9, "top_k": 3}, (True, False, True)),
    ],
)
@pytest.mark.parametrize("static_shapes", [False, True])
def test_a_plan_has_what_some_row_requires(sampling, plan, static_shapes):
    """Scaled, truncated, greedy; a greedy row is not truncated. With static shapes there are only
    two plans, since each takes a recording."""
    for others in (0, 1):  # rows that require nothing change nothing
        params = [SamplingParams(9)] * others + [SamplingParams(9, **sampling)]
        expected = DrawPlan(True, plan[1], True, True) if static_shapes else DrawPlan(*plan)
        assert DrawPlan.of(params, static_shapes) == expected


TINY = [0.0, 1e-300, 1e-46, 1e-45, 1e-40, 1e-38, 1.2e-38, 1e-30, 1e-8]


@pytest.mark.parametrize("vocab", [90, 700])
@pytest.mark.parametrize("static_shapes", [False, True])
@pytest.mark.parametrize("key", ["temperature", "top_p"])
def test_the_smallest_values_draw_the_likeliest_token(vocab, static_shapes, key):
    """A quotient by 1e-38 is beyond float32's range, and 1 - 1e-8 is 1 in float32."""
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))
    row = torch.linspace(-30, 30, vocab)[order]
    row[order == 3] = -torch.inf  # a masked token
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    for value in TINY if key == "temperature" else TINY[1:]:
        params = SamplingParams(9, **{key: value})
        column = torch.ones(3)
        tokens, logprobs, _ = sample(
            row.expand(3, -1).clone(),
            uniform,
            column * params.temperature,
            column * params.top_p,
            torch.zeros(3, dtype=torch.int64),
            DrawPlan.of([params], static_shapes),
        )
        assert (tokens == row.argmax()).all(), value
        assert logprobs.isfinite().all() and (logprobs <= 0).all()


def last_kept(masses, top_p, top_k=0):
    """The last token that can be drawn, in order of mass, and of number where masses are equal."""
    uniform = torch.tensor([1 - 2**-53], dtype=torch.float64)
    columns = masses[None], uniform, torch.tensor([top_p]), torch.tensor([top_k])
    return int(_draw_truncated(*columns, recorded=0).tokens)


def test_top_p_keeps_the_fewest_tokens_whose_mass_reaches_it():
    """Sums of powers of two are exact, so a mass may equal top-p."""
    masses = torch.tensor([0.5, 0.25, 0.125, 0.125])
    assert [last_kept(masses, p) for p in (0.25, 0.5, 0.75, 0.875)] == [0, 0, 1, 2]
    # Half of the 0.75 that top-k leaves is less than the likeliest token has, two thirds are not.
    assert [last_kept(masses, p, 2) for p in (0.5, 0.67, 1.0)] == [0, 1, 1]


def test_top_p_counts_rare_tokens_exactly():
    """One token of 1 and 1,000 of 2^-25. (1 − 2^-16) of the mass is 1 + 487.98 · 2^-25, which takes
    488 rare tokens; float32 sums near 1 are multiples of 4 · 2^-25."""
    masses = torch.full((1001,), 2.0**-25)
    masses[0] = 1.0
    assert last_kept(masses, 1 - 2.0**-16) == 488


def test_greedy_takes_the_largest_logit_and_reports_its_raw_logprob():
    torch.manual_seed(0)
    logits = torch.randn(50, 1000)
    off = torch.zeros(50, dtype=torch.int64)
    tokens, logprobs, _ = sample(
        logits, torch.rand(50).double(), torch.zeros(50), torch.full((50,), 0.3), off + 2
    )
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).amax(-1), atol=1e-5, rtol=0)


def test_a_draw_does_not_depend_on_its_neighbors_sampling():
    torch.manual_seed(1)
    logits, u = torch.randn(60, 500) * 2, torch.rand(60).double()
    temperature = torch.tensor([1.0, 0.0, 0.6]).repeat(20)
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.8]).repeat(15)
    top_k = torch.tensor([0, 0, 0, 0, 10]).repeat(12)
    tokens, logprobs, _ = sample(logits, u, temperature, top_p, top_k)
    for i in range(60):
        row = slice(i, i + 1)
        token, logprob, _ = sample(logits[row], u[row], temperature[row], top_p[row], top_k[row])
        assert token == tokens[i]
        assert logprob == logprobs[i]


@pytest.mark.parametrize("vocab", [100, 1000, 1024])
def test_a_row_of_nan_draws_a_token_of_the_vocabulary(vocab):
    masses = torch.full((2, vocab), math.nan)
    uniform = torch.tensor([0.0, 0.9], dtype=torch.float64)
    assert (invert(masses, uniform) < vocab).all()
