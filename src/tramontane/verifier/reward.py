"""One completion → one verdict: the four axes combined (arXiv 2506.10910, section 2.2).

Format comes first: a malformed completion gets 0 and is not graded further. A well-formed one gets
+0.1, +0.9 for a right answer, up to −0.1 for its length, and +0.1 when problem, thoughts and answer
are in one language: at most 1.1. The user's own rewards (`custom`) are added.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from tramontane.config import VerifierConfig
from tramontane.types import Outcome, Problem, Verdict
from tramontane.verifier import code, custom, language, math
from tramontane.verifier.format import check_format
from tramontane.verifier.length import length_penalty


def grade(
    problem: Problem,
    response_text: str,
    n_tokens: int,
    config: VerifierConfig,
    l_max: int,
    l_cache: int,
) -> Verdict:
    """Grade one completion of `n_tokens` tokens; lengths are in tokens.

    Never raises: an exception makes the completion `unscorable`. Time and memory are not bounded
    here but in `VerifierPool`.
    """
    started = time.perf_counter()
    try:
        verdict = _grade(problem, response_text, n_tokens, config, l_max, l_cache)
    except Exception as error:  # the stated boundary: an exception is never silently a zero
        verdict = unscorable(f"{type(error).__name__}: {error}"[:300], config.reward.parts)
    return replace(verdict, seconds=time.perf_counter() - started)


def _grade(
    problem: Problem, text: str, n_tokens: int, config: VerifierConfig, l_max: int, l_cache: int
) -> Verdict:
    weights = config.reward
    parts = dict.fromkeys(weights.parts, 0.0)
    parsed = check_format(text, problem.domain, config.tags)
    if not parsed.ok:
        return Verdict(0.0, parts, "malformed", parsed.reason)
    outcome, reason, answer, share = _correctness(problem, parsed.answer, config)
    if outcome == "unscorable":
        return unscorable(reason, parts, answer=answer)
    parts["format"] = weights.format
    parts["correctness"] = weights.correctness * share
    parts["length"] = length_penalty(n_tokens, l_max, l_cache, weights.length)
    if weights.language and language.consistent(
        problem.problem, parsed.thoughts, parsed.answer, problem.language
    ):
        parts["language"] = weights.language
    for reward in weights.custom:
        if reward.weight:
            parts[reward.name] = custom.part(reward, problem, text, n_tokens)
    return Verdict(sum(parts.values()), parts, outcome, reason, answer=answer)


def _correctness(
    problem: Problem, answer_part: str, config: VerifierConfig
) -> tuple[Outcome, str, str | None, float]:
    """(outcome, reason, extracted answer, share of the correctness reward) of an answer part."""
    if problem.domain == "math":
        outcome, reason, answer = math.judge(answer_part, problem.answer)
        return outcome, reason, answer, float(outcome == "right")
    return code.judge(answer_part, problem, config)


def unscorable(
    reason: str, parts: Iterable[str], *, seconds: float = 0.0, answer: str | None = None
) -> Verdict:
    """A verdict without a judgement: every part is 0, and `reason` says what went wrong."""
    return Verdict(0.0, dict.fromkeys(parts, 0.0), "unscorable", reason, seconds, answer)
