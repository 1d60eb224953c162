"""One completion → one verdict: the four axes combined (arXiv 2506.10910, section 2.2).

Format comes first: a malformed completion gets 0 and is not graded further. A well-formed one gets
+0.1, +0.9 for a right answer, up to −0.1 for its length, and +0.1 when problem, thoughts and answer
are in the same language: at most 1.1. User-defined rewards (`custom`) are added. The problem's
domain determines the format and the verifier (`correctness`).

Rewards of a whole group come last (`group_rewards`).
"""

from __future__ import annotations

import time
from dataclasses import replace

from tramontane.config import FormatConfig, VerifierConfig
from tramontane.config.domains import JUDGE
from tramontane.types import Judgment, Problem, ThinkingTags, Verdict
from tramontane.verifier import correctness, custom, language
from tramontane.verifier.correctness import judge_by_rewards, outcome_of, unscorable
from tramontane.verifier.custom import Response
from tramontane.verifier.format import Parsed, check_format, split_thoughts
from tramontane.verifier.functions import FunctionFailed
from tramontane.verifier.group_rewards import group_calls, run_group_call, with_group_rewards


def grade(
    problem: Problem,
    response_text: str,
    n_tokens: int,
    config: VerifierConfig,
    l_max: int,
    l_cache: int,
) -> Verdict:
    """Grade one completion of `n_tokens` tokens; lengths are in tokens.

    For rewards of a whole group, the completion is a group of one. Never raises: an exception makes
    the completion `unscorable`. Time and memory are bounded in `VerifierPool`, not here.
    """
    response = Response(response_text, n_tokens)
    verdicts = [grade_apart(problem, response, config, l_max, l_cache)]
    if verdicts[0].verdict == "unscorable":
        return verdicts[0]
    calls = group_calls(problem, verdicts, [response], config)
    results = {call.name: run_group_call(problem, call, config) for call in calls}
    return with_group_rewards(problem, verdicts, results, config)[0]


def grade_apart(
    problem: Problem, response: Response, config: VerifierConfig, l_max: int, l_cache: int
) -> Verdict:
    """Like `grade`, without the rewards of a whole group; `response` may be a conversation.

    A conversation's format is checked on each turn, its language on all that the model wrote, and
    its correctness on the last turn. A reward of its environment replaces the correctness, and
    counts in any format.
    """
    started = time.perf_counter()
    try:
        verdict = _grade(problem, response, config, l_max, l_cache)
    except FunctionFailed as error:
        verdict = unscorable(str(error), config.reward.parts)
    except Exception as error:  # the stated boundary: an exception is never silently a zero
        verdict = unscorable(f"{type(error).__name__}: {error}"[:300], config.reward.parts)
    return replace(verdict, seconds=time.perf_counter() - started)


def _grade(
    problem: Problem, response: Response, config: VerifierConfig, l_max: int, l_cache: int
) -> Verdict:
    weights, domain = config.reward, correctness.domain_of(problem, config)
    parts = dict.fromkeys(weights.parts, 0.0)
    if response.failure:
        return unscorable(response.failure, parts)
    text, n_tokens = response.text, response.n_tokens
    parsed = _parse(response, domain.format, config.tags)
    earned = response.earned is not None  # which no format gates
    rewards = [
        r
        for r in weights.custom
        if r.weight and (parsed.ok or earned or r.malformed) and not custom.of_group(r)
    ]
    judged = None
    if response.earned is not None:
        outcome = outcome_of(response.earned, domain)
        given = response.unrewarded or f"the environment's reward: {response.earned:g}"
        reason = "" if outcome == "right" else given
        judged = Judgment(outcome, reason, share=response.earned)
    elif parsed.ok and domain.verifier not in (None, JUDGE):
        judged = correctness.judge(problem, parsed, config, n_tokens)
        if judged.outcome == "unscorable":
            return unscorable(judged.reason, parts, answer=judged.answer)
    for reward in rewards:
        parts[reward.name] = custom.part(reward, problem, text, n_tokens)
    if not (parsed.ok or earned):
        return Verdict(sum(parts.values()), parts, "malformed", parsed.reason)
    if judged is None:
        judged = judge_by_rewards(sum(parts.values()), [r.weight for r in rewards], domain)
    else:
        parts["correctness"] = weights.correctness * judged.share
    parts["format"] = weights.format * (parsed.ok and domain.format.has_conditions)
    scale = weights.length if problem.length_penalty is None else problem.length_penalty
    parts["length"] = length_penalty(n_tokens, *problem.lengths(l_max, l_cache), scale)
    readable = parsed if parsed.ok else check_format(response.last, FormatConfig(), config.tags)
    spoken = _spoken(response, readable, config.tags)
    if not (spoken[0] or (parsed.ok and domain.format.needs_thoughts)):
        spoken = (spoken[1], "")
    if weights.language and language.consistent(problem.problem, *spoken, problem.language):
        parts["language"] = weights.language
    return Verdict(sum(parts.values()), parts, judged.outcome, judged.reason, answer=judged.answer)


def _parse(response: Response, form: FormatConfig, tags: ThinkingTags) -> Parsed:
    """The parts of a response, or of a conversation's last turn; not ok if an earlier turn lacks
    its thoughts."""
    parsed = check_format(response.last, form, tags)
    for number, (turn, _) in enumerate(response.turns[:-1], 1):
        earlier = split_thoughts(turn, tags, required=form.needs_thoughts)
        if not earlier.ok and form.has_conditions:
            return parsed._replace(ok=False, reason=f"turn {number}: {earlier.reason}")
    return parsed


def _spoken(response: Response, parsed: Parsed, tags: ThinkingTags) -> tuple[str, str]:
    """All thoughts, and all answers except those that contain calls, which have no language."""
    thoughts, answers = [], []
    for turn, makes_calls in response.turns[:-1]:
        parts = split_thoughts(turn, tags, required=False)
        thoughts.append(parts.thoughts)
        answers += [] if makes_calls else [parts.answer]
    said = "\n".join([*thoughts, parsed.thoughts]).strip()  # empty if no turn has thoughts
    return said, "\n".join([*answers, parsed.answer])


def length_penalty(n_tokens: int, l_max: int, l_cache: int, scale: float = 0.1) -> float:
    """The soft length penalty (equation 2) for a completion of `n_tokens` tokens: −scale to 0.

    0 up to l_max − l_cache tokens, then linear, −scale from l_max on. With an `l_cache` of 0 it is
    a step: 0 up to l_max, −scale beyond.
    """
    excess = n_tokens - (l_max - l_cache)
    if excess <= 0:
        return 0.0
    if n_tokens > l_max:
        return -scale
    return -scale * excess / l_cache
