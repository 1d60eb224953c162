"""Discussions of simulated agents for tests."""

from collections.abc import Mapping, Sequence

from tramontane.oversight.agents.simulated import SimulatedAgent
from tramontane.oversight.config import SimulatedModel, WinRates
from tramontane.oversight.episode import Episode, Rules
from tramontane.oversight.play import Game, play
from tramontane.oversight.protocols import PROTOCOLS
from tramontane.oversight.questions import Question, two_choices
from tramontane.oversight.transcript import Transcript

ARTICLE = "Anna has key 4. Key 4 opens the kitchen. Tom has key 7. Key 7 opens the cellar."


def questions(n: int) -> list[Question]:
    return [
        two_choices(
            Question(f"q{i}", "Which room?", ("kitchen", "cellar", "attic"), i % 3, ARTICLE), seed=1
        )
        for i in range(n)
    ]


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
