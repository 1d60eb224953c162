"""Second opinions on maths verdicts, for `audit`: verifiers that share no rule with ours.

Each says True (right), False (wrong) or None (cannot say) of a box and a reference as they stand.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction

from tramontane.types import Problem
from tramontane.verifier.format import CLOSE, last_box

_PLAIN = re.compile(r"[+-]?(?:\d{1,30}|\d{1,3}(?:,\d{3}){1,9})(?:\.\d{1,30}|/0*[1-9]\d{0,29})?")


def same_string(box: str, reference: str) -> bool | None:
    """Equal but for whitespace; unequal strings may still mean the same."""
    return "".join(box.split()) == "".join(reference.split()) or None


def same_number(box: str, reference: str) -> bool | None:
    """Equal as integers, decimals or fractions, where both are nothing else."""
    a, b = (side.strip().strip("$").strip() for side in (box, reference))
    if not _PLAIN.fullmatch(a) or not _PLAIN.fullmatch(b):
        return None
    return Fraction(a.replace(",", "")) == Fraction(b.replace(",", ""))


def math_verify(problem: Problem, text: str, n_tokens: int) -> float:
    """What math-verify alone says, as a custom reward: 1 right, 0 wrong, ½ cannot say.

    A custom reward because it may run for ever, as only the pool's workers can afford.
    """
    from math_verify import parse, verify
    from math_verify.parser import LatexExtractionConfig

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no timeout
    box = last_box(text.rpartition(CLOSE)[2])
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
