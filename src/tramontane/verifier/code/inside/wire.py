"""The two halves of a function test: a Python program in one process, its tests in another.

A socket joins them. Each half is a `Peer`: `program_side` answers, `tests_side` asks. The tests'
process holds all expected values, and decides. It receives plain values, encoded as bytes; an
object that is not plain stays in the program's process, and the tests use it through a
`tests_side.Handle`. The tests' process never runs anything that comes from the program.

A frame is a length (4 bytes) and a value. Decoding makes built-in objects and runs no code: the
result is a plain value, or `Garbage` is raised. Numbers are little-endian.
"""

from __future__ import annotations

import builtins
import os
import struct
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from .records import CHANNEL, write_all

FRAME_BYTES = 16 * 1024 * 1024  # largest frame
DEPTH = 200  # deepest nesting of a value
MINE, YOURS = 77, 89  # references to objects that stay in the sender's or the receiver's process
TYPES = [int, float, str, bool, bytes, list, tuple, set, dict, frozenset, complex, bytearray]
TYPES += [range, deque, type(None), object]

GONE, BROKEN = 97, 98  # exit codes of the tests' process: the program is gone; the tests are broken
# Plain types that a function can change in place.
MUTABLE_TYPES: tuple[type[Any], ...] = (list, tuple, dict, set, deque, bytearray)
BUILTIN_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}

_SIZE = struct.Struct("<I")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_SINGLES: dict[int, Any] = {78: None, 84: True, 70: False}
_SEQUENCES: dict[int, type[Any]] = {108: list, 116: tuple, 115: set, 122: frozenset, 113: deque}
_TAG_OF = {make: tag for tag, make in _SEQUENCES.items()}
_INT, _DOUBLE, _COMPLEXES, _STR, _BYTES, _BYTEARRAY, _DICT = 105, 100, 99, 117, 98, 97, 123
_INTS, _DOUBLES, _RANGE, _DECIMAL, _FRACTION, _TYPE = 73, 68, 114, 46, 47, 120


class Garbage(Exception):
    """Bytes that do not encode a value, or a value nested too deeply or too long to send."""


Refer = Callable[[Any], tuple[int, int]]
Resolve = Callable[[int, int], Any]


def encode(value: Any, refer: Refer) -> bytes:
    """The value's bytes; subclasses of plain types are encoded as the plain type.

    `refer` gives MINE or YOURS and a number for an object that is not plain. Raises `Garbage` for a
    value nested too deeply, or within itself.
    """
    out: list[bytes] = []
    _put(out, value, refer, DEPTH)
    return b"".join(out)


def _put(out: list[bytes], value: Any, refer: Refer, depth: int) -> None:
    if depth == 0:
        raise Garbage("a value nested too deeply, or within itself")
    if value is None or value is True or value is False:
        out.append(b"N" if value is None else b"T" if value else b"F")
    elif isinstance(value, int):
        _put_bytes(out, _INT, int_bytes(value))
    elif isinstance(value, float):
        out.append(b"d" + _FLOAT.pack(value))
    elif isinstance(value, str):
        _put_bytes(out, _STR, str.encode(value, "utf-8", "surrogatepass"))
    elif isinstance(value, (list, tuple)) and _put_numbers(out, value):
        pass
    elif isinstance(value, tuple(_TAG_OF)):
        kind = next(k for k in _TAG_OF if isinstance(value, k))
        _put_all(out, _TAG_OF[kind], list(kind.__iter__(value)), refer, depth)
    elif isinstance(value, dict):
        items = [part for item in dict.items(value) for part in item]
        _put_all(out, _DICT, items, refer, depth)
    elif isinstance(value, (bytes, bytearray)):
        _put_bytes(out, _BYTES if isinstance(value, bytes) else _BYTEARRAY, bytes(value))
    elif isinstance(value, complex):
        out.append(b"c" + _COMPLEX.pack(value.real, value.imag))
    elif isinstance(value, range):
        _put_all(out, _RANGE, [value.start, value.stop, value.step], refer, depth)
    elif _is_instance(value, "decimal", "Decimal"):
        _put_bytes(out, _DECIMAL, str(value).encode())
    elif _is_instance(value, "fractions", "Fraction"):
        _put_all(out, _FRACTION, [value.numerator, value.denominator], refer, depth)
    elif any(value is kind for kind in TYPES):
        out.append(bytes([_TYPE, TYPES.index(value)]))
    else:
        tag, number = refer(value)
        out.append(bytes([tag]) + _SIZE.pack(number))


def int_bytes(value: int) -> bytes:
    return int.to_bytes(value, int.bit_length(value) // 8 + 1, "little", signed=True)


def _put_bytes(out: list[bytes], tag: int, data: bytes) -> None:
    out.append(bytes([tag]) + _SIZE.pack(len(data)) + data)


def _put_all(out: list[bytes], tag: int, items: list[Any], refer: Refer, depth: int) -> None:
    out.append(bytes([tag]) + _SIZE.pack(len(items)))
    for item in items:
        _put(out, item, refer, depth - 1)


def _put_numbers(out: list[bytes], value: list[Any] | tuple[Any, ...]) -> bool:
    """Encode a list of four or more numbers in one call; False if it has anything else."""
    kinds = set(map(type, value)) if len(value) > 3 else set()
    if kinds != {int} and kinds != {float}:
        return False
    tag, code = (_INTS, "q") if kinds == {int} else (_DOUBLES, "d")
    try:
        data = struct.pack(f"<{len(value)}{code}", *value)
    except struct.error:  # an integer of more than 64 bits
        return False
    out.append(bytes([tag, isinstance(value, list)]) + _SIZE.pack(len(value)) + data)
    return True


def _is_instance(value: Any, module: str, name: str) -> bool:
    """`isinstance` for a class whose module may not have been imported."""
    return module in sys.modules and isinstance(value, getattr(sys.modules[module], name))


def decode(data: bytes, resolve: Resolve) -> Any:
    """The value that the bytes encode; raises `Garbage` if they are anything but one value.

    `resolve` gives the object for MINE or YOURS and a number.
    """
    try:
        reader = _Reader(data, resolve)
        value = reader.value(DEPTH)
    except (ValueError, TypeError, LookupError, ArithmeticError, struct.error) as error:
        raise Garbage(f"no value: {error}") from error
    if reader.position != len(data):
        raise Garbage("more than a value")
    return value


class _Reader:
    def __init__(self, data: bytes, resolve: Resolve) -> None:
        self.data, self.resolve, self.position = data, resolve, 0

    def take(self, size: int) -> bytes:
        part = self.data[self.position : self.position + size]
        if len(part) != size:
            raise Garbage("a value cut short")
        self.position += size
        return part

    def size(self) -> int:
        return int(_SIZE.unpack(self.take(4))[0])

    def items(self, depth: int) -> list[Any]:
        return [self.value(depth - 1) for _ in range(self.size())]

    def value(self, depth: int) -> Any:
        if depth == 0:
            raise Garbage("a value nested too deeply")
        tag = self.take(1)[0]
        if tag in _SINGLES:
            return _SINGLES[tag]
        if tag == _INT:
            return int.from_bytes(self.take(self.size()), "little", signed=True)
        if tag == _DOUBLE:
            return _FLOAT.unpack(self.take(8))[0]
        if tag == _STR:
            return self.take(self.size()).decode("utf-8", "surrogatepass")
        if tag in (_INTS, _DOUBLES):
            is_list, count = self.take(1)[0], self.size()
            code = "q" if tag == _INTS else "d"
            numbers = struct.unpack(f"<{count}{code}", self.take(8 * count))
            return list(numbers) if is_list else numbers
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self.items(depth))
        if tag == _DICT:
            parts = self.items(depth)
            return dict(zip(parts[::2], parts[1::2], strict=True))
        return self.rare(tag, depth)

    def rare(self, tag: int, depth: int) -> Any:
        """A value of one of the less common types."""
        if tag in (_BYTES, _BYTEARRAY):
            data = self.take(self.size())
            return data if tag == _BYTES else bytearray(data)
        if tag == _COMPLEXES:
            return complex(*_COMPLEX.unpack(self.take(16)))
        if tag == _RANGE:
            return range(*self.items(depth))
        if tag == _DECIMAL:
            from decimal import Decimal

            return Decimal(self.take(self.size()).decode())
        if tag == _FRACTION:
            from fractions import Fraction

            return Fraction(*self.items(depth))
        if tag == _TYPE:
            return TYPES[self.take(1)[0]]
        if tag in (MINE, YOURS):
            return self.resolve(tag, self.size())
        raise Garbage("no such kind of value")


# ------------------------------------------------------------------------------------------ peers


class Peer:
    """One end of the channel: asks the other end, and answers requests while waiting."""

    def __init__(self) -> None:
        self.objects: list[Any] = []  # referred to by index from the other end; kept alive
        self.numbers: dict[int, int] = {}  # index in `objects`, by id

    def send(self, *message: Any) -> None:
        """Send one frame; raises `Garbage` if the message is too long or nested too deeply."""
        data = encode(message, self.refer)
        if len(data) > FRAME_BYTES:
            raise Garbage(f"a value of more than {FRAME_BYTES >> 20} MB")
        data = len(data).to_bytes(4, "little") + data
        try:
            write_all(CHANNEL, data)
        except OSError:
            self.on_closed()

    def receive(self) -> Any:
        """Wait for one frame, a plain value; raises `Garbage` if it is too long, or not a value."""
        size = int.from_bytes(self.read(4), "little")
        if size > FRAME_BYTES:
            raise Garbage(f"a value of more than {FRAME_BYTES >> 20} MB")
        return decode(self.read(size), self.resolve)

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

        Raises the error that it answered with, as the nearest known class, or `Garbage`.
        """
        self.send(*question)
        while True:
            message = self.receive()
            if not isinstance(message, tuple) or not message:
                raise Garbage("no message")
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
