"""A question, the record of its discussion, and the calls of its participants.

A protocol asks with `Call`s and receives a `Reply` to each; what others may read of a reply becomes
a `Turn` of the `Transcript`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

LETTERS = "AB"  # the labels of the two answers, in the order shown
Role = Literal["judge", "agent", "opponent", "preference"]
Task = Literal["answer", "argue", "ask", "judge", "prefer"]


@dataclass(frozen=True)
class Question:
    """A question, its possible answers, and the article that the answer is in.

    Args:
        id: unique within its source.
        text: the question.
        choices: possible answers; exactly two once it is discussed (`two_choices`).
        right: index of the right answer; None if it is unknown.
        article: text that agents read and the judge does not; None for a closed question.
        language: ISO 639-1 code, when known.
        metadata: other facts of the source, e.g. the sentences that the answer follows from.
    """

    id: str
    text: str
    choices: tuple[str, ...]
    right: int | None
    article: str | None = None
    language: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """The words of one participant in a round.

    Args:
        round: counted from 0.
        role: the speaker.
        side: index of the answer that the speaker argues for; None for the judge's questions.
        text: the part that others read, one line: without thoughts, quotes checked.
        response: the whole response, with its thoughts.
        rejected: the other candidates for this turn, if a preference model chose.
    """

    round: int
    role: Role
    side: int | None
    text: str
    response: str
    rejected: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """One request to a participant, with everything that it may see.

    Args:
        role: the participant.
        task: `answer` the question alone, `argue` for a side, `ask` a question about the arguments,
            `judge` which answer is right, or choose (`prefer`) among candidates for a turn.
        question: with two choices in the order shown.
        turns: the turns so far.
        article: the article, if this participant sees it.
        side: the answer to argue for, or whose candidates are compared.
        round: counted from 0; `rounds` in all.
        rounds: number of rounds.
        candidates: arguments to choose among (`prefer`).
    """

    role: Role
    task: Task
    question: Question
    turns: tuple[Turn, ...] = ()
    article: str | None = None
    side: int | None = None
    round: int = 0
    rounds: int = 0
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reply:
    """A participant's response.

    Args:
        text: the whole response; thoughts stand between the paper's tags.
        tokens: generated tokens.
        probability: probability of the answer's letter that the response gives, if its model
            reports one: that of the letter's token, or a simulated judge's.
        fault: reason why there is no response; empty if there is one.
    """

    text: str
    tokens: int = 0
    probability: float | None = None
    fault: str = ""


@dataclass
class Transcript:
    """A discussion of one question.

    Args:
        question: with two choices in the order shown; the answers are called A and B.
        protocol: name of the protocol.
        turns: the turns in their order; of simultaneous ones, that for answer A is first.
        side: the answer that the agent argues for; None without an agent.
        opponent: True if an opponent argues for the other answer.
        chosen: the agent's own answer, where it argues for that (open protocols); None if it gave
            none, and its side was drawn.
        verdict: the answer that the judge chose; None if it chose none.
        probability: the judge's probability of answer A; None without a verdict.
        responses: the judge's responses behind the verdict.
        tokens: generated tokens of all participants.
        fault: reason why the discussion could not be finished.
    """

    question: Question
    protocol: str
    turns: list[Turn] = field(default_factory=list)
    side: int | None = None
    opponent: bool = False
    chosen: int | None = None
    verdict: int | None = None
    probability: float | None = None
    responses: list[str] = field(default_factory=list)
    tokens: int = 0
    fault: str = ""

    @property
    def judged_right(self) -> bool | None:
        """True if the judge chose the right answer; None if the right answer is unknown."""
        right = self.question.right
        return None if right is None else self.verdict == right

    @property
    def won(self) -> bool | None:
        """True if the judge chose the agent's side; None without an agent."""
        return None if self.side is None else self.verdict == self.side

    def to_dict(self) -> dict[str, Any]:
        """The transcript in JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Transcript:
        """The transcript of a row that `to_dict` made."""
        question = Question(**row["question"] | {"choices": tuple(row["question"]["choices"])})
        turns = [Turn(**turn | {"rejected": tuple(turn["rejected"])}) for turn in row["turns"]]
        return cls(**row | {"question": question, "turns": turns})

    def markdown(self) -> str:
        """The transcript as readable text: question, every turn with its hidden thoughts,
        verdict."""
        question = self.question
        lines = [f"## {question.id}", "", question.text, ""]
        for side, choice in enumerate(question.choices):
            right = " (right)" if side == question.right else ""
            lines.append(f"- **{LETTERS[side]}** {choice}{right}")
        if question.article:
            lines += ["", "> " + question.article.replace("\n", "\n> ")]
        for turn in self.turns:
            argued = "" if turn.side is None else f", for {LETTERS[turn.side]}"
            lines += ["", f"**Round {turn.round + 1}, {turn.role}{argued}:** {turn.text}"]
            if turn.response.strip() != turn.text.strip():
                lines.append(f"<details><summary>whole response</summary>{turn.response}</details>")
        for response in self.responses:
            lines += ["", f"**Judge:** {response}"]
        verdict = "none" if self.verdict is None else LETTERS[self.verdict]
        known = {True: ", right", False: ", wrong", None: ""}[self.judged_right]
        shown = "" if self.probability is None else f"; probability of A {self.probability:.3f}"
        lines += ["", f"**Verdict:** {verdict}{known}{shown}"]
        if self.fault:
            lines += ["", f"**Not finished:** {self.fault}"]
        return "\n".join([*lines, "", ""])
