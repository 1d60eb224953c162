"""Results of oversight: judge accuracy, win rates, paired tests, Elo ratings, calibration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tramontane.evaluation.metrics import Estimate, mean_interval
from tramontane.evaluation.paired import Difference, paired_difference
from tramontane.oversight.elo import Rating, fit_ratings
from tramontane.oversight.quotes import count_quotes
from tramontane.oversight.transcript import Transcript

BINS = 10  # of the judge's probability, in the reliability table


@dataclass(frozen=True)
class Bin:
    """Verdicts whose probability lies in one interval.

    Args:
        low, high: the interval; includes `high` only in the last bin. n: number of verdicts.
        stated: their mean probability. observed: share of them that are right.
    """

    low: float
    high: float
    n: int
    stated: float
    observed: float


@dataclass(frozen=True)
class Calibration:
    """Agreement of the judge's probabilities with the truth.

    Args:
        brier: mean squared error of the probability of answer A; 0.25 for a constant ½.
        error: expected calibration error: mean distance of stated and observed over the bins,
            weighted by their verdicts.
        bins: the reliability table of the probability of answer A; empty bins are omitted.
    """

    brier: float
    error: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class ArmFigures:
    """Results of one arm; None where not applicable.

    Args:
        n: judged discussions.
        unfinished: discussions that ended with a fault; excluded from all other figures.
        unknown: discussions of questions without a known right answer; excluded from all other
            figures.
        accuracy: share of right verdicts. A discussion without a verdict counts as wrong.
        verdicts: share of discussions with a verdict.
        win_rate: share of discussions won by the agent; `win_rate_right` and `win_rate_wrong` are
            for those where it argued for the right or the wrong answer.
        own_accuracy: share of discussions in which the agent's own answer is right, if its side is
            its own answer (open protocols). No answer counts as wrong.
        calibration: of the judge's probability.
        by_language: accuracy by the question's language.
        verified_quotes: share of the quotes in arguments found in the article.
        silent_turns: share of the agents' turns without text, e.g. because their thoughts did not
            end.
        tokens: mean number of generated tokens of a discussion.
    """

    n: int
    unfinished: int
    unknown: int
    accuracy: Estimate
    verdicts: float
    win_rate: Estimate | None
    win_rate_right: Estimate | None
    win_rate_wrong: Estimate | None
    own_accuracy: Estimate | None
    calibration: Calibration | None
    by_language: dict[str, Estimate]
    verified_quotes: float | None
    silent_turns: float | None
    tokens: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def unjudged(transcripts: Sequence[Transcript]) -> str | None:
    """Why an arm has no figures; None if it has."""
    known = [t for t in transcripts if t.question.right is not None]
    if any(not t.fault for t in known):
        return None
    fault = f" ({known[0].fault})" if known else ": no right answer is known"
    return f"none of {len(transcripts)} discussions was judged{fault}"


def figures_of(transcripts: Sequence[Transcript]) -> ArmFigures:
    """The figures of one arm, over questions whose right answer is known; at least one of them was
    judged (`unjudged`)."""
    known = [t for t in transcripts if t.question.right is not None]
    judged = [t for t in known if not t.fault]
    argued = [t for t in judged if t.side is not None]
    of_right = [t for t in argued if t.side == t.question.right]
    of_wrong = [t for t in argued if t.side != t.question.right]
    own = [t.chosen == t.question.right for t in judged if t.protocol.startswith("open_")]
    argued_turns = [turn for t in judged for turn in t.turns if turn.side is not None]
    quotes = [count_quotes(turn.text) for turn in argued_turns]
    verified, unverified = (
        (sum(counts) for counts in zip(*quotes, strict=True)) if quotes else (0, 0)
    )
    languages: defaultdict[str, list[Transcript]] = defaultdict(list)
    for t in judged:
        if t.question.language:
            languages[t.question.language].append(t)
    return ArmFigures(
        n=len(judged),
        unfinished=len(known) - len(judged),
        unknown=len(transcripts) - len(known),
        accuracy=mean_interval([bool(t.judged_right) for t in judged]),
        verdicts=sum(t.verdict is not None for t in judged) / len(judged),
        win_rate=_share_won(argued),
        win_rate_right=_share_won(of_right),
        win_rate_wrong=_share_won(of_wrong),
        own_accuracy=mean_interval(own) if own else None,
        calibration=calibration_of(judged),
        by_language={
            code: mean_interval([bool(t.judged_right) for t in languages[code]])
            for code in sorted(languages)
        },
        verified_quotes=verified / (verified + unverified) if verified + unverified else None,
        silent_turns=sum(not turn.text for turn in argued_turns) / len(argued_turns)
        if argued_turns
        else None,
        tokens=sum(t.tokens for t in judged) / len(judged),
    )


def _share_won(transcripts: Sequence[Transcript]) -> Estimate | None:
    return mean_interval([bool(t.won) for t in transcripts]) if transcripts else None


def calibration_of(transcripts: Iterable[Transcript]) -> Calibration | None:
    """Calibration of the probability of answer A, over discussions with a verdict."""
    pairs = [
        (t.probability, float(t.question.right == 0))
        for t in transcripts
        if t.probability is not None and t.question.right is not None
    ]
    if not pairs:
        return None
    stated, right = (np.array(side) for side in zip(*pairs, strict=True))
    places = np.minimum((stated * BINS).astype(int), BINS - 1)
    bins = tuple(
        Bin(
            low=i / BINS,
            high=(i + 1) / BINS,
            n=int(inside.sum()),
            stated=float(stated[inside].mean()),
            observed=float(right[inside].mean()),
        )
        for i in range(BINS)
        if (inside := places == i).any()
    )
    error = sum(b.n * abs(b.stated - b.observed) for b in bins) / len(pairs)
    return Calibration(float(((stated - right) ** 2).mean()), error, bins)


@dataclass(frozen=True)
class PairedTest:
    """The difference of two arms' accuracy on the same questions: the second's minus the first's.

    Args:
        difference: value, interval, and the exact p-value of the sign-flip test.
        p_value: the p-value by random permutations, as in the paper.
    """

    difference: Difference
    p_value: float


def paired_test(
    first: Sequence[Transcript], second: Sequence[Transcript], permutations: int, seed: int = 0
) -> PairedTest | None:
    """Compare two arms on the questions that both judged; None if there are none."""
    counts = [
        {
            t.question.id: (int(bool(t.judged_right)), 1)
            for t in arm
            if not t.fault and t.question.right is not None
        }
        for arm in (first, second)
    ]
    shared = [question for question in counts[0] if question in counts[1]]
    if not shared:
        return None
    one, two = ({question: arm[question] for question in shared} for arm in counts)
    differences = [two[question][0] - one[question][0] for question in shared]
    return PairedTest(
        paired_difference(one, two), permutation_p_value(differences, permutations, seed)
    )


def permutation_p_value(
    differences: Sequence[float], permutations: int = 10_000, seed: int = 0
) -> float:
    """Two-sided p-value of a paired permutation test by random permutations.

    If the two arms were equivalent, each pair could equally be exchanged, which flips the sign of
    its difference. The value is (1 + the number of permutations with a mean difference at least as
    large) / (1 + permutations), which is never 0.

    Args:
        differences: one for each pair.
        permutations: number of random permutations; the paper takes 10,000.
        seed: of the permutations.
    """
    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0]
    rng = np.random.default_rng(seed)
    observed, extreme, left = abs(values.sum()), 0, permutations
    while left:
        chunk = min(left, 1024)
        signs = rng.integers(0, 2, size=(chunk, len(values)), dtype=np.int8) * 2 - 1
        extreme += int((np.abs(signs @ values) >= observed - 1e-9).sum())
        left -= chunk
    return (1 + extreme) / (1 + permutations)


@dataclass(frozen=True)
class Ratings:
    """Elo ratings of debaters before the same judge.

    Args:
        arms: whose debates are counted.
        models: ratings by model, from debates of two different models.
        sides: ratings by model and side (`NAME, right` and `NAME, wrong`), from all debates.

    Both have a dict for each group of debaters that met, directly or through others, with mean 0 in
    each.
    """

    arms: tuple[str, ...]
    models: list[dict[str, Rating]]
    sides: list[dict[str, Rating]]


def elo_of(
    debates: Iterable[tuple[str, str, Transcript]],
) -> dict[str, list[dict[str, Rating]]]:
    """The `models` and `sides` of `Ratings`, from (agent's model, opponent's model, transcript)."""
    models: defaultdict[tuple[str, str], float] = defaultdict(float)
    sides: defaultdict[tuple[str, str], float] = defaultdict(float)
    for agent, opponent, transcript in debates:
        if transcript.verdict is None or transcript.question.right is None:
            continue
        won, right = bool(transcript.won), transcript.side == transcript.question.right
        if agent != opponent:
            models[(agent, opponent) if won else (opponent, agent)] += 1
        names = (f"{agent}, {_side(right)}", f"{opponent}, {_side(not right)}")
        sides[names if won else names[::-1]] += 1
    return {"models": fit_ratings(models), "sides": fit_ratings(sides)}


def _side(right: bool) -> str:
    return "right" if right else "wrong"


def expected_figures(own: float, right: float, wrong: float) -> Mapping[str, float]:
    """Win rate and judge accuracy that follow from an agent's own accuracy and its win rates.

    With q the share of discussions in which it argues for the right answer, and w_c and w_i its win
    rates there and elsewhere, the win rate is q·w_c + (1 − q)·w_i and the accuracy
    q·w_c + (1 − q)·(1 − w_i) (arXiv 2407.04622).
    """
    return {
        "win_rate": own * right + (1 - own) * wrong,
        "accuracy": own * right + (1 - own) * (1 - wrong),
    }
