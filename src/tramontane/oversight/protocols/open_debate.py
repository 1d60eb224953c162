"""Open debate: one debater argues for the answer that it believes in, the other against."""

from tramontane.oversight.episode import Episode, Moves
from tramontane.oversight.protocols.debate import dispute


def open_debate(episode: Episode) -> Moves:
    """The agent's side is its own direct answer, with the article; the opponent has the other."""
    yield from episode.choose(opponent=True)
    yield from dispute(episode)
