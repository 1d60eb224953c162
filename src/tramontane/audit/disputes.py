"""Disputes in an audit: verdicts that another verifier contradicts.

Opinions on math answers come from verifiers that share no rules with `verifier.math`. Each takes
the content of a box and a reference, and returns True (right), False (wrong) or None (undecided).
"""

from __future__ import annotations

import logging
import random
import re
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction

from tramontane.audit.collect import Graded, Pair
from tramontane.audit.findings import Audit
from tramontane.config import BUILT_IN, CustomReward, RewardConfig, VerifierConfig
from tramontane.types import PAPER_TAGS, Problem, Verdict
from tramontane.verifier.format import last_box
from tramontane.verifier.pool import VerifierPool

_PLAIN = re.compile(r"[+-]?(?:\d{1,30}|\d{1,3}(?:,\d{3}){1,9})(?:\.\d{1,30}|/0*[1-9]\d{0,29})?")


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
    function = f"{math_verify.__module__}.{math_verify.__name__}"
    opinion = CustomReward(name="math_verify", function=function, weight=1)
    weights = RewardConfig(format=0, correctness=0, length=0, language=0, custom=(opinion,))
    return config.model_copy(
        update={
            "reward": weights,
            "judge": None,
            "thinking_tags": PAPER_TAGS,
            "domains": BUILT_IN,
        }
    )


def _opinions(pair: Pair, verdict: Verdict) -> dict[str, bool | None]:
    decided = verdict.verdict in ("right", "wrong")
    return {
        "string equality": same_string(*pair),
        "numeric comparison": same_number(*pair),
        "math-verify": {0.0: False, 1.0: True}.get(verdict.reward) if decided else None,
        "grading again": verdict.verdict == "right" if decided else None,
    }


def same_string(box: str, reference: str) -> bool | None:
    """True if equal up to whitespace, else None: different strings may mean the same."""
    return "".join(box.split()) == "".join(reference.split()) or None


def same_number(box: str, reference: str) -> bool | None:
    """Comparison of integers, decimals or fractions; None if a side is anything else."""
    a, b = (side.strip().strip("$").strip() for side in (box, reference))
    if not _PLAIN.fullmatch(a) or not _PLAIN.fullmatch(b):
        return None
    return Fraction(a.replace(",", "")) == Fraction(b.replace(",", ""))


def math_verify(problem: Problem, text: str, n_tokens: int) -> float:
    """The opinion of math-verify, as a custom reward: 1 right, 0 wrong, ½ undecided.

    It is a custom reward because math-verify may never return, and the pool kills late workers.
    """
    from math_verify import parse, verify
    from math_verify.parser import LatexExtractionConfig

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no timeout
    box = last_box(text.rpartition(PAPER_TAGS.closing)[2])
    if box is None or not problem.answer:
        return 0.5
    # LaTeX only: its parser of plain expressions calls `eval`.
    reference, answer = (
        parse(
            f"\\boxed{{{side}}}",
            extraction_config=(LatexExtractionConfig(),),
            fallback_mode="no_fallback",
            parsing_timeout=None,  # type: ignore[arg-type]
            raise_on_error=True,
        )
        for side in (problem.answer, box)
    )
    if not reference:
        return 0.5
    return float(verify(reference, answer, timeout_seconds=None, raise_on_error=True))
