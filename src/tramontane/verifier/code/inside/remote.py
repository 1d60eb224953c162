"""A Python program in one process, its tests in another, joined by a socket.

The tests' process holds all that is expected and decides. It gets plain values (`wire`); what is
not plain stays in the program's process and is spoken to through a `Handle`, which compares by
identity alone. Nothing that comes from the program is ever run by the tests' process.
"""

from __future__ import annotations

import builtins
import marshal
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any, NoReturn

from . import wire
from .runner import CHANNEL, write_all

GONE, BROKEN = 97, 98  # how the tests' process says: the program is gone; the tests are broken
_ONLY_AST = 0x400
_WITH_PARTS: tuple[type[Any], ...] = (list, tuple, dict, set, deque, bytearray)
_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}


class Peer:
    """One end of the channel: asks the other, and answers what it asks meanwhile."""

    def __init__(self) -> None:
        self.objects: list[Any] = []  # all that were told of stay alive
        self.numbers: dict[int, int] = {}  # by id

    def send(self, *message: Any) -> None:
        data = wire.encode(message, self.refer)
        if len(data) > wire.FRAME_BYTES:
            raise wire.Garbage(f"a value of more than {wire.FRAME_BYTES >> 20} MB")
        data = len(data).to_bytes(4, "little") + data
        try:
            write_all(CHANNEL, data)
        except OSError:
            self.lost()

    def receive(self) -> Any:
        size = int.from_bytes(self.read(4), "little")
        if size > wire.FRAME_BYTES:
            raise wire.Garbage(f"a value of more than {wire.FRAME_BYTES >> 20} MB")
        return wire.decode(self.read(size), self.resolve)

    def read(self, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = os.read(CHANNEL, min(size, 1 << 20))  # no `socket`: slow to import
            except OSError:
                part = b""
            if not part:
                self.lost()
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def lost(self) -> NoReturn:
        """The other end is closed."""
        os._exit(GONE)

    def number(self, value: Any) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def refer(self, value: Any) -> tuple[int, int]:
        raise NotImplementedError

    def resolve(self, tag: int, number: int) -> Any:
        raise NotImplementedError

    def serve(self, message: Any) -> None:
        raise NotImplementedError

    def reply(self, action: Callable[[], tuple[Any, ...]]) -> None:
        """Send what the action gives, or how it failed."""
        try:
            self.send("value", *action())
        except Exception as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            self.send("error", names, [_plain(x) for x in error.args])

    def ask(self, *question: Any) -> Any:
        """What the other end answers; the message's parts."""
        self.send(*question)
        while True:
            message = self.receive()
            if not isinstance(message, tuple) or not message:
                raise wire.Garbage("no message")
            if message[0] == "value":
                return message[1:]
            if message[0] == "error":
                raise self.error(message)
            self.serve(message)

    def error(self, message: Any) -> Exception:
        _, names, args = message
        for name in names:
            kind = _ERRORS.get(name)
            if kind is not None:
                try:
                    return kind(*args)
                except TypeError:  # this class wants other arguments
                    continue
        return Exception(*args)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bytes, type(None))) else str(value)


# --------------------------------------------------------------------------- the program's end


class Program(Peer):
    """Answers the tests. All this is at the program's mercy, and nothing depends on it."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        self.module = module
        self.theirs: dict[int, Callable[..., Any]] = {}
        self.numbers_of_theirs: dict[int, int] = {}

    def refer(self, value: Any) -> tuple[int, int]:
        if id(value) in self.numbers_of_theirs:
            return wire.YOURS, self.numbers_of_theirs[id(value)]
        return wire.MINE, self.number(value)

    def resolve(self, tag: int, number: int) -> Any:
        if tag == wire.YOURS:
            return self.objects[number]
        if number not in self.theirs:
            self.theirs[number] = stand_in(self, number)
            self.numbers_of_theirs[id(self.theirs[number])] = number
        return self.theirs[number]

    def serve(self, message: Any) -> None:
        question, *rest = message
        self.reply(lambda: _ANSWERS[question](self, *rest))

    def names(self) -> tuple[Any, ...]:
        return ([name for name in vars(self.module) if not name.startswith("__")],)

    def name(self, name: str) -> tuple[Any, ...]:
        value = vars(self.module)[name]
        if isinstance(value, ModuleType):
            return ("module", value.__name__)
        if isinstance(value, type) and issubclass(value, Exception):
            return ("exception", [kind.__name__ for kind in value.__mro__])
        return ("object", value)

    def call(self, target: Any, args: list[Any], named: dict[str, Any]) -> tuple[Any, ...]:
        """The result, and which of the arguments are now other than they were."""
        given = [*args, *named.values()]
        before = [self.snapshot(x) for x in given]
        result = target(*args, **named)
        changed = {i: x for i, x in enumerate(given) if before[i] != self.snapshot(x)}
        return result, changed

    def snapshot(self, value: Any) -> bytes | None:
        if not isinstance(value, _WITH_PARTS):
            return None
        try:
            return marshal.dumps(value, 2)
        except ValueError:
            return wire.encode(value, self.refer)


def stand_in(program: Program, number: int) -> Callable[..., Any]:
    """For a function, or an iterator, that the tests passed."""

    class Theirs:
        def __call__(self, *args: Any, **named: Any) -> Any:
            return program.ask("call", number, list(args), named)[0]

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            return program.ask("next", number)[0]

    return Theirs()


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


def serve(module: ModuleType) -> NoReturn:
    """Answer the tests until they are done with the loaded program."""
    program = Program(module)
    while True:
        program.serve(program.receive())


# ----------------------------------------------------------------------------- the tests' end


class Handle:
    """An object of the program's. Equality and order are not asked of it: it is equal to itself."""

    __slots__ = ("_number", "_tests")
    _tests: Tests
    _number: int

    def __init__(self, tests: Tests, number: int) -> None:
        object.__setattr__(self, "_tests", tests)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **named: Any) -> Any:
        result, changed = self._tests.ask("call", self, list(args), named)
        given = [*args, *named.values()]
        for i, value in changed.items():
            update(given[i], value)
        return result

    def _ask(self, *question: Any) -> Any:
        return self._tests.ask(question[0], self, *question[1:])[0]

    def __getattr__(self, name: str) -> Any:
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("set item", key, value)

    def __delitem__(self, key: Any) -> None:
        self._ask("delete item", key)

    def __len__(self) -> int:
        return self._ask("len")  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Any]:
        return self._ask("iter")  # type: ignore[no-any-return]

    def __next__(self) -> Any:
        return self._ask("next")

    def __str__(self) -> str:
        return self._ask("str")  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return self._ask("repr")  # type: ignore[no-any-return]

    def __bool__(self) -> bool:
        return self._ask("bool")  # type: ignore[no-any-return]

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Handle) and bool(value._ask("has", self))


def update(old: Any, new: Any) -> Any:
    """`old` made equal to `new` in place, its parts too where they can be."""
    if type(old) is not type(new) or not isinstance(old, _WITH_PARTS):
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
    """What the tests would pass to the program cannot travel."""


class Tests(Peer):
    """Asks the program. What is not a message of the program's ends the process: it failed."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: dict[int, Handle] = {}
        self.errors: dict[str, type[Exception]] = {}
        self.bound: list[Any] = []

    def lost(self) -> NoReturn:
        leave(GONE, "")

    def ask(self, *question: Any) -> Any:
        try:
            return super().ask(*question)
        except wire.Garbage as garbage:
            leave(1, f"answered with {garbage}")
        except NoPlainValue as error:
            # Not the program's doing, if the tests call what they name.
            if any(question[1] is x for x in self.bound):
                leave(BROKEN, str(error))
            raise

    def receive(self) -> Any:
        message = super().receive()
        # A shape that is not one of these would fail somewhere in the tests.
        shapes: dict[Any, tuple[type, ...]] = {
            "error": (list, list),
            "call": (int, list, dict),
            "next": (int,),
        }
        if not isinstance(message, tuple) or not message or type(message[0]) is not str:
            raise wire.Garbage("no message")
        kinds = shapes.get(message[0])
        if kinds is not None and tuple(map(type, message[1:])) != kinds:
            raise wire.Garbage("no message")
        if kinds is None and message[0] != "value":
            raise wire.Garbage("no message")
        return message

    def refer(self, value: Any) -> tuple[int, int]:
        if isinstance(value, Handle):
            return wire.YOURS, value._number
        if not callable(value) and not hasattr(value, "__next__"):
            raise NoPlainValue(f"the tests pass a {type(value).__name__}, which is no plain value")
        return wire.MINE, self.number(value)

    def resolve(self, tag: int, number: int) -> Any:
        if tag == wire.YOURS:
            return self.objects[number]
        return self.handles.setdefault(number, Handle(self, number))

    def serve(self, message: Any) -> None:
        if message[0] == "next":
            self.reply(lambda: (next(self.objects[message[1]]),))
        else:
            _, number, args, named = message
            self.reply(lambda: (self.objects[number](*args, **named),))

    def error(self, message: Any) -> Exception:
        names = [name for name in message[1] if type(name) is str]
        for name in names:
            if name in self.errors:
                return self.errors[name](*message[2])
        return super().error((message[0], names, message[2]))

    def bind(self, names: set[str], declared: Callable[[str], bool]) -> dict[str, Any]:
        """What the program has under the names that the tests use."""
        found: dict[str, Any] = {}
        (theirs,) = self.ask("names")
        for name in sorted(names & set(theirs)):
            if name in sys.stdlib_module_names and not declared(name):
                found[name] = __import__(name)
            elif not hasattr(builtins, name) or declared(name):
                kind, value = self.ask("name", name)
                if kind == "exception":
                    base = next((_ERRORS[x] for x in value if x in _ERRORS), Exception)
                    value = self.errors[name] = type(name, (base,), {})
                elif kind == "module":  # `import numpy as np` and the like
                    value = __import__(value) if value in sys.stdlib_module_names else None
                found[name] = value
        self.bound = [x for x in found.values() if isinstance(x, Handle)]
        return found


def run_tests(settings: dict[str, Any]) -> int:
    """Run the tests' code against the program; the exit code."""
    code, statement, entry_point = (settings[x] for x in ("code", "statement", "entry_point"))
    module = ModuleType("__main__")
    space = module.__dict__
    sys.modules["__main__"] = module
    try:
        compiled = compile(code, "<tests>", "exec")
    except (SyntaxError, ValueError) as error:
        leave(BROKEN, f"the tests do not compile: {error}")

    def declared(name: str) -> bool:
        return name == entry_point or f"def {name}(" in statement

    names = used(compiled)
    helpers = compile(complete(statement, names, entry_point), "<statement>", "exec")
    try:
        space.update(Tests().bind(names, declared))
        exec(helpers, space)
        exec(compiled, space)
    except SystemExit as end:
        if end.code not in (None, 0):
            leave(1, "the tests ended the process")
    except BaseException as error:
        leave(1, told(error))
    return 0


def told(error: BaseException) -> str:
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<tests>":
            line = trace.tb_lineno
        trace = trace.tb_next
    text = "" if isinstance(error, AssertionError) else str(error)[:100].replace("\n", " ")
    return f"{type(error).__name__}{text and ': ' + text} (line {line} of the tests)"


def leave(code: int, reason: str) -> NoReturn:
    """End at once, whatever the tests would catch."""
    os.write(2, reason.encode("utf-8", "replace"))
    os._exit(code)


def used(code: CodeType) -> set[str]:
    """The names that the code reads, attributes among them."""
    inner = [used(x) for x in code.co_consts if isinstance(x, CodeType)]
    return {x for x in code.co_names if not x.startswith("__")}.union(*inner)


def _says_nothing(node: Any) -> bool:
    """Whether this statement of a function is `pass`, `...` or its docstring."""
    name, value = type(node).__name__, type(getattr(node, "value", None)).__name__
    return name == "Pass" or (name == "Expr" and value == "Constant")


def complete(statement: str, names: set[str], entry_point: str) -> str:
    """Those functions which the statement defines whole, with its imports, if the tests use any.

    They are taken from here: a program that redefines them would decide over its own tests.
    """
    blocks: list[str] = []
    for line in statement.splitlines():
        if line[:1] in ("", " ", "\t", ")") and blocks:
            blocks[-1] += "\n" + line
        else:
            blocks.append(line)
    kept, wanted = [], False
    for block in blocks:
        if not block.startswith(("def ", "import ", "from ")):
            continue
        try:
            (node,) = compile(block, "<statement>", "exec", _ONLY_AST).body  # type: ignore[attr-defined]
        except (SyntaxError, ValueError):  # prose
            continue
        if block.startswith("def "):
            if node.name == entry_point or all(map(_says_nothing, node.body)):
                continue
            wanted = wanted or node.name in names
        kept.append(block)
    return "\n".join(kept) if wanted else ""
