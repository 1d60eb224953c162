"""The moves of protocols: an agent's own answer, arguments, questions, and the verdict.

A protocol is a Python generator: it yields lists of `Call`s that are asked at the same time, and
receives their replies in the same order. So thousands of discussions can share models concurrently,
and a discussion can be replayed exactly from recorded replies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from tramontane.oversight.labels import conclusion, letter_of, number_of
from tramontane.oversight.questions import Question
from tramontane.oversight.quotes import check_quotes, without_marks
from tramontane.oversight.transcript import Call, Reply, Role, Transcript, Turn

Moves: TypeAlias = Generator[list[Call], list[Reply], None]


@dataclass(frozen=True)
class Rules:
    """The numbers of a protocol.

    Args:
        rounds: rounds of arguments; the paper has 3.
        best_of: candidates for each turn; a preference model chooses one. The paper's best-of-n has
            4. 1: no choice.
        judge_samples: verdicts of the judge; the majority counts.
    """

    rounds: int = 3
    best_of: int = 1
    judge_samples: int = 1


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
        [reply] = yield [self._call("agent", "answer", article=self.question.article)]
        self._count(reply)
        chosen = letter_of(reply.text, self.question.choices)
        self.transcript.chosen = chosen
        if chosen is not None:
            self.transcript.side = chosen

    def argue(self, number: int) -> Moves:
        """One round of arguments. Debaters speak simultaneously: neither sees the other's argument
        of the same round. Turns are in the order of the answers, A's first, since the order must
        not reveal the agent's own answer."""
        side, best_of = self.transcript.side, self.rules.best_of
        assert side is not None
        sides: dict[Role, int] = {"agent": side}
        if self.transcript.opponent:
            sides["opponent"] = 1 - side
        calls = [
            self._call(role, "argue", number, side=side, article=self.question.article)
            for role, side in sides.items()
            for _ in range(best_of)
        ]
        replies = yield calls
        self._count(*replies)
        candidates = {
            role: replies[i * best_of : (i + 1) * best_of] for i, role in enumerate(sides)
        }
        texts = {
            role: [self._shown(reply) for reply in found] for role, found in candidates.items()
        }
        best = dict.fromkeys(sides, 0)
        if best_of > 1:
            choices = yield [
                self._call("preference", "prefer", number, side=side, candidates=tuple(texts[role]))
                for role, side in sides.items()
            ]
            self._count(*choices)
            best = {
                role: number_of(choice.text, best_of) or 0
                for role, choice in zip(sides, choices, strict=True)
            }
        for role, side in sorted(sides.items(), key=lambda item: item[1]):
            rejected = tuple(text for i, text in enumerate(texts[role]) if i != best[role])
            response = candidates[role][best[role]].text
            turn = Turn(number, role, side, texts[role][best[role]], response, rejected)
            self.transcript.turns.append(turn)

    def ask(self, number: int) -> Moves:
        """The judge asks a question about the arguments so far. Its quotes are not checked, since
        that would reveal the article's content, so they lose their marks."""
        [reply] = yield [self._call("judge", "ask", number)]
        self._count(reply)
        turn = Turn(number, "judge", None, without_marks(conclusion(reply.text)), reply.text)
        self.transcript.turns.append(turn)

    def judge(self, *, article: bool = False) -> Moves:
        """The judge's verdict: the answer chosen by most of its samples, the first in a tie.

        Its probability is the mean over the samples with an answer. A sample whose model reports no
        probability counts as certain.
        """
        shown = self.question.article if article else None
        call = self._call("judge", "judge", self.rules.rounds, article=shown)
        replies = yield [call] * self.rules.judge_samples
        self._count(*replies)
        self.transcript.responses = [reply.text for reply in replies]
        choices = self.question.choices
        votes = [(letter_of(reply.text, choices), reply.probability) for reply in replies]
        found = [(side, 1.0 if p is None else p) for side, p in votes if side is not None]
        if not found:
            return
        self.transcript.verdict = Counter(side for side, _ in found).most_common(1)[0][0]
        of_first = [p if side == 0 else 1 - p for side, p in found]
        self.transcript.probability = sum(of_first) / len(of_first)

    def _call(
        self,
        role: Role,
        task: str,
        number: int = 0,
        *,
        side: int | None = None,
        article: str | None = None,
        candidates: tuple[str, ...] = (),
    ) -> Call:
        return Call(
            role=role,
            task=task,  # type: ignore[arg-type]
            question=self.question,
            turns=tuple(self.transcript.turns),
            article=article,
            side=side,
            round=number,
            rounds=self.rules.rounds,
            candidates=candidates,
        )

    def _shown(self, reply: Reply) -> str:
        """The part of an argument that others read."""
        return check_quotes(conclusion(reply.text), self.question.article)

    def _count(self, *replies: Reply) -> None:
        self.transcript.tokens += sum(reply.tokens for reply in replies)
