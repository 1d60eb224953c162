"""What of a toolbox is a tool, calls that a description does not allow, and their answers."""

import asyncio
import copy
import datetime
import functools
import threading
import time

import numpy as np
import pytest

from tramontane.config.images import ImagesConfig
from tramontane.data.values import UnknownType
from tramontane.environments.running import EnvironmentFailed, Runner
from tramontane.environments.tools import (
    RESERVED,
    Described,
    Misuse,
    Toolset,
    checked,
    cut,
    methods,
    schema_of,
    text_of,
)
from tramontane.errors import InputError
from tramontane.types import ToolCall

INT, LIMITS = {"type": "integer"}, ImagesConfig().limits


def answered(tools, *calls, answer_bytes=1000):
    """Answers to (name, arguments)."""
    made = [ToolCall(name, arguments, "") for name, arguments in calls]
    asyncio.run(Toolset(tools, answer_bytes, LIMITS).answer(made, Runner()))
    return made


class Parent:
    def second(self) -> str:
        """Be second."""
        return "second"


class Box(Parent):
    """A toolbox with all that is none of its tools."""

    constant = 5
    Inner = Parent
    _private = print

    def first(self) -> str:
        """Be first."""
        return "first"

    @staticmethod
    def fixed(x: int) -> int:
        """Give it back.

        Args:
            x: It.
        """
        return x

    @classmethod
    def named(cls) -> str:
        """Name it."""
        return cls.__name__

    def second(self) -> str:
        """Be second, otherwise."""
        return "other"

    @property
    def shown(self):
        raise AssertionError

    @functools.cached_property
    def kept(self):
        raise AssertionError

    def _hidden(self):
        raise AssertionError


for _name in RESERVED:
    setattr(Box, _name, lambda self: None)


def test_the_public_methods_are_tools_in_the_order_of_their_definition():
    """A method that a class defines anew keeps its place."""
    names = ["second", "first", "fixed", "named"]
    for toolbox in (Box, Box()):
        assert [schema_of(each)["function"]["name"] for each in methods(toolbox)] == names
    made = answered(methods(Box()), *((n, {"x": 3} if n == "fixed" else {}) for n in names))
    assert [call.answer for call in made] == ["other", "first", "3", "Box"]
    assert {"start", "step", "close", "reset", "get_reward", "tools"} == RESERVED


def test_methods_that_python_cannot_bind_are_refused():
    class Half(Parent):
        half = functools.partialmethod(Parent.second)

    class Several(Parent):
        @functools.singledispatchmethod
        def several(self, x: int):
            """Give several."""

    assert [each.__name__ for each in methods(Half())] == ["second", "half"]
    with pytest.raises(InputError, match="Several.several is a singledispatchmethod"):
        methods(Several)


class Elsewhere:
    """A toolbox that describes its tools, and calls them by name."""

    name = "mcp:there"

    def __init__(self):
        self.called = []

    @classmethod
    def descriptions(cls):
        parameters = {"properties": {"a": INT | {"nullable": True}}, "required": ["a"]}
        for name, own in (
            ("far", parameters),
            ("free", {"additionalProperties": INT}),
            ("no", None),
        ):
            function = {"name": name, "description": "Call."} | ({"parameters": own} if own else {})
            yield Described({"type": "function", "function": function})

    async def call(self, name, arguments):
        self.called.append((name, arguments))
        if name == "no":
            raise Misuse("not today")
        return "called"


def test_a_toolbox_may_describe_its_tools_and_call_them_itself():
    box = Elsewhere()
    calls = [("far", {"a": "1"}), ("far", {"a": None}), ("free", {"z": "2"}), ("no", {})]
    wrong = [("far", {}), ("far", {"a": "x"}), ("far", {"a": 1, "b": 2}), ("free", {"z": "x"})]
    made = answered(methods(box), *calls, *wrong)
    assert box.called == [("far", {"a": 1}), ("far", {"a": None}), ("free", {"z": 2}), ("no", {})]
    assert [call.answer for call in made[:4]] == ["called"] * 3 + ["error: not today"]
    assert [call.answer for call in made[4:]] == [
        "error: far needs the argument 'a'",
        "error: argument 'a' of far: 'x' is not valid under any of the given schemas",
        "error: far has no argument 'b'; it takes: a",
        "error: argument 'z' of free: 'x' is not of type 'integer'",
    ]
    with pytest.raises(InputError, match=r"two tools are named 'far': mcp:there and mcp:there;"):
        Toolset([*methods(box), *methods(Elsewhere())], 100, LIMITS)
    nameless = type("Nameless", (), {"descriptions": Elsewhere.descriptions})
    with pytest.raises(InputError, match=r"'far': src/tramontane/environments/tools.py:\d+ and "):
        Toolset(methods(nameless()) * 2, 100, LIMITS)


@pytest.mark.parametrize(
    ("arguments", "schema", "said"),
    [
        ({"a": 1}, {}, "t has no argument 'a'; it takes: none"),
        ({"x" * 100: 1}, {"properties": {"a": INT, "b": {}}},
         f"t has no argument {'x' * 80!r}; it takes: a, b"),
        ({}, {"properties": {"a": INT}, "required": ["a", "b"]}, "t needs the argument 'a'"),
        ({"a": 1}, {"properties": {"a": False}},
         "argument 'a' of t: False schema does not allow 1"),
        ({"a": "x"}, {"properties": {"a": {"items": {}, "nullable": True, "type": "array"}}},
         "argument 'a' of t: 'x' is not valid under any of the given schemas"),
        ({"a": {"b": 1}}, {"properties": {"a": {"properties": {"b": {"not": {}}}}}},
         "argument 'a' of t: 1 should not be valid under {}"),
    ],
)  # fmt: skip
def test_what_a_description_does_not_allow_is_said(arguments, schema, said):
    with pytest.raises(Misuse) as refused:
        checked("t", arguments, schema)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("arguments", "schema", "values"),
    [
        ({}, {}, {}),
        ({"a": "1"}, {"properties": {"a": INT}}, {"a": 1}),
        ({"a": "1"}, {"properties": {"a": True}}, {"a": "1"}),
        ({"b": "1"}, {"additionalProperties": INT}, {"b": 1}),
        ({"b": "1"}, {"additionalProperties": True}, {"b": "1"}),
        ({"a": None}, {"properties": {"a": INT | {"nullable": True}}}, {"a": None}),
        # Names in objects are texts; those of properties may be keywords.
        ({"a": {"1": 2}}, {"properties": {"a": {"propertyNames": INT}}}, {"a": {"1": 2}}),
        ({"a": {"nullable": None}},
         {"properties": {"a": {"properties": {"nullable": INT | {"nullable": True}}}}},
         {"a": {"nullable": None}}),
        ({"a": [None]}, {"properties": {"a": {"items": INT | {"nullable": True}}}}, {"a": [None]}),
        ({"a": None}, {"properties": {"a": {"anyOf": [INT | {"nullable": True}]}}}, {"a": None}),
    ],
)  # fmt: skip
def test_what_it_allows_has_the_types_of_the_description(arguments, schema, values):
    assert checked("t", arguments, schema) == values


def test_a_long_fault_is_cut():
    with pytest.raises(Misuse) as refused:
        checked("t", {"a": ["x" * 9000]}, {"properties": {"a": INT}})
    assert len(str(refused.value)) < 1000


def test_an_unknown_tool_is_named_with_those_that_there_are():
    [call] = answered([], ("x" * 100, {}))
    assert call.answer == f"error: there is no tool {'x' * 80!r}; the tools are: none"
    [call] = answered(methods(Parent()), ("first", {}), answer_bytes=40)
    assert call.error and call.answer == cut(
        "error: there is no tool 'first'; the tools are: second", 40
    )


def test_the_arguments_that_are_recorded_are_those_of_the_model():
    def change(xs: list[int], ys: list) -> int:
        """Change it.

        Args:
            xs: It.
            ys: It.
        """
        xs.append(0)
        ys[0]["a"].append(ys.pop())
        return len(xs)

    given = {"xs": ["1", 2], "ys": [{"a": [{}]}, 5]}
    [call] = answered([change], ("change", copy.deepcopy(given)))
    assert (call.arguments, call.answer) == (given, "3")


def test_a_call_takes_the_time_of_its_tool():
    def rest() -> None:
        """Rest."""
        time.sleep(0.02)

    def fails() -> None:
        """Rest, and fail."""
        time.sleep(0.02)
        raise LookupError("x" * 100)

    made = answered([rest, fails], ("rest", {}), ("fails", {}), answer_bytes=64)
    assert all(0.02 <= call.seconds < 10 for call in made)
    assert [call.error for call in made] == [False, True]
    assert made[1].answer == cut("error: LookupError: " + "x" * 100, 64)


def test_calls_of_two_toolboxes_are_answered_side_by_side():
    come = threading.Event()

    class Waits:
        def wait(self) -> bool:
            """Wait for the other."""
            return come.wait(5)

    class Comes:
        def come(self) -> None:
            """Come."""
            come.set()

    waited, _ = answered([Waits().wait, Comes().come], ("wait", {}), ("come", {}))
    assert waited.answer == "true"


def test_calls_that_do_not_parse_keep_their_answer_and_their_place():
    broken = ToolCall("", {}, "error: so", error=True)
    calls = [broken, ToolCall("second", {}, ""), broken]
    shown = asyncio.run(Toolset(methods(Parent()), 100, LIMITS).answer(calls, Runner()))
    assert [call.answer for call in calls] == ["error: so", "second", "error: so"]
    assert shown == [[], [], []]


def test_where_one_tool_breaks_the_others_are_given_up():
    ended = asyncio.Event()

    async def slow() -> None:
        """Wait."""
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def breaks() -> None:
        """Break."""
        await asyncio.sleep(0)
        raise OSError("the disk")

    async def both():
        calls = [ToolCall(name, {}, "") for name in ("slow", "breaks")]
        with pytest.raises(EnvironmentFailed, match="breaks: OSError: the disk"):
            await Toolset([slow, breaks], 1000, LIMITS).answer(calls, Runner())
        await asyncio.wait_for(ended.wait(), 9)  # at once, not with the event loop

    asyncio.run(both())


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("é\n", "é\n"),
        ({"é": 1}, '{"é": 1}'),
        ({3, 1.5, "b", "a", (2, 1)}, '[1.5, 3, "a", "b", [2, 1]]'),
        ({False, True, "a"}, '[false, true, "a"]'),
        (np.datetime64("2026-01-02"), '"2026-01-02"'),
        (np.array(["2026-01-02"], "M8[D]"), '["2026-01-02"]'),
        (np.timedelta64(3, "D"), '"3 days"'),
        (np.array([{"a": 1}, None], "O"), '[{"a": 1}, null]'),
        ({datetime.date(2026, 1, 2): 1}, '{"2026-01-02": 1}'),
        ({None: 1, 2.5: 2}, '{"null": 1, "2.5": 2}'),
    ],
)
def test_results_are_written_as_json(result, text):
    assert text_of(result) == text


def test_a_name_in_an_object_that_is_no_text_is_refused():
    with pytest.raises(UnknownType, match=r"^\(1, 2\) as a name in an object: give text"):
        text_of({(1, 2): 3})
    with pytest.raises(UnknownType) as refused:
        text_of({tuple(range(99)): 3})
    assert len(str(refused.value)) < 200


def test_an_answer_is_cut_at_its_limit_in_bytes():
    assert cut("é" * 50, 100) == "é" * 50
    assert cut("é" * 50 + "a", 100) == "é" * 41 + " [cut: 101 bytes]"
    assert cut("a" * 101, 100) == "a" * 83 + " [cut: 101 bytes]"
