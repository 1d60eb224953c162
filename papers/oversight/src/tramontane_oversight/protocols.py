"""The protocols of scalable oversight (arXiv 2407.04622), and the moves that they consist of.

A protocol is a function from an `Episode` to its moves, a Python generator: it yields lists of
`Call`s that are asked at the same time, and receives their replies in the same order. So thousands
of discussions can share models concurrently, and a discussion can be replayed exactly from recorded
replies. A new protocol is a function of a few lines and an entry in `PROTOCOLS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from random import Random
from typing import Any, TypeAlias

from tramontane.asking import conclusion
from tramontane_oversight.config import Rules
from tramontane_oversight.responses import check_quotes, letter_of, number_of, without_marks
from tramontane_oversight.transcript import Call, Question, Reply, Role, Task, Transcript, Turn

Moves: TypeAlias = Generator[list[Call], list[Reply], None]


class Episode:
    """One discussion under way.

    Args:
        question: with two choices in the order shown (`two_choices`).
        protocol: name of the protocol, for the transcript.
        rules: its numbers.
        seed: with the question's id, determines drawn sides.

    Attributes:
        transcript: the record so far.
    """

    def __init__(self, question: Question, protocol: str, rules: Rules, seed: int) -> None:
        self.question, self.rules = question, rules
        self.transcript = Transcript(question, protocol)
        self._rng = Random(f"{seed}/{question.id}/side")

    def assign(self, *, opponent: bool = False) -> None:
        """Draw the agent's side, 50/50; an opponent argues for the other."""
        self.transcript.side = int(self._rng.random() < 0.5)
        self.transcript.opponent = opponent

    def choose(self, *, opponent: bool = False) -> Moves:
        """Let the agent answer the question; its side is its answer. Without an answer the side is
        drawn."""
        self.assign(opponent=opponent)
        [reply] = yield from self._ask(self._call("agent", "answer", article=self.question.article))
        self.transcript.chosen = letter_of(reply.text, self.question.choices)
        if self.transcript.chosen is not None:
            self.transcript.side = self.transcript.chosen

    def argue(self, number: int) -> Moves:
        """One round of arguments. Debaters speak simultaneously: neither sees the other's argument
        of the same round. Turns are in the order of the answers, A's first, since the order must
        not reveal the agent's own answer."""
        side, best_of, article = self.transcript.side, self.rules.best_of, self.question.article
        assert side is not None
        speakers: list[tuple[Role, int]] = [("agent", side)]
        if self.transcript.opponent:
            speakers.append(("opponent", 1 - side))
        replies = yield from self._ask(
            *(
                self._call(role, "argue", number, side=side, article=article)
                for role, side in speakers
                for _ in range(best_of)
            )
        )
        texts = [check_quotes(conclusion(reply.text), article) for reply in replies]
        offered = [range(i * best_of, (i + 1) * best_of) for i in range(len(speakers))]
        best = [0] * len(speakers)
        if best_of > 1:
            choices = yield from self._ask(
                *(
                    self._call(
                        "preference", "prefer", number, side=side,
                        candidates=tuple(texts[i] for i in candidates),
                    )
                    for (_, side), candidates in zip(speakers, offered, strict=True)
                )
            )  # fmt: skip
            best = [number_of(choice.text, best_of) or 0 for choice in choices]
        turns = []
        for (role, side), candidates, chosen in zip(speakers, offered, best, strict=True):
            place = candidates[chosen]
            rejected = tuple(texts[i] for i in candidates if i != place)
            turns.append(Turn(number, role, side, texts[place], replies[place].text, rejected))
        self.transcript.turns += sorted(turns, key=lambda turn: turn.side or 0)

    def ask(self, number: int) -> Moves:
        """The judge asks a question about the arguments so far. Its quotes are not checked, since
        that would reveal the article's content, so they lose their marks."""
        [reply] = yield from self._ask(self._call("judge", "ask", number))
        turn = Turn(number, "judge", None, without_marks(conclusion(reply.text)), reply.text)
        self.transcript.turns.append(turn)

    def judge(self, *, article: bool = False) -> Moves:
        """The judge's verdict: the answer chosen by most of its samples, the first in a tie.

        Its probability is the mean over the samples with an answer. A sample whose model reports no
        probability counts as certain.
        """
        shown = self.question.article if article else None
        call = self._call("judge", "judge", self.rules.rounds, article=shown)
        replies = yield from self._ask(*[call] * self.rules.judge_samples)
        self.transcript.responses = [reply.text for reply in replies]
        choices = self.question.choices
        votes = [(letter_of(reply.text, choices), reply.probability) for reply in replies]
        found = [(side, 1.0 if p is None else p) for side, p in votes if side is not None]
        if found:
            self.transcript.verdict = Counter(side for side, _ in found).most_common(1)[0][0]
            of_first = [p if side == 0 else 1 - p for side, p in found]
            self.transcript.probability = sum(of_first) / len(of_first)

    def _call(self, role: Role, task: Task, number: int = 0, **shown: Any) -> Call:
        turns = tuple(self.transcript.turns)
        return Call(
            role, task, self.question, turns, round=number, rounds=self.rules.rounds, **shown
        )

    def _ask(self, *calls: Call) -> Generator[list[Call], list[Reply], list[Reply]]:
        """The replies to calls that are asked at the same time."""
        replies = yield [*calls]
        self.transcript.tokens += sum(reply.tokens for reply in replies)
        return replies


def direct(episode: Episode) -> Moves:
    """Without the article: what the judge knows by itself."""
    yield from episode.judge()


def direct_article(episode: Episode) -> Moves:
    """With the article: what the judge could know if it could read everything."""
    yield from episode.judge(article=True)


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


def debate(episode: Episode) -> Moves:
    """Sides are assigned; the debaters of a round speak at once."""
    episode.assign(opponent=True)
    yield from dispute(episode)


def dispute(episode: Episode) -> Moves:
    """Rounds of simultaneous arguments, then the verdict."""
    for number in range(episode.rules.rounds):
        yield from episode.argue(number)
    yield from episode.judge()


def open_consultancy(episode: Episode) -> Moves:
    """The consultant's side is its own direct answer, with the article."""
    yield from episode.choose()
    yield from consult(episode)


def open_debate(episode: Episode) -> Moves:
    """The agent's side is its own direct answer, with the article; the opponent has the other."""
    yield from episode.choose(opponent=True)
    yield from dispute(episode)


PROTOCOLS: dict[str, Callable[[Episode], Moves]] = {
    protocol.__name__: protocol
    for protocol in (direct, direct_article, consultancy, debate, open_consultancy, open_debate)
}
