"""Tools: their descriptions, the arguments that they take, and their answers."""

import asyncio
import time
from typing import Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.environments.worlds import Counter, add, divide
from tramontane.environments.running import EnvironmentFailed, Runner
from tramontane.environments.tools import Toolset, coerced, cut, methods, schema_of
from tramontane.errors import InputError
from tramontane.types import ToolCall


def answer(tools, *calls, answer_bytes=1000):
    """Answers to (name, arguments)."""
    made = [ToolCall(name, arguments, "") for name, arguments in calls]
    asyncio.run(Toolset(tools, answer_bytes).answer(made, Runner()))
    return made


def test_a_tool_is_described_by_its_hints_and_docstring():
    described = schema_of(add)["function"]
    assert described["name"] == "add" and described["description"] == "Add two numbers."
    assert described["parameters"]["properties"]["a"] == {
        "type": "integer",
        "description": "The first number.",
    }
    assert [schema_of(m)["function"]["name"] for m in methods(Counter())] == [
        "increase", "fail", "hang", "give", "doze",
    ]  # fmt: skip


def test_a_tool_without_hints_or_docstring_is_named():
    def bare(a: int):
        return a

    def untyped(a):
        """Do it.

        Args:
            a: It.
        """

    def unsaid(a: int):
        """Do it."""

    for tool, said in ((bare, "docstring"), (untyped, "'?a'?|type hint"), (unsaid, "'a'")):
        with pytest.raises(InputError, match=f"{tool.__name__}.*test_tools.py.*{said}"):
            schema_of(tool)
    with pytest.raises(InputError, match="two tools are named 'add'"):
        Toolset([add, add], 100)


def test_calls_are_answered_and_values_read_as_the_types_say():
    made = answer([add, divide], ("add", {"a": 1, "b": "2"}), ("divide", {"a": "1.5", "b": 3.0}))
    assert [call.answer for call in made] == ["3", "0.5"]
    assert not any(call.error for call in made)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("ad", {}, "there is no tool 'ad'; the tools are: add, divide"),
        ("add", {"a": 1}, "add needs the argument 'b'"),
        ("add", {"a": 1, "b": 2, "c": 3}, "add has no argument 'c'; it takes: a, b"),
        ("add", {"a": "one", "b": 2}, "argument 'a' of add: 'one' is not of type 'integer'"),
        ("add", {"a": True, "b": 2}, "argument 'a' of add: True is not of type 'integer'"),
        ("divide", {"a": 1, "b": 0}, "ZeroDivisionError: "),
    ],
)
def test_a_tool_used_wrongly_answers_with_an_error(name, arguments, said):
    [call] = answer([add, divide], (name, arguments))
    assert call.error and call.answer.startswith(f"error: {said}")


def test_a_tool_that_breaks_is_a_failure():
    counter = Counter()
    with pytest.raises(EnvironmentFailed, match=r"Counter.fail: OSError: the disk.*worlds.py:\d+"):
        answer([counter.fail], ("fail", {}))


def test_calls_of_one_turn_run_side_by_side():
    counter = Counter()
    started = time.perf_counter()
    calls = [("hang", {"seconds": 0.2}), ("doze", {"seconds": 0.2})] * 4
    made = answer([counter.hang, counter.doze], *calls)
    assert {call.answer for call in made} == {"awake"}
    assert time.perf_counter() - started < 0.8  # 1.6 s one after another
    assert all(call.seconds >= 0.19 for call in made)


def test_results_are_texts_or_json():
    def give(kind: Literal["text", "none", "number", "mapping", "object"]):
        """Give something.

        Args:
            kind: What.
        """
        found = {"text": 'say "é"', "none": None, "number": 1.5, "mapping": {"é": [1]}}
        return found.get(kind, {1, 2} if kind == "object" else None)

    kinds = ("text", "none", "number", "mapping", "object")
    made = answer([give], *(("give", {"kind": kind}) for kind in kinds))
    assert [c.answer for c in made] == ['say "é"', "null", "1.5", '{"é": [1]}', '"{1, 2}"']
    [call] = answer([give], ("give", {"kind": "color"}))
    assert call.error and "'color' is not one of" in call.answer


def test_a_result_of_any_kind_is_answered():
    counter = Counter()
    kinds = ("unprintable", "loop", "huge", "half")
    made = answer([counter.give], *(("give", {"kind": kind}) for kind in kinds))
    assert [call.error for call in made] == [True, True, True, False]
    assert made[1].answer == "error: ValueError: Circular reference detected"
    assert made[3].answer == "a?b"


def test_optional_arguments_take_null():
    def find(name: Optional[str] = None, near: Optional[list[float]] = None) -> str:  # noqa: UP045
        """Find something.

        Args:
            name: Its name.
            near: A place.
        """
        return f"{name} {near}"

    made = answer([find], ("find", {"name": None, "near": "[1, 2.5]"}), ("find", {}))
    assert [call.answer for call in made] == ["None [1, 2.5]", "None None"]


@given(st.text(), st.integers(64, 200))
def test_an_answer_is_cut_with_a_mark(text, limit):
    found = cut(text, limit)
    data = text.encode("utf-8", "replace")
    assert len(found.encode()) <= limit
    if len(data) <= limit:
        assert found == data.decode()
    else:
        head, _, mark = found.rpartition(" [cut: ")
        assert mark == f"{len(data)} bytes]"
        assert data.decode().startswith(head) and len(head.encode()) > limit - 40


@given(st.sampled_from(["integer", "number", "boolean", "array", "object", "string"]), st.text())
def test_no_text_breaks_the_reading_of_values(kind, text):
    value = coerced(text, {"type": kind})
    assert kind != "string" or value == text
