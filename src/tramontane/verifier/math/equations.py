r"""Equations in answers: names, values, chains, contradictions.

`x = 5`, `5 = x`, `\frac{10}{2} = 5` and `C = 2\pi r = 2\pi` are answers with a value and something
that stands for it. `value_last` moves the value to the end; the refusals reject equations that
contradict themselves or are not solved; `values` removes the names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import pairwise, permutations

from tramontane.verifier.math.numbers import numeral_value, to_number
from tramontane.verifier.math.structure import Refused, Unscorable, split
from tramontane.verifier.math.units import split_unit

Equal = Callable[[str, str], bool]

# Commands allowed in an expression without variables; all others count as variables.
_COMMANDS = """
    frac sqrt pi cdot times div pm mp infty circ left right binom choose overline ldots begin end
    sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp max min gcd operatorname
    mathrm lfloor rfloor lceil rceil lvert rvert bmod mod pmod
"""
_CONSTANT = set(_COMMANDS.split())
_ENVIRONMENT = re.compile(r"(\\(?:begin|end))\s*\{[a-zA-Z]*\*?\}(?:\{[lcr|]*\})?")
_TOKEN = re.compile(r"\\([A-Za-z]+)|([^\W\d_])")
_GREEK = (
    r"\\(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho"
    r"|sigma|tau|upsilon|phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega)"
    r"(?![A-Za-z])|\\ell(?![A-Za-z])"
)
_FONT = (
    r"\\(?:vec|hat|bar|tilde|overline|widehat|overrightarrow|overleftrightarrow|mathbf|mathbb"
    r"|mathrm|mathcal|mathsf|boldsymbol|bm|text|textbf|textit|mbox|operatorname)\s*\{[^{}]*\}"
)
_ATOM = rf"(?:{_FONT}|{_GREEK}|[A-Z]{{2,5}}|[^\W\d_])"
_INDEX = r"(?:\s*_\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\\?\w))"
_ARGUMENT = r"(?:\s*\((?:[^()]|\([^()]*\))*\))"
_NAMED = rf"{_ATOM}{_INDEX}?(?:'|\^\s*\{{?(?:\\prime|-1)\}}?)*{_INDEX}?{_ARGUMENT}?"
_NAME = re.compile(
    rf"(?:m\s*)?(?:\\(?:angle|measuredangle|triangle|Delta|square|arc|deg|det|dim|gcd|min|max)\s*)?"
    rf"{_NAMED}"
    rf"|(?:\||\\[lr]?vert\s*|\\[lr]?Vert\s*|\\\|)\s*{_NAMED}\s*(?:\||\\[lr]?vert|\\[lr]?Vert|\\\|)"
    rf"|\[\s*[A-Z]{{3,5}}\s*\]"
    rf"|(?:m\s*)?\\(?:angle|measuredangle)\s*\d"
    rf"|\\(?:sin|cos|tan|cot|sec|csc|gcd|operatorname\{{\w+\}})\s*(?:\\angle\s*)?(?:{_NAMED}|{_ARGUMENT})"
)
_LONG_NAME = re.compile(
    r"\\(?:int|lim|sum|prod)(?![A-Za-z]).*|\\frac\s*\{\s*(?:d|\\partial)[^{}]*\}\s*\{\s*(?:d|\\partial)"
    r"[^{}]*\}.*",
    re.DOTALL,
)
_LETTER = re.compile(rf"(?:{_GREEK}|[^\W\d_]){_INDEX}?")
_RELATIONS = ("<", ">", "\\le", "\\ge", "\\ne", "\\neq", "\\in", "\\notin", "\\approx", "\\equiv")


def is_name(text: str) -> bool:
    r"""True for a text that names a value: `x`, `f(3)`, `|AB|`, `\angle ABC`, `\text{Area}`."""
    return bool(_NAME.fullmatch(text.strip()) or _LONG_NAME.fullmatch(text.strip()))


def _has_relation(text: str) -> bool:
    """True if there is a relation other than `=` outside of all brackets."""
    return len(split(text, *_RELATIONS)) > 1


def variables(text: str) -> set[str]:
    r"""The letters of an expression, and commands that are letters, such as `\theta`."""
    found = _TOKEN.findall(_ENVIRONMENT.sub(" ", text))
    return {command or letter for command, letter in found if command not in _CONSTANT}


def _is_closed(text: str) -> bool:
    return not variables(text) or numeral_value(text) is not None


def _members(statement: str) -> list[str]:
    return split(statement, "=")


_APPROXIMATION = re.compile(
    r"\\(?:approx(?:eq)?|simeq|doteq|thickapprox)(?![A-Za-z])|\\(?:thick)?sim(?=\s*-?[\d.])"
)


def exact(text: str) -> str:
    r"""An answer without its approximations: `\frac13` for `\frac13 \approx 0.33`.

    The value of a mere name is the approximation: `x = 0.33` for `x \approx 0.33`.
    """
    if not _APPROXIMATION.search(text):
        return text
    text = _APPROXIMATION.sub(r"\\approx ", text)
    separator = ";" if len(split(text, ";")) > 1 else ","
    return f"{separator} ".join(map(_exact, split(text, separator)))


FAR = Fraction(1, 10)  # largest accepted relative error of an approximation


def _exact(statement: str) -> str:
    left, *others = [part.strip() for part in split(statement, "\\approx")] or [""]
    if not others or statement.lstrip().startswith("\\approx"):
        return left
    bare = (split_unit(part)[0] for part in (left, *others))
    numbers = [n for part in bare if (n := to_number(part)) is not None]
    if any(abs(a - b) > abs(a) * FAR for a, b in pairwise(numbers)):
        return statement  # 5 is not approximately 6
    if len(_members(left)) > 1 or variables(left) - {"e"} <= variables(others[0]):
        is_name_of_value = left == "e" and not others[0].startswith("2.7")
        return f"{left} = {others[0]}" if is_name_of_value else left
    return f"{left} = {others[0]}"


def value_last(text: str, *, is_reference: bool = False) -> str:
    r"""Move the value of each equation to its end: `5 = x` becomes `x = 5`, `2x = f(x) = y` becomes
    `f(x) = y = 2x`.

    The value is a member without variables, or else a member that is not a name. A reference such
    as `xy = c` has no value: it is an equation.
    """
    if "=" not in text:
        return text
    separator = ";" if len(split(text, ";")) > 1 else ","
    statements = split(text, separator)
    first, last = statements[:-1], _members(statements[-1])
    if first and len(last) == 2 and is_name(last[1]) and not any("=" in s for s in first):
        listed = f"{separator} ".join([*first, last[0]])
        return f"{last[1]} = {listed}"  # `1, 2 = x`
    ordered = [" = ".join(_value_last(_members(s), is_reference)) for s in statements]
    kept = [" = ".join(_members(s)) for s in statements]
    return text if ordered == kept else f"{separator} ".join(ordered)


def _value_last(members: list[str], is_reference: bool) -> list[str]:
    if len(members) < 2 or any(map(_has_relation, members)):
        return members
    if _is_closed(members[-1]):
        return members
    kinds = [_is_closed, lambda m: not variables(split_unit(m)[0]), lambda m: not is_name(m)]
    if is_reference and _LETTER.fullmatch(members[-1]):
        kinds.pop()
    for is_value in kinds:
        if any(map(is_value, members)):
            return sorted(members, key=is_value)  # stable: names first, in their order
    return members


def refuse_contradiction(pred: str, equal: Equal) -> None:
    """Refuse a chain such as `1 = 2 = 5`.

    Every member without variables must equal the last one. So must every member that has the last
    one's variables and is not a name; for two members, this is left to `refuse_unsolved`.
    """
    for statement in split(pred, ",", ";") if "=" in pred else []:
        members = _members(statement)
        if len(members) < 2:
            continue
        of_last = variables(members[-1])
        for member in members[:-1]:
            letters = variables(member)
            same = letters == of_last and len(members) > 2 and not is_name(member)
            if (same or _is_closed(member)) and not _holds(member, members[-1], equal):
                raise Refused(f"contradicts itself: {member} = {members[-1]}")


def _holds(left: str, right: str, equal: Equal) -> bool:
    """Compare two members of a prediction; one that cannot be judged is the prediction's fault."""
    if None not in (numbers := (numeral_value(left), numeral_value(right))):
        return numbers[0] == numbers[1]
    try:
        return equal(left, right)
    except Unscorable as error:
        raise Refused("the answer cannot be parsed") from error


_POLYNOMIAL = re.compile(r"[\dA-Za-zα\s.+*/^{}()|-]*")
# A function of something, such as `f_1(x)`; an index.
_PARTS = re.compile(r"[A-Za-z]+(?:_(?:\{[^{}]*\}|\w))?'*\s*\([^()]*\)|_(?:\{[^{}]*\}|\w)")


def refuse_unsolved(gold: str, pred: str, equal: Equal) -> None:
    """Refuse `2x = 5` and `x = 5 - x` as the answer 5; `x = 5`, `a + b = 5` and identities such as
    `(x+1)^2 = x^2 + 2x + 1` are accepted.

    If the reference is an equation itself, any equation is accepted, unless it names a value (`x =
    5`).
    """
    members, of_gold = _members(pred), _members(gold)
    is_value = len(of_gold) == 1 or (
        bool(of_gold) and is_name(of_gold[0]) and _is_closed(of_gold[-1])
    )
    if len(members) != 2 or not is_value:
        return
    if _LONG_NAME.fullmatch(members[0]):
        return
    left, right = _plain(members)
    letters = set(re.findall("[A-Za-zα]", _PARTS.sub("", left)))
    one_unknown = len(letters) == 1 and len(left.strip()) > 1 and _POLYNOMIAL.fullmatch(left)
    unsolved = one_unknown and not _PARTS.search(left) and not is_name(members[0])
    if unsolved or letters & set(re.findall("[A-Za-zα]", right)):
        of_left, of_right = (variables(member) for member in members)
        is_identity = of_left == of_right and not is_name(members[0])
        if not (is_identity and _holds(members[0], members[1], equal)):
            raise Refused(f"an equation that is not solved: {pred}")


def _plain(members: list[str]) -> list[str]:
    """Members without commands, with one letter for each segment (`AB`) and Greek letter."""
    segments: dict[str, str] = {}
    plain = []
    for member in members:
        member = re.sub(
            r"(?<![A-Za-z\\])[A-Z]{2,5}(?![A-Za-z])",
            lambda m: segments.setdefault(m[0], chr(ord("A") + len(segments) % 26)),
            re.sub(_GREEK, "α", member),
        )
        plain.append(re.sub(r"\\[A-Za-z]+", " ", member))
    return plain


def values(gold: str, pred: str) -> tuple[str, str]:
    """The values of two equations without the names; the answers unchanged where the names matter,
    as in `x = 5` against `y = 5`."""
    if "=" not in gold + pred:
        return gold, pred
    g, p = (split(side, ",", ";") for side in (gold, pred))
    if len(g) > 1 or len(p) > 1 or _has_relation(gold) or _has_relation(pred):
        return gold, pred
    of_gold, of_pred = _members(gold), _members(pred)
    if not of_gold or not of_pred:  # only equality signs
        return gold, pred
    if any(map(_HEDGED.search, of_pred[:-1])):
        raise Refused("a label that takes back the value")
    if len(of_gold) == 1:
        return gold, of_pred[-1]
    if not is_name(of_gold[0]):
        return gold, pred
    if len(of_pred) == 1 or any(_same_name(of_gold[0], name) for name in of_pred[:-1]):
        return of_gold[-1], of_pred[-1]
    if _EVENT.search(of_gold[0]):
        raise Refused(f"a value of something else: {of_pred[0]}")
    return gold, pred


_EVENT = re.compile(r"\([^()]*[=<>]")  # P(X=1)
_HEDGED = re.compile(r"\b(?:not|or|nor|except|unless)\b")
_OF_LETTER = re.compile(
    r"\s*([A-Za-z](?:'*|\^\s*\{\s*-1\s*\}))\s*(?:\(\s*([a-z](?:\s*,\s*[a-z])*)\s*\)|_\s*\{?\s*([a-z])\s*\}?)\s*(?==)"
)
_FROM_START = (
    r"\s*(?:[,(]\s*|(?=\\text))(?:\\text\s*\{{\s*for\s*\}}\s*)?"
    r"{}\s*(?:\\ge\s*[01]|>\s*0|=\s*[01]\s*,.*)\s*\)?$"
)


def with_bound_letter(gold: str, pred: str) -> str:
    """The prediction with the reference's letters for the arguments or index of its name: `f(x) =
    2x` for `f(t) = 2t`, and without a remark where the index begins."""
    g = _OF_LETTER.match(gold)
    if g is None:
        return pred
    letters = re.findall("[a-z]", g[2] or g[3])
    p = _OF_LETTER.match(pred)
    if p is not None and p[1] == g[1] and bool(p[2]) == bool(g[2]):
        named = dict(zip(re.findall("[a-z]", p[2] or p[3]), letters, strict=False))
        is_renaming = len(named) == len(set(letters)) == len(letters)
        if is_renaming and not (set(letters) - named.keys()) & variables(pred):
            label, value = pred[: p.end()], pred[p.end() :]
            rename = partial(re.sub, r"\\[A-Za-z]+|[a-z]", lambda m: named.get(m[0], m[0]))
            pred = label[: p.end(1)] + rename(label[p.end(1) :]) + rename(value)
    return re.sub(_FROM_START.format(letters[0]), "", pred)


_TERM = re.compile(r"([A-Za-z])_\s*(?:\{\s*([a-z])\s*(?:([-+])\s*(\d{1,2})\s*)?\}|([a-z]))")


def with_index(gold: str, pred: str) -> tuple[str, str]:
    """A recursion, and a prediction with its letter and first index: `a_{n+1} = 2a_n` for `a_n =
    2a_{n-1}`; both unchanged if one is no recursion in one letter."""
    if "_" not in gold or "_" not in pred or "=" not in gold:
        return gold, pred
    terms = [list(_TERM.finditer(side)) for side in (gold, pred)]
    letters = [{m[2] or m[5] for m in found} for found in terms]
    names = [{m[1] for m in found} for found in terms]
    if any(len(found) != 1 for found in letters) or names[0] != names[1]:
        return gold, pred
    (letter,), (other,) = letters
    last = [max(int(f"{m[3]}{m[4]}" if m[4] else 0) for m in found) for found in terms]
    is_taken = letter != other and letter in variables(pred)
    if is_taken or len({m[0] for m in terms[0]}) < 2:
        return gold, pred
    return _spelled_terms(gold, letter, letter, 0), _spelled_terms(
        pred, other, letter, last[0] - last[1]
    )


def _spelled_terms(text: str, old: str, new: str, shift: int) -> str:
    """A text whose index `old` is `new + shift`, with terms spelled `a_{n+1}`."""
    value = f"({new}{shift:+d})" if shift else new

    def of(m: re.Match[str]) -> str:
        if m[1] is None:
            return value if m[0] == old else m[0]
        offset = int(f"{m[4]}{m[5]}" if m[5] else 0) + shift
        return f"{m[2]}_{{{new}{offset:+d}}}" if offset else f"{m[2]}_{new}"

    return re.sub(rf"({_TERM.pattern})|\\[A-Za-z]+|[A-Za-z]", of, text)


def with_imaginary_unit(gold: str, pred: str) -> str:
    """The prediction with `i` for the `I` of computer algebra, if the reference has an `i` and no
    `I`."""
    of_gold, of_pred = variables(gold), variables(pred)
    if "i" not in of_gold - of_pred or "I" in of_gold:
        return pred
    return re.sub(r"\\[A-Za-z]+|I", lambda m: "i" if m[0] == "I" else m[0], pred)


def _same_name(a: str, b: str) -> bool:
    a, b = (_DERIVATIVE.sub(r"\1'", x) for x in (a, b))
    a, b = (
        re.sub(r"\\(?:text|mathrm|mbox|operatorname)(?![A-Za-z])|[\s{}]", "", x) for x in (a, b)
    )
    a, b = (_LENGTH.sub(r"\1", x) for x in (a, b))
    if _OF_LETTER_ALONE.sub("", a) == b or _OF_LETTER_ALONE.sub("", b) == a:
        return bool(a)  # v(t) and v
    if "y" in (a, b) and all(name == "y" or _OF_X.fullmatch(name) for name in (a, b)):
        return True
    return a == b and bool(a)


_OF_LETTER_ALONE = re.compile(r"(?<=^[A-Za-z])\([a-z]\)$")
_LENGTH = re.compile(r"\|(?:\\overline)?([A-Z]{2})\||\\overline(?=[A-Z]{2}$)")
_CONSTANT_NAME = re.compile(
    r"\\(?:text\w*|mathrm|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+|([A-DKMa-ckmpqr](?:_\{?\d\}?)?)"
)
_FUNCTION_OF_X = re.compile(r"\s*(?:[fghFGH]\s*\(\s*[xtn]\s*\)|P\s*\(\s*x\s*\))\s*=")
MAX_CONSTANTS = 3


def with_constants(gold: str, pred: str) -> list[str]:
    r"""Spellings of the prediction with the reference's letters for arbitrary constants: `f(x) =
    cx` for `f(x) = kx`, `C_1e^x+C_2e^{-x}` for `Ae^x+Be^{-x}`; just the prediction otherwise.

    In a reference, arbitrary constants are `C`, `C_1`, `C_2`, … beside a variable, and all letters
    of the value of a function whose name is `f(x)` or alike.
    """
    start = _FUNCTION_OF_X.match(gold)
    found = _constants(gold[start.end() if start else 0 :])
    if not start:
        found = [name for name in found if name == "C" or (name[0] in "Cc" and "_" in name)]
    if not 0 < len(found) <= MAX_CONSTANTS or not (start or variables(gold) & set("xyztu")):
        return [pred]
    named = variables(gold) - {name[0] for name in found}
    fresh = [name for name in _constants(pred) if name[0] not in named]
    is_swap = set(fresh) == set(found) and all("_" in name for name in found)
    if "\\begin" in gold + pred and set(fresh) & set(found):
        return [pred]
    if not is_swap:  # letters that both have keep their places
        fresh, found = ([n for n in a if n not in b] for a, b in ((fresh, found), (found, fresh)))
    if len(fresh) != len(found):
        return [pred]
    orders = [dict(zip(fresh, order, strict=True)) for order in permutations(found)]
    return [_renamed(pred, order) for order in orders]


def _renamed(text: str, names: dict[str, str]) -> str:
    return _CONSTANT_NAME.sub(lambda m: names.get(m[1], m[0]), text)


def _constants(text: str) -> list[str]:
    """The letters that may be constants, in their order."""
    return list(dict.fromkeys(filter(None, _CONSTANT_NAME.findall(text))))


_OF_X = re.compile(r"[A-Za-z](?:\^-1)?\(x\)")
_DERIVATIVE = re.compile(r"\\frac\s*\{\s*d\s*([A-Za-z])\s*\}\s*\{\s*d\s*[A-Za-z]\s*\}")
# A constant of integration: alone on one side, or the last term.
_ARBITRARY = re.compile(
    r"(?:(?:^|=)\s*(?P<side>[CcKk](?:_\{?\d\}?)?)\s*(?==|$)|\+\s*(?P<term>[CcKk](?:_\{?\d\}?)?)\s*$)"
)


def with_constant(gold: str, pred: str) -> str:
    """The prediction with the reference's letter for a constant: `x^2 + K` as `x^2 + C`.

    In a reference, an arbitrary constant is `C` or `K` as the last term of an expression in a
    variable, or such a letter, in either case, alone on one side of an equation.
    """
    g, p = _ARBITRARY.search(gold), _ARBITRARY.search(pred)
    if g is None or p is None:
        return pred
    of_gold, of_pred = (m["side"] or m["term"] for m in (g, p))
    start, end = p.span("side") if p["side"] else p.span("term")
    others = variables(gold.replace(of_gold, "", 1)), variables(pred[:start] + pred[end:])
    is_arbitrary = (g["side"] or of_gold[0].isupper()) and others[0] & set("xyztu")
    is_free = of_gold[0] not in others[1] and of_pred[0] not in others[0]
    if not (is_arbitrary and is_free and len(_members(gold)) == len(_members(pred))):
        return pred
    return pred[:start] + of_gold + pred[end:]
