"""Correctness by domain: a table of verifiers, with entries for math, code, instructions and
function calls.

A user's verifier is a function of (problem, answer), where `answer` is the part of the response
extracted by the domain's format. It returns True or False, a number from 0 to 1 (the share of the
correctness reward), or a pair of one of these and a reason. An exception, or any other result,
makes the completion unscorable.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tramontane.config import DomainConfig, VerifierConfig
from tramontane.config.domains import VERIFIERS
from tramontane.errors import InputError
from tramontane.types import Judgment, Outcome, Problem, Verdict
from tramontane.verifier import calls, code, custom, functions, gym, instructions, math, tasksets
from tramontane.verifier.format import Parsed, boxes

PARAMETERS = ("problem", "answer")


class ReferenceCheck(NamedTuple):
    """Asks a worker whether answers to its problem can be judged at all (`can_judge`)."""


def _judge_math(problem: Problem, parsed: Parsed, config: VerifierConfig) -> Judgment:
    policy = config.math
    judged = math.judge_answer(str(parsed.extracted), problem.answer, policy)
    if judged.outcome == "right" and policy.boxes == "equal":
        contents = [parsed.answer[start : end - 1] for _, start, end in boxes(parsed.answer)]
        if any(math.judge_answer(c, problem.answer, policy).outcome != "right" for c in contents):
            return Judgment("wrong", "boxes that differ", judged.answer)
    return judged


def _judge_instructions(problem: Problem, parsed: Parsed, config: VerifierConfig) -> Judgment:
    share, broken = instructions.judge(problem.metadata, parsed.answer)
    reason = f"not followed: {broken}" if broken else ""
    return Judgment(outcome_of(share, domain_of(problem, config)), reason, None, share)


def _judge_calls(problem: Problem, parsed: Parsed, config: VerifierConfig) -> Judgment:
    right, reason = calls.judge(problem.metadata, parsed.answer)
    return Judgment("right" if right else "wrong", reason, None, float(right))


def _judge_task(
    problem: Problem, parsed: Parsed, config: VerifierConfig, n_tokens: int
) -> Judgment:
    scale = config.reward.verifiers_scale
    answer = str(parsed.extracted)
    try:
        scored = tasksets.score(problem, parsed.thoughts, answer, scale, n_tokens)
        share, rewards = asyncio.run(scored)
    except Exception as error:
        if not tasksets.is_of_answer(error, problem, scale):
            raise
        return Judgment("wrong", f"its rewards cannot judge it: {error}"[:300], answer)
    return Judgment(outcome_of(share, domain_of(problem, config)), rewards, answer, share)


BUILT_IN: dict[str, Callable[[Problem, Parsed, VerifierConfig], Judgment]] = {
    "math": _judge_math,
    "code": lambda problem, parsed, config: code.judge(parsed.answer, problem, config),
    "instructions": _judge_instructions,
    "calls": _judge_calls,
    "reasoning_gym": gym.judge,
}
_TASKS = "verifiers"


def check(config: VerifierConfig) -> None:
    """Import the user's verifiers and rewards.

    Raises:
        InputError: a function cannot be imported, or does not take its arguments.
    """
    for reward in config.reward.custom:
        custom.check(reward)
    for name, domain in config.domains.items():
        if domain.verifier is not None and domain.verifier not in VERIFIERS:
            functions.check(domain.verifier, f"verifier.domains.{name}.verifier", fault)


def fault(function: Callable[..., Any]) -> str:
    """The reason why a function cannot be called as a verifier; empty if it can."""
    return functions.fault_of_call(function, *PARAMETERS) or functions.fault_of_order(
        function, *PARAMETERS
    )


def has_functions(config: VerifierConfig, domain: str) -> bool:
    """True if a user-defined verifier or reward is called in a domain, or the judge is asked."""
    used = config.domains[domain].verifier
    own = used is not None and used not in VERIFIERS
    return own or config.asks_judge(domain) or any(reward.weight for reward in config.reward.custom)


def judge(problem: Problem, parsed: Parsed, config: VerifierConfig, n_tokens: int) -> Judgment:
    """Judge the answer of a well-formed response of `n_tokens` with its domain's verifier, which is
    not None.

    Raises:
        FunctionFailed: the user's function failed; the message names the domain.
    """
    domain = domain_of(problem, config)
    assert domain.verifier is not None
    if domain.verifier == _TASKS:
        return _judge_task(problem, parsed, config, n_tokens)
    if built_in := BUILT_IN.get(domain.verifier):
        return built_in(problem, parsed, config)
    what = f"{functions.VERIFIER} {problem.domain!r}"
    given = {"problem": problem, "answer": parsed.extracted}
    returned = functions.call_with(domain.verifier, what, **given)
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    result, reason = returned if is_pair else (returned, "")
    share = functions.number(result, bools=True)
    if share is None or not 0 <= share <= 1:
        wanted = "True, False or a number from 0 to 1"
        raise functions.refused(domain.verifier, what, result, wanted)
    answer = parsed.extracted
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return Judgment(outcome_of(share, domain), str(reason), text, share)


def can_judge(problem: Problem, config: VerifierConfig) -> bool:
    """True if a built-in verifier, programs aside, can judge a plain answer to a problem."""
    verifier = domain_of(problem, config).verifier
    if verifier == "math":
        return math.can_judge(problem.answer, config.math)
    if verifier == _TASKS:
        return tasksets.can_score(problem, config.reward.verifiers_scale)
    return verifier in BUILT_IN and verifier != "code"


def domain_of(problem: Problem, config: VerifierConfig) -> DomainConfig:
    """The entry of a problem's domain.

    Raises:
        InputError: there is none.
    """
    if problem.domain not in config.domains:
        raise InputError(
            f"problem {problem.id!r}: unknown domain {problem.domain!r}; verifier.domains has "
            f"{', '.join(config.domains)}"
        )
    return config.domains[problem.domain]


def outcome_of(share: float, domain: DomainConfig) -> Outcome:
    """Right if at least the domain's pass mark, up to rounding."""
    return "right" if share >= domain.pass_mark - 1e-9 else "wrong"


def judge_by_rewards(earned: float, weights: Iterable[float], domain: DomainConfig) -> Judgment:
    """The judgment without a verifier: what rewards of these weights earned, as a share of their
    possible maximum."""
    most = sum(weight for weight in weights if weight > 0)
    outcome = outcome_of(earned / most if most else 0.0, domain)
    reason = "" if outcome == "right" else f"rewards {earned:.3g} of {most:.3g}"
    return Judgment(outcome, reason)


def unscorable(
    reason: str, parts: Iterable[str], *, seconds: float = 0.0, answer: str | None = None
) -> Verdict:
    """A verdict without a judgment: every part is 0, and `reason` says what went wrong."""
    return Verdict(0.0, dict.fromkeys(parts, 0.0), "unscorable", reason, seconds, answer)


def is_slow(problem: Problem, config: VerifierConfig) -> bool:
    """True for programs, whose verdicts take seconds each."""
    return domain_of(problem, config).verifier == "code"


def time_limit(problem: Problem, config: VerifierConfig) -> float:
    """Time limit of one verdict on this problem, in seconds, not counting its worker's waits for a
    processor."""
    limit = domain_of(problem, config).timeout_s
    if limit is not None:
        return limit
    return code.time_limit(problem, config) if is_slow(problem, config) else config.timeout_s


def group_time_limit(problem: Problem, completions: int, config: VerifierConfig) -> float:
    """Longest time in seconds that a pool may take for the verdicts on a group of this problem's
    completions, one after another, and for the whole group's rewards."""
    of_group = sum(custom.of_group(reward) for reward in config.reward.custom if reward.weight)
    calls = of_group * call_time_limit(problem, completions, config)
    judge = config.judge.timeout_s if config.judge and config.asks_judge(problem.domain) else 0.0
    return completions * time_limit(problem, config) + calls + judge


def call_time_limit(problem: Problem, completions: int, config: VerifierConfig) -> float:
    """Time limit of one reward of a whole group, in seconds."""
    return completions * (domain_of(problem, config).timeout_s or config.timeout_s)
