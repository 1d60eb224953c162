"""Verdicts by closed forms, and how often they are right."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from tramontane.studies.measures import MEASURES, Measure
from tramontane.studies.study import LOOKS, Claim
from tramontane.studies.verdicts import (
    judge,
    mean_and_interval,
    q_values,
    quantile,
    seeds_needed,
    surviving,
)

ARMS = {"a": [0.50, 0.53, 0.56], "b": [0.40, 0.42, 0.44]}
PLAIN = Measure("a figure", lambda run: 0.0, ".9f")
FIRST = stats.t.ppf(0.99, 2)  # 98 % at 3 seeds


def claim(expect="higher", margin=0.03, against="b"):
    return Claim(text="", arm="a", against=against, expect=expect, margin=margin)


def verdict(values, expect="higher", margin=0.03, measure=PLAIN, samples=0):
    return judge(values, claim(expect, margin), measure, samples)


def test_the_interval_by_hand():
    # The differences are 0.10, 0.11 and 0.12, with a standard deviation of 0.01.
    found, error = verdict(ARMS), 0.01 / math.sqrt(3)
    assert found.difference == pytest.approx(0.11)
    assert (found.low, found.high) == pytest.approx((0.11 - FIRST * error, 0.11 + FIRST * error))
    seen = (FIRST + stats.t.ppf(0.8, 2)) * error
    assert found.detectable == pytest.approx(seen)
    # To be refuted, arms that are claimed to be equal must differ by the margin more.
    assert verdict(ARMS, "equal").detectable == pytest.approx(seen + 0.03)


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=3, max_size=3))
def test_the_p_value_is_that_of_scipy(pairs):
    first, second = map(list, zip(*pairs, strict=True))
    assume(np.std(np.subtract(first, second)) > 1e-3)
    found = verdict({"a": first, "b": second})
    known = stats.ttest_rel(first, second)
    interval = known.confidence_interval(0.98)
    assert (found.low, found.high) == pytest.approx(tuple(interval), rel=1e-9, abs=1e-9)
    if found.outcome != "does not hold":
        greater = stats.ttest_rel(first, second, alternative="greater").pvalue
        assert found.p == pytest.approx(greater, rel=1e-6)


def test_what_both_arms_share_by_seed_does_not_widen_the_interval():
    shared = [0.0, 0.3, -0.2]
    moved = {arm: [v + s for v, s in zip(runs, shared, strict=True)] for arm, runs in ARMS.items()}
    assert verdict(moved).low == pytest.approx(verdict(ARMS).low)
    mean, half = mean_and_interval(ARMS["b"])
    assert (mean, half) == (pytest.approx(0.42), pytest.approx(4.302653 * 0.02 / 3**0.5, rel=1e-5))


def test_no_interval_is_a_point():
    same = {"a": [0.75] * 3, "b": [0.75] * 3}
    share = (0.75 * 3072 + 2) / 3076  # of all seeds' samples
    found = verdict(same, "equal", measure=MEASURES["pass_at_1"], samples=1024)
    error = math.sqrt(2 * share * (1 - share) / 1024 / 3)
    assert found.high == pytest.approx(stats.norm.ppf(0.99) * error, rel=1e-4)
    rounded = Measure("padding", lambda run: 0.0, ".3f")
    found = verdict(same, "equal", measure=rounded)
    assert found.error == pytest.approx(0.0005 * math.sqrt(2 / 3))


@pytest.mark.parametrize(
    ("form", "value", "half"),
    [(".3f", 12.0, 5e-4), (",.0f", 1985.0, 0.5), (".2g", 0.0123, 5e-4), (".1e", 2.34e-7, 5e-9)],
)
def test_half_of_the_last_digit_shown(form, value, half):
    assert Measure("", lambda run: 0.0, form).rounding(value) == pytest.approx(half)


def test_a_seed_without_a_figure_is_left_out_with_its_pair():
    gap = {"a": [0.50, math.nan, 0.56], "b": ARMS["b"]}
    found = verdict(gap)
    assert found.difference == pytest.approx((0.10 + 0.12) / 2)
    none = verdict({"a": [math.nan] * 3, "b": ARMS["b"]})
    assert (none.outcome, none.seeds) == ("undecided", 0) and math.isnan(none.difference)
    assert verdict({"a": [0.5, math.nan, math.nan], "b": ARMS["b"]}).high == math.inf


@pytest.mark.parametrize(
    ("gap", "spread", "expect", "outcome"),
    [
        (0.10, 0.005, "higher", "holds"),
        (0.10, 0.005, "lower", "does not hold"),
        (0.10, 0.005, "equal", "does not hold"),
        (0.01, 0.001, "higher", "does not hold"),  # real, but an effect of the margin is excluded
        (0.025, 0.003, "higher", "undecided"),  # above 0, and below the margin
        (0.00, 0.002, "equal", "holds"),
        (0.01, 0.002, "equal", "holds"),  # real, but of no interest
        (0.04, 0.009, "equal", "undecided"),  # the margin is within the interval
        (0.02, 0.1, "higher", "undecided"),
        (0.02, 0.1, "equal", "undecided"),
        (-0.10, 0.005, "lower", "holds"),
    ],
)
def test_outcomes(gap, spread, expect, outcome):
    values = {"a": [0.5 + gap - spread, 0.5 + gap, 0.5 + gap + spread], "b": [0.5] * 3}
    assert verdict(values, expect).outcome == outcome


@given(
    st.lists(st.floats(-0.2, 0.2), min_size=3, max_size=3),
    st.floats(0.001, 0.2),
)
def test_a_difference_is_never_both_an_effect_and_none(differences, margin):
    values = {"a": differences, "b": [0.0] * 3}
    held = [verdict(values, e, margin).outcome == "holds" for e in ("higher", "lower", "equal")]
    assert sum(held) <= 1


@pytest.mark.parametrize(
    ("control", "expect", "decided"),
    [
        (0.98, "higher", False),
        (0.98, "lower", True),
        (0.98, "equal", False),
        (0.01, "lower", False),
    ],
)
def test_a_control_at_the_end_of_the_scale_decides_nothing(control, expect, decided):
    values = {"a": [0.5, 0.51, 0.52], "b": [control] * 3}
    found = verdict(values, expect, measure=MEASURES["pass_at_1"], samples=1024)
    assert (found.outcome != "no room") == decided


def test_seeds_beyond_a_look_wait_for_the_next():
    more = {"a": [*ARMS["a"], 0.0, 0.0], "b": [*ARMS["b"], 1.0, 1.0]}
    assert verdict(more) == verdict(ARMS)
    before = verdict({"a": [0.90, 0.91], "b": [0.1] * 2})
    assert (before.outcome, before.seeds) == ("undecided", 2)
    assert before.difference == pytest.approx(0.805)  # shown, and not judged
    assert sum(LOOKS.values()) == pytest.approx(0.05)


def test_looking_at_every_look_costs_nothing():
    """Without any effect, at most 2.5 % of studies ever see one on either side."""
    rng = np.random.default_rng(0)
    seen = 0
    for _ in range(2000):
        runs = rng.normal(0, 0.05, (2, max(LOOKS)))
        seen += any(
            verdict({"a": runs[0, :n], "b": runs[1, :n]}, margin=1e-9).outcome == "holds"
            for n in LOOKS
        )
    assert 0.005 < seen / 2000 < 0.025


@pytest.mark.parametrize(("true", "outcome"), [(0.04, "holds"), (0.0, "does not hold")])
def test_the_seeds_needed_tell_the_margin_from_nothing_in_80_percent_of_studies(true, outcome):
    rng = np.random.default_rng(1)
    pilot = verdict({"a": [0.06, 0.01, 0.11], "b": [0.0] * 3})  # a deviation of 0.05
    needed = seeds_needed(pilot, claim(margin=0.04))
    assert needed == pytest.approx(
        ((stats.norm.ppf(0.995) + stats.norm.ppf(0.8)) * 0.05 / 0.04) ** 2
    )
    assert 12 < needed < 24
    runs = rng.normal(true, 0.05, (1000, 24))
    zeros = {"b": [0.0] * 24}
    found = [judge({"a": list(r)} | zeros, claim(margin=0.04), PLAIN) for r in runs]
    if outcome == "holds":  # with an effect of the margin the estimate is below it half the time
        assert np.mean([v.low > 0 for v in found]) > 0.8
    else:
        assert np.mean([v.outcome == outcome for v in found]) > 0.8
    assert seeds_needed(verdict({"a": [0.5], "b": [0.5]}), claim()) == math.inf


def test_three_of_three_runs_do_not_prove_a_share():
    yes_or_no = replace(PLAIN, bounds=(0.0, 1.0), samples=1)
    values = {"a": [1.0] * 6}
    outcomes = []
    for seeds in (3, 6):
        of = {"a": values["a"][:seeds]}
        outcomes.append(judge(of, claim(margin=0.4, against=0.5), yes_or_no).outcome)
    assert outcomes == ["undecided", "holds"]
    # By hand: Agresti and Coull's 5 of 7 at three seeds.
    error = judge({"a": [1.0] * 3}, claim(margin=0.4, against=0.5), yes_or_no).error
    assert error == pytest.approx(math.sqrt(5 / 7 * 2 / 7 / 3))


def test_corrections_for_the_number_of_claims():
    gaps = [0.9, 0.05, 0.04, *[0.0] * 7]
    found = [verdict({"a": [g, g + 0.01, g - 0.01], "b": [0.0] * 3}) for g in gaps]
    p = [v.p for v in found]
    # Benjamini and Hochberg: p · m / rank, made monotone from the largest.
    by_hand = np.minimum.accumulate((np.sort(p) * 10 / np.arange(1, 11))[::-1])[::-1]
    assert q_values(found) == pytest.approx(list(by_hand[np.argsort(np.argsort(p))].clip(max=1)))
    assert surviving(found, "holds") == {"Holm": 1, "Benjamini–Hochberg": 2}


def test_quantiles_and_q_values_are_those_of_scipy_to_the_last_digit():
    """The published figures have them."""
    for degrees in (1, 2, 5, 11, 23, 10**6):
        for share in (0.975, 0.99, 0.995, 0.8):
            assert quantile(degrees, share) == stats.t.ppf(share, degrees)
    found = [verdict({"a": [g, g + 0.01, g - 0.02], "b": [0.0] * 3}) for g in (0.9, 0.0, 0.05, 0.0)]
    for one in found:
        distance = 0.03 - one.difference if one.outcome == "does not hold" else one.difference
        assert one.p == stats.t.sf(distance / one.error, 2)
    assert q_values(found) == [*stats.false_discovery_control([one.p for one in found])]
    assert q_values([]) == []
