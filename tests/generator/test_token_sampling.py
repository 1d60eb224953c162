"""Random numbers and draws: the right distribution, and nobody else's numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tramontane.generator.sampling import invert, sample, streams, uniforms


def draw(logits, n, temperature=1.0, top_p=1.0, top_k=0, seed=0):
    """`n` draws from one distribution: tokens and log-probs."""
    at = torch.arange(n)
    return sample(
        logits.expand(n, -1).clone(),
        uniforms(streams([seed]).expand(n), at),
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


@pytest.mark.parametrize("what", ["positions of a seed", "seeds at a position", "both"])
def test_uniforms_are_uniform(what):
    n = 64_000
    one = torch.zeros(n, dtype=torch.int64)
    if what == "positions of a seed":
        u = uniforms(streams([42]).expand(n), torch.arange(n))
    elif what == "seeds at a position":
        u = uniforms(streams(list(range(n))), one)
    else:
        u = uniforms(
            streams(list(range(250))).repeat(256), torch.arange(256).repeat_interleave(250)
        )
    assert (u >= 0).all()
    assert (u < 1).all()
    assert len(u.unique()) == n
    assert_frequencies((u * 64).long(), torch.full((64,), 1 / 64))
    # Neighbours know nothing of each other.
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


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_invert_at_the_ends(u):
    mass = torch.zeros(1, 300)
    mass[0, [70, 200]] = torch.tensor([0.3, 0.7])
    expected = 70 if u == 0 else 200
    assert invert(mass, torch.tensor([u], dtype=torch.float64)).tolist() == [expected]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_softmax(temperature):
    logits = torch.linspace(-1.5, 1.5, 90)[torch.randperm(90)]
    tokens, logprobs = draw(logits, 200_000, temperature)
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
    tokens, logprobs = draw(logits, 20_000, top_p=top_p, top_k=top_k)
    expected = torch.zeros(4)
    expected[order[kept]] = probs[kept] / probs[kept].sum()
    assert set(tokens.tolist()) == set(order[kept].tolist())
    if len(kept) > 1:
        assert_frequencies(tokens, expected)
    # Log-probs are of the whole distribution: nothing is renormalised.
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[tokens], atol=1e-5, rtol=0)


def test_greedy_takes_the_largest_and_says_its_raw_logprob():
    torch.manual_seed(0)
    logits = torch.randn(50, 1000)
    off = torch.zeros(50, dtype=torch.int64)
    tokens, logprobs = sample(
        logits, torch.rand(50).double(), torch.zeros(50), torch.full((50,), 0.3), off + 2
    )
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).amax(-1), atol=1e-5, rtol=0)


def test_a_draw_is_the_same_whatever_its_neighbours_ask_for():
    torch.manual_seed(1)
    logits, u = torch.randn(60, 500) * 2, torch.rand(60).double()
    temperature = torch.tensor([1.0, 0.0, 0.6]).repeat(20)
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.8]).repeat(15)
    top_k = torch.tensor([0, 0, 0, 0, 10]).repeat(12)
    tokens, logprobs = sample(logits, u, temperature, top_p, top_k)
    for i in range(60):
        row = slice(i, i + 1)
        token, logprob = sample(logits[row], u[row], temperature[row], top_p[row], top_k[row])
        assert token == tokens[i]
        assert logprob == logprobs[i]
