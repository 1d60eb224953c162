"""Runs a Python program in a warm interpreter forked by the runner."""

from __future__ import annotations

import builtins
import marshal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .descriptors import read_file

CHECKER_FAILED = 3  # testlib's exit code, to be distinguished from the rejection of an output


def warm_up(prelude: str) -> None:
    """Import what the prelude imports, once for all executions."""
    exec(compile(prelude, "<prelude>", "exec", dont_inherit=True), {})


def run_source(path: str, settings: dict[str, Any], arguments: list[str]) -> int:
    """Run a Python program, or one half of a function test; returns the exit code."""
    prelude = settings["prelude"]
    if settings["channel"] is None:
        return run_python(path, prelude, arguments)
    # Imported here: programs without function tests do not pay for the import.
    if path:
        from .program_side import serve

        return run_python(path, prelude, arguments, serve)
    from .tests_side import run_tests

    return run_tests(marshal.loads(read_file(0, sys.maxsize)))


def run_python(
    path: str,
    prelude: str,
    arguments: list[str],
    then: Callable[[ModuleType], None] | None = None,
) -> int:
    """Do what `python path` does, in a running process; returns the exit code.

    Args:
        path: the program.
        prelude: runs before it, in its namespace.
        arguments: of its command line.
        then: called with the loaded module, which is then imported instead of run as `__main__`.
    """
    with open(path, "rb") as file:
        source = file.read()
    module = ModuleType("solution" if then else "__main__")
    module.__dict__.update(__builtins__=__builtins__, __file__=path)
    sys.modules[module.__name__] = module
    sys.argv = [path, *arguments]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as `site` would
    sys.setrecursionlimit(1010)  # the default, plus the runner's own frames
    code = 0
    try:
        exec(compile(prelude, "<prelude>", "exec", dont_inherit=True), module.__dict__)
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
        if then:
            then(module)
    except SystemExit as end:
        code = exit_code(end.code)
    except BaseException:
        show_error()
        code = CHECKER_FAILED if arguments else 1
    return code if shut_down() else code or 120


def exit_code(code: object) -> int:
    """The process's exit code for the argument of `sys.exit`, printed if it is a message."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def show_error() -> None:
    """Print the current exception's traceback, without the frame of this package."""
    kind, error, trace = sys.exc_info()
    assert kind is not None
    assert error is not None
    sys.__excepthook__(kind, error, trace.tb_next if trace else None)


def shut_down() -> bool:
    """Perform the interpreter's shutdown: join threads, run exit functions, flush.

    Returns False if the output cannot be flushed.
    """
    import atexit

    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        show_error()
        return False
    return True
