r"""Common LaTeX → SymPy objects, in a twentieth of the time of the whole grammar.

Reads numbers, letters with an index, fractions, roots, powers, products, sums, functions of one
argument, relations, intervals, tuples and unions, and gives the object that latex2sympy2_extended
gives for the same text. Any other text, and any that the grammar may read in two ways, is left to
it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import sympy
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from sympy.core.relational import Relational

_GREEK = (
    "alpha|beta|delta|epsilon|varepsilon|zeta|eta|theta|Theta|vartheta|iota|kappa|lambda|mu|nu|xi"
    "|rho|sigma|tau|upsilon|phi|Phi|varphi|chi|psi|Psi|omega|Omega|Delta|pi"
)
_LETTERS = frozenset(_GREEK.split("|"))
_FUNCTIONS = {name: getattr(sympy, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
_LOGARITHMS = ("ln", "log")
_PRODUCTS = ("*", "\\cdot", "\\times")
_QUOTIENTS = ("/", ":")
_RELATIONS: dict[str, Callable[..., Any]] = {
    "=": sympy.Eq,
    "<": sympy.StrictLessThan,
    ">": sympy.StrictGreaterThan,
    "\\le": sympy.LessThan,
    "\\ge": sympy.GreaterThan,
    "\\neq": sympy.Ne,
}
_AROUND: dict[str, tuple[str, Callable[..., Any]]] = {
    "\\lfloor": ("\\rfloor", sympy.floor),
    "\\lceil": ("\\rceil", sympy.ceiling),
    "|": ("|", sympy.Abs),
}
_COMMANDS = "frac|sqrt|binom|infty|cdot|times|le|ge|neq|in|cup|lfloor|rfloor|lceil|rceil"
_TOKEN = re.compile(
    rf"\s*(?:(?P<number>\d+(?:\.\d+)?)(?!\.?\d|,\d{{3}}|\s*[eE])"
    rf"|(?P<command>\\(?:{_COMMANDS}|{'|'.join([*_LOGARITHMS, *_FUNCTIONS])}|{_GREEK})"
    r"(?![A-Za-z]))|\\text\{(?P<name>[A-Za-z]+)\}"
    r"|(?P<letter>[A-Za-z])|(?P<sign>\\[{}]|[-+*/:^(){}=<>_|!,\[\]]))"
)
# Words, and names that the grammar reads without a backslash.
_WORD = re.compile(r"[A-Za-z]{4}|tr|gcd|lcm|eye|eig|svd|SVD")
_INDEX = re.compile(r"_\s*(?:([A-DF-Za-df-z]|\d)(?![\d.])|\{\s*([A-Za-z]+|\d+)\s*\})")
# In `x(x + 1)` a product, unlike `f(x)`.
_TERMS = re.compile(r"\s*\((?:[^(){},+*/-]|\{[^{}]*\})*[-+*/]")


class Unknown(Exception):
    """The text is left to the whole grammar."""


def read(text: str) -> Any:
    """The SymPy object of a text; None if it is not of the kinds that are read here.

    Raises:
        ValueError: the object has no meaning, as an interval with a complex end.
    """
    for whole in (_Reader.set, _Reader.relation):
        try:
            reader = _Reader(text)
            found = whole(reader)
            if reader.kind is None:
                return found
        except Unknown:
            continue
    return None


class _Reader:
    """A recursive descent with one token ahead; each method reads one level of the grammar."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.end = 0  # of the token ahead
        self.kind: str | None = ""
        self.token = ""
        self.in_bars = False
        self.next()

    def next(self) -> str:
        """Step over the token ahead, which is returned."""
        passed = self.token
        match = _TOKEN.match(self.text, self.end)
        if match is None:
            if self.text[self.end :].strip():
                raise Unknown
            self.kind, self.token = None, ""
            return passed
        self.end, self.kind = match.end(), match.lastgroup
        self.token = match[self.kind or 0]
        if self.kind == "letter" and _WORD.match(self.text, self.end - 1):
            raise Unknown
        return passed

    def expect(self, sign: str) -> None:
        if self.token != sign:
            raise Unknown
        self.next()

    # ------------------------------------------------------------------------ sets and relations

    def set(self) -> Any:
        """Intervals, tuples, finite sets and their unions."""
        total = self.set_atom()
        while self.token == "\\cup":
            self.next()
            sides = total, self.set_atom()
            sets = (FiniteSet(*s) if isinstance(s, sympy.Tuple) else s for s in sides)
            total = sympy.Union(*sets, evaluate=False)
        return total

    def set_atom(self) -> Any:
        if self.token not in ("(", "[", "\\{"):
            raise Unknown
        opening, items = self.next(), [self.sum()]
        while self.token == ",":
            self.next()
            items.append(self.sum())
        closing = self.next()
        if opening == "\\{" and closing == "\\}":
            return FiniteSet(*items)
        if opening not in ("(", "[") or closing not in (")", "]"):
            raise Unknown
        if len(items) == 2:
            return _interval(*items, left_open=opening == "(", right_open=closing == ")")
        if len(items) < 2 or opening != "(" or closing != ")":
            raise Unknown
        return sympy.Tuple(*items)

    def relation(self) -> Any:
        left = self.sum()
        if self.token == "\\in" and left.is_Symbol:
            self.next()
            return sympy.Eq(left, self.set(), evaluate=False)
        while self.token in _RELATIONS:
            relation = _RELATIONS[self.next()]
            if isinstance(left, And):
                conditions = left._unsorted_args
                following = relation(conditions[-1].rhs, self.sum(), evaluate=False)
                left = And(*conditions, following)
            elif isinstance(left, Relational):
                left = And(left, relation(left.rhs, self.sum(), evaluate=False))
            else:
                left = relation(left, self.sum(), evaluate=False)
        return left

    # ------------------------------------------------------------------------------- expressions

    def sum(self) -> Any:
        total = self.product()
        while self.token in ("+", "-"):
            sign, term = self.next(), self.product()
            total = _flat(sympy.Add, total, _negative(term) if sign == "-" else term)
        return total

    def product(self, is_argument: bool = False) -> Any:
        total = self.signed(is_argument)
        while self.token in _PRODUCTS or self.token in _QUOTIENTS:
            is_quotient, factor = self.next() in _QUOTIENTS, self.signed(is_argument)
            total = _quotient(total, factor) if is_quotient else _flat(sympy.Mul, total, factor)
        return total

    def signed(self, is_argument: bool) -> Any:
        if self.token in ("+", "-"):
            sign, value = self.next(), self.signed(is_argument)
            return _negative(value) if sign == "-" else value
        return self.factors(is_argument)

    def factors(self, is_argument: bool) -> Any:
        """Factors without a sign between them. The argument of a function ends before another."""
        found = [self.postfixed()]
        while self.begins_factor():
            if is_argument and (self.token in ("\\sqrt", "e") or self.is_function()):
                break
            found.append(self.postfixed())
        total = found.pop()
        while found:
            factor = found.pop()
            if factor.is_Integer and total.is_Rational:
                raise Unknown  # a mixed number
            total = _flat(sympy.Mul, factor, total)
        return total

    def begins_factor(self) -> bool:
        if self.kind == "sign":
            return self.token == "(" or (self.token == "|" and not self.in_bars)
        if self.kind == "command":
            name = self.token[1:]
            return name in _LETTERS or self.is_function() or self.token in _AROUND or name in (
                "frac", "sqrt", "binom", "infty"
            )  # fmt: skip
        return self.kind is not None

    def is_function(self) -> bool:
        return self.token[1:] in _FUNCTIONS or self.token[1:] in _LOGARITHMS

    def postfixed(self) -> Any:
        base = self.power()
        if self.token == "!":
            self.next()
            base = sympy.factorial(base, evaluate=False)
        if self.token in ("^", "_", "!"):
            raise Unknown
        return base

    def power(self) -> Any:
        if self.token == "e" and self.kind == "letter":
            self.next()
            return sympy.exp(self.exponent() if self.token == "^" else 1)
        is_symbol = self.kind in ("letter", "name", "command")
        base = self.atom()
        if self.token != "^":
            return base
        power = sympy.Pow(base, self.exponent(), evaluate=False)
        if is_symbol and self.token == "(":  # `f^2(x)`
            raise Unknown
        return power

    def exponent(self) -> Any:
        self.next()
        if self.token == "{" and not self.text.startswith("T}", self.end):  # a transpose
            return self.group("{", "}")
        if self.kind == "number":
            return _number(self.next())
        if self.kind == "letter" and self.token not in "eETI":
            return sympy.Symbol(self.next())
        raise Unknown

    def group(self, opening: str, closing: str) -> Any:
        self.expect(opening)
        inner = self.sum()
        self.expect(closing)
        return inner

    def atom(self) -> Any:
        if self.kind == "number":
            return _number(self.next())
        if self.token == "(":
            return self.group("(", ")")
        if self.is_function():
            return self.function()
        if self.token in _AROUND:
            return self.around()
        if self.token == "\\sqrt":
            return self.root()
        if self.token in ("\\frac", "\\binom"):
            combine = _quotient if self.next() == "\\frac" else sympy.binomial
            return combine(self.group("{", "}"), self.group("{", "}"))
        if self.token == "\\infty":
            self.next()
            return sympy.oo
        return self.symbol()

    def around(self) -> Any:
        opening = self.token
        if self.in_bars and opening == "|":
            raise Unknown
        self.in_bars |= opening == "|"
        closing, function = _AROUND[opening]
        inner = self.group(opening, closing)
        self.in_bars &= opening != "|"
        return function(inner, evaluate=False)

    def root(self) -> Any:
        self.next()
        exponent = 1 / self.group("[", "]") if self.token == "[" else sympy.S.Half
        return sympy.Pow(self.group("{", "}"), exponent, evaluate=False)

    def function(self) -> Any:
        """A function of one argument, in brackets or without any."""
        name, base, exponent = self.next()[1:], None, None
        if self.token == "_" and name == "log":
            base = self.exponent()
        if self.token == "^" and name in _FUNCTIONS:
            exponent = self.exponent()
            if exponent in (0, -1):
                raise Unknown
        if self.token == "(":
            argument = self.group("(", ")")
            if self.token in ("^", "_", "!"):
                raise Unknown
        else:
            argument = self.product(is_argument=True)
        if name in _FUNCTIONS:
            value = _FUNCTIONS[name](argument, evaluate=False)
            return sympy.Pow(value, exponent, evaluate=False) if exponent else value
        natural = sympy.E if name == "ln" else 10
        return sympy.log(argument, natural if base is None else base, evaluate=False)

    def symbol(self) -> Any:
        kind, name = self.kind, self.token.removeprefix("\\")
        if kind == "command" and name not in _LETTERS:
            raise Unknown
        if kind not in ("letter", "name", "command") or (kind == "name" and name in _CONSTANTS):
            raise Unknown
        if index := _INDEX.match(self.text, self.end):
            self.end = index.end()
        is_factor = _TERMS.match(self.text, self.end)
        self.next()
        is_i = name == "I" and kind == "letter"
        if name == "E" and kind == "letter" and (index or self.token == "("):
            raise Unknown
        if (self.token == "(" and not is_factor) or self.token in ("_", "["):
            raise Unknown  # a function, a set
        if is_i and (index or self.token == "^"):
            raise Unknown  # the grammar drops what I carries
        if index:
            inner = index[1] or index[2]
            return sympy.Symbol(f"{name}_{{{inner}}}" if len(inner) > 1 else f"{name}_{inner}")
        if is_i:
            return sympy.I
        return sympy.pi if name == "pi" else sympy.Symbol(name)


_CONSTANTS = ("pi", "gamma", "Gamma")


def _interval(left: Any, right: Any, *, left_open: bool, right_open: bool) -> Any:
    """An interval, or a pair if that would be empty."""
    try:
        if left_open == right_open and (right < left or (left_open and right <= left)):
            return sympy.Tuple(left, right)
    except TypeError:  # the ends have letters
        pass
    return sympy.Interval(left, right, left_open=left_open, right_open=right_open)


def _number(text: str) -> Any:
    return sympy.Integer(int(text)) if text.isdigit() else sympy.Number(text)


def _negative(e: Any) -> Any:
    return -e if e.is_Number else _flat(sympy.Mul, sympy.S.NegativeOne, e)


def _flat(operation: Any, left: Any, right: Any) -> Any:
    """A sum or product of two terms, without brackets in its terms."""
    terms = [part for e in (left, right) for part in (e.args if type(e) is operation else (e,))]
    return operation(*terms, evaluate=False)


def _quotient(top: Any, bottom: Any) -> Any:
    if top.is_Integer and bottom.is_Integer:
        return sympy.Rational(top, bottom)
    return sympy.Mul(top, sympy.Pow(bottom, -1, evaluate=False), evaluate=False)
