"""What environments and their workers return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tramontane.types import Ending, Message, TurnRecord


@dataclass
class Turn:
    """An environment's answer to one message of the model. An environment may also return a tuple
    (messages, reward, done), a mapping with these keys, or an object with these attributes.

    Args:
        messages: put in before the model's next turn; roles `user`, `tool` or `system`. A text is
            one message of the user. A content may be a list of parts, texts and images.
        reward: reward of this turn; None if it has none.
        done: True ends the conversation.
    """

    messages: Sequence[Message] | str = ()
    reward: float | None = None
    done: bool = False


class Broken(Exception):
    """An exception of this package on the path of one conversation; its text is the traceback."""


@dataclass(frozen=True)
class Lost:
    """The answer to a call whose conversation the process does not know (any more)."""

    how: str = ""  # what happened to the process; empty if it happened before the call
    late: bool = False  # True if the call itself took too long, and was the reason


@dataclass
class Started:
    """A conversation ready for its first turn: the tokens of its prompt, or why there is none, and
    the names of the tools that the model may call."""

    prompt_ids: list[int]
    ending: Ending | None = None
    reason: str = ""
    tools: Sequence[str] = ()
    images: Sequence[str] = ()  # of the prompt, as data URIs
    opened: Sequence[Message] = ()  # of the prompt, without images; empty: the problem's own


@dataclass
class Continued:
    """What follows a turn of the model."""

    turn: TurnRecord  # record of the turn
    # True if nobody read the newest turn, which is dropped: `turn` is the one before it again.
    withdrawn: bool = False
    # Tokens to append to the sequence; empty if the conversation ended or forked.
    put: Sequence[int] = field(default_factory=list)
    # If not None, the template rewrote history: a new sequence of the conversation begins with this
    # prompt.
    prompt_ids: list[int] | None = None
    # Limit of the next request's tokens (`SamplingParams.max_tokens`), including those that it
    # already has.
    max_tokens: int = 0
    ending: Ending | None = None  # not None if the conversation has ended
    reason: str = ""  # details of the ending, e.g. the error of an environment that failed
