"""Discussions of simulated agents for tests."""

from collections.abc import Mapping, Sequence
from functools import cache

from tramontane_oversight.config import Rules, SimulatedModel, WinRates
from tramontane_oversight.play import Game, play
from tramontane_oversight.protocols import PROTOCOLS, Episode
from tramontane_oversight.questions import two_choices
from tramontane_oversight.simulated import SimulatedAgent
from tramontane_oversight.transcript import Question, Transcript

ARTICLE = "Anna has key 4. Key 4 opens the kitchen. Tom has key 7. Key 7 opens the cellar."


@cache
def questions(n: int) -> tuple[Question, ...]:
    return tuple(
        two_choices(
            Question(f"q{i}", "Which room?", ("kitchen", "cellar", "attic"), i % 3, ARTICLE), seed=1
        )
        for i in range(n)
    )


def simulated(accuracy=1.0, right=0.5, wrong=0.5, **other) -> SimulatedModel:
    rates = WinRates(right=right, wrong=wrong)
    return SimulatedModel(accuracy=accuracy, persuasiveness=rates, **other)


def played(
    protocol: str,
    cast: Mapping[str, SimulatedModel],
    asked: Sequence[Question],
    rules: Rules = Rules(),  # noqa: B008
    seed: int = 0,
) -> list[Transcript]:
    """The transcripts in the order of the questions."""
    agents = {role: SimulatedAgent(model, seed) for role, model in cast.items()}
    games = []
    for question in asked:
        episode = Episode(question, protocol, rules, seed)
        games.append(
            Game(f"{protocol}/{question.id}", episode, PROTOCOLS[protocol](episode), agents)
        )
    list(play(games, concurrent=100))
    return [game.transcript for game in games]
