"""Many concurrent discussions: each waits for its own replies, and all share the models' batches.

Every reply is written to a journal when it arrives. An interrupted comparison replays the recorded
replies to the same protocols, which then continue where they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from tramontane.journals import Journal
from tramontane_oversight.agents import Agent
from tramontane_oversight.protocols import Episode, Moves
from tramontane_oversight.transcript import Call, Reply, Role, Transcript

_TICKETS = count()  # unique in the process: participants outlive a call of `play`
POLL_SECONDS = 0.05  # longest wait for one participant while others may have replies


@dataclass
class Game:
    """A discussion, its participants, and the replies so far.

    Args:
        key: unique name, from which the replies' seeds are derived.
        episode: the discussion.
        moves: its protocol, not started.
        cast: the participants by role.
        journal: file for the replies, shared by the discussions of an arm.
        recorded: replies from before, by their number in the discussion.
        examples: worked examples for the judge.
    """

    key: str
    episode: Episode
    moves: Moves
    cast: Mapping[Role, Agent]
    journal: Journal | None = None
    recorded: dict[int, Reply] = field(default_factory=dict)
    examples: Sequence[Transcript] = ()
    asked: int = 0  # calls so far
    replies: list[Reply | None] = field(default_factory=list)  # to the calls being asked

    @property
    def transcript(self) -> Transcript:
        return self.episode.transcript


def play(games: Iterable[Game], concurrent: int) -> Iterator[Game]:
    """Yield each discussion when it has ended, with a verdict or a fault.

    Args:
        games: not started.
        concurrent: maximum number at once.

    Raises:
        InputError: a participant that cannot answer any call.
    """
    table = _Table()
    waiting = iter(games)
    exhausted = False
    while table.open or not exhausted:
        fresh = list(islice(waiting, concurrent - table.open))
        exhausted = not fresh and not table.open
        for game in fresh:
            table.advance(game, None)
        yield from table.take_ended()
        if table.open:
            table.poll()
        yield from table.take_ended()


class _Table:
    """The running discussions, and the calls that wait for a reply."""

    def __init__(self) -> None:
        # By ticket: the discussion, and the place among its calls.
        self._asked: dict[int, tuple[Game, int]] = {}
        self._agents: dict[int, Agent] = {}
        self._ended: list[Game] = []
        self.open = 0

    def take_ended(self) -> list[Game]:
        ended, self._ended = self._ended, []
        return ended

    def advance(self, game: Game, replies: list[Reply] | None) -> None:
        """Continue a discussion until a call has no reply, or to its end."""
        self.open += replies is None
        while True:
            try:
                calls = game.moves.send(replies) if replies is not None else next(game.moves)
            except StopIteration:
                self._end(game)
                return
            numbers = range(game.asked, game.asked + len(calls))
            game.asked += len(calls)
            game.replies = [game.recorded.get(number) for number in numbers]
            for place, call in enumerate(calls):
                if game.replies[place] is None:
                    self._ask(game, place, numbers[place], call)
            if None in game.replies:
                return
            replies = [reply for reply in game.replies if reply is not None]

    def poll(self) -> None:
        """Deliver the finished replies."""
        active = [agent for agent in self._agents.values() if agent.waiting]
        computing = any(agent.computes for agent in active)
        for agent in active:
            seconds = POLL_SECONDS if agent.computes or not computing else 0.0
            for ticket, reply in agent.poll(seconds):
                self._deliver(ticket, reply)

    def _ask(self, game: Game, place: int, number: int, call: Call) -> None:
        agent = game.cast[call.role]
        self._agents[id(agent)] = agent
        ticket = next(_TICKETS)
        self._asked[ticket] = game, place
        examples = game.examples if call.task == "judge" else ()
        agent.submit(ticket, f"{game.key}/{number}", call, examples)

    def _deliver(self, ticket: int, reply: Reply) -> None:
        if ticket not in self._asked:  # of a discussion that a fault ended in an earlier `play`
            return
        game, place = self._asked.pop(ticket)
        if reply.fault:
            if not game.transcript.fault:
                game.transcript.fault = reply.fault
                game.moves.close()
                self._end(game)
            return
        number = game.asked - len(game.replies) + place
        if game.journal is not None:
            row = (number, reply.text, reply.tokens, reply.probability)
            game.journal.add((game.episode.question.id, *row))
        game.replies[place] = reply
        if not game.transcript.fault and None not in game.replies:
            self.advance(game, [found for found in game.replies if found is not None])

    def _end(self, game: Game) -> None:
        self.open -= 1
        self._ended.append(game)


def recorded_replies(journal: Journal) -> dict[str, dict[int, Reply]]:
    """The replies of a journal, by the question's id and the number in the discussion."""
    found: dict[str, dict[int, Reply]] = {}
    for question, number, text, tokens, probability in journal:
        found.setdefault(question, {})[number] = Reply(text, tokens, probability)
    return found
