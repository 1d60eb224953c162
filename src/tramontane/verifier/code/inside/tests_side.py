"""The tests' half of a function test: runs the tests' code, which calls the program."""

from __future__ import annotations

import os
import sys
from collections import deque
from types import ModuleType
from typing import Any, NoReturn

from . import discovery, wire
from .wire import BROKEN, BUILTIN_ERRORS, GONE, MUTABLE_TYPES, Peer


def run_tests(settings: dict[str, Any]) -> int:
    """Run the tests' code against the program; returns the exit code.

    Functions and classes of the tests that nothing calls are found as pytest and unittest find
    them, and run. Tests that never reach the program decide nothing: the exit code is BROKEN.

    Args:
        settings: `code` (the tests); the names in it that belong to the `program`, and those that
            belong to the `library` (modules by name); `helpers` (source of the statement's
            functions); the `entry_point`; and the names `used` by the tests.
    """
    module = ModuleType("__main__")
    space = module.__dict__
    sys.modules["__main__"] = module
    if "pytest" in settings["code"]:
        sys.modules["pytest"] = discovery.pytest()
    try:
        compiled = compile(settings["code"], "<tests>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        exit_with(BROKEN, f"the tests do not compile: {error}")
    helpers = compile(settings["helpers"], "<statement>", "exec", dont_inherit=True)
    try:
        for name, module_name in settings["library"].items():
            library = __import__(module_name)
            space[name] = library if name == module_name else getattr(library, name)
        tests = Tests()
        space.update(tests.bind(settings["program"]))
        exec(helpers, space)
        exec(compiled, space)
        for test in discovery.find(space, set(settings["used"]), settings["entry_point"]):
            test()
    except SystemExit as end:
        if end.code not in (None, 0):
            exit_with(1, "the tests ended the process")
    except discovery.NotSupported as error:
        exit_with(BROKEN, f"the tests need {error}")
    except BaseException as error:
        if isinstance(error, (NameError, ImportError)) and is_of_tests(error):
            missing = getattr(error, "name", None)
            if missing not in settings["program"]:
                exit_with(BROKEN, f"the tests use {missing}, which nothing declares: {error}")
        exit_with(1, describe(error))
    if not tests.reached:
        exit_with(BROKEN, "the tests never called the program")
    return 0


def is_of_tests(error: BaseException) -> bool:
    """True if the tests' own code raised it, not the program or a library."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename == "<tests>"


def describe(error: BaseException) -> str:
    """The error's class and message, and the line of the tests that it came from."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<tests>":
            line = trace.tb_lineno
        trace = trace.tb_next
    text = "" if isinstance(error, AssertionError) else str(error)[:100].replace("\n", " ")
    return f"{type(error).__name__}{text and ': ' + text} (line {line} of the tests)"


def exit_with(code: int, reason: str) -> NoReturn:
    """End this process immediately; the tests cannot catch it."""
    os.write(2, reason.encode("utf-8", "replace"))
    os._exit(code)


class Handle:
    """A stand-in for an object of the program. Operations are sent to the program, except equality
    and order: a handle equals only itself.
    """

    __slots__ = ("_number", "_tests")
    _tests: Tests
    _number: int

    def __init__(self, tests: Tests, number: int) -> None:
        object.__setattr__(self, "_tests", tests)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **named: Any) -> Any:
        result, changed = self._tests.ask("call", self, list(args), named)
        arguments = [*args, *named.values()]
        for i, value in changed.items():
            update(arguments[i], value)
        return result

    def _ask(self, *question: Any) -> Any:
        return self._tests.ask(question[0], self, *question[1:])[0]

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Handle) and bool(value._ask("has", self))


def _forwarded(question: str) -> Any:
    def method(self: Handle, *arguments: Any) -> Any:
        return self._ask(question, *arguments)

    return method


for _name, _question in {
    "__getattr__": "get", "__setattr__": "set", "__getitem__": "item", "__setitem__": "set item",
    "__delitem__": "delete item", "__len__": "len", "__iter__": "iter", "__next__": "next",
    "__str__": "str", "__repr__": "repr", "__bool__": "bool",
}.items():  # fmt: skip
    setattr(Handle, _name, _forwarded(_question))


def update(old: Any, new: Any) -> Any:
    """Make `old` equal to `new` in place, and its parts too; returns `new` where that fails."""
    if type(old) is not type(new) or not isinstance(old, MUTABLE_TYPES):
        return new
    if isinstance(old, (list, deque, tuple)):
        parts = [update(a, b) for a, b in zip(old, new)]  # noqa: B905 - lengths may differ
        parts += list(new)[len(parts) :]
        if isinstance(old, tuple):
            return tuple(parts)
        old.clear()
        old.extend(parts)
    elif isinstance(old, dict):
        parts_of = {key: update(old[key], new[key]) if key in old else new[key] for key in new}
        old.clear()
        old.update(parts_of)
    else:
        old.clear()
        old.update(new) if isinstance(old, set) else old.extend(new)
    return old


class NoPlainValue(TypeError):
    """A value that the tests pass to the program cannot be sent."""


class Tests(Peer):
    """The asking end of the channel. A frame that is not a message ends the process: the program
    failed."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: dict[int, Handle] = {}
        self.errors: dict[str, type[Exception]] = {}  # the program's exception classes
        self.bound: list[Any] = []  # handles that have a name in the tests
        self.reached = False  # the tests have used something of the program's

    def on_closed(self) -> NoReturn:
        exit_with(GONE, "")

    def ask(self, *question: Any) -> Any:
        # A program's function has a name before it is called.
        is_own = question[0] == "get" and question[2].startswith("__")
        self.reached |= question[0] not in ("names", "name") and not is_own
        try:
            return super().ask(*question)
        except StopIteration:
            # Otherwise it would end a loop of the tests, such as `zip(map(f, xs), wanted)`.
            if question[0] == "next":
                raise
            raise RuntimeError("the program raised StopIteration") from None
        except wire.Garbage as garbage:
            exit_with(1, f"answered with {garbage}")
        except NoPlainValue as error:
            # Not the program's fault if the tests call a function by its name.
            if any(question[1] is x for x in self.bound):
                exit_with(BROKEN, str(error))
            raise

    def receive(self) -> Any:
        message = super().receive()
        # A message of a different shape would fail somewhere in the tests.
        shapes = {"error": (list, list), "call": (int, list, dict), "next": (int,)}
        if not isinstance(message, tuple) or not message or type(message[0]) is not str:
            raise wire.Garbage("no message")
        kinds = tuple(map(type, message[1:]))
        if message[0] != "value" and kinds != shapes.get(message[0]):
            raise wire.Garbage("no message")
        return message

    def refer(self, value: Any) -> tuple[int, int]:
        if isinstance(value, Handle):
            return wire.YOURS, value._number
        if not callable(value) and not hasattr(value, "__next__"):
            raise NoPlainValue(
                f"the tests pass a {type(value).__name__}, which is not a plain value"
            )
        return wire.MINE, self.number(value)

    def resolve(self, tag: int, number: int) -> Any:
        if tag == wire.YOURS:
            return self.objects[number]
        return self.handles.setdefault(number, Handle(self, number))

    def answer(self, message: Any) -> None:
        if message[0] == "next":
            self.reply(lambda: (next(self.objects[message[1]]),))
        else:
            _, number, args, named = message
            self.reply(lambda: (self.objects[number](*args, **named),))

    def as_error(self, message: Any) -> Exception:
        names = [name for name in message[1] if type(name) is str]
        for name in names:
            if name in self.errors:
                return self.errors[name](*message[2])
        return super().as_error((message[0], names, message[2]))

    def bind(self, names: frozenset[str]) -> dict[str, Any]:
        """The program's values for those of the names that it defines."""
        found: dict[str, Any] = {}
        (defined,) = self.ask("names")
        for name in sorted(set(names) & set(defined)):
            kind, value = self.ask("name", name)
            if kind == "exception":
                base = next((BUILTIN_ERRORS[x] for x in value if x in BUILTIN_ERRORS), Exception)
                value = self.errors[name] = type(name, (base,), {})
            found[name] = value
        self.bound = [x for x in found.values() if isinstance(x, Handle)]
        self.reached = any(not isinstance(x, (Handle, type)) for x in found.values())
        return found
