r"""Maths answers refused for a stated reason, although a parser might find the reference in them.

The LaTeX parser drops notation that it does not know: `7\text{ or more}` would be 7, `f'(x)` would
be `f(x)`. And an answer may hedge: `1 = 2 = 5` contains three answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tramontane.verifier.math.structure import label, read_shape, split
from tramontane.verifier.math.wording import WRAPPER


class Refused(Exception):
    """The prediction is wrong, for the reason in the message."""


class Unscorable(Exception):
    """No prediction can be judged against this reference, for the reason in the message."""


_DOTS = re.compile(r"\\ldots(?![A-Za-z])")
_CLOSED_INFINITY = re.compile(r"\\infty\s*\]|\[\s*-\s*\\infty")
_EQUALS = re.compile(r"(?<![<>!\\:])=")
_PRIME = re.compile(r"(?<=[A-Za-z)}])\s*\^?\{?(?:'|(?<=[\^{])T\b|\\(?:prime|top)(?![A-Za-z]))")


def refuse_notation(gold: str, pred: str) -> None:
    """Refuse dots, a bracket that includes infinity, primes and transposes that the reference does
    not have: the parser drops them."""
    if _DOTS.search(pred) and not _DOTS.search(gold):
        raise Refused("dots")
    if _CLOSED_INFINITY.search(pred) and not _CLOSED_INFINITY.search(gold):
        raise Refused("infinity is not a number")
    if _count_primes(gold) != _count_primes(pred):
        raise Refused("a derivative, a transpose, or another name")


def _count_primes(text: str) -> int:
    """Count the primes of the value only: `f'(x) = 2x` is 2x."""
    return len(_PRIME.findall(_EQUALS.split(text)[-1]))


def refuse_contradiction(pred: str, equal: Callable[[str, str], bool]) -> None:
    """Refuse a chain such as `1 = 2 = 5`.

    Every member without variables must equal the last one, and so must every member after the
    first whose variables are those of the last.
    """
    for statement in split(pred, ",", ";"):
        members = [m for m in split(statement, "=") if m]
        for i, member in enumerate(members[:-1]):
            variables = _variables(member)
            comparable = not variables or (i > 0 and variables == _variables(members[-1]))
            if comparable and not _holds(member, members[-1], equal):
                raise Refused(f"contradicts itself: {member} = {members[-1]}")


def _variables(text: str) -> set[str]:
    return set(re.findall(r"[^\W\d_]", re.sub(r"\\[A-Za-z]+|\{[a-z]?matrix\}", "", text)))


def _holds(left: str, right: str, equal: Callable[[str, str], bool]) -> bool:
    """Compare two members of the prediction: `left` takes the reference's place, but a member that
    cannot be judged is still the prediction's fault."""
    try:
        return equal(left, right)
    except Unscorable as error:
        raise Refused("the answer cannot be parsed") from error


_POLYNOMIAL = re.compile(r"[\dA-Za-z\s.+*/^{}()-]*")
_NAME = re.compile(r"_(?:\{[^{}]*\}|\w)|[A-Za-z]+'*\s*\([^()]*\)")  # an index; f(x)


def refuse_unsolved(gold: str, pred: str) -> None:
    """Refuse `2x = 5` and `x = 5 - x` as the answer 5; `x = 5` is accepted, and so is `a + b = 5`.

    A reference that is an equation itself accepts any equation.
    """
    pair = label(pred)
    if pair is None or "=" in gold:
        return
    left, right = (re.sub(r"\\[A-Za-z]+", " ", part) for part in pair)
    letters = set(re.findall("[A-Za-z]", _NAME.sub("", left)))
    in_one_unknown = len(letters) == 1 and len(left.strip()) > 1 and _POLYNOMIAL.fullmatch(left)
    unsolved = in_one_unknown and not _NAME.search(left)
    if unsolved or letters & set(re.findall("[A-Za-z]", right)):
        raise Refused(f"an equation that is not solved: {pred}")


def refuse_more_than_a_number(pred: str) -> None:
    """Refuse words, lists and notation in an answer whose reference is one number."""
    value = _EQUALS.split(pred)[-1]
    if WRAPPER.search(value):
        raise Refused("words beside the number")
    if len(read_shape(value).items) > 1:
        raise Refused("a list, not a number")
    if re.search(r"\\(?:lor|vee|color|cancel|prime)(?![A-Za-z])|'", value):
        raise Refused("not a number")
