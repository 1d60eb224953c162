"""The two halves of a function test: a Python program in one process, its tests in another.

A socket joins them. Each half is a `Peer`: `program_side` answers, `tests_side` asks. The tests'
process holds all expected values, and decides. It receives plain values (`wire`); an object that is
not plain stays in the program's process, and the tests use it through a `tests_side.Handle`. The
tests' process never runs anything that comes from the program.
"""

from __future__ import annotations

import builtins
import os
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from . import wire
from .descriptors import CHANNEL, write_all

GONE, BROKEN = 97, 98  # exit codes of the tests' process: the program is gone; the tests are broken
# Plain types that a function can change in place.
MUTABLE_TYPES: tuple[type[Any], ...] = (list, tuple, dict, set, deque, bytearray)
BUILTIN_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}


class Peer:
    """One end of the channel: asks the other end, and answers requests while waiting."""

    def __init__(self) -> None:
        self.objects: list[Any] = []  # referred to by index from the other end; kept alive
        self.numbers: dict[int, int] = {}  # index in `objects`, by id

    def send(self, *message: Any) -> None:
        """Send one frame.

        Raises:
            wire.Garbage: the message is too long or nested too deeply.
        """
        data = wire.encode(message, self.refer)
        if len(data) > wire.FRAME_BYTES:
            raise wire.Garbage(f"a value of more than {wire.FRAME_BYTES >> 20} MB")
        data = len(data).to_bytes(4, "little") + data
        try:
            write_all(CHANNEL, data)
        except OSError:
            self.on_closed()

    def receive(self) -> Any:
        """Wait for one frame: a plain value.

        Raises:
            wire.Garbage: the frame is too long, or not a value.
        """
        size = int.from_bytes(self.read(4), "little")
        if size > wire.FRAME_BYTES:
            raise wire.Garbage(f"a value of more than {wire.FRAME_BYTES >> 20} MB")
        return wire.decode(self.read(size), self.resolve)

    def read(self, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = os.read(CHANNEL, min(size, 1 << 20))  # the module `socket` imports slowly
            except OSError:
                part = b""
            if not part:
                self.on_closed()
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def on_closed(self) -> NoReturn:
        """End this process: the other end of the channel is closed."""
        os._exit(GONE)

    def number(self, value: Any) -> int:
        """The number that identifies this object to the other end."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def refer(self, value: Any) -> tuple[int, int]:
        raise NotImplementedError

    def resolve(self, tag: int, number: int) -> Any:
        raise NotImplementedError

    def answer(self, message: Any) -> None:
        raise NotImplementedError

    def reply(self, action: Callable[[], tuple[Any, ...]]) -> None:
        """Send the action's result or error."""
        try:
            self.send("value", *action())
        except Exception as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            self.send("error", names, [_as_plain(x) for x in error.args])

    def ask(self, *question: Any) -> Any:
        """The parts of the other end's answer.

        Raises:
            Exception: the error that the other end answered with, as its nearest known class.
            wire.Garbage: the answer is not a message.
        """
        self.send(*question)
        while True:
            message = self.receive()
            if not isinstance(message, tuple) or not message:
                raise wire.Garbage("no message")
            if message[0] == "value":
                return message[1:]
            if message[0] == "error":
                raise self.as_error(message)
            self.answer(message)

    def as_error(self, message: Any) -> Exception:
        """The exception of an "error" message."""
        _, names, args = message
        for name in names:
            kind = BUILTIN_ERRORS.get(name)
            if kind is not None:
                try:
                    return kind(*args)
                except TypeError:  # this class takes different arguments
                    continue
        return Exception(*args)


def _as_plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bytes, type(None))) else str(value)
