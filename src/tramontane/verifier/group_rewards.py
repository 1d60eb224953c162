"""Rewards of a whole group: the judge's, and those of functions that are called once for all
completions of a problem, also with TRL's signature.

`group_calls` says what to call once all completions of a problem have been graded individually
(`reward.grade_apart`), and `with_group_rewards` adds what was returned.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from tramontane.config import CustomReward, VerifierConfig
from tramontane.config.domains import JUDGE
from tramontane.errors import InputError
from tramontane.types import Problem, Verdict
from tramontane.verifier import correctness, custom, functions
from tramontane.verifier.correctness import judge_by_rewards, outcome_of, unscorable
from tramontane.verifier.custom import (
    NO_PROGRESS,
    TRL_PARAMETERS,
    GroupCall,
    GroupResult,
    JudgeCall,
    Progress,
    Response,
    label,
)
from tramontane.verifier.functions import FunctionFailed
from tramontane.verifier.judge import answer_of

TRL_EXTRAS = ("trainer_state", "log_extra", "log_metric")
NOT_GIVEN = ("prompt", "completion", "completion_ids")  # columns of a row that TRL withholds
OF_OPENRLHF = (
    "; OpenRLHF's queries and labels are prompts with their completions, and answers: take "
    "completions and answer"
)
NO_NUMBER = "every reward returned None"  # of functions that alone judge


def group_calls(
    problem: Problem,
    verdicts: Sequence[Verdict],
    responses: Sequence[Response],
    config: VerifierConfig,
    progress: Progress = NO_PROGRESS,
) -> list[GroupCall | JudgeCall]:
    """The functions to call on a whole group, and the judge if needed: those that count for at
    least one of its completions."""
    calls: list[GroupCall | JudgeCall] = []
    for reward in _group_rewards(problem, config):
        counts = [_counts(reward, verdict) for verdict in verdicts]
        if not reward.judged and any(counts):
            calls.append(GroupCall(reward.name, [*responses], progress))
        pairs = [*zip(responses, counts, strict=True)]
        if reward.judged and any(counted and r.earned is None for r, counted in pairs):
            answers = [answer_of(r, config.tags) if counted else None for r, counted in pairs]
            calls.append(JudgeCall(reward.name, answers))
    return calls


def run_group_call(
    problem: Problem, call: GroupCall | JudgeCall, config: VerifierConfig
) -> GroupResult:
    """Call a function on a whole group. Never raises: see `GroupResult`."""
    if isinstance(call, JudgeCall):
        return GroupResult([], "judge: only a VerifierPool asks it")
    [reward] = [r for r in config.reward.custom if r.name == call.name]
    try:
        arguments = _arguments(reward, copy.deepcopy(problem), call)  # it may change the problem
        returned = functions.call(reward.function, label(reward), **arguments)
        return GroupResult(_values(reward, returned, len(call.responses)))
    except FunctionFailed as error:
        return GroupResult([], str(error))


def with_group_rewards(
    problem: Problem,
    verdicts: Sequence[Verdict],
    results: Mapping[str, GroupResult],
    config: VerifierConfig,
) -> list[Verdict]:
    """The verdicts on a group with the rewards of the whole group.

    If a function failed, every completion that it counts for is unscorable. If the judge could not
    grade a completion, only that one is.

    Args:
        problem: the problem that all completions answer.
        verdicts: the results of `grade_apart`.
        results: what each function of `group_calls` or the judge returned, by the reward's name.
        config: weights, and the domains.
    """
    return [_added(problem, v, i, results, config) for i, v in enumerate(verdicts)]


def _added(
    problem: Problem,
    verdict: Verdict,
    place: int,
    results: Mapping[str, GroupResult],
    config: VerifierConfig,
) -> Verdict:
    rewards = [r for r in _group_rewards(problem, config) if r.name in results]
    counting = [reward for reward in rewards if _counts(reward, verdict)]
    for reward in counting:
        if reason := results[reward.name].fault(place):
            return unscorable(reason, verdict.parts, seconds=verdict.seconds, answer=verdict.answer)
    values = {r.name: results[r.name].values[place] for r in counting}
    given = [r for r in counting if values[r.name] is not None]
    parts = verdict.parts | {r.name: r.weight * (values[r.name] or 0.0) for r in given}
    verdict = replace(verdict, reward=sum(parts.values()), parts=parts)
    domain = correctness.domain_of(problem, config)
    if "correctness" in values:  # the judge's
        outcome = outcome_of(values["correctness"] or 0.0, domain)
        note = results["correctness"].notes[place]
        reason = "" if outcome == "right" else note or f"judged {values['correctness']:.3g}"
        return replace(verdict, verdict=outcome, reason=reason)
    if not counting or domain.verifier is not None or verdict.verdict == "malformed":
        return verdict
    of_one = [r for r in config.reward.custom if r.weight and not custom.of_group(r)]
    weights = {r.name: r.weight for r in given} | {r.name: r.weight for r in of_one}
    if not weights:
        return unscorable(NO_NUMBER, parts, seconds=verdict.seconds)
    judged = judge_by_rewards(sum(parts[name] for name in weights), weights.values(), domain)
    return replace(verdict, verdict=judged.outcome, reason=judged.reason)


class _GroupReward(NamedTuple):
    """A reward of a whole group: the part of a function, or of the judge."""

    name: str
    weight: float
    malformed: bool = False
    judged: bool = False


def _group_rewards(problem: Problem, config: VerifierConfig) -> list[_GroupReward]:
    weights = config.reward
    rewards = [
        _GroupReward(r.name, r.weight, r.malformed)
        for r in weights.custom
        if r.weight and custom.of_group(r)
    ]
    if correctness.domain_of(problem, config).verifier == JUDGE:
        rewards.append(_GroupReward("correctness", weights.correctness, judged=True))
    elif weights.judge:
        rewards.append(_GroupReward("judge", weights.judge, judged=True))
    return rewards


def _counts(reward: _GroupReward, verdict: Verdict) -> bool:
    return verdict.verdict in ("right", "wrong") or (
        verdict.verdict == "malformed" and reward.malformed
    )


def _values(reward: CustomReward, returned: Any, count: int) -> list[float | None]:
    """One number or None for each completion; `FunctionFailed` if anything else was returned."""
    wanted, what = f"a list of {count} numbers", label(reward)
    has_order = not isinstance(returned, str | bytes | dict | set | frozenset)
    if not (has_order and hasattr(returned, "__len__")):
        raise functions.refused(reward.function, what, returned, wanted)
    entries = list(returned)
    if len(entries) != count:
        raise functions.refused(reward.function, what, returned, f"{wanted} but of {len(entries)}")
    numbers = [functions.number(entry, bools=True) for entry in entries]
    for entry, number in zip(entries, numbers, strict=True):
        if number is None and entry is not None:
            raise functions.refused(reward.function, what, entry, f"one of {wanted}, or None")
    return numbers


def _arguments(reward: CustomReward, problem: Problem, call: GroupCall) -> dict[str, Any]:
    responses, given = call.responses, dict[str, Any]()
    if custom.kind(reward.function) == "TRL":
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
        said = [r.messages or [{"role": "assistant", "content": r.text}] for r in responses]
        texts = copy.deepcopy([[*messages] for messages in said])
    columns = {name: [value] * count for name, value in _columns_of(problem).items()}
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


def _columns_of(problem: Problem) -> dict[str, Any]:
    """The columns that TRL gives to a function of a row, by name."""
    return {name: value for name, value in problem.row.items() if name not in NOT_GIVEN}


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
    asked = [
        (reward, _columns(reward)) for reward in rewards if custom.kind(reward.function) == "TRL"
    ]
    if not any(columns for _, columns in asked):
        return
    known = {name for problem in problems for name in _columns_of(problem)}
    for reward, columns in asked:
        if missing := [name for name in columns if name not in known]:
            place = functions.defined_at(functions.load(reward.function))
            raise InputError(
                f"{label(reward)} ({place}) takes {', '.join(missing)}, and no row of the data has "
                f"such a column; the columns are {', '.join(sorted(known))}"
                + OF_OPENRLHF
                * ("queries" in missing)
            )
