"""Conversations in evaluations: the columns of their rows, their figures, and their text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tramontane.data.images import TokensOf, named
from tramontane.tokens import INSERTED
from tramontane.types import IMAGE, PLACE, Completion, TurnRecord

Row = dict[str, Any]  # of an evaluation


def conversation_row(completion: Completion, tokens_of: TokensOf | None = None) -> Row:
    """The columns of a conversation: the `prompt_ids` that it began with, `ending`,
    `ending_reason`, `inserted_tokens` (of `tokens`) and `turns`, each as in `TurnRecord`, with the
    names of images in place of them; empty for a completion without an environment."""
    if completion.ending is None:
        return {}
    return {
        "prompt_ids": completion.sequences[0].prompt_ids,
        "ending": completion.ending,
        "ending_reason": completion.ending_reason,
        "inserted_tokens": sum(s.versions.count(INSERTED) for s in completion.sequences),
        "turns": [_turn(turn, tokens_of) for turn in completion.turns],
    }


def _turn(turn: TurnRecord, tokens_of: TokensOf | None) -> Row:
    messages = []
    for message in turn.messages:
        row = {"role": message["role"], "content": message["content"].replace(PLACE, IMAGE)}
        if images := message.get("images"):
            row |= named(images, tokens_of)
        messages.append(row)
    calls = [vars(call) | {"answer": call.answer.replace(PLACE, IMAGE)} for call in turn.calls]
    return vars(turn) | {"messages": messages, "calls": calls}


@dataclass(frozen=True)
class ConversationFigures:
    """Figures of conversations.

    Args:
        mean_turns: turns of the model.
        mean_calls: calls of tools.
        mean_inserted_tokens: tokens inserted by environments and tools.
        parsed_rate: share of calls that could be parsed; 1 without calls.
        failed_rate: share of calls that were answered with an error; 0 without calls.
        endings: share of each ending that occurred.
        right_by_turn: share of the judged conversations that are right after 1, 2, … turns: the
            first is pass@1 of a single turn, the last that of the whole conversation.
    """

    mean_turns: float
    mean_calls: float
    mean_inserted_tokens: float
    parsed_rate: float
    failed_rate: float
    endings: dict[str, float]
    right_by_turn: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> ConversationFigures | None:
        """The figures of an evaluation's rows; None if none is a conversation."""
        rows = [row for row in rows if "turns" in row]
        if not rows:
            return None
        n = len(rows)
        calls = [call for row in rows for turn in row["turns"] for call in turn["calls"]]
        made = max(1, len(calls))
        return cls(
            sum(len(row["turns"]) for row in rows) / n,
            len(calls) / n,
            sum(row["inserted_tokens"] for row in rows) / n,
            1 - sum(not call["name"] for call in calls) / made,
            sum(call["error"] for call in calls) / made,
            {ending: k / n for ending, k in Counter(row["ending"] for row in rows).most_common()},
            right_by_turn(rows),
        )


def right_by_turn(rows: Sequence[Row]) -> list[float]:
    """Share of the judged conversations that are right after 1, 2, … turns; empty without any."""
    judged = [row for row in rows if row.get("verdict", "unscorable") != "unscorable"]
    right = [len(row["turns"]) for row in judged if row["verdict"] == "right"]
    turns = range(1, max((len(row["turns"]) for row in judged), default=0) + 1)
    return [sum(used <= most for used in right) / len(judged) for most in turns]


def transcript(completion: Completion) -> str:
    """All messages of a conversation after its prompt, each below its role, with the time of each
    answer, and how the conversation ended."""
    blocks = []
    for turn in completion.turns:
        blocks.append(f"[assistant]\n{turn.text}")
        blocks += [f"[answered in {turn.seconds:.1f} s]"] if turn.messages else []
        blocks += [f"[{message['role']}]\n{message['content']}" for message in turn.messages]
    reason = f": {completion.ending_reason}" if completion.ending_reason else ""
    return "\n".join([*blocks, f"[{completion.ending}{reason}]"])
