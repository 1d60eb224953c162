"""Tools: their descriptions, the arguments that they take, and their answers."""

import asyncio
import dataclasses
import datetime
import functools
import time
import types
from decimal import Decimal
from enum import Enum
from typing import Literal, Optional

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.environments.worlds import Counter, Dozer, add, divide
from tramontane.data.values import UnknownType
from tramontane.environments.running import EnvironmentFailed, Runner
from tramontane.environments.tools import Toolset, coerced, cut, methods, schema_of, text_of
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
        "increase", "fail", "hang", "give",
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
    counter, dozer = Counter(), Dozer()
    counter.independent = dozer.independent = True
    started = time.perf_counter()
    calls = [("hang", {"seconds": 0.2}), ("doze", {"seconds": 0.2})] * 4
    made = answer([counter.hang, dozer.doze], *calls)
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
    assert [c.answer for c in made] == ['say "é"', "null", "1.5", '{"é": [1]}', "[1, 2]"]
    [call] = answer([give], ("give", {"kind": "color"}))
    assert call.error and "'color' is not one of" in call.answer


def test_calls_of_one_toolbox_keep_the_models_order():
    class Files:
        texts: dict[str, str]

        def __init__(self):
            self.texts = {}

        def write(self, text: str) -> str:
            """Write.

            Args:
                text: What.
            """
            time.sleep(0.05)
            self.texts["a"] = text
            return "written"

        async def read(self) -> str:
            """Read."""
            return self.texts.get("a", "nothing")

    pair = ("write", {"text": "one"}), ("read", {}), ("write", {"text": "two"}), ("read", {})
    files = Files()
    made = answer([files.write, files.read], *pair)
    assert [call.answer for call in made] == ["written", "one", "written", "two"]


@pytest.mark.parametrize("kind", ["unprintable", "loop", "huge"])
def test_a_result_without_json_is_a_failure_of_the_tool(kind):
    with pytest.raises(EnvironmentFailed, match=r"result of give \(.*worlds.py:\d+\)"):
        answer([Counter().give], ("give", {"kind": kind}))


def test_half_a_surrogate_pair_in_a_result_is_replaced():
    [made] = answer([Counter().give], ("give", {"kind": "half"}))
    assert made.answer == "a?b" and not made.error


class Color(Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: np.int64
    when: datetime.date


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (np.int64(5), "5"),
        (np.bool_(True), "true"),
        ({"mean": np.float32(0.5)}, '{"mean": 0.5}'),
        (np.arange(3), "[0, 1, 2]"),
        (np.array([[1.5], [2.0]]), "[[1.5], [2.0]]"),
        (np.array(["2026-01-02"], dtype="datetime64[D]"), '["2026-01-02"]'),
        (np.datetime64("2026-01-02"), '"2026-01-02"'),
        ({np.int64(3): {np.int64(1)}}, '{"3": [1]}'),
        (torch.tensor([1, 2]), "[1, 2]"),
        (torch.tensor(0.5), "0.5"),
        ({10, 9, "b", "a"}, '[9, 10, "a", "b"]'),
        (frozenset({(2, 1)}), "[[2, 1]]"),
        ([datetime.date(2026, 1, 2), datetime.time(3)], '["2026-01-02", "03:00:00"]'),
        ({"a": Decimal("1.5"), "b": Color.RED}, '{"a": 1.5, "b": "red"}'),
        (Point(np.int64(1), datetime.date(2026, 1, 2)), '{"x": 1, "when": "2026-01-02"}'),
    ],
)
def test_values_of_libraries_are_json(result, expected):
    assert text_of(result) == expected


@pytest.mark.parametrize("result", [{(1, 2): 3}, b"ab", object(), [1j], {"a": lambda: 0}])
def test_what_has_no_json_is_refused(result):
    with pytest.raises(UnknownType):
        text_of(result)


class Kept:
    """A decorator with `__get__`, which calls what it decorates."""

    def __init__(self, function):
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *arguments, **named):
        return self._function(*arguments, **named)

    def __get__(self, instance, owner):
        return types.MethodType(self, instance)


class Desk:
    """A toolbox with decorated methods."""

    class Inner:
        """Not a tool."""

    @functools.lru_cache  # noqa: B019
    def find(self, key: str) -> str:
        """Find.

        Args:
            key: It.
        """
        return key.upper()

    @Kept
    def keep(self, key: str) -> str:
        """Keep.

        Args:
            key: It.
        """
        return key + "!"


def test_decorated_methods_are_tools():
    assert [schema_of(m)["function"]["name"] for m in methods(Desk)] == ["find", "keep"]
    made = answer(methods(Desk()), ("find", {"key": "a"}), ("keep", {"key": "b"}))
    assert [call.answer for call in made] == ["A", "b!"]


def test_what_cannot_be_bound_is_refused_by_its_name():
    class Unbound:
        def __init__(self, function):
            self._function = function

        def __call__(self, key: str):
            return self._function(key)

    for kind in (functools.partialmethod, Unbound):
        box = type("Box", (), {"find": kind(vars(Desk)["keep"])})
        with pytest.raises(InputError, match=f"Box.find is a {kind.__name__}"):
            methods(box())


def test_parameters_that_json_cannot_give_are_refused_by_name():
    def described(hint, by_name=True):
        if by_name:

            def tool(good: int, bad):
                return bad
        else:

            def tool(good: int, *bad):
                return bad

        tool.__annotations__["bad"] = hint
        tool.__doc__ = "Do it.\n\nArgs:\n    good: One.\n    bad: Two.\n"
        return schema_of(tool)

    for hint in (dict[int, str], tuple[int, str], list[tuple[int, int]], Point, list[Point],
                 Color | None, bytes, complex):  # fmt: skip
        with pytest.raises(InputError, match=r"tool .*test_tools.py.*parameter 'bad'"):
            described(hint)
    with pytest.raises(InputError, match="parameter 'bad' cannot be given by name"):
        described(int, by_name=False)
    for hint in (Literal["a", "b"], dict[str, list[int]], int | None, list[str] | str):
        assert "bad" in described(hint)["function"]["parameters"]["properties"]


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
