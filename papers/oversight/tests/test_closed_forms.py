"""The closed forms of arXiv 2407.04622, with agents of stated accuracy and persuasiveness.

Each figure is compared with its formula at five standard errors of the number of discussions.
"""

import math
from itertools import product

import pytest

from papers.oversight.tests.staged import played, questions, simulated
from tramontane_oversight.config import Rules
from tramontane_oversight.figures import (
    Rating,
    calibration_of,
    elo_of,
    figures_of,
    fit_ratings,
    permutation_p_value,
    win_probability,
)
from tramontane_oversight.simulated import strength_of

N = 2000
JUDGE = simulated(blind_accuracy=0.5)  # impartial: arguments alone decide
ORACLE = simulated(blind_accuracy=1.0)


def near(found: float, expected: float, n: int = N) -> bool:
    return abs(found - expected) <= 5 * math.sqrt(max(expected * (1 - expected), 1e-4) / n)


def expected_figures(own: float, right: float, wrong: float) -> dict[str, float]:
    """Win rate and judge accuracy that follow from an agent's own accuracy q and its win rates:
    q·w_c + (1 − q)·w_i and q·w_c + (1 − q)·(1 − w_i)."""
    return {
        "win_rate": own * right + (1 - own) * wrong,
        "accuracy": own * right + (1 - own) * (1 - wrong),
    }


def test_a_gap_of_500_points_is_a_win_probability_of_ten_elevenths() -> None:
    assert win_probability(500, 0) == pytest.approx(10 / 11)
    assert round(win_probability(500, 0), 6) == 0.909091


def test_win_rate_and_accuracy_follow_from_own_accuracy_and_win_rates() -> None:
    """Enumerated over the agent's answer and the judge's verdict."""
    q, w_c, w_i = 0.84, 0.9, 0.6
    win = accuracy = 0.0
    for agent_right, won in product((True, False), repeat=2):
        rate = w_c if agent_right else w_i
        p = (q if agent_right else 1 - q) * (rate if won else 1 - rate)
        win += p * won
        accuracy += p * (agent_right == won)
    found = expected_figures(q, w_c, w_i)
    assert found == pytest.approx({"win_rate": win, "accuracy": accuracy})
    assert [round(v, 3) for v in found.values()] == [0.852, 0.820]


def test_open_consultancy_has_the_win_rate_and_accuracy_of_the_formula() -> None:
    agent = simulated(accuracy=0.84, right=0.9, wrong=0.6)
    found = figures_of(played("open_consultancy", {"judge": JUDGE, "agent": agent}, questions(N)))
    assert found.win_rate and found.own_accuracy
    assert found.win_rate_right and found.win_rate_wrong
    assert near(found.own_accuracy.value, 0.84)
    assert near(found.win_rate.value, 0.852)
    assert near(found.accuracy.value, 0.820)
    # The identity holds exactly between the measured figures.
    rates = found.own_accuracy.value, found.win_rate_right.value, found.win_rate_wrong.value
    assert expected_figures(*rates) == pytest.approx(
        {"win_rate": found.win_rate.value, "accuracy": found.accuracy.value}
    )


def test_assigned_consultancy_is_half_of_each_side() -> None:
    agent = simulated(right=0.9, wrong=0.6)
    found = figures_of(played("consultancy", {"judge": JUDGE, "agent": agent}, questions(N)))
    assert found.win_rate and found.win_rate_right and found.win_rate_wrong
    assert near(found.accuracy.value, (0.9 + 1 - 0.6) / 2)
    assert near(found.win_rate.value, (0.9 + 0.6) / 2)
    assert near(found.win_rate_right.value, 0.9, N // 2)
    assert near(found.win_rate_wrong.value, 0.6, N // 2)


@pytest.mark.parametrize(
    "protocol", ["direct", "consultancy", "debate", "open_consultancy", "open_debate"]
)
def test_an_oracle_is_always_right(protocol: str) -> None:
    agent = simulated(accuracy=0.7, right=0.6, wrong=0.99)
    cast = {"judge": ORACLE, "agent": agent, "opponent": agent}
    found = figures_of(played(protocol, cast, questions(N)))
    assert found.accuracy.value == 1
    if found.win_rate:  # the agent wins whenever it argues for the truth
        assert near(found.win_rate.value, 0.7 if protocol.startswith("open_") else 0.5)
        assert found.win_rate_right and found.win_rate_right.value == 1
        assert found.win_rate_wrong and found.win_rate_wrong.value == 0


def test_direct_answers_have_the_judges_accuracy_with_and_without_the_article() -> None:
    judge = simulated(accuracy=0.9, blind_accuracy=0.6)
    for protocol, accuracy in (("direct", 0.6), ("direct_article", 0.9)):
        found = figures_of(played(protocol, {"judge": judge}, questions(N)))
        assert near(found.accuracy.value, accuracy)
        assert found.win_rate is None and found.own_accuracy is None


@pytest.mark.parametrize("protocol", ["debate", "open_debate"])
def test_a_debate_follows_the_elo_formula(protocol: str) -> None:
    """Odds of the right side: those of w_c over those of w_i, whoever argues for it."""
    agent = simulated(accuracy=0.84, right=0.9, wrong=0.6)
    cast = {"judge": JUDGE, "agent": agent, "opponent": agent}
    transcripts = played(protocol, cast, questions(N))
    odds = (0.9 / 0.1) / (0.6 / 0.4)
    expected = odds / (1 + odds)
    found = figures_of(transcripts)
    assert found.win_rate is not None
    assert near(found.accuracy.value, expected)
    right = 0.84 if protocol == "open_debate" else 0.5
    assert near(found.win_rate.value, expected_figures(right, expected, 1 - expected)["win_rate"])
    [elo] = elo_of([("x", "x", t) for t in transcripts])["sides"]
    share = found.accuracy.value
    gap = 500 * math.log10(share / (1 - share))
    assert elo["x, right"].value - elo["x, wrong"].value == pytest.approx(gap)
    assert gap == pytest.approx(500 * math.log10(odds), abs=60)
    assert elo["x, right"].value == pytest.approx(-elo["x, wrong"].value)


def test_the_number_of_rounds_changes_nothing_without_spread() -> None:
    agent = simulated(right=0.9, wrong=0.6)
    cast = {"judge": JUDGE, "agent": agent, "opponent": agent}
    for rounds in (1, 5):
        found = figures_of(played("debate", cast, questions(N), Rules(rounds=rounds)))
        assert near(found.accuracy.value, 6 / 7)


def test_a_partial_judge_adds_its_own_odds() -> None:
    judge = simulated(blind_accuracy=0.8, susceptibility=0.5)
    agent = simulated(right=0.9, wrong=0.6)
    cast = {"judge": judge, "agent": agent, "opponent": agent}
    odds = (0.8 / 0.2) * math.sqrt((0.9 / 0.1) / (0.6 / 0.4))
    found = figures_of(played("debate", cast, questions(N)))
    assert near(found.accuracy.value, odds / (1 + odds))


def test_a_partial_judge_of_a_consultancy_weighs_the_argument() -> None:
    """Odds of the argued answer: the judge's own times those of the win rate to the power s."""
    judge = simulated(blind_accuracy=0.8, susceptibility=0.5)
    agent = simulated(right=0.9, wrong=0.6)
    found = figures_of(played("consultancy", {"judge": judge, "agent": agent}, questions(N)))
    right = (0.8 / 0.2) * (0.9 / 0.1) ** 0.5
    wrong = (0.2 / 0.8) * (0.6 / 0.4) ** 0.5
    assert found.win_rate_right and near(found.win_rate_right.value, right / (1 + right), N // 2)
    assert found.win_rate_wrong and near(found.win_rate_wrong.value, wrong / (1 + wrong), N // 2)


def test_without_a_verdict_both_sides_lose() -> None:
    agent = simulated(right=0.9, wrong=0.6)
    transcripts = played("consultancy", {"judge": JUDGE, "agent": agent}, questions(300))
    whole = figures_of(transcripts)
    for t in transcripts[::3]:
        t.verdict = t.probability = None
    found = figures_of(transcripts)
    kept = figures_of([t for t in transcripts if t.verdict is not None])
    assert found.verdicts == pytest.approx(2 / 3)
    assert found.accuracy.value == pytest.approx(kept.accuracy.value * 2 / 3)
    assert found.win_rate and kept.win_rate and whole.win_rate
    assert found.win_rate.value == pytest.approx(kept.win_rate.value * 2 / 3)


def test_best_of_four_raises_the_strength_by_the_expected_maximum() -> None:
    """E[max of 4 standard normals] = 3/(2√π) · (1 + 2/π · asin(1/3)) = 1.02938."""
    agent = simulated(right=0.7, wrong=0.7, spread=200)
    cast = {"judge": JUDGE, "agent": agent, "opponent": agent, "preference": JUDGE}
    transcripts = played("debate", cast, questions(500), Rules(rounds=2, best_of=4))
    strengths = [strength_of(turn.text) for t in transcripts for turn in t.turns]
    assert len(strengths) == 500 * 2 * 2
    expected = 3 / (2 * math.sqrt(math.pi)) * (1 + 2 / math.pi * math.asin(1 / 3))
    assert expected == pytest.approx(1.02938, abs=1e-5)
    mean = sum(strengths) / len(strengths)
    base = 500 * math.log10(0.7 / 0.3)
    assert mean == pytest.approx(base + 200 * expected, abs=5 * 200 * 0.7 / math.sqrt(2000))
    for t in transcripts:
        for turn in t.turns:
            assert all(strength_of(text) <= strength_of(turn.text) for text in turn.rejected)
            assert len(turn.rejected) == 3


def test_the_majority_of_three_verdicts() -> None:
    judge = simulated(blind_accuracy=0.7)
    found = figures_of(played("direct", {"judge": judge}, questions(N), Rules(judge_samples=3)))
    assert near(found.accuracy.value, 0.7**3 + 3 * 0.7**2 * 0.3)


def test_a_judge_that_states_its_accuracy_is_calibrated() -> None:
    """Brier score p(1 − p), and no calibration error but that of sampling."""
    transcripts = [
        t
        for accuracy in (0.3, 0.6, 0.95)
        for t in played("direct", {"judge": simulated(blind_accuracy=accuracy)}, questions(N))
    ]
    found = calibration_of(transcripts)
    assert found is not None
    assert found.brier == pytest.approx((0.3 * 0.7 + 0.6 * 0.4 + 0.95 * 0.05) / 3, abs=0.01)
    assert found.error < 0.03
    assert sum(b.n for b in found.bins) == 3 * N
    assert all(b.low - 1e-9 <= b.stated <= b.high + 1e-9 for b in found.bins)


def test_certain_verdicts_have_the_calibration_of_their_accuracy() -> None:
    judge = simulated(blind_accuracy=0.7)
    transcripts = played("direct", {"judge": judge}, questions(N))
    for t in transcripts:  # as of a model without log-probs: each verdict counts as certain
        t.probability = float(t.verdict == 0)
    found, accuracy = calibration_of(transcripts), figures_of(transcripts).accuracy.value
    assert found is not None
    assert found.brier == pytest.approx(1 - accuracy)
    assert found.error == pytest.approx(1 - accuracy, abs=0.02)


def values(ratings: dict[str, Rating]) -> dict[str, float]:
    return {player: rating.value for player, rating in ratings.items()}


def test_ratings_of_three_players_are_those_of_the_expected_wins() -> None:
    ratings = {"a": 300.0, "b": 0.0, "c": -300.0}
    wins = {
        (i, j): 1000 * win_probability(ratings[i], ratings[j])
        for i, j in product(ratings, repeat=2)
        if i != j
    }
    [found] = fit_ratings(wins)
    assert values(found) == pytest.approx(ratings, abs=1e-6)


def test_players_that_never_met_have_scales_of_their_own() -> None:
    wins = {("a", "b"): 90, ("b", "a"): 10, ("x", "y"): 60, ("y", "x"): 40}
    one, two = fit_ratings(wins)
    half = 250 * math.log10(9), 250 * math.log10(1.5)
    assert values(one) == pytest.approx({"a": half[0], "b": -half[0]})
    assert values(two) == pytest.approx({"x": half[1], "y": -half[1]})
    [joined] = fit_ratings(wins | {("b", "y"): 1})
    assert set(joined) == {"a", "b", "x", "y"}
    assert fit_ratings({}) == []


def test_two_different_debaters_are_rated_by_model_and_by_side() -> None:
    strong, weak = simulated(right=0.8, wrong=0.7), simulated(right=0.6, wrong=0.5)
    cast = {"judge": JUDGE, "agent": strong, "opponent": weak}
    transcripts = played("debate", cast, questions(N))
    found = elo_of([("strong", "weak", t) for t in transcripts])
    by_side = {
        "strong, right": (0.8, 0.5),
        "strong, wrong": (0.7, 0.6),
    }
    assert len(found["sides"]) == 2  # each side of one met the other side of the other only
    for name, (rate, other) in by_side.items():
        opponent = "weak, wrong" if name == "strong, right" else "weak, right"
        gap = 500 * (math.log10(rate / (1 - rate)) - math.log10(other / (1 - other)))
        [ratings] = [group for group in found["sides"] if name in group]
        assert ratings[name].value - ratings[opponent].value == pytest.approx(gap, abs=90)
    [models] = found["models"]
    assert models["strong"].value > 0 > models["weak"].value


def test_a_player_that_never_won_has_a_finite_rating() -> None:
    [found] = fit_ratings({("a", "b"): 20.0})
    gap = found["a"].value - found["b"].value
    assert gap == pytest.approx(500 * math.log10(20.5 / 0.5))


def test_a_pair_without_a_win_back_is_left_as_it_is_where_others_close_the_circle() -> None:
    """a beats b, b beats c and c beats a: the likelihood has a maximum as it stands."""
    [found] = fit_ratings({("a", "b"): 10, ("b", "c"): 10, ("c", "a"): 10})
    assert values(found) == pytest.approx({"a": 0, "b": 0, "c": 0}, abs=1e-6)
    [found] = fit_ratings({("a", "b"): 8, ("b", "c"): 8, ("c", "a"): 1})
    # Expected wins of each are those it has: 8, 8 and 1.
    p = {
        (i, j): win_probability(found[i].value, found[j].value) for i, j in product(found, repeat=2)
    }
    assert 8 * p["a", "b"] + 1 * p["a", "c"] == pytest.approx(8, abs=1e-6)
    assert 8 * p["b", "a"] + 8 * p["b", "c"] == pytest.approx(8, abs=1e-6)


def test_the_interval_of_two_players_is_that_of_a_share() -> None:
    """A player wins 60 of 100 games: the log-odds have the standard error 1/√(n p (1 − p))."""
    [found] = fit_ratings({("a", "b"): 60, ("b", "a"): 40})
    error = 500 / math.log(10) / math.sqrt(100 * 0.6 * 0.4)
    for rating in found.values():  # each has half of the difference
        assert rating.high - rating.value == pytest.approx(1.959964 * error / 2, rel=1e-4)
        assert rating.value - rating.low == pytest.approx(1.959964 * error / 2, rel=1e-4)


def test_random_permutations_agree_with_the_enumeration_of_all() -> None:
    differences = [1, 1, 1, 0, -1, 1, 0.5, 1, -0.5]
    values = [d for d in differences if d]
    total = abs(sum(values))
    flips = [
        sum(sign * value for sign, value in zip(signs, values, strict=True))
        for signs in product((1, -1), repeat=len(values))
    ]
    exact = sum(abs(flip) >= total - 1e-9 for flip in flips) / len(flips)
    found = permutation_p_value(differences, 10_000)
    assert near(found, exact, 10_000)
    assert permutation_p_value([0, 0, 0]) == 1
    assert permutation_p_value([1] * 40) == pytest.approx(1 / 10_001)
