"""Direct question answering: the judge answers alone."""

from tramontane.oversight.episode import Episode, Moves


def direct(episode: Episode) -> Moves:
    """Without the article: what the judge knows by itself."""
    yield from episode.judge()


def direct_article(episode: Episode) -> Moves:
    """With the article: what the judge could know if it could read everything."""
    yield from episode.judge(article=True)
