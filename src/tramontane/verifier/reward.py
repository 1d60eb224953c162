"""One completion → one verdict: the four axes composed (arXiv 2506.10910, section 2.2).

Format first: any failure there ends grading at 0. Else +0.1, +0.9 for a right answer, up to −0.1
for length, +0.1 when problem, thoughts and answer are in one language; 1.1 at most. Rewards of the
user's own (`custom`) come on top.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

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
    """Grade one completion of `n_tokens` tokens. Never raises: what goes wrong is `unscorable`.

    This alone does not bound time or memory; `VerifierPool` does.
    """
    started = time.perf_counter()
    names = config.reward.parts
    try:
        verdict, reason, answer, parts = _grade(
            problem, response_text, n_tokens, config, l_max, l_cache
        )
    except Exception as error:  # the stated boundary: an exception is never silently a zero
        seconds = time.perf_counter() - started
        return unscorable(f"{type(error).__name__}: {error}"[:300], seconds, names)
    if verdict == "unscorable":
        return unscorable(reason, time.perf_counter() - started, names, answer)
    seconds = time.perf_counter() - started
    return Verdict(sum(parts.values()), parts, verdict, reason, seconds, answer)


def unscorable(
    reason: str, seconds: float, parts: Iterable[str], answer: str | None = None
) -> Verdict:
    """No judgement: all parts 0, and the reason said."""
    return Verdict(0.0, dict.fromkeys(parts, 0.0), "unscorable", reason, seconds, answer)


def _grade(
    problem: Problem, text: str, n_tokens: int, config: VerifierConfig, l_max: int, l_cache: int
) -> tuple[Outcome, str, str | None, dict[str, float]]:
    weights = config.reward
    parts = dict.fromkeys(weights.parts, 0.0)
    parsed = check_format(text, problem.domain)
    if not parsed.ok:
        return "malformed", parsed.reason, None, parts
    outcome: Outcome
    if problem.domain == "math":
        outcome, reason, answer = math.judge(parsed.answer, problem.answer)
        share = float(outcome == "right")
    else:
        outcome, reason, answer, share = code.judge(parsed.answer, problem, config)
    parts["format"] = weights.format
    parts["correctness"] = weights.correctness * share
    parts["length"] = length_penalty(n_tokens, l_max, l_cache, weights.length)
    if weights.language and language.consistent(
        problem.problem, parsed.thoughts, parsed.answer, problem.language
    ):
        parts["language"] = weights.language
    if outcome != "unscorable":
        for own in weights.custom:
            if own.weight:
                parts[own.name] = custom.part(own, problem, text, n_tokens)
    return outcome, reason, answer, parts
