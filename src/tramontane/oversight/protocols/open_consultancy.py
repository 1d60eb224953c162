"""Open consultancy: the consultant argues for the answer that it believes in."""

from tramontane.oversight.episode import Episode, Moves
from tramontane.oversight.protocols.consultancy import consult


def open_consultancy(episode: Episode) -> Moves:
    """The consultant's side is its own direct answer, with the article."""
    yield from episode.choose()
    yield from consult(episode)
