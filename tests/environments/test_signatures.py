"""Types of tools' parameters under annotations that are texts, as most modules have them."""

from __future__ import annotations

import asyncio
import functools
from collections import UserList
from collections.abc import Iterable
from datetime import date
from enum import Enum
from ipaddress import ip_network
from typing import Annotated, Any, Dict, Literal, TypedDict  # noqa: UP035

import numpy as np
import pydantic
import pytest
from typing_extensions import NotRequired, ReadOnly, Required

from tramontane.config.images import ImagesConfig
from tramontane.environments.running import Runner
from tramontane.environments.tools import Toolset, methods, text_of
from tramontane.errors import InputError
from tramontane.types import ToolCall


class Color(Enum):
    RED = "r"


class Address(TypedDict):
    street: ReadOnly[str]
    zip: NotRequired[int]


class Person(TypedDict, total=False):
    name: Required[str]
    home: Address
    age: ReadOnly[Annotated[int, pydantic.Field(ge=0)]]
    work: NotRequired[ReadOnly[Address]]


class Held(pydantic.BaseModel):
    values: Any


def answered(hint, value):
    """What a tool with a parameter of a type answers to a call: the argument that it got."""

    def tool(x):
        return repr(x)

    tool.__doc__ = "Show.\n\n    Args:\n        x (Any, optional): it\n    "
    tool.__annotations__ = {"x": hint}
    call = ToolCall("tool", {"x": value}, "")
    asyncio.run(Toolset([tool], 2000, ImagesConfig().limits).answer([call], Runner()))
    return call.answer


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (Address, {"street": "s"}, "{'street': 's'}"),
        (Address, {"zip": 1}, "error: argument 'x' of tool: 'street' is a required property"),
        (Person, {"name": "A", "home": {"street": "s", "zip": "9"}},
         "{'name': 'A', 'home': {'street': 's', 'zip': 9}}"),
        (Person, {"home": {"street": "s"}},
         "error: argument 'x' of tool: 'name' is a required property"),
        (Person, {"name": "A", "age": -1},
         "error: argument 'x' of tool: -1 is less than the minimum of 0"),
        (Literal["a", Color.RED], "r", "<Color.RED: 'r'>"),
        (Literal["a", Color.RED], "a", "'a'"),
        (list[Literal[Color.RED]], ["r"], "[<Color.RED: 'r'>]"),
        (Literal["auto"] | int, "3", "3"),
        (Literal["auto"] | int, "auto", "'auto'"),
        (Literal["auto"] | int, "x",
         "error: argument 'x' of tool: 'x' is not one of ['auto']"),
        (Literal["a", "b"] | None, "null", "None"),
        (Color | None, "None", "None"),
        (date | None, "null", "None"),
        (str | None, "null", "'null'"),
        (Dict, {"a": 1}, "{'a': 1}"),  # noqa: UP006
        (Iterable[Color], ["r"], "[<Color.RED: 'r'>]"),
        (Iterable[int] | None, [1], "[1]"),
        (list[date], [""] * 4, "error: argument 'x' of tool: " + "; ".join(
            f"{i}: Input should be a valid date or datetime, input is too short"
            for i in range(3))),  # what the model reads of several faults
    ],
)  # fmt: skip
def test_an_argument_has_the_type_of_its_hint(hint, value, expected):
    assert answered(hint, value) == expected


def test_a_class_as_an_argument_is_refused():
    with pytest.raises(InputError, match=r"parameter 'x': type\[int\] is a class"):
        answered(type[int], "int")


def test_no_decorator_hides_a_method():
    class Bound:  # has `__get__` alone
        def __init__(self, function):
            functools.update_wrapper(self, function)

        def __get__(self, instance, owner=None):
            return functools.partial(self.__wrapped__, instance)

    def add(self, a: int) -> int:
        """Add.

        Args:
            a: it
        """
        return a + 1

    class Lazy(property):
        def __init__(self, function):
            super().__init__(function)
            functools.update_wrapper(self, function)

    class Box:
        plus = Bound(add)
        lazy = Lazy(add)
        kept = functools.cached_property(add)
        seen = property(add)

    assert len(methods(Box)) == 1

    class Several:
        plus = functools.singledispatchmethod(add)

    with pytest.raises(InputError, match=r"Several.plus is a singledispatchmethod"):
        methods(Several)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (Held(values=np.arange(2)), '{"values": [0, 1]}'),
        (Held(values=[{Color.RED}]), '{"values": [["r"]]}'),
        (UserList([1]), "[1]"),
        (ip_network("10.0.0.0/8"), '"10.0.0.0/8"'),
    ],
)
def test_a_result_is_json_also_within_models(result, expected):
    assert text_of(result) == expected
