"""Tools: their descriptions, the arguments that they take, and their answers."""

import asyncio
import dataclasses
import datetime
import functools
import json
import time
import types
import typing
from collections import UserString, deque
from collections.abc import Callable
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from ipaddress import ip_address, ip_network
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, Optional, TypedDict
from uuid import UUID

import numpy as np
import pydantic
import pytest
import torch
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from transformers.utils import get_json_schema
from typing_extensions import Required

from tests.environments.worlds import Counter, Dozer, add, divide
from tramontane.config.images import ImagesConfig
from tramontane.data.values import UnknownType
from tramontane.environments.arguments import inlined, typed
from tramontane.environments.learned import NAME, PROBE
from tramontane.environments.running import EnvironmentFailed, Runner
from tramontane.environments.tools import Toolset, coerced, cut, methods, schema_of, text_of
from tramontane.errors import InputError
from tramontane.types import ToolCall

LIMITS = ImagesConfig().limits


def answer(tools, *calls, answer_bytes=1000):
    """Answers to (name, arguments)."""
    made = [ToolCall(name, arguments, "") for name, arguments in calls]
    asyncio.run(Toolset(tools, answer_bytes, LIMITS).answer(made, Runner()))
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


def test_parameters_in_a_docstring_may_have_types_and_stars():
    def tool(x: int, y: int, *z: int):
        """Do it.

        Args:
            x(int): It (see y): as *y: so.
            y (): Other.
            *z (int): More.
        """

    properties = schema_of(tool)["function"]["parameters"]["properties"]
    said = {name: part["description"] for name, part in properties.items()}
    assert said == {"x": "It (see y): as *y: so.", "y": "Other.", "z": "More."}


def test_the_docstring_of_its_class_describes_an_object():
    class Adds:
        """Add one.

        Args:
            x: A number.
        """

        def __call__(self, x: int):
            return x + 1

    assert schema_of(Adds())["function"]["description"] == "Add one."


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
    place = r"tests/environments/worlds.py:\d+"
    with pytest.raises(InputError, match=f"two tools are named 'add': {place} and {place}; "):
        Toolset([add, add], 100, LIMITS)
    assert Toolset([add, divide], 100, LIMITS).schemas == [schema_of(add), schema_of(divide)]


class Undocumented:
    def look(self):
        return "left"


def test_pythons_own_docstring_of_a_method_describes_no_tool():
    for tool in (Undocumented().look, functools.partial(Undocumented.look, None)):
        with pytest.raises(InputError, match="it has no docstring"):
            schema_of(tool)


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


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, ArithmeticError])
def test_what_a_tool_says_of_its_use_is_the_models_error(kind):
    def tool():
        """Fail."""
        raise kind("so")

    [call] = answer([tool], ("tool", {}))
    assert call.error and call.answer.startswith(f"error: {kind.__name__}: ")


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
    made = answer([functools.partial(files.write), files.read], *pair)
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
        (np.zeros((1, 2), "u1").data, "[[0, 0]]"),
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
        ([UUID(int=1), PurePosixPath("a")], '["00000000-0000-0000-0000-000000000001", "a"]'),
        (datetime.timedelta(days=2), '"P2D"'),
        ([np.timedelta64(5, "s"), np.array([5], "m8[s]")], '["5 seconds", ["5 seconds"]]'),
        ([np.array(Fraction(1, 3)), np.array([[{1}, None]])], '["1/3", [[[1], null]]]'),
        ([range(2), deque([1]), {"a": 1}.values()], "[[0, 1], [1], [1]]"),
        ([Fraction(1, 3), ip_address("::1"), ip_address("1.2.3.4")], '["1/3", "::1", "1.2.3.4"]'),
        ([ip_network("::/8"), ip_network("1.0.0.0/8")], '["::/8", "1.0.0.0/8"]'),
        (Point(np.int64(1), datetime.date(2026, 1, 2)), '{"x": 1, "when": "2026-01-02"}'),
    ],
)
def test_values_of_libraries_are_json(result, expected):
    assert text_of(result) == expected


@pytest.mark.parametrize(
    "result",
    [
        {(1, 2): 3}, b"ab", bytearray(2), UserString("a"), Point, object(), [1j], {"a": lambda: 0},
        types.SimpleNamespace(dtype=np.dtype(object)),  # describes a column, and is none
    ],
)  # fmt: skip
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

    class Plain:  # without `__get__`
        def __init__(self, function):
            functools.update_wrapper(self, function)

        def __call__(self, *arguments):
            return self.__wrapped__(*arguments)

    [call] = answer([Plain(add)], ("add", {"a": 1, "b": 2}))
    assert call.answer == "3"


def test_what_cannot_be_bound_is_refused_by_its_name():
    class Unbound:
        def __init__(self, function):
            self._function = function

        def __call__(self, key: str):
            return self._function(key)

    box = type("Box", (), {"find": Unbound(vars(Desk)["keep"])})
    with pytest.raises(InputError, match="Box.find is a Unbound"):
        methods(box())


def test_partial_functions_and_objects_are_tools_without_what_is_bound():
    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def times(self, amount: int, plus: int = 0, *, unit: str = "") -> str:
            """Multiply.

            Args:
                amount: What.
                plus: Added.
                unit: Written behind.
            """
            return f"{self.factor * amount + plus}{unit}"

        meters = functools.partialmethod(times, unit="m")

        def __call__(self, amount: int) -> int:
            """Scale.

            Args:
                amount: What.
            """
            return self.factor * amount

    scale = Scale(3)
    bound = functools.partial(scale.times, unit="km")
    for tool, name, known in (
        (bound, "times", ["amount", "plus"]),
        (functools.partial(scale.times, plus=1), "times", ["amount", "unit"]),
        (scale, "Scale", ["amount"]),
        (methods(scale)[1], "meters", ["amount", "plus"]),
        (methods(Scale)[1], "meters", ["amount", "plus"]),
    ):
        described = schema_of(tool)["function"]
        assert described["name"] == name and [*described["parameters"]["properties"]] == known
        assert described["parameters"]["required"] == ["amount"]
    assert [c.answer for c in answer([bound, scale], ("times", {"amount": 2, "plus": 1}),
                                     ("Scale", {"amount": 2}))] == ["7km", "6"]  # fmt: skip
    [call] = answer([methods(scale)[1]], ("meters", {"amount": "2"}))
    assert call.answer == "6m"
    [call] = answer([bound], ("times", {"amount": 2, "unit": "ly"}))
    assert call.answer == "error: times has no argument 'unit'; it takes: amount, plus"


def tool_of(hint, **default):
    """A tool whose parameter `given` has this type; it answers with the value's repr."""

    def tool(given):
        return repr(given)

    if default:
        tool.__defaults__ = (default["default"],)
    tool.__annotations__["given"] = hint
    tool.__doc__ = "Do it.\n\nArgs:\n    given: It.\n"
    return tool


class Level(IntEnum):
    LOW = 1


class Options(TypedDict, total=False):
    a: Required[int]
    b: list[str]


class Pair(NamedTuple):
    x: int
    y: str = "?"


@dataclasses.dataclass
class Leaf:
    n: int
    children: list["Leaf"] = dataclasses.field(default_factory=list)


class Nullable(pydantic.BaseModel, extra="forbid"):
    nullable: bool


class Order(pydantic.BaseModel):
    price: Decimal
    when: datetime.date | None = None
    color: Color = Color.RED


CONVERTED = [
    (Color, "red", "<Color.RED: 'red'>"),
    (Level, 1, "<Level.LOW: 1>"),
    (Color | None, None, "None"),
    (tuple[int, str], [1, "a"], "(1, 'a')"),
    (tuple[int, ...], "[1, \"2\"]", "(1, 2)"),
    (tuple, [1], "(1,)"),
    (set[int], ["2"], "{2}"),
    (dict[int, float], {"1": "2"}, "{1: 2.0}"),
    (dict[Level, int], {"1": "2"}, "{<Level.LOW: 1>: 2}"),
    (dict[Color, Options], {"red": {"a": 1}}, "{<Color.RED: 'red'>: {'a': 1}}"),
    (list[int] | dict[str, int], {"a": "1"}, "{'a': 1}"),
    (list[Pair] | dict[str, int] | None, {"a": "1"}, "{'a': 1}"),
    (Nullable, {"nullable": "true"}, "Nullable(nullable=True)"),
    (list[tuple[int, Color]], [["1", "red"]], "[(1, <Color.RED: 'red'>)]"),
    (Options, {"a": "1"}, "{'a': 1}"),
    (list[Options], [{"a": 1, "b": ["x"]}], "[{'a': 1, 'b': ['x']}]"),
    (Pair, [1, "a"], "Pair(x=1, y='a')"),
    (Leaf, {"n": 1, "children": [{"n": 2}]},
     "Leaf(n=1, children=[Leaf(n=2, children=[])])"),
    (Order, {"price": "1.10", "when": "2026-01-02"},
     "Order(price=Decimal('1.10'), when=datetime.date(2026, 1, 2), color=<Color.RED: 'red'>)"),
    (datetime.datetime, "2026-01-02T03:04:05", "datetime.datetime(2026, 1, 2, 3, 4, 5)"),
    (datetime.timedelta, "PT1M", "datetime.timedelta(seconds=60)"),
    (Decimal, 1.5, "Decimal('1.5')"),
    (UUID, "12345678-1234-5678-1234-567812345678",
     "UUID('12345678-1234-5678-1234-567812345678')"),
    (Path, "a/b", f"{Path('a/b')!r}"),
    (bytes, "é", "b'\\xc3\\xa9'"),
    (float, 3, "3.0"),
    (int | str, "7", "'7'"),
    (Annotated[int, pydantic.Field(gt=0)], 3, "3"),
]  # fmt: skip


@pytest.mark.parametrize(("hint", "given", "taken"), CONVERTED)
def test_arguments_are_converted_to_the_types_of_the_hints(hint, given, taken):
    tool = tool_of(hint)
    Draft202012Validator.check_schema(schema_of(tool)["function"]["parameters"])
    assert "$ref" not in json.dumps(schema_of(tool)) and "title" not in json.dumps(schema_of(tool))
    [call] = answer([tool], ("tool", {"given": given}))
    assert call.answer == taken and not call.error


@pytest.mark.parametrize(
    ("hint", "given", "said"),
    [
        (Color, "blue", "argument 'given' of tool: 'blue' is not one of"),
        (tuple[int, int], [1], "argument 'given' of tool: [1] is too short"),
        (Options, {"b": []}, "argument 'given' of tool: 'a' is a required property"),
        (datetime.date, "tomorrow", "argument 'given' of tool: Input should be a valid date"),
        (Order, {"price": "x"}, "argument 'given' of tool: price: Input should be"),
        (UUID, "x", "argument 'given' of tool: Input should be a valid UUID"),
        (dict[int, str], {"a": "b"}, "argument 'given' of tool: a: [key]: Input should be a valid"),
        (Annotated[int, pydantic.Field(gt=0)], 0, "argument 'given' of tool: 0 is less than"),
        (list[datetime.date], ["2026-01-02", "x"], "argument 'given' of tool: 1: Input should be"),
    ],
)
def test_an_argument_of_another_type_is_the_models_error(hint, given, said):
    [call] = answer([tool_of(hint)], ("tool", {"given": given}))
    assert call.error and call.answer.startswith(f"error: {said}"), call.answer


def test_a_type_that_fails_by_itself_is_the_tools_failure():
    @dataclasses.dataclass
    class Disk:
        path: str

        def __post_init__(self):
            raise OSError("the disk is gone")

    with pytest.raises(
        EnvironmentFailed, match=r"'given' of tool \(.*test_tools.py:\d+\).*the disk"
    ):
        answer([tool_of(Disk)], ("tool", {"given": {"path": "a"}}))


@pytest.mark.parametrize(
    "hint", [type("Own", (), {}), np.int64, list[torch.Tensor], Callable[[int], int]]
)
def test_parameters_that_json_cannot_give_are_refused_by_name(hint):
    with pytest.raises(
        InputError, match=r"tool .*test_tools.py.*parameter 'given'.*of a type that"
    ):
        schema_of(tool_of(hint))


class Corner(Enum):
    LEFT = (0, 1)


@pytest.mark.parametrize(
    "hint",
    [
        Corner,
        list[Corner],
        Literal[b"a"],
        dict[tuple[int, int], str],
        dict[str, dict[Pair, int]] | None,
    ],
)
def test_values_that_the_model_can_never_write_are_refused(hint):
    with pytest.raises(InputError, match="parameter 'given': .*neither texts nor numbers"):
        schema_of(tool_of(hint))


def test_parameters_of_every_kind_are_given():
    def tool(first: int, /, second: int = 2, *rest: int, last: str = "z", **others: int) -> str:
        """Do it.

        Args:
            first: One.
            second: Two.
            *rest: More.
            last: The last.
            **others: Even more.
        """
        return repr((first, second, rest, last, others))

    described = schema_of(tool)["function"]["parameters"]
    assert described["required"] == ["first"]
    assert [*described["properties"]] == ["first", "second", "rest", "last", "others"]
    made = answer(
        [tool],
        ("tool", {"first": 1}),
        ("tool", {"first": 1, "rest": [3, "4"]}),
        ("tool", {"first": 1, "last": "y", "others": {"x": "5"}}),
        ("tool", {"first": 1, "rest": 3}),
    )
    assert [call.answer for call in made] == [
        "(1, 2, (), 'z', {})",
        "(1, 2, (3, 4), 'z', {})",
        "(1, 2, (), 'y', {'x': 5})",
        "error: argument 'rest' of tool: 3 is not of type 'array'",
    ]


@pytest.mark.parametrize("module", [typing, typing_extensions])
def test_other_arguments_are_the_fields_of_a_typed_dict(module):
    def tool(**options):
        """Do it.

        Args:
            **options: Some.
        """
        return repr(options)

    unpack = getattr(module, "Unpack", typing_extensions.Unpack)  # Python 3.10 has one
    tool.__annotations__["options"] = unpack[Options]
    fits, lacks = answer([tool], ("tool", {"options": {"a": "1"}}), ("tool", {"options": {}}))
    assert fits.answer == "{'a': 1}" and "'a' is a required property" in lacks.answer


def test_descriptions_stand_in_annotations_and_defaults_in_fields():
    def find(
        key: Annotated[str | None, "The key."],
        near: Annotated[list[float] | None, pydantic.Field(description="A place.")] = None,
        most: int = pydantic.Field(5, le=9, description="How many."),
        sort: str = pydantic.Field(description="By what."),
        by: Annotated[str, typing_extensions.Doc("Whose.")] = "",
        kinds: list[str] = pydantic.Field(default_factory=list, description="Which."),  # noqa: B008
        unit: Annotated[str, 'In which\nunit. (Choices:["m",\n"km"])'] = "m",
    ) -> str:
        """Find something."""
        kinds.append("x")
        return f"{key} {near} {most} {sort} {kinds}"

    described = schema_of(find)["function"]["parameters"]
    assert described["properties"]["key"] == {
        "type": "string", "nullable": True, "description": "The key."
    }  # fmt: skip
    assert described["properties"]["near"]["description"] == "A place."
    assert described["properties"]["most"]["maximum"] == 9
    assert described["properties"]["by"] == {"type": "string", "description": "Whose."}
    assert described["required"] == ["key", "sort"]
    unit = {"type": "string", "enum": ["m", "km"], "description": "In which\nunit."}
    assert described["properties"]["unit"] == unit
    given = {"key": "a", "sort": "b"}
    made = answer([find], ("find", given), ("find", given), ("find", given | {"most": 10}))
    assert [call.answer for call in made[:2]] == ["a None 5 b ['x']"] * 2 and made[2].error


def test_descriptions_of_types_of_json_are_those_of_transformers():
    def tool(
        a: int, b: list[str], c: dict[str, float | None], d: Literal["x", "y"], e: str | None = "",
        f: int | str = 0, g: bool = False, h: Optional[list[list[int]]] = None, i: dict = {},  # noqa: B006, UP045
    ) -> list[int]:  # fmt: skip
        """Do it.

        Args:
            a: One.
            b: Two
                lines.
            c: Three.
            d: Four.
            e: Five (choices: ["p", "q"])
            f: Six.
            g: Seven.
            h: Eight.
            i: (choices: [{}])

        Returns:
            Numbers.
        """

    assert schema_of(tool) == get_json_schema(tool)

    def today() -> datetime.date:
        """Tell the date."""

    def nothing():
        """Do nothing."""

    for kind in (bool, float, None, list, Any, dict[str, int | None]):
        empty = types.FunctionType(nothing.__code__, {}, "empty")
        empty.__doc__, empty.__annotations__ = "Do nothing.", {"return": kind}
        assert schema_of(empty) == get_json_schema(empty)
    for tool in (today, nothing):  # not of a type of JSON
        assert {*schema_of(tool)["function"]} == {"name", "description", "parameters"}
        assert schema_of(tool)["function"]["parameters"] == {"type": "object", "properties": {}}


def test_templates_are_tried_with_a_tool_like_any_other():
    def tool(x: str):
        """x

        Args:
            x: x
        """

    tool.__name__ = NAME
    assert schema_of(tool) == PROBE


def test_generators_give_lists():
    def count(n: int):
        """Count.

        Args:
            n: How far.
        """
        yield from range(n)

    async def slowly(n: int):
        """Count.

        Args:
            n: How far.
        """
        for i in range(n):
            yield i

    made = answer([count, slowly], ("count", {"n": 3}), ("slowly", {"n": 2}))
    assert [call.answer for call in made] == ["[0, 1, 2]", "[0, 1]"]


def test_optional_arguments_take_null():
    def find(name: Optional[str] = None, near: Optional[list[float]] = None) -> str:  # noqa: UP045
        """Find something.

        Args:
            name: Its name.
            near: A place.
        """
        return f"{name} {near}"

    made = answer([find], ("find", {"name": None, "near": "[1, 2.5]"}), ("find", {}))
    assert [call.answer for call in made] == ["None [1.0, 2.5]", "None None"]


def test_arguments_follow_references_and_alternatives_of_their_schema():
    """OpenAI's clients send schemas that pydantic made."""

    class Item(pydantic.BaseModel):
        count: int
        price: float | None = None

    class Basket(pydantic.BaseModel):
        items: list[Item]
        first: tuple[int, bool]
        by_name: dict[str, Item]
        other: Item | list[int] | None = None
        next: Optional["Basket"] = None

    parameters = {
        "type": "object",
        "properties": {"basket": {"$ref": "#/$defs/Basket"}},
        "$defs": {"Basket": Basket.model_json_schema()["$defs"]["Basket"]}
        | {"Item": Item.model_json_schema()},
    }
    tool = {"type": "function", "function": {"name": "buy", "parameters": parameters}}
    text = (
        '{"items": [{"count": "2", "price": "null"}], "first": ["1", "true"], '
        '"by_name": {"a": {"count": "3"}}, "other": {"count": "4"}, '
        '"next": {"items": [], "first": [1, "false"], "by_name": {}}}'
    )
    call = ToolCall("buy", {"basket": text}, "")
    typed([call], [tool], as_text=True)
    assert call.arguments["basket"]["items"][0]["count"] == 2
    assert call.arguments["basket"]["first"] == [1, True]
    assert call.arguments["basket"]["by_name"] == {"a": {"count": 3}}
    assert call.arguments["basket"]["other"] == {"count": 4}


def test_what_is_written_as_text_is_a_number_where_both_are_allowed():
    either = {
        "type": ["integer", "string", "array", "null"],
        "items": {"type": ["number", "string"]},
    }
    given = {"a": "7", "b": "x", "c": "null", "d": "[1, 2]", "e": ["1.5", "y"]}
    parameters = {"type": "object", "properties": dict.fromkeys(given, either)}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    as_text, quoted = ToolCall("f", dict(given), ""), ToolCall("f", dict(given), "")
    typed([as_text], [tool], as_text=True)
    typed([quoted], [tool], as_text=False)
    assert [*as_text.arguments.values()] == [7, "x", None, [1, 2], [1.5, "y"]]
    assert quoted.arguments == given


def test_a_schema_that_refers_to_itself_or_to_nothing_is_read():
    loop = {"$ref": "#/$defs/A", "$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/A"}}}}
    assert inlined(loop) == {"type": "array", "items": {}}
    assert inlined({"properties": {"title": {"title": "T", "$ref": "x"}}}) == {
        "properties": {"title": {}}
    }
    for broken in ({"properties": []}, {"anyOf": [True, 3]}, {"items": True}, {"$ref": 3}):
        assert coerced({"a": ["1"]}, inlined(broken)) == {"a": ["1"]}


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
