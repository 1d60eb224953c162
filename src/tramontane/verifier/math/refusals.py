r"""Maths answers rejected for a stated reason, although a parser might find the reference in them.

The LaTeX parser drops unknown notation: `7\text{ or more}` would be 7, `f'(x)` would be `f(x)`.
Contradictions and unsolved equations are handled in `equations`.
"""

from __future__ import annotations

import re

from tramontane.verifier.math.structure import read_shape
from tramontane.verifier.math.wording import WRAPPER


class Refused(Exception):
    """The prediction is wrong, for the reason in the message."""


class Unscorable(Exception):
    """No prediction can be judged against this reference, for the reason in the message."""


class Unreadable(Unscorable):
    """The reference is in an unknown notation; it can only be compared as written."""


_DOTS = re.compile(r"\\ldots(?![A-Za-z])")
_CLOSED_INFINITY = re.compile(r"\\infty\s*\]|\[\s*-\s*\\infty")
_EQUALS = re.compile(r"(?<![<>!\\:])=")
_PRIME = re.compile(r"(?<=[A-Za-z)}])\s*\^?\{?(?:'|(?<=[\^{])T\b|\\(?:prime|top)(?![A-Za-z]))")


def refuse_notation(gold: str, pred: str) -> None:
    """Reject dots, a bracket that includes infinity, primes and transposes that the reference does
    not have, since the parser drops them."""
    if "\\approx" in pred:  # left by `equations.exact`, as in `5 \approx 6`
        raise Refused("an approximation far from the value")
    if _DOTS.search(pred) and not _DOTS.search(gold):
        raise Refused("dots")
    if _CLOSED_INFINITY.search(pred) and not _CLOSED_INFINITY.search(gold):
        raise Refused("infinity is not a number")
    if _count_primes(gold) != _count_primes(pred):
        raise Refused("a derivative, a transpose, or another name")


def _count_primes(text: str) -> int:
    """Count the primes of the value only: `f'(x) = 2x` is 2x."""
    return len(_PRIME.findall(_EQUALS.split(text)[-1]))


def refuse_more_than_a_number(pred: str) -> None:
    """Reject words, lists and notation in an answer whose reference is a single number."""
    value = _EQUALS.split(pred)[-1]
    if WRAPPER.search(value):
        raise Refused("words beside the number")
    if len(read_shape(value).items) > 1:
        raise Refused("a list, not a number")
    if re.search(r"\\(?:lor|vee|color|cancel|prime)(?![A-Za-z])|'", value):
        raise Refused("not a number")
