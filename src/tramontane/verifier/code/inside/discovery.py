"""Tests that nothing calls: found and run as pytest and unittest do, with a stand-in for pytest,
which is not installed in a sandbox."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from types import FunctionType, MethodType, ModuleType
from typing import Any


class NotSupported(Exception):
    """The tests need a part of pytest that the stand-in lacks."""


class Skipped(Exception):
    """`pytest.skip` was called."""


def find(space: dict[str, Any], used: set[str], entry_point: str) -> Iterator[Callable[[], object]]:
    """The tests that are defined in `space`: `check(candidate)` of HumanEval, pytest's functions
    and classes, and unittest's. Those that the tests name themselves are left to them, except
    unittest's, whose runners report failures without raising them."""
    unittest = sys.modules.get("unittest")  # if the tests import it
    own = {k: v for k, v in space.items() if getattr(v, "__module__", None) == "__main__"}
    fixtures = {k: v for k, v in own.items() if hasattr(v, "is_fixture")}
    for name, value in own.items():
        if unittest and isinstance(value, type) and issubclass(value, unittest.TestCase):
            suite = unittest.defaultTestLoader.loadTestsFromTestCase(value)
            for case in suite:
                case.debug = partial(_unless_skipped, case.debug, unittest.SkipTest)
            yield suite.debug
        elif name in used:
            continue
        elif name == "check" and isinstance(value, FunctionType):
            if entry_point:
                yield partial(_call_check, value, entry_point, space)
        elif isinstance(value, type) and name.startswith("Test"):
            yield from _of_class(value, fixtures)
        elif name.startswith("test") and isinstance(value, FunctionType):
            for setup in ("setup_module", "setup_function"):
                if setup in own:
                    yield partial(_call_setup, own[setup])
            yield partial(_run, value, fixtures)


def _call_check(check: Any, entry_point: str, space: dict[str, Any]) -> None:
    check(eval(entry_point, space))


def _unless_skipped(debug: Callable[[], object], skipped: type[Exception]) -> None:
    """Run a unittest's test; one that is skipped ends as passed, and the next follows."""
    try:  # noqa: SIM105 (every import delays every test)
        debug()
    except skipped:
        pass


def _of_class(owner: type, fixtures: dict[str, Any]) -> Iterator[Callable[[], object]]:
    """The test methods of a class, each of a new instance, and of the classes in it."""
    for name in dir(owner):
        value = getattr(owner, name)
        if isinstance(value, type) and name.startswith("Test"):
            yield from _of_class(value, fixtures)
        elif name.startswith("test") and callable(value):
            yield partial(_run_method, owner, name, fixtures)


def _run_method(owner: type, name: str, fixtures: dict[str, Any]) -> None:
    instance = owner()
    own = {k: getattr(instance, k) for k in dir(owner) if hasattr(getattr(owner, k), "is_fixture")}
    for setup in ("setup_class", "setup_method", "setup"):
        if hasattr(owner, setup):
            _call_setup(getattr(instance, setup))
    _run(getattr(instance, name), fixtures | own)


def _call_setup(function: Any) -> None:
    """Call a setup, which may take the module, class or function that it is for."""
    function(*[None] * len(_parameters(function)))


def _parameters(function: Any) -> tuple[str, ...]:
    """The names of the parameters without defaults, without `self`."""
    is_bound = isinstance(function, MethodType)
    plain = getattr(function, "__func__", function)
    while hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__
    code = plain.__code__
    required = code.co_argcount - len(plain.__defaults__ or ())
    return tuple(code.co_varnames[is_bound:required])


def _run(function: Any, fixtures: dict[str, Any]) -> None:
    """Run a test, once for each of its parameter sets."""
    if getattr(function, "is_skipped", False):
        return
    for chosen in product(*getattr(function, "parameters", ())):
        values: dict[str, Any] = {}
        for named in chosen:
            values |= named
        for name in _parameters(function):
            if name not in values:
                values[name] = _value(name, fixtures)
        try:
            result = function(**values)
            if hasattr(result, "__await__"):
                import asyncio

                asyncio.run(result)
        except Skipped:
            pass


def _value(name: str, fixtures: dict[str, Any]) -> Any:
    """The value of a fixture, whose parameters are fixtures too."""
    if name not in fixtures:
        raise NotSupported(f"the fixture {name!r}, which they do not define")
    function = fixtures[name]
    made = function(**{other: _value(other, fixtures) for other in _parameters(function)})
    return next(made) if hasattr(made, "__next__") else made


# ------------------------------------------------------------------------------ pytest's names


class raises:
    """`pytest.raises`: a block, or a call, that must raise."""

    def __init__(self, expected: Any, *call: Any, match: str | None = None, **named: Any) -> None:
        self.expected, self.match = expected, match
        self.type: Any = None
        self.value: Any = None
        if call:
            with self:
                call[0](*call[1:], **named)

    def __enter__(self) -> raises:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if kind is None:
            raise AssertionError(f"did not raise {self.expected}")
        if not issubclass(kind, self.expected):
            return False
        self.type, self.value = kind, error
        if self.match is not None:
            import re  # rare, and every import delays every test

            if not re.search(self.match, str(error)):
                raise AssertionError(f"{str(error)!r} does not match {self.match!r}")
        return True


class approx:
    """`pytest.approx` of numbers, and of lists and mappings of them."""

    def __init__(
        self,
        expected: Any,
        rel: float | None = None,
        abs: float | None = None,
        nan_ok: bool = False,
    ) -> None:
        self.expected, self.rel, self.abs, self.nan_ok = expected, rel, abs, nan_ok

    def __eq__(self, actual: object) -> bool:
        return self._same(self.expected, actual)

    def _same(self, expected: Any, actual: Any) -> bool:
        if isinstance(expected, dict):
            return (
                isinstance(actual, dict)
                and expected.keys() == actual.keys()
                and all(self._same(expected[key], actual[key]) for key in expected)
            )
        if isinstance(expected, (list, tuple)):
            return (
                type(actual) is type(expected)
                and len(actual) == len(expected)
                and all(map(self._same, expected, actual))
            )
        numbers = (int, float, complex)
        if not (isinstance(expected, numbers) and isinstance(actual, numbers)):
            return bool(expected == actual)
        if expected == actual or (self.nan_ok and expected != expected and actual != actual):
            return True
        least = 1e-12 if self.abs is None else self.abs
        share = (1e-6 if self.abs is None else 0.0) if self.rel is None else self.rel
        allowed = max(least, share * abs_(expected))
        return allowed != float("inf") and abs_(expected - actual) <= allowed

    __hash__ = None  # type: ignore[assignment]


abs_ = abs  # `approx` has a parameter of that name


def _parametrize(names: str | Iterable[str], values: Iterable[Any], **_: Any) -> Any:
    keys = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    rows = [dict(zip(keys, (v,) if len(keys) == 1 else v)) for v in values]  # noqa: B905

    def decorate(function: Any) -> Any:
        function.parameters = [*getattr(function, "parameters", ()), rows]
        return function

    return decorate


def _skipped(function: Any) -> Any:
    function.is_skipped = True
    return function


def _mark(*args: Any, **_: Any) -> Any:
    return args[0] if len(args) == 1 and callable(args[0]) else lambda function: function


def _skip(*args: Any, **_: Any) -> Any:
    return _skipped(args[0]) if args and callable(args[0]) else _skipped


def _skipif(condition: Any, *_: Any, **__: Any) -> Any:
    return _skipped if condition else lambda function: function


class _Marks:
    """`pytest.mark`, of whose marks these have an effect."""

    parametrize = staticmethod(_parametrize)
    skip = staticmethod(_skip)
    skipif = staticmethod(_skipif)

    def __getattr__(self, name: str) -> Any:
        return _mark


def fixture(*args: Any, **_: Any) -> Any:
    """`pytest.fixture`, with or without options."""

    def decorate(function: Any) -> Any:
        function.is_fixture = True
        return function

    return decorate(args[0]) if args and callable(args[0]) else decorate


def param(*values: Any, **_: Any) -> Any:
    """`pytest.param`: the values of one case."""
    return values if len(values) > 1 else values[0]


def skip(reason: str = "", **_: Any) -> None:
    """Raises Skipped, which ends the test as passed."""
    raise Skipped(reason)


def fail(reason: str = "", **_: Any) -> None:
    """Raises AssertionError."""
    raise AssertionError(reason)


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise NotSupported(f"pytest.{name}")


def pytest() -> ModuleType:
    """The stand-in for the module `pytest`."""
    module = ModuleType("pytest")
    names = (raises, approx, fixture, param, skip, fail)
    module.__dict__.update({value.__name__: value for value in names}, mark=_Marks())
    module.__dict__["__getattr__"] = _missing
    return module
