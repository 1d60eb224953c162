"""Verdicts by closed forms, and how often they are right."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from tramontane.studies.verdicts import judge, mean_and_interval

ARMS = {"a": [0.50, 0.52, 0.54], "b": [0.40, 0.42, 0.44]}


def verdict(values, expect="higher", margin=0.03):
    return judge(values, "a", "b", expect=expect, margin=margin)


def test_the_interval_by_hand():
    # Each arm has variance 0.0004 over its seeds; equal spreads give 2 + 2 degrees of freedom.
    found = verdict(ARMS)
    half = 2.776445 * 0.02 * math.sqrt(2 / 3)  # Student's 0.975 quantile at 4
    assert found.difference == pytest.approx(0.10)
    assert (found.low, found.high) == (pytest.approx(0.1 - half), pytest.approx(0.1 + half))
    # … and 0.941 at 0.8: an effect of this size is seen in 80 % of studies.
    seen = (2.776445 + 0.940965) * 0.02 * math.sqrt(2 / 3)
    assert found.detectable == pytest.approx(seen, rel=1e-5)
    # To be refuted, arms that are claimed to be equal must differ by the margin more.
    assert verdict(ARMS, "equal").detectable == pytest.approx(seen + 0.03, rel=1e-5)


@given(
    st.lists(st.floats(-1, 1), min_size=2, max_size=6),
    st.lists(st.floats(-1, 1), min_size=2, max_size=6),
)
def test_the_interval_is_that_of_scipy(first, second):
    assume(np.std(first) > 1e-3 and np.std(second) > 1e-3)
    found = verdict({"a": first, "b": second})
    known = stats.ttest_ind(first, second, equal_var=False).confidence_interval()
    assert (found.low, found.high) == pytest.approx(tuple(known), rel=1e-9, abs=1e-9)


def test_an_erratic_arm_widens_its_own_interval_alone():
    wild = ARMS | {"c": [0.1, 0.9, 0.5]}
    assert verdict(wild) == verdict(ARMS)
    mean, half = mean_and_interval(ARMS["a"])
    assert (mean, half) == (pytest.approx(0.52), pytest.approx(4.302653 * 0.02 / 3**0.5, rel=1e-5))


def test_arms_without_spread_have_a_point_as_their_interval():
    found = verdict({"a": [1.0] * 3, "b": [1.0] * 3}, "equal")
    assert (found.low, found.high, found.outcome) == (0, 0, "holds")


def test_figures_that_are_missing_are_left_out_arm_by_arm():
    with_gap = {"a": [0.50, math.nan, 0.52, 0.54], "b": ARMS["b"]}
    assert verdict(with_gap) == verdict(ARMS)
    none = verdict({"a": [math.nan] * 3, "b": ARMS["b"]})
    assert (none.outcome, none.seeds) == ("undecided at this budget", 0)
    assert math.isnan(none.difference)
    assert verdict({"a": [0.5, math.nan], "b": ARMS["b"]}).high == math.inf


@pytest.mark.parametrize(
    ("gap", "spread", "expect", "outcome"),
    [
        (0.10, 0.005, "higher", "holds"),
        (0.10, 0.005, "lower", "does not hold"),
        (0.10, 0.005, "equal", "does not hold"),
        (0.01, 0.002, "higher", "holds"),
        (0.00, 0.002, "higher", "does not hold"),  # an effect of the margin is excluded
        (0.00, 0.002, "equal", "holds"),
        (0.01, 0.002, "equal", "holds"),  # real, but of no interest
        (0.04, 0.009, "equal", "undecided at this budget"),  # the margin is within the interval
        (0.02, 0.1, "higher", "undecided at this budget"),
        (0.02, 0.1, "equal", "undecided at this budget"),
        (-0.10, 0.005, "lower", "holds"),
    ],
)
def test_outcomes(gap, spread, expect, outcome):
    values = {
        "a": [0.5 + gap - spread, 0.5 + gap, 0.5 + gap + spread],
        "b": [0.5 - spread, 0.5, 0.5 + spread],
    }
    assert verdict(values, expect).outcome == outcome


def test_one_seed_decides_nothing():
    found = verdict({"a": [0.9], "b": [0.1]})
    assert found.outcome == "undecided at this budget"
    assert (found.low, found.high, found.detectable) == (-math.inf, math.inf, math.inf)


def test_the_detectable_effect_is_detected_in_80_percent_of_studies():
    rng = np.random.default_rng(0)
    found = [
        verdict({"a": rng.normal(0.12, 0.05, 4), "b": rng.normal(0, 0.05, 4)}) for _ in range(1000)
    ]
    # Where the runs themselves say that 0.12 could be seen, it mostly is.
    able = [v.outcome == "holds" for v in found if v.detectable <= 0.13]
    assert len(able) > 300 and np.mean(able) > 0.7
    none = [verdict({"a": rng.normal(0, 1, 4), "b": rng.normal(0, 1, 4)}) for _ in range(1000)]
    assert 0.005 < np.mean([v.outcome == "holds" for v in none]) < 0.05  # 2.5 % by construction


def test_the_interval_covers_a_difference_of_arms_with_different_spreads():
    rng = np.random.default_rng(0)
    found = [
        verdict({"a": rng.normal(0, 0.09, 3), "b": rng.normal(0, 0.005, 3)}) for _ in range(2000)
    ]
    assert 0.93 < np.mean([v.low < 0 < v.high for v in found]) < 0.97


def test_a_difference_within_the_margin_is_rarely_refuted():
    rng = np.random.default_rng(0)
    close = [
        verdict({"a": rng.normal(0.027, 0.01, 3), "b": rng.normal(0, 0.01, 3)}, "equal")
        for _ in range(1000)
    ]
    assert np.mean([v.outcome == "does not hold" for v in close]) < 0.05
