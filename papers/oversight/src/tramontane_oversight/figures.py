"""Results of oversight: judge accuracy, win rates, paired tests, Elo ratings, calibration."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tramontane.statistics import Difference, Estimate, Z, mean_interval, paired_difference
from tramontane_oversight.responses import quotes_of
from tramontane_oversight.transcript import Transcript

BINS = 10  # of the judge's probability, in the reliability table
SCALE = 500.0  # Elo points of a tenfold increase of the odds
PRIOR_WINS = 0.5  # added to both sides of a pair whose difference would be infinite


@dataclass(frozen=True)
class Rating:
    """A rating in Elo points, and its 95 % interval relative to the mean of its group."""

    value: float
    low: float
    high: float


def win_probability(rating: float, other: float) -> float:
    """Probability that a player of `rating` beats a player of rating `other`."""
    return 1 / (1 + 10 ** ((other - rating) / SCALE))


def fit_ratings(wins: Mapping[tuple[str, str], float]) -> list[dict[str, Rating]]:
    """Ratings of maximum likelihood, with mean 0, by the iteration of Hunter (2004) for
    Bradley-Terry models; intervals by the likelihood's curvature (Fisher's information).

    The likelihood has a maximum if a chain of wins leads from each player to every other. If two
    players met and no chain leads back from one of them, half a win is added to both.

    Args:
        wins: number of wins of the first player over the second, by pair.

    Returns:
        One dict for each group of players connected by matches, since different groups have no
        common scale.
    """
    if not wins:
        return []
    from scipy.sparse.csgraph import connected_components  # 0.2 s

    players = sorted({player for pair in wins for player in pair})
    table = np.zeros((len(players), len(players)))
    for (winner, loser), count in wins.items():
        table[players.index(winner), players.index(loser)] += count
    # Players of one strong component reach each other by chains of wins.
    _, chained = connected_components(table, connection="strong")
    met = (table + table.T) > 0
    table += PRIOR_WINS * (met & (chained[:, None] != chained))
    count, group_of = connected_components(table, connection="weak")
    groups = [np.flatnonzero(group_of == group) for group in range(count)]
    return [_ratings([players[i] for i in at], table[np.ix_(at, at)]) for at in groups]


def _ratings(players: Sequence[str], table: np.ndarray) -> dict[str, Rating]:
    """Ratings of players that met, directly or through others, from their table of wins."""
    games, total = table + table.T, table.sum(axis=1)
    strengths = np.ones(len(players))
    for _ in range(10_000):
        updated = total / (games / (strengths[:, None] + strengths)).sum(axis=1)
        updated /= np.exp(np.log(updated).mean())
        change = np.abs(np.log(updated / strengths)).max()
        strengths = updated
        if change < 1e-12:
            break
    ratings = SCALE * np.log10(strengths)
    certain = games * np.outer(strengths, strengths) / (strengths[:, None] + strengths) ** 2
    information = (np.diag(certain.sum(axis=1)) - certain) * (math.log(10) / SCALE) ** 2
    half = Z * np.sqrt(np.diag(np.linalg.pinv(information, hermitian=True)))
    return {
        player: Rating(float(value), float(value - width), float(value + width))
        for player, value, width in zip(players, ratings, half, strict=True)
    }


@dataclass(frozen=True)
class Bin:
    """Verdicts whose probability lies in [low, high), or [low, high] in the last bin: their number,
    the mean of their probabilities, and the share of them that are right."""

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
    turns = [turn for t in judged for turn in t.turns if turn.side is not None]
    quotes = [quote for turn in turns for quote in quotes_of(turn.text)]
    languages: defaultdict[str, list[bool]] = defaultdict(list)
    for t in judged:
        if t.question.language:
            languages[t.question.language].append(bool(t.judged_right))
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
        by_language={code: mean_interval(languages[code]) for code in sorted(languages)},
        verified_quotes=sum(quotes) / len(quotes) if quotes else None,
        silent_turns=sum(not turn.text for turn in turns) / len(turns) if turns else None,
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
    """The second arm's accuracy minus the first's on the same questions: value, interval and exact
    p-value of the sign-flip test; and the p-value by random permutations, as in the paper."""

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


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Args:
        transcripts: of each arm, in the order of the questions.
        figures: of each arm.
        tests: of each pair of arms, the later one compared to the earlier one.
        elo: ratings of debaters, one for each set of arms with the same judge and rules, since only
            their debates are comparable.
        faults: for each arm without figures, why none of its discussions was judged.
    """

    transcripts: dict[str, list[Transcript]]
    figures: dict[str, ArmFigures]
    tests: dict[tuple[str, str], PairedTest]
    elo: list[Ratings]
    faults: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The figures in JSON types."""
        return {
            "arms": {name: asdict(figures) for name, figures in self.figures.items()},
            "paired_tests": [
                {"arm": second, "against": first, **asdict(test)}
                for (first, second), test in self.tests.items()
            ],
            "elo": [asdict(ratings) for ratings in self.elo],
            "faults": self.faults,
        }
