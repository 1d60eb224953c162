"""The calculator, the notebook and the guessing game."""

import ast
import contextlib
import operator
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tramontane.environments.builtin import BUILT_IN, Guessing, Notebook, calculator, guess_of
from tramontane.environments.loading import kind_of, load
from tramontane.types import Problem

OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


def expressions(depth=4):
    number = st.integers(0, 10**12).map(lambda n: (str(n), Fraction(n)))
    decimal = st.decimals(0, 1000, places=3).map(lambda d: (str(d), Fraction(d)))
    if not depth:
        return number | decimal
    smaller = expressions(depth - 1)

    def join(parts):
        (left, a), (right, b), op = parts
        value = Fraction(OPERATORS[op](a, b)) if b or op in "+-*" else None  # `//` gives an int
        return f"({left}) {op} ({right})", value

    def fits(parts):
        return parts[0][1] is not None and parts[1][1] is not None

    joined = st.tuples(smaller, smaller, st.sampled_from(list(OPERATORS))).filter(fits).map(join)
    return smaller | joined


@given(expressions())
@example(("((1) // (1)) / ((1) // (0.001))", Fraction(1, 1000)))
def test_the_calculator_is_exact(drawn):
    text, value = drawn
    if len(text) > 500:
        return
    if value is None:
        with pytest.raises(ValueError, match="division by zero"):
            calculator(text)
    else:
        assert Fraction(calculator(text)) == value


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("84213 * 90312", "7605444456"),
        ("7 / 3", "7/3"),
        ("0.1 + 0.2", "3/10"),
        ("2^10", "1024"),
        ("2 ** -2", "1/4"),
        ("-(3 − 5) × 4 ÷ 2", "4"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        (" 12 ", "12"),
        ("2 · 3", "6"),
        ("+3", "3"),
        ("1" + " " * 499, "1"),
        ("1 ** 10000", "1"),
        ("(2 ** 4999 * 2 ** 4999 * 2) // 2 ** 4999 // 2 ** 4999", "2"),  # of 10,000 bits
        ("1 ** (10 ** 100)", None),
    ],
)
def test_forms_that_models_write(expression, answer):
    if answer is None:
        with pytest.raises(ValueError, match="too large"):
            calculator(expression)
    else:
        assert calculator(expression) == answer


@given(st.text(max_size=80) | st.text("0123456789+-*/%().^ ", max_size=120))
def test_the_calculator_answers_anything_with_a_number_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        Fraction(calculator(text))


@pytest.mark.parametrize(
    "expression",
    ["9**9**9**9", "(" * 250 + "1" + ")" * 250, "2**99999", "1/0", "0**-1", "2**0.5", "abs(1)",
     "1 ** 10001", "2 ** 5001", "2 ** 4999 * 2 ** 4999 * 4", "1,000", "1 +", "1_000", "1e9",
     "() + 1", "9" * 501, "-" * 499, "**".join("2" * 100)],
)  # fmt: skip
def test_what_the_calculator_refuses(expression):
    with pytest.raises(ValueError, match="."):
        calculator(expression)


def test_the_notebook_has_the_facts_of_its_problem():
    notebook = Notebook()
    notebook.start(Problem("p", "math", "?", metadata={"facts": {"K42": "B17"}}))
    assert notebook.lookup(" K42 ") == "B17"
    with pytest.raises(LookupError, match="no entry 'k42'"):
        notebook.lookup("k42")
    notebook.start(Problem("p", "math", "?"))
    with pytest.raises(LookupError, match="no entry 'K42'"):
        notebook.lookup("K42")


def test_the_game_tells_the_direction_and_ends_with_the_number_or_the_last_guess():
    hints = {"higher": "more", "lower": "less", "unread": "a number, please"}
    problem = Problem("p", "math", "?", answer="37", metadata={"guesses": 4, **hints})

    def play(*guesses):
        game = Guessing()
        game.start(problem)
        return [game.step({"role": "assistant", "content": guess}) for guess in guesses]

    turns = play("from 3 to 99: \\boxed{30}", "50?", "who knows", "\\boxed{37}")
    assert [turn.messages for turn in turns[:3]] == ["more", "less", "a number, please"]
    assert [(turn.reward, turn.done) for turn in turns] == [(None, False)] * 3 + [(1.0, True)]
    assert [(t.reward, t.done) for t in play("1", "2", "3", "4")][-1] == (0.0, True)
    assert guess_of("\\boxed{12} or 13") == 12 and guess_of("9" * 5000) is not None


def test_built_in_names_are_what_they_say():
    kinds = {name: kind_of(load(name)) for name in BUILT_IN}
    assert kinds == {
        "calculator": "tool",
        "notebook": "toolbox",
        "python": "toolbox",
        "guessing": "environment",
        "repair": "environment",
    }
    assert ast.literal_eval(calculator("6 * 7")) == 42
