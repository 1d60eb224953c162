"""Second opinions on maths verdicts: verifiers that share no rules with `verifier.math`.

Each takes the content of a box and a reference, and returns True (right), False (wrong) or None
(undecided).
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction

from tramontane.types import PAPER_TAGS, Problem
from tramontane.verifier.format import last_box

_PLAIN = re.compile(r"[+-]?(?:\d{1,30}|\d{1,3}(?:,\d{3}){1,9})(?:\.\d{1,30}|/0*[1-9]\d{0,29})?")


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
