"""Closed forms for every metric; the intervals' coverage by simulation; exact p-values."""

import math
import time
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.signal import convolve

from tramontane.statistics import (
    MAX_SUBSETS,
    Estimate,
    Z,
    _product,
    counts_of,
    grouped,
    maj_at_k,
    majority,
    mean_interval,
    paired_difference,
    pass_at_k,
    powers_of_two,
    sign_flip_p_value,
    student_quantile,
    wilson,
)


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_mean_over_all_subsets(right: int, k: int) -> None:
    outcomes = [i < right for i in range(5)]
    wins = [any(subset) for subset in combinations(outcomes, k)]
    assert pass_at_k(5, right, k) == pytest.approx(sum(wins) / len(wins), abs=1e-15)


def test_pass_at_k_is_unbiased() -> None:
    n, k, p = 6, 3, 0.3
    mean = sum(
        p ** sum(draw) * (1 - p) ** (n - sum(draw)) * pass_at_k(n, sum(draw), k)
        for draw in product((0, 1), repeat=n)
    )
    assert mean == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize("k", [0, 5])
def test_k_beyond_the_samples_is_an_error(k: int) -> None:
    with pytest.raises(ValueError, match="within 1…4"):
        pass_at_k(4, 2, k)
    with pytest.raises(ValueError, match="within 1…4"):
        maj_at_k(["7"] * 4, [True] * 4, k)


def test_majority_breaks_ties_in_favor_of_the_first_seen() -> None:
    assert majority(["3", "7", "7", "3"]) == "3"
    assert majority([None, "7", "3"]) == "7"
    assert majority([None, None]) is None


def test_majority_of_all_samples() -> None:
    right = [True, False, True, False]
    assert maj_at_k(["7", "3", "7", "5"], right, 4) == 1.0
    assert maj_at_k(["7", "3", "7", "3"], right, 4) == 1.0
    assert maj_at_k(["3", "7", "7", "3"], [False, True, True, False], 4) == 0.0
    # Malformed completions do not vote: a single voice carries it.
    assert maj_at_k([None, None, "7", None], right, 4) == 1.0
    assert maj_at_k([None] * 4, [False] * 4, 4) == 0.0


def test_right_answers_vote_together_however_they_are_written() -> None:
    votes, right = ["2", "x=2", "3", "3", "two"], [True, True, False, False, True]
    assert maj_at_k(votes, right, 5) == 1.0
    assert maj_at_k(votes, [False, False, True, True, False], 5) == 1.0
    assert maj_at_k(["2", "x=2", "3", "3", "3"], [True, True, False, False, False], 5) == 0.0


def test_equal_items_are_grouped_in_order() -> None:
    assert grouped([3, 1, 13, 2, 11], lambda a, b: a % 10 == b % 10) == [[3, 13], [1, 11], [2]]
    assert grouped([], lambda a, b: True) == []


def test_majority_of_fewer_is_the_mean_over_subsets() -> None:
    votes, right = ["7", "3", "7", "3", "3"], [True, False, True, False, False]
    assert maj_at_k(votes, right, 1) == pytest.approx(2 / 5)
    # Pairs: (7,7) wins, (7,3) in this order wins, all else loses.
    wins = sum(votes[i] == "7" for i, j in combinations(range(5), 2))
    assert maj_at_k(votes, right, 2) == pytest.approx(wins / 10)
    assert maj_at_k(votes, right, 5) == 0.0


def test_majority_over_seeded_subsets_repeats_and_is_near_the_truth() -> None:
    rng = np.random.default_rng(0)
    right = [bool(x) for x in rng.random(20) < 0.6]
    votes = ["7" if ok else "3" for ok in right]
    exact = np.mean([maj_at_k([votes[i] for i in s], [right[i] for i in s], 5)
                     for s in combinations(range(20), 5)])  # fmt: skip
    assert maj_at_k(votes, right, 5, seed=1) == maj_at_k(votes, right, 5, seed=1)
    assert maj_at_k(votes, right, 5, seed=1) == pytest.approx(exact, abs=4 * 0.5 / MAX_SUBSETS**0.5)
    by_seed = [maj_at_k(votes, right, 5, seed=seed) for seed in range(8)]
    assert len(set(by_seed)) > 1
    assert maj_at_k(votes, right, 5) == by_seed[0] != by_seed[1]  # unless told otherwise, seed 0


@pytest.mark.parametrize("k", [1, MAX_SUBSETS - 1])
def test_as_many_subsets_as_the_limit_are_all_taken(k: int) -> None:
    """A majority of the 256 samples is right by one vote; without one of its own, it is a tie."""
    right = [i % 2 == 1 for i in range(MAX_SUBSETS)]
    right[0] = True
    votes = ["7" if ok else "3" for ok in right]
    count = sum(right)
    assert count == MAX_SUBSETS // 2 + 1
    assert maj_at_k(votes, right, k) == (count / MAX_SUBSETS if k == 1 else 1.0)


def test_every_vote_has_a_judgment() -> None:
    with pytest.raises(ValueError, match="shorter"):
        maj_at_k(["7", "3", "3"], [True, False], 2)


def test_powers_of_two() -> None:
    assert powers_of_two(1) == [1]
    assert powers_of_two(6) == [1, 2, 4]
    assert powers_of_two(64) == [1, 2, 4, 8, 16, 32, 64]


def test_wilson_closed_form() -> None:
    # 7 of 10: the roots of (p̂ − p)² = z² p (1 − p) / n.
    interval = wilson(0.7, 10)
    assert [interval.low, interval.high] == pytest.approx(wilson_roots(0.7, 10, Z))
    for n in range(1, 200):  # whatever rounding does
        assert wilson(0.0, n).low == 0.0
        assert wilson(1.0, n).high == 1.0


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (10, 2.2281), (30, 2.0423),
     (1000, 1.9623)],
)  # fmt: skip
def test_student_quantile(degrees: int, quantile: float) -> None:
    assert student_quantile(degrees) == pytest.approx(quantile, abs=5e-5)
    for share in (0.5, 0.8, 0.05, 0.975, 0.999, 1 - 1e-6):
        expected = pytest.approx(stats.t.ppf(share, degrees), 1e-9, 1e-15)
        assert student_quantile(degrees, share) == expected


def test_student_quantile_approaches_the_normal_one() -> None:
    assert student_quantile(10**6) == pytest.approx(stats.norm.ppf(0.975), abs=1e-5)
    assert student_quantile(10**6) == pytest.approx(stats.t.ppf(0.975, 10**6), 1e-10)
    assert student_quantile(0) == float("inf")


def wilson_roots(p: float, n: float, z: float) -> list[float]:
    """The ends of Wilson's interval: the roots of (p − x)² = z² x (1 − x) / n."""
    return sorted(np.roots([1 + z * z / n, -(2 * p + z * z / n), p * p]).tolist())


def test_an_estimate_is_recorded_by_field_and_printed_with_its_interval() -> None:
    estimate = Estimate(0.25, 0.125, 0.5)
    assert estimate.to_dict() == {"value": 0.25, "low": 0.125, "high": 0.5}
    assert str(estimate) == "0.250 [0.125, 0.500]"


def test_few_problems_use_students_quantile() -> None:
    """Rates 0.2, 0.4, 0.9: p = 0.5, s² = 0.13, so m_eff = 0.25 · 3 / 0.13; 2 degrees of freedom."""
    interval = mean_interval([0.2, 0.4, 0.9], samples=10)
    assert interval.value == pytest.approx(0.5)
    assert [interval.low, interval.high] == pytest.approx(wilson_roots(0.5, 0.75 / 0.13, 4.302653))


def test_two_problems_have_one_degree_of_freedom() -> None:
    """Rates 0.2 and 0.6: p = 0.4, s² = 0.08, so m_eff = 0.24 · 2 / 0.08 = 6."""
    interval = mean_interval([0.2, 0.6], samples=10)
    assert [interval.low, interval.high] == pytest.approx(wilson_roots(0.4, 6, 12.706205))


def test_rates_in_float32_are_averaged_in_float64() -> None:
    rates = np.array([0.2, 0.4, 0.9], dtype=np.float32)
    assert mean_interval(rates, 10) == mean_interval(rates.tolist(), 10)


def test_problems_more_alike_than_chance_count_no_more_than_their_samples() -> None:
    """Eight rates of 0.45 and 0.55: p = 0.5, s² = 0.02/7, so without the cap of 8 · 4 m_eff would
    be 700."""
    interval = mean_interval([0.45, 0.55] * 4, samples=4)
    expected = wilson_roots(0.5, 8 * 4, student_quantile(7))
    assert [interval.low, interval.high] == pytest.approx(expected)
    assert student_quantile(7) == pytest.approx(2.364624, abs=1e-3)
    assert mean_interval([0.45, 0.55] * 4) == mean_interval([0.45, 0.55] * 4, samples=1)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("problems", [1, 2, 50])
def test_an_interval_never_closes(value: float, problems: int) -> None:
    interval = mean_interval([value] * problems, samples=8)
    assert interval == wilson(value, problems)
    assert interval.low <= value <= interval.high
    assert interval.high - interval.low > 0.05


def test_an_interval_shrinks_with_problems_not_with_copies_of_samples() -> None:
    values = [0.0, 1.0] * 32
    width = {n: mean_interval(values, n).high - mean_interval(values, n).low for n in (1, 64)}
    assert width[1] == pytest.approx(width[64], rel=0.02)
    assert mean_interval(values * 4, 1).high < mean_interval(values, 1).high


def test_no_problems_is_an_error() -> None:
    with pytest.raises(ValueError, match="^no problems: a mean needs at least one$"):
        mean_interval([])


@pytest.mark.parametrize("problems", [32, 256])
@pytest.mark.parametrize("samples", [1, 4, 16])
@pytest.mark.parametrize("ability", [(0.5, 0.5), (1, 3), (8, 2), (50, 50)])
def test_coverage(problems: int, samples: int, ability: tuple[float, float]) -> None:
    """Abilities of the problems from Beta(a, b): very easy or very hard, hard, easy, all alike."""
    rng = np.random.default_rng(7)
    a, b = ability
    rates = rng.binomial(samples, rng.beta(a, b, (1200, problems))) / samples
    intervals = [mean_interval(x, samples) for x in rates]
    covered = np.mean([i.low <= a / (a + b) <= i.high for i in intervals])
    assert 0.92 <= covered <= 0.98


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


@pytest.mark.parametrize("sizes", [(2, 3), (64, 900), (65, 65), (300, 7001), (5000, 5000)])
def test_products_of_polynomials_are_those_of_scipy(sizes):
    rng = np.random.default_rng(0)
    one, other = (rng.dirichlet(np.ones(size)) for size in sizes)
    assert _product(one, other) == pytest.approx(convolve(one, other), abs=1e-16)


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
    assert counts_of(rows) == {"a": (1, 1), "b": (0, 1)}
