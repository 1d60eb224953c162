"""Disputes in an audit: verdicts that another verifier contradicts."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping

from tramontane.audit.collect import Graded, Pair
from tramontane.audit.findings import Audit
from tramontane.audit.opinions import math_verify, same_number, same_string
from tramontane.config import BUILT_IN, CustomReward, RewardConfig, VerifierConfig
from tramontane.types import PAPER_TAGS, Problem, Verdict
from tramontane.verifier.pool import VerifierPool


def find_disputes(
    graded: Mapping[Pair, list[Graded]],
    result: Audit,
    sample: int,
    config: VerifierConfig,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Ask the other verifiers about each pair, once for all its completions.

    Args:
        graded: completions by pair of box and reference.
        result: gets the findings, the total of `disputed`, and the count of undecided pairs.
        sample: maximum number of pairs, drawn by a fixed seed.
        config: workers and limits.
        progress: called with (pairs judged, all pairs).
    """
    pairs = sorted(graded)
    if len(pairs) > sample:
        pairs = sorted(random.Random(0).sample(pairs, sample))
    asked = sum(len(graded[pair]) for pair in pairs)
    result.totals["disputed"] = (asked, "completions that others looked at")
    if not pairs:
        return  # the pool's workers take seconds to start
    with VerifierPool(_only_math_verify(config), sys.maxsize, 0) as pool:
        futures = [
            pool.score(
                Problem(str(i), "math", "", reference),
                [(f"{PAPER_TAGS.around('')}\\boxed{{{box}}}", 0)],
            )
            for i, (box, reference) in enumerate(pairs)
        ]
        for i, (pair, future) in enumerate(zip(pairs, futures, strict=True), 1):
            [verdict] = future.result()
            opinions = _opinions(pair, verdict)
            result.undecided += opinions["math-verify"] is None
            for completion in graded[pair]:
                right = completion.verdict == "right"
                against = [name for name, says in opinions.items() if says not in (None, right)]
                if against:
                    detail = f"{', '.join(against)}: {'wrong' if right else 'right'}"
                    result.findings.append(completion.finding("disputed", detail))
            if progress:
                progress(i, len(pairs))


def _only_math_verify(config: VerifierConfig) -> VerifierConfig:
    """The config with math-verify's opinion as the only reward."""
    function = f"{math_verify.__module__}.{math_verify.__name__}"
    opinion = CustomReward(name="math_verify", function=function, weight=1)
    weights = RewardConfig(format=0, correctness=0, length=0, language=0, custom=(opinion,))
    return config.model_copy(
        update={"reward": weights, "thinking_tags": PAPER_TAGS, "domains": BUILT_IN}
    )


def _opinions(pair: Pair, verdict: Verdict) -> dict[str, bool | None]:
    """By verifier: True (right), False (wrong) or None (undecided)."""
    decided = verdict.verdict in ("right", "wrong")
    return {
        "string equality": same_string(*pair),
        "numeric comparison": same_number(*pair),
        "math-verify": {0.0: False, 1.0: True}.get(verdict.reward) if decided else None,
        "grading again": verdict.verdict == "right" if decided else None,
    }
