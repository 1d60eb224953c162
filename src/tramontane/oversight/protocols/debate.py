"""Debate: two debaters argue for opposite answers, and the judge decides."""

from tramontane.oversight.episode import Episode, Moves


def debate(episode: Episode) -> Moves:
    """Sides are assigned; the debaters of a round speak at once."""
    episode.assign(opponent=True)
    yield from dispute(episode)


def dispute(episode: Episode) -> Moves:
    """Rounds of simultaneous arguments, then the verdict."""
    for number in range(episode.rules.rounds):
        yield from episode.argue(number)
    yield from episode.judge()
