"""The program's half of a function test. The program can change all of it, so nothing relies on
it."""

from __future__ import annotations

import marshal
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from . import wire
from .peer import MUTABLE_TYPES, Peer


def serve(module: ModuleType) -> NoReturn:
    """Answer the tests' requests to a loaded program until they close the channel."""
    program = Program(module)
    while True:
        program.answer(program.receive())


class Program(Peer):
    """Answers the tests from a loaded module."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        self.module = module
        self.stand_ins: dict[int, Callable[..., Any]] = {}  # by the number that the tests gave
        self.stand_in_numbers: dict[int, int] = {}  # by id

    def refer(self, value: Any) -> tuple[int, int]:
        if id(value) in self.stand_in_numbers:
            return wire.YOURS, self.stand_in_numbers[id(value)]
        return wire.MINE, self.number(value)

    def resolve(self, tag: int, number: int) -> Any:
        if tag == wire.YOURS:
            return self.objects[number]
        if number not in self.stand_ins:
            self.stand_ins[number] = stand_in(self, number)
            self.stand_in_numbers[id(self.stand_ins[number])] = number
        return self.stand_ins[number]

    def answer(self, message: Any) -> None:
        question, *rest = message
        self.reply(lambda: _ANSWERS[question](self, *rest))

    def names(self) -> tuple[Any, ...]:
        return ([name for name in vars(self.module) if not name.startswith("__")],)

    def name(self, name: str) -> tuple[Any, ...]:
        """The kind of the name's value (exception or object), and the value."""
        value = vars(self.module)[name]
        if isinstance(value, type) and issubclass(value, Exception):
            return ("exception", [kind.__name__ for kind in value.__mro__])
        return ("object", value)

    def call(self, target: Any, args: list[Any], named: dict[str, Any]) -> tuple[Any, ...]:
        """The result, and by position the arguments changed in place by the call."""
        arguments = [*args, *named.values()]
        before = [self.snapshot(x) for x in arguments]
        result = target(*args, **named)
        changed = {i: x for i, x in enumerate(arguments) if before[i] != self.snapshot(x)}
        return result, changed

    def snapshot(self, value: Any) -> bytes | None:
        if not isinstance(value, MUTABLE_TYPES):
            return None
        try:
            return marshal.dumps(value, 2)
        except ValueError:
            return wire.encode(value, self.refer)


def stand_in(program: Program, number: int) -> Callable[..., Any]:
    """A stand-in for a function or iterator passed by the tests."""

    class StandIn:
        def __call__(self, *args: Any, **named: Any) -> Any:
            return program.ask("call", number, list(args), named)[0]

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            return program.ask("next", number)[0]

    return StandIn()


_ANSWERS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "names": Program.names,
    "name": Program.name,
    "call": Program.call,
    "get": lambda _, target, name: (getattr(target, name),),
    "set": lambda _, target, name, value: (target.__setattr__(name, value),),
    "item": lambda _, target, key: (target[key],),
    "set item": lambda _, target, key, value: (target.__setitem__(key, value),),
    "delete item": lambda _, target, key: (target.__delitem__(key),),
    "len": lambda _, target: (len(target),),
    "iter": lambda _, target: (iter(target),),
    "next": lambda _, target: (next(target),),
    "str": lambda _, target: (str(target),),
    "repr": lambda _, target: (repr(target),),
    "bool": lambda _, target: (bool(target),),
    "has": lambda _, target, kind: (isinstance(target, kind),),
}
