"""Consultancy: one agent argues for an assigned answer, right or wrong, and the judge asks."""

from tramontane.oversight.episode import Episode, Moves


def consultancy(episode: Episode) -> Moves:
    """The consultant's side is drawn 50/50; the judge asks between its turns."""
    episode.assign()
    yield from consult(episode)


def consult(episode: Episode) -> Moves:
    """Arguments for one side with the judge's questions between them, then the verdict."""
    for number in range(episode.rules.rounds):
        if number > 0:
            yield from episode.ask(number)
        yield from episode.argue(number)
    yield from episode.judge()
