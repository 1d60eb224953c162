"""User-defined rewards: Python functions named by import path, added to the four axes.

A function of one completion takes (problem, text, n_tokens) and returns a number between 0 and 1.
A function of a whole group is called once for all completions of a problem, by keyword, and returns
a number or None for each: it has a parameter `texts`, or TRL's signature with `completions` (and
`prompts`, `completion_ids`, and the data's columns, each a list). The number times the weight is
the reward's part.

Functions run in a worker process of the pool, so that time and memory are bounded; an exception
makes the completions unscorable.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

from tramontane.config import CustomReward, RewardSource
from tramontane.types import FAILED, Completion, Message, Problem
from tramontane.verifier import functions

PARAMETERS = ("problem", "text", "n_tokens")
GROUP_PARAMETERS = ("problem", "texts", "n_tokens")
TRL_PARAMETERS = ("prompts", "completions", "completion_ids", "completions_ids")
Kind = Literal["completion", "group", "TRL"]
Progress = tuple[int, int]  # updates done, and updates of the run
NO_PROGRESS: Progress = (0, 1)


# What a judge grades: an answer, or the messages of a conversation, each a role and a content, up
# to the model's last. They stand behind the problem's prompt, or in place of it: then the first is
# not the model's.
Answered: TypeAlias = "str | tuple[tuple[str, str], ...]"


class Response(NamedTuple):
    """The part of a completion that is graded.

    Args:
        text: its text; for a conversation, what the model wrote.
        n_tokens: its length in tokens.
        token_ids: its tokens if known.
        turns: for a conversation, the text of each of the model's turns, and whether it makes
            calls.
        earned: the environment's reward, which replaces the verifier's judgment; None without one.
        failure: why the environment failed, so that nothing can be judged; empty if it did not.
        unrewarded: how a conversation was cut short before its environment gave any reward, which
            counts as 0; empty for others.
        messages: for a conversation, its messages after the prompt; see `turn_messages`.
        opened: chats that an environment or a harness began, each behind a number of `messages`; a
            prompt that is the problem's own is not among them.
    """

    text: str
    n_tokens: int
    token_ids: Sequence[int] | None = None
    turns: Sequence[tuple[str, bool]] = ()
    earned: float | None = None
    failure: str = ""
    unrewarded: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    opened: Sequence[tuple[int, Sequence[Message]]] = ()

    @property
    def last(self) -> str:
        """The text of the last turn, or all of it."""
        return self.turns[-1][0] if self.turns else self.text

    @classmethod
    def of(cls, completion: Completion, reward: RewardSource = "verifier") -> Response:
        """The graded part of a completion; `reward` is `conversation.reward`."""
        turns, ending, earned = completion.turns, completion.ending, None
        rewards = [turn.reward for turn in turns if turn.reward is not None]
        failure, unrewarded = failure_of(ending, completion.ending_reason), ""
        if ending and reward != "verifier":
            earned = float(sum(rewards if reward == "sum" else rewards[-1:]))
            if not rewards:
                unrewarded = f"{ending}, without a reward (conversation.reward: {reward})"
            if ending == "completed":
                failure, unrewarded = unrewarded, ""
        messages, opened = list[dict[str, Any]](), [(0, completion.opened)]
        for turn in turns:
            made = [(call.name, call.arguments) for call in turn.calls]
            messages += turn_messages(turn.text, made, turn.messages)
            opened.append((len(messages), turn.opened))
        return cls(
            completion.text,
            completion.n_tokens,
            completion.token_ids,
            [(turn.text, bool(turn.calls)) for turn in turns],
            earned,
            failure,
            unrewarded,
            messages,
            [(place, chat) for place, chat in opened if chat],
        )


def turn_messages(
    text: str, calls: Iterable[tuple[str, Any]], answers: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A turn of the model and what answered it as TRL's functions read them: the model's message
    with the calls that could be read, and each tool's with its name.

    Args:
        text: what the model wrote, calls included.
        calls: (name, arguments) of each; the name is empty if it could not be read.
        answers: messages with `role` and `content`; those of tools are in the order of the calls.
    """
    calls = list(calls)
    said: dict[str, Any] = {"role": "assistant", "content": text}
    if made := [{"name": name, "arguments": given} for name, given in calls if name]:
        said["tool_calls"] = [{"type": "function", "function": call} for call in made]
    names, messages = iter([name for name, _ in calls]), [said]
    for answer in answers:
        message = {"role": answer["role"], "content": answer["content"]}
        if answer["role"] == "tool":
            message["name"] = next(names, "")
        messages.append(message)
    return messages


def failure_of(ending: Any, reason: Any) -> str:
    """Why a conversation with this ending cannot be judged; empty if it can."""
    return f"{ending}: {reason}" if ending in tuple(FAILED) else ""


@dataclass(frozen=True)
class GroupCall:
    """One reward function to call on all completions of a problem; `name` is the reward's part."""

    name: str
    responses: list[Response]
    progress: Progress


@dataclass(frozen=True)
class JudgeCall:
    """Answers for the judge to grade, one per completion of a problem; None for those that it is
    not asked about. `name` is the reward's part."""

    name: str
    answers: Sequence[Answered | None]


class GroupResult(NamedTuple):
    """What a function or the judge returned for each completion."""

    # One for each completion. None: the function gives this one no reward, or the judge could not
    # grade it.
    values: list[float | None]
    reason: str = ""  # why the whole call failed; `values` is then empty
    # What the judge says of each: why it could not be graded, or criteria that it misses.
    notes: Sequence[str] = ()

    def fault(self, place: int) -> str:
        """Why a completion cannot be graded; empty if it can."""
        ungraded = self.notes and self.values[place] is None
        return self.reason or (self.notes[place] if ungraded else "")


# Parameters that functions written for other projects have for the reference and the response, as
# verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` has.
_OF_OTHERS = ("ground_truth", "solution_str", "answer", "reference", "label", "labels", "target")


def check(reward: CustomReward) -> None:
    """Import a reward function.

    Raises:
        InputError: see `functions.check`.
    """
    functions.check(reward.function, f"verifier.reward.custom: {reward.name}", fault)


def fault(function: Callable[..., Any]) -> str:
    """The reason why a function cannot be called as a reward; empty if it can."""
    called = kind_of(function)
    if called == "TRL":
        return ""  # the available columns depend on the data: `group_rewards.check_columns`
    if called == "group":
        names = functions.parameters_of(function)
        return functions.fault_of_call(function, **{n: n for n in GROUP_PARAMETERS if n in names})
    if fault := functions.fault_of_order(function, *PARAMETERS):
        return fault
    taken = [*functions.parameters_of(function)][: len(PARAMETERS)]
    if others := [name for name in taken if name in _OF_OTHERS]:
        return (
            f"{getattr(function, '__name__', type(function).__name__)}({', '.join(taken)}, …), "
            f"{functions.defined_at(function)}, takes {others[0]!r}, and would be called with "
            f"({', '.join(PARAMETERS)}) in this order: give it these three, and read "
            f"problem.answer, problem.metadata and problem.source"
        )
    found = functions.fault_of_call(function, *PARAMETERS)
    return found and (
        f"{found}. A reward of one completion is called with ({', '.join(PARAMETERS)}), one of a "
        f"whole group by keyword with ({', '.join(GROUP_PARAMETERS)}), and one of TRL's by keyword "
        f"with (prompts, completions, completion_ids, **columns)"
    )


def kind_of(function: Callable[..., Any]) -> Kind:
    """The kind of a function, by the names of its parameters."""
    names = functions.parameters_of(function)
    only_named = [p.kind for p in names.values()] == [inspect.Parameter.VAR_KEYWORD]
    if only_named or not names.keys().isdisjoint(TRL_PARAMETERS):
        return "TRL"
    return "group" if "texts" in names else "completion"


@lru_cache
def kind(path: str) -> Kind:
    """Like `kind_of`, for the path of a function."""
    return kind_of(functions.load(path))


def of_group(reward: CustomReward) -> bool:
    """True for a function that is called once for all completions of a problem."""
    return kind(reward.function) != "completion"


def part(reward: CustomReward, problem: Problem, text: str, n_tokens: int) -> float:
    """A completion's weighted part of the reward, from a function of one completion.

    Raises:
        FunctionFailed: the function failed.
    """
    what = label(reward)
    given = {"problem": problem, "text": text, "n_tokens": n_tokens}
    value = functions.call_with(reward.function, what, **given)
    number = functions.number(value)
    if number is None or not 0 <= number <= 1:
        raise functions.refused(reward.function, what, value, "a number from 0 to 1")
    return reward.weight * number


def label(reward: CustomReward) -> str:
    """What messages call a reward."""
    return f"{functions.REWARD} {reward.name!r}"
