"""Elo ratings by the paper's formula: P(i beats j) = 1 / (1 + 10^((E_j − E_i) / 500)).

Source: arXiv 2407.04622.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from tramontane.evaluation.metrics import Z

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
    return [
        _connected_ratings({pair: count for pair, count in wins.items() if pair[0] in group})
        for group in _connected(wins)
    ]


def _connected(pairs: Iterable[tuple[str, str]]) -> list[set[str]]:
    groups: list[set[str]] = []
    for pair in pairs:
        met = [group for group in groups if not group.isdisjoint(pair)]
        groups = [group for group in groups if group not in met] + [set(pair).union(*met)]
    return groups


def _connected_ratings(wins: Mapping[tuple[str, str], float]) -> dict[str, Rating]:
    players = sorted({player for pair in wins for player in pair})
    place = {player: i for i, player in enumerate(players)}
    table = np.zeros((len(players), len(players)))
    for (winner, loser), count in wins.items():
        table[place[winner], place[loser]] += count
    reached = table > 0  # by a chain of wins
    for middle in range(len(players)):
        reached |= reached[:, [middle]] & reached[[middle]]
    met = (table + table.T) > 0
    table = table + PRIOR_WINS * (met & ~(reached & reached.T))
    games, total = table + table.T, table.sum(axis=1)
    strengths = np.ones(len(players))
    for _ in range(10_000):
        sums = strengths[:, None] + strengths[None, :]
        updated = total / (games / sums).sum(axis=1)
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
        player: Rating(*map(float, (ratings[i], ratings[i] - half[i], ratings[i] + half[i])))
        for player, i in place.items()
    }
