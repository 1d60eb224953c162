"""A completion as the screen and the diagnosis show it: what the model read and wrote, in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tramontane.types import Completion, Outcome, Problem, Verdict

Decode: TypeAlias = Callable[[Sequence[int]], str]  # tokens to text, with special tokens
MODEL, PROMPT, PROBLEM = "model", "prompt", "problem"


@dataclass(frozen=True)
class Sample:
    """A completion to show.

    Args:
        messages: (role, text) of what the model read and wrote, in order. The first is the
            `problem` or, for a conversation, the whole `prompt` that its environment began with;
            then come those of the `model`, each with the answers (`user`, `tool`, `system`) to it.
        verdict: the outcome.
        reward: the reward of the completion.
        parts: the parts of its reward by name.
        reason: the reason of the verdict; may be empty.
    """

    messages: list[tuple[str, str]]
    verdict: Outcome
    reward: float = 0.0
    parts: Mapping[str, float] | None = None
    reason: str = ""

    @classmethod
    def of(
        cls, problem: Problem, completion: Completion, verdict: Verdict, decode: Decode
    ) -> Sample:
        """The sample of a graded completion."""
        messages = messages_of(problem, completion, decode)
        return cls(messages, verdict.verdict, verdict.reward, verdict.parts, verdict.reason)

    @property
    def judgment(self) -> str:
        """The verdict with its reason, and the reward with its parts that are not 0."""
        parts = {name: value for name, value in (self.parts or {}).items() if value}
        terms = " ".join(f"{name} {value:+.3g}" for name, value in parts.items())
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.verdict}{reason}, reward {self.reward:.3g}{f' = {terms}' if terms else ''}"


def messages_of(problem: Problem, completion: Completion, decode: Decode) -> list[tuple[str, str]]:
    """The messages of a completion; see `Sample`."""
    if completion.ending is None:
        return [(PROBLEM, problem.problem), (MODEL, completion.text)]
    messages = [(PROMPT, decode(completion.sequences[0].prompt_ids))]
    for turn in completion.turns:
        messages.append((MODEL, turn.text))
        messages += [(message["role"], message["content"]) for message in turn.messages]
    return messages
