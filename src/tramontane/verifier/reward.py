"""One completion → one verdict: the four axes combined (arXiv 2506.10910, section 2.2).

Format comes first: a malformed completion gets 0 and is not graded further. A well-formed one gets
+0.1, +0.9 for a right answer, up to −0.1 for its length, and +0.1 when problem, thoughts and answer
are in one language: at most 1.1. The user's own rewards (`custom`) are added. Format and verifier
are those of the problem's domain (`correctness`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tramontane.config import CustomReward, DomainConfig, VerifierConfig
from tramontane.types import Problem, Verdict
from tramontane.verifier import correctness, custom, language
from tramontane.verifier.correctness import Judgement, outcome_of
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
    weights, domain = config.reward, correctness.domain_of(problem, config)
    parts = dict.fromkeys(weights.parts, 0.0)
    parsed = check_format(text, domain.format, config.tags)
    rewards = [r for r in weights.custom if r.weight and (parsed.ok or r.malformed)]
    judged = None
    if parsed.ok and domain.verifier is not None:
        judged = correctness.judge(problem, parsed, config)
        if judged.outcome == "unscorable":
            return unscorable(judged.reason, parts, answer=judged.answer)
    for reward in rewards:
        parts[reward.name] = custom.part(reward, problem, text, n_tokens)
    if not parsed.ok:
        return Verdict(sum(parts.values()), parts, "malformed", parsed.reason)
    if judged is None:
        judged = _judge_by_rewards(sum(parts.values()), rewards, domain)
    else:
        parts["correctness"] = weights.correctness * judged.share
    parts["format"] = weights.format * domain.format.has_conditions
    parts["length"] = length_penalty(n_tokens, l_max, l_cache, weights.length)
    spoken = (parsed.thoughts, parsed.answer)
    if not (parsed.thoughts or domain.format.needs_thoughts):
        spoken = (parsed.answer, "")
    if weights.language and language.consistent(problem.problem, *spoken, problem.language):
        parts["language"] = weights.language
    return Verdict(sum(parts.values()), parts, judged.outcome, judged.reason, answer=judged.answer)


def _judge_by_rewards(
    earned: float, rewards: Sequence[CustomReward], domain: DomainConfig
) -> Judgement:
    """The judgement in a domain without a verifier: by the share of all that rewards can give."""
    most = sum(reward.weight for reward in rewards if reward.weight > 0)
    outcome = outcome_of(earned / most if most else 0.0, domain)
    reason = "" if outcome == "right" else f"rewards {earned:.3g} of {most:.3g}"
    return Judgement(outcome, reason, None, 0.0)


def unscorable(
    reason: str, parts: Iterable[str], *, seconds: float = 0.0, answer: str | None = None
) -> Verdict:
    """A verdict without a judgement: every part is 0, and `reason` says what went wrong."""
    return Verdict(0.0, dict.fromkeys(parts, 0.0), "unscorable", reason, seconds, answer)
