"""User-defined functions: verifiers and rewards, which worker processes load by import path.

A function that cannot be imported (defined in a notebook, a script, or another function) is pickled
by value, and its path is `pickle:` with the pickle as text.

A failure is reported as `reward 'name': KeyError: 'x' (my_rewards.py:12, in brevity)`: the
function's role, the exception, and the place in the user's file.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import importlib
import inspect
import math
import mmap
import os
import re
import site
import sys
import sysconfig
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from decimal import Decimal
from functools import lru_cache, partial
from numbers import Real
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn

import cloudpickle

from tramontane.config.domains import pickled_here
from tramontane.errors import InputError
from tramontane.imports import search_current_folder
from tramontane.types import FAILED

MAX_PICKLE = 1 << 20  # bytes of a pickled function, compressed; it is one line in config.yaml
MAX_NUMBER = 1e300  # beyond it a sum may not be finite
MAX_ERROR = 300  # characters of an exception's text in a message
MAX_KIND = 100  # characters of a kind of failure, without its place
MAX_KINDS, OTHER_KINDS = 16, "other kinds"  # of failures that are counted separately
PICKLE = "pickle:"
REWARD, VERIFIER = "reward", "verifier"  # the first word of a message about a failure
_PLACE = re.compile(r" \([^()]*:\d+(?:, in [^()]*)?\)")  # as `place_of` and `defined_at` name it
_RETURNED = re.compile(r"returned .* \((\w+)\), not .*", re.DOTALL)  # of `unusable`
_TRAIL, _TRAIL_BYTES = "calling", 512
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    *site.getsitepackages(),
)


class FunctionFailed(Exception):
    """A user-defined function raised an exception, or returned an unusable value.

    The message names the function, and the file and line of the failure.
    """


def path_of(function: Callable[..., Any]) -> str:
    """The path from which worker processes load a function.

    Raises:
        InputError: the function must be pickled, but cannot be, or holds too much data.
    """
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", None) or ""
    if module not in ("", "__main__") and name.isidentifier():
        return f"{module}.{name}"
    remedy = "move the function to a module (a .py file), and pass it or name it as module.function"
    try:
        # With the file name, for messages, since a pickled function does not know its file.
        code = _code(function)
        pickled = zlib.compress(cloudpickle.dumps((function, code.co_filename if code else "")))
    except Exception as error:  # an object of any library may fail in its own way
        raise InputError(
            f"function {name or function!r} cannot be sent to worker processes "
            f"({type(error).__name__}: {error}); {remedy}"
        ) from error
    if len(pickled) > MAX_PICKLE:
        raise InputError(
            f"function {name!r} carries {len(pickled) / 2**20:.0f} MB of data, through its globals "
            f"or defaults: let it read the data from a file, or {remedy}"
        )
    path = PICKLE + base64.urlsafe_b64encode(pickled).decode()
    pickled_here.add(path)
    return path


@lru_cache
def load(path: str) -> Callable[..., Any]:
    """Load a function by its path; the current folder is searched last.

    What its module prints goes to standard error: standard output may be a command's result.
    """
    with redirect_stdout(sys.stderr):
        return _loaded(path)


def _loaded(path: str) -> Callable[..., Any]:
    search_current_folder()
    if path.startswith(PICKLE):
        pickled = base64.urlsafe_b64decode(path.removeprefix(PICKLE))
        function, file = cloudpickle.loads(zlib.decompress(pickled))
        _name_file(function, file)
        return function  # type: ignore[no-any-return]
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def _name_file(function: Any, file: str) -> None:
    """Restore the file name of a function and those pickled with it, which cloudpickle omits."""
    if not isinstance(function, FunctionType):
        return
    dynamic = function.__code__.co_filename
    for found in (function, *function.__globals__.values()):
        if isinstance(found, FunctionType) and found.__code__.co_filename == dynamic != file:
            found.__code__ = _renamed(found.__code__, file)


def _renamed(code: CodeType, file: str) -> CodeType:
    inner = (_renamed(c, file) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=file, co_consts=tuple(inner))


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """A function's parameters by name; empty for built-in functions without a signature."""
    try:
        return dict(inspect.signature(function).parameters)
    except ValueError:  # some built-in functions have no signature
        return {}


def accepted(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Those of the given arguments that a function takes."""
    parameters = parameters_of(function)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def check(path: str, key: str, call: Callable[[Callable[..., Any]], str]) -> None:
    """Load a function, and check that it takes its arguments: `call` returns what is wrong, if
    anything.

    Raises:
        InputError: it cannot be loaded, is not callable, or has a fault; the message
            names its `key`.
    """
    try:
        function = load(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may raise anything on import
        place = place_of(error)
        place = "" if place.startswith(importlib.__file__) else place  # the module is not found
        raise InputError(
            f"{key}: function {_shown(path)} cannot be imported ({said(error)}"
            f"{place and f'; {place}'}); name it as module.function, the module in this folder, "
            f"installed, or on PYTHONPATH"
        ) from error
    if not callable(function):
        kind = type(function).__name__
        raise InputError(f"{key}: function {_shown(path)} is of type {kind}, not a function")
    if fault := call(function):
        # In a notebook, for example, the user did not write this key.
        raise InputError(fault if path.startswith(PICKLE) else f"{key}: {fault}")


def _shown(path: str) -> str:
    return "from a notebook or script" if path.startswith(PICKLE) else repr(path)


def fault_of_call(function: Callable[..., Any], *arguments: str, **named: str) -> str:
    """The reason why a function cannot be called with arguments of these names; empty if it can.

    The function is identified by its signature, since a lambda has no name.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have no signature
        return ""
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        shown = f"lambda {signature}" if name == "<lambda>" else f"{name}{signature}"
        call = ", ".join((*arguments, *named))
        return f"{shown}, {defined_at(function)}, is called with ({call}): {error}"
    return ""


def defined_at(function: Callable[..., Any]) -> str:
    """File and line of a function's definition."""
    code = _code(function)
    if code is None:
        return f"module {getattr(function, '__module__', None)}"
    return f"{_file(code.co_filename)}:{code.co_firstlineno}"


def _code(function: Any) -> CodeType | None:
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)


def call_with(path: str, what: str, **given: Any) -> Any:
    """`call` with copies of these arguments: by name if the function has all the names, otherwise
    in order."""
    own = copy.deepcopy(given)  # what it changes must not reach other calls
    by_name = given.keys() <= parameters_of(load(path)).keys()
    return call(path, what, **own) if by_name else call(path, what, *own.values())


def fault_of_order(function: Callable[..., Any], *names: str) -> str:
    """The reason why `call_with` would mistake the arguments with these names; empty if it would
    not."""
    found = list(parameters_of(function))
    moved = [name for i, name in enumerate(names) if name in found and found.index(name) != i]
    if not moved or set(names) <= set(found):
        return ""
    order = ", ".join(names)
    return (
        f"{getattr(function, '__name__', type(function).__name__)}({', '.join(found)}), "
        f"{defined_at(function)}, is called with ({order}) in this order, and its parameter "
        f"{moved[0]!r} is at another place: keep the order, or use all of these names"
    )


def call(path: str, what: str, *arguments: Any, **named: Any) -> Any:
    """Call a function; a coroutine is run to its end. `what` is its role, e.g. `reward 'brevity'`.

    The current folder is restored after it.

    Raises:
        FunctionFailed: it raised an exception.
    """
    function, folder = load(path), os.getcwd()
    text = _trail_text(path, what)
    _trail[: len(text)] = text
    try:
        with ending_forks():
            value = function(*arguments, **named)
            if inspect.isawaitable(value):
                value = _event_loop().run_until_complete(_awaited(value))
    except BaseException as error:  # any kind makes the completion unscorable
        if isinstance(error, KeyboardInterrupt) and not _is_worker():  # somebody's Ctrl-C
            raise
        raise FunctionFailed(f"{what}: {said(error)} ({place_of(error)})") from error
    finally:
        _trail[0] = 0
        os.chdir(folder)
    return value


@contextmanager
def ending_forks() -> Iterator[None]:
    """A block of a user's code: a child that it forks, and that does not end in it, ends with it,
    as it would at the end of a program."""
    process = os.getpid()
    try:
        yield
        if os.getpid() != process:
            print("a forked process returned: end it with os._exit", file=sys.stderr)
            _leave(0)
    except BaseException as error:
        if os.getpid() == process:
            raise
        code = error.code if isinstance(error, SystemExit) else 1
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif isinstance(code, str):
            print(code, file=sys.stderr)
        _leave(1 if isinstance(code, str) else code or 0)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    os._exit(code)


def refused(path: str, what: str, value: Any, wanted: str) -> FunctionFailed:
    """The error of a function that returned an unusable value."""
    return FunctionFailed(f"{what}: {unusable(load(path), value, wanted)}")


def unusable(function: Callable[..., Any], value: Any, wanted: str) -> str:
    """What is wrong with a function's result, worded to follow its name."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
    place = defined_at(function)
    return f"returned {shown} ({type(value).__name__}), not {wanted} ({place})"


def kind_of_failure(reason: str) -> str:
    """The reason of an unscorable verdict without what differs from one completion to the next: the
    text of an exception, values and numbers. It keeps the function, the type and the place."""
    places = _PLACE.findall(reason)
    head = _RETURNED.sub(r"returned a \1", _PLACE.sub("", reason))
    parts = 3 if head.startswith(tuple(FAILED)) else 2
    kind = re.sub(r"(?<!\w)\d+(?:\.\d+)?", "N", ": ".join(head.split(": ")[:parts]))
    return f"{kind[:MAX_KIND]}{places[-1] if places else ''}"


def failures(reasons: Iterable[str]) -> dict[str, int]:
    """Number of reasons by their kind, the most frequent first; beyond MAX_KINDS, of all others."""
    kinds = Counter(map(kind_of_failure, reasons)).most_common()
    rest = sum(count for _, count in kinds[MAX_KINDS:])
    return dict(kinds[:MAX_KINDS]) | ({OTHER_KINDS: rest} if rest else {})


def failed(reason: str) -> bool:
    """True if a user-defined function made a verdict unscorable."""
    return reason.startswith((f"{REWARD} '", f"{VERIFIER} '"))


def number(value: Any, *, bools: bool = False) -> float | None:
    """A finite number, also as a NumPy scalar or a tensor or array of one, as a float; None for
    anything else, such as a text or a vector. True and False are 1 and 0 only with `bools`.
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and math.prod(shape) == 1 and _has_value(value):
        value = value.item()
    if isinstance(value, Decimal):
        value = float(value) if value.is_finite() else math.nan
    if not isinstance(value, Real) or (isinstance(value, bool) and not bools):
        return None
    plain: Any = value
    return float(plain) if -MAX_NUMBER < plain < MAX_NUMBER else None  # NaN is neither


def _has_value(array: Any) -> bool:
    """True for an array of one number that is there: neither masked, nor on torch's meta device."""
    mask = getattr(array, "mask", False)
    masked = not callable(mask) and bool(mask)
    return hasattr(array, "item") and not masked and not getattr(array, "is_meta", False)


async def _awaited(value: Any) -> Any:
    return await value


@lru_cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for the life of the process: a client kept by a user's module is bound to it."""
    return asyncio.new_event_loop()


def said(error: BaseException) -> str:
    """The type and text of an exception, even if making its text fails."""
    try:
        text = str(error)
    except Exception:  # of a user's class
        text = "(its text cannot be made)"
    return f"{type(error).__name__}: {text}"[:MAX_ERROR]


def place_of(error: BaseException) -> str:
    """File, line and function of an exception: its deepest frame outside of libraries, if any."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    users = [f for f in frames if not f.filename.startswith(_LIBRARIES)] or frames
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_file(error.filename)}:{error.lineno}"
    if not users:
        return ""  # it was never entered
    frame = users[-1]
    inside = "" if frame.name == "<module>" else f", in {frame.name}"
    return f"{_file(frame.filename)}:{frame.lineno}{inside}"


def _file(name: str) -> str:
    """A file's name, relative if it is below the current folder."""
    here = f"{os.getcwd()}{os.sep}"
    return name.removeprefix(here)


# The function being called; a worker's is in a file.
_trail: bytearray | mmap.mmap = bytearray(_TRAIL_BYTES)


def leave_trail(folder: Path) -> None:
    """Keep the function being called in a file, which tells the pool what hung or killed this
    process."""
    global _trail
    (folder / _TRAIL).write_bytes(bytes(_TRAIL_BYTES))
    with (folder / _TRAIL).open("r+b") as opened:
        _trail = mmap.mmap(opened.fileno(), _TRAIL_BYTES)


def _is_worker() -> bool:
    return isinstance(_trail, mmap.mmap)


@lru_cache
def _trail_text(path: str, what: str) -> bytes:
    text = f"{what} ({defined_at(load(path))})".encode()
    return text[: _TRAIL_BYTES - 1] + b"\0"


def read_trail(folder: Path) -> str:
    """The function that a process was calling when it ended; empty if none."""
    file = folder / _TRAIL
    return file.read_bytes().partition(b"\0")[0].decode(errors="replace") if file.exists() else ""
