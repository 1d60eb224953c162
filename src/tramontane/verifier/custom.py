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

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from tramontane.config import CustomReward, RewardSource
from tramontane.errors import InputError
from tramontane.types import FAILED, Completion, Problem
from tramontane.verifier import functions
from tramontane.verifier.functions import FunctionFailed

PARAMETERS = ("problem", "text", "n_tokens")
GROUP_PARAMETERS = ("problem", "texts", "n_tokens")
TRL_PARAMETERS = ("prompts", "completions", "completion_ids", "completions_ids")
TRL_EXTRAS = ("trainer_state", "log_extra", "log_metric")
COLUMNS = ("id", "domain", "problem", "answer", "tests", "language", "difficulty", "source")
Kind = Literal["completion", "group", "TRL"]
Progress = tuple[int, int]  # updates done, and updates of the run
NO_PROGRESS: Progress = (0, 1)


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
    """

    text: str
    n_tokens: int
    token_ids: Sequence[int] | None = None
    turns: Sequence[tuple[str, bool]] = ()
    earned: float | None = None
    failure: str = ""
    unrewarded: str = ""

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
        return cls(
            completion.text,
            completion.n_tokens,
            completion.token_ids,
            [(turn.text, bool(turn.calls)) for turn in turns],
            earned,
            failure,
            unrewarded,
        )


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
    answers: Sequence[str | None]


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
        return ""  # the available columns depend on the data: `check_columns`
    if called == "group":
        names = functions.parameters_of(function)
        return functions.fault_of_call(function, **{n: n for n in GROUP_PARAMETERS if n in names})
    if fault := functions.fault_of_order(function, *PARAMETERS):
        return fault
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
    what = _what(reward)
    given = {"problem": problem, "text": text, "n_tokens": n_tokens}
    value = functions.call_with(reward.function, what, **given)
    number = functions.number(value)
    if number is None or not 0 <= number <= 1:
        raise functions.refused(reward.function, what, value, "a number from 0 to 1")
    return reward.weight * number


def call_group(reward: CustomReward, problem: Problem, call: GroupCall) -> GroupResult:
    """Call a function of a whole group. Never raises."""
    try:
        named = _named(reward, copy.deepcopy(problem), call)  # which the function may change
        returned = functions.call(reward.function, _what(reward), **named)
        return GroupResult(_values(reward, returned, len(call.responses)))
    except FunctionFailed as error:
        return GroupResult([], str(error))


def _values(reward: CustomReward, returned: Any, count: int) -> list[float | None]:
    """One number or None for each completion; `FunctionFailed` if anything else was returned."""
    wanted, what = f"a list of {count} numbers", _what(reward)
    if isinstance(returned, str | bytes | dict) or not hasattr(returned, "__len__"):
        raise functions.refused(reward.function, what, returned, wanted)
    entries = list(returned)
    if len(entries) != count:
        raise functions.refused(reward.function, what, returned, f"{wanted} but of {len(entries)}")
    numbers = [functions.number(entry, bools=True) for entry in entries]
    for entry, number in zip(entries, numbers, strict=True):
        if number is None and entry is not None:
            raise functions.refused(reward.function, what, entry, f"one of {wanted}, or None")
    return numbers


def _named(reward: CustomReward, problem: Problem, call: GroupCall) -> dict[str, Any]:
    responses, given = call.responses, dict[str, Any]()
    if kind(reward.function) == "TRL":
        # A column of other rows may be missing from this one.
        absent = {name: [None] * len(responses) for name in _columns(reward)}
        given = absent | _trl_arguments(problem, call)
    else:
        texts, lengths = [r.text for r in responses], [r.n_tokens for r in responses]
        given = {"problem": problem, "texts": texts, "n_tokens": lengths}
    return functions.accepted(functions.load(reward.function), given)


def _trl_arguments(problem: Problem, call: GroupCall) -> dict[str, Any]:
    responses, count = call.responses, len(call.responses)
    done, updates = call.progress
    # If only the length is known, as when scoring a file, each token is 0.
    ids = [[0] * r.n_tokens if r.token_ids is None else [*r.token_ids] for r in responses]
    texts: list[Any] = [r.text for r in responses]
    if problem.messages:  # TRL's conversational format
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {name: [value] * count for name, value in columns_of(problem).items()}
    return columns | {
        "prompts": [problem.messages or problem.problem] * count,
        "completions": texts,
        "completion_ids": ids,
        "completions_ids": ids,
        "trainer_state": SimpleNamespace(global_step=done, max_steps=updates),
        "log_extra": _ignore,
        "log_metric": _ignore,
    }


def _ignore(*arguments: Any) -> None:
    """A stand-in for TRL's `log_extra` and `log_metric`."""


def columns_of(problem: Problem) -> dict[str, Any]:
    """The columns of a problem's row, by name."""
    fields = {name: getattr(problem, name) for name in COLUMNS}
    return {name: value for name, value in fields.items() if value is not None} | problem.metadata


def _columns(reward: CustomReward) -> list[str]:
    return [
        name
        for name, p in functions.parameters_of(functions.load(reward.function)).items()
        if p.default is p.empty
        and p.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        and name not in (*TRL_PARAMETERS, *TRL_EXTRAS)
    ]


def check_columns(rewards: Iterable[CustomReward], problems: Iterable[Problem]) -> None:
    """Check that the data has the columns that functions with TRL's signature require.

    Raises:
        InputError: no problem has a column.
    """
    asked = [(reward, _columns(reward)) for reward in rewards if kind(reward.function) == "TRL"]
    if not any(columns for _, columns in asked):
        return
    known = {name for problem in problems for name in columns_of(problem)}
    for reward, columns in asked:
        if missing := [name for name in columns if name not in known]:
            place = functions.defined_at(functions.load(reward.function))
            raise InputError(
                f"{_what(reward)} ({place}) takes {', '.join(missing)}, and no row of the data has "
                f"such a column; the columns are {', '.join(sorted(known))}"
            )


def _what(reward: CustomReward) -> str:
    return f"{functions.REWARD} {reward.name!r}"
