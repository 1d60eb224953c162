"""Paired comparison: exact p-values and intervals."""

import math
import time
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tramontane.evaluation.paired import counts_of, paired_difference, sign_flip_p_value


@given(st.lists(st.integers(-6, 6), min_size=1, max_size=10))
def test_the_p_value_is_that_of_all_changes_of_sign(differences):
    sums = [
        sum(s * d for s, d in zip(signs, differences, strict=True))
        for signs in product((1, -1), repeat=len(differences))
    ]
    expected = np.mean([abs(total) >= abs(sum(differences)) for total in sums])
    assert sign_flip_p_value(np.array(differences)) == pytest.approx(expected)


def test_large_differences_have_the_p_value_of_the_normal_distribution():
    """61 against 64 samples have the common denominator 3,904: a sum has millions of values."""
    rng = np.random.default_rng(0)
    differences = 64 * rng.integers(0, 62, 500) - 61 * rng.integers(0, 65, 500)
    began = time.process_time()
    found = sign_flip_p_value(differences)
    assert time.process_time() - began < 10
    z = abs(differences.sum()) / np.sqrt((differences.astype(float) ** 2).sum())
    assert found == pytest.approx(math.erfc(z / math.sqrt(2)), abs=2e-3)


def counts(*right, n=4):
    return {f"p{i}": (c, n) for i, c in enumerate(right)}


def test_a_difference_by_hand():
    found = paired_difference(counts(0, 1, 2, 4), counts(1, 3, 2, 4))
    assert found.value == pytest.approx((1 / 4 + 2 / 4) / 4)
    assert (found.better, found.worse, found.n_problems) == (2, 0, 4)
    # Of the four signs of the two problems that differ, ++ and −− are as large as what was seen.
    assert found.p_value == pytest.approx(0.5)
    spread = np.std([1 / 4, 2 / 4, 0, 0], ddof=1)
    # Student's 0.975 quantile at 3 degrees of freedom
    assert found.high - found.value == pytest.approx(3.1824 * spread / 2, rel=2e-3)


def test_different_numbers_of_samples():
    found = paired_difference(counts(1, 2, n=2), counts(3, 3, n=3))
    assert found.value == pytest.approx(0.25)
    assert found.p_value == 1.0


def test_exchanging_the_models_changes_the_sign_alone():
    one, two = counts(0, 1, 4, 2, 3), counts(2, 2, 3, 4, 4)
    there, back = paired_difference(one, two), paired_difference(two, one)
    assert back.value == -there.value
    assert (back.low, back.high) == (-there.high, -there.low)
    assert back.p_value == there.p_value
    assert (back.better, back.worse) == (there.worse, there.better)


def test_models_that_agree_on_every_problem():
    found = paired_difference(counts(*[2] * 50), counts(*[2] * 50))
    assert (found.value, found.p_value) == (0, 1)
    assert found.low == -found.high and 0.05 < found.high < 0.1  # not a point


def test_intervals_cover_and_p_values_are_uniform():
    """Equal models: 95 % of intervals hold 0, and p is below 0.05 in at most 5 % of draws."""
    rng = np.random.default_rng(0)
    covered, small = 0, 0
    for _ in range(400):
        ability = rng.beta(0.5, 0.5, size=60)
        one, two = (counts(*rng.binomial(4, ability)) for _ in range(2))
        found = paired_difference(one, two)
        covered += found.low <= 0 <= found.high
        small += found.p_value < 0.05
    assert covered >= 0.92 * 400
    assert small <= 0.08 * 400


def test_problems_of_one_model_alone_are_named():
    with pytest.raises(ValueError, match="1 problems .* e.g. 'p2'"):
        paired_difference(counts(1, 1), counts(1, 1, 1))


def test_counts_of_rows():
    rows = [
        {"problem_id": "a", "verdict": "right"},
        {"problem_id": "a", "verdict": "unscorable"},
        {"problem_id": "b", "verdict": "wrong"},
    ]
    assert counts_of(rows) == {"a": (1, 2), "b": (0, 1)}
