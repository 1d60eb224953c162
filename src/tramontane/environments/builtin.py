"""Tools and environments that come with the package, by the names that `data.tools` and
`data.environment` take."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from tramontane.environments.protocol import Turn
from tramontane.types import Problem

BUILT_IN: dict[str, str] = {
    "calculator": "tramontane.environments.builtin.calculator",
    "notebook": "tramontane.environments.builtin.Notebook",
    "python": "tramontane.environments.python.Python",
    "guessing": "tramontane.environments.builtin.Guessing",
    "repair": "tramontane.environments.repair.Repair",
}

EXPRESSION_CHARACTERS = 500
RESULT_BITS = 10_000  # of a numerator or denominator
_EXPRESSION = re.compile(r"[0-9\s.+\-*/%()]+")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})


def calculator(expression: str) -> str:
    """Calculate an arithmetic expression exactly.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, e.g. "(17 + 25) * 2".

    Returns:
        The result: a whole number, or a fraction such as 7/3.
    """
    if len(expression) > EXPRESSION_CHARACTERS:
        raise ValueError(f"the expression is longer than {EXPRESSION_CHARACTERS} characters")
    text = expression.translate(_SIGNS).strip()
    if not _EXPRESSION.fullmatch(text):
        raise ValueError(f"{expression!r}: only numbers, + - * / // % ** and parentheses")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, RecursionError, MemoryError):  # the last two: nested too deeply
        raise ValueError(f"{expression!r} is not a complete expression") from None
    try:
        return str(_value(tree.body, text))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


calculator.deterministic = True  # type: ignore[attr-defined]


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(ast.get_source_segment(text, node) or "")  # a decimal number is exact
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp):
        raise ValueError("only numbers, + - * / // % ** and parentheses")
    left, right = _value(node.left, text), _value(node.right, text)
    if isinstance(node.op, ast.Pow):
        if right.denominator != 1:
            raise ValueError("the exponent is not a whole number")
        if abs(right) * _bits(left) > RESULT_BITS:
            raise ValueError("the result is too large")
    result = Fraction(_OPERATORS[type(node.op)](left, right))
    if _bits(result) > RESULT_BITS:
        raise ValueError("the result is too large")
    return result


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda left, right: left ** int(right),
}


class Notebook:
    """A toolbox with the facts of its problem, `facts` in the problem's row: texts by key."""

    deterministic = True

    def start(self, problem: Problem) -> None:
        self._facts: dict[str, str] = problem.metadata.get("facts", {})

    def lookup(self, key: str) -> str:
        """Look up a fact in the notebook.

        Args:
            key: The name of the entry.

        Returns:
            The entry's text.
        """
        if key.strip() not in self._facts:
            raise LookupError(f"no entry {key.strip()!r}")
        return self._facts[key.strip()]


_NUMBER = re.compile(r"\d{1,18}")
_BOXED = re.compile(r"\\boxed\{\s*(\d{1,18})\s*\}")


class Guessing:
    """The model guesses a number, and is told whether to go higher or lower.

    The problem's `answer` is the number, and its metadata have the number of `guesses` and the
    texts of the answers, `higher`, `lower` and `unread` (a message without a number). Reward 1 for
    the right guess, 0 once the guesses are used up.
    """

    deterministic = True

    def start(self, problem: Problem) -> None:
        self._number, self._problem = int(problem.answer or ""), problem
        self._left = int(problem.metadata["guesses"])

    def step(self, message: dict[str, Any]) -> Turn:
        guess = guess_of(message["content"])
        self._left -= 1
        if guess == self._number:
            return Turn(reward=1.0, done=True)
        if not self._left:
            return Turn(reward=0.0, done=True)
        hint = "unread" if guess is None else "higher" if guess < self._number else "lower"
        return Turn(self._problem.metadata[hint])


def guess_of(text: str) -> int | None:
    """The number in the last box of a message; without a box, its last number."""
    found = _BOXED.findall(text) or _NUMBER.findall(text)
    return int(found[-1]) if found else None
