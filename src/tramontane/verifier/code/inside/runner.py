"""The first process in a sandbox: forks every execution of a program from a warm interpreter, and
runs Python programs in the fork.

`sandbox.Sandbox` starts it in a bare interpreter with only the standard library. It imports as
little as possible, because every program pays for every import. The job arrives on standard input
(see `sandbox.job`); a record is written to standard output as each execution ends. Expected outputs
are never here.
"""

from __future__ import annotations

import builtins
import marshal
import os
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import execution, lockdown, processes, records

CHECKER_FAILED = 3  # testlib's exit code, distinct from those that reject an output


def main() -> None:
    job, results = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    settings = marshal.loads(records.read_block(job))
    confine(settings)
    records.send_record(results, (records.READY, b"", b""), (0.0, 0.0, 0.0))
    command, source, program = settings["command"], settings["source"], None
    if settings["compile"] is not None:
        compiler, limits = settings["compile"]
        compilation = execution.Execution(settings, limits, -1)
        record = compilation.run(b"", lambda _: execute(compiler))
        if records.send_record(results, record, compilation.seconds) != 0:
            return
        program = records.sealed_file(command[0])
        if program is not None:  # otherwise an execution could replace it in the box
            settings["keep"] = None
            processes.empty(settings["box"], keep=None)
    warm_up(settings["prelude"])
    if settings["is_session"]:
        from .session import Session

        Session(settings, settings["limits"], 0).serve(job, results)
        return

    def run_program(arguments: list[str]) -> int:
        if command:
            return execute([*command, *arguments], program)
        # Compiled in each execution: the compiler's errors are the program's.
        return run_source(source, settings, arguments)

    for number in range(settings["inputs"]):
        run = execution.Execution(settings, settings["limits"], number, program)
        stdin = records.read_block(job)
        if settings["has_files"]:
            run.files, stdin = marshal.loads(stdin), b""
        record = run.run(stdin, run_program)
        status = records.send_record(results, record, run.seconds)
        if status != 0 and not settings["keep_going"]:
            return


def confine(settings: dict[str, Any]) -> None:
    """Become the sandbox's own user, out of the programs' reach; die when the judge dies."""
    if settings["uid"]:
        os.setgroups([])
        os.setresgid(*[settings["uid"]] * 3)
        os.setresuid(*[settings["uid"]] * 3)
    if sys.platform == "linux":
        lockdown.drop_capabilities()
        # After the change of user, which resets the first two.
        at_death = signal.SIGKILL if settings["namespaces"] else signal.SIGTERM
        processes.prctl(processes.PDEATHSIG, at_death)
        processes.prctl(processes.DUMPABLE, 0)
        processes.prctl(lockdown.NO_NEW_PRIVS, 1)
        processes.prctl(processes.SUBREAPER, 1)
    if not settings["namespaces"]:  # the end of a namespace ends all processes in it
        signal.signal(signal.SIGTERM, lambda *_: kill_rest_and_exit(settings))


def kill_rest_and_exit(settings: dict[str, Any]) -> None:
    processes.kill_rest(settings)
    os._exit(1)


def execute(command: list[str], program: int | None = None) -> int:
    """Replace this process with a compiler, or with a compiled program, whose file is then at
    `records.CHANNEL`."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execve(command[0] if program is None else records.CHANNEL, command, os.environ)


# -------------------------------------------------------------------------------- Python programs


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

    return run_tests(marshal.loads(records.read_file(0, sys.maxsize)))


def run_python(
    path: str,
    prelude: str,
    arguments: list[str],
    then: Callable[[ModuleType], None] | None = None,
) -> int:
    """Do what `python path` does, in a running process; returns the exit code.

    `prelude` runs before the program, in its namespace. With `then`, the module is imported instead
    of run as `__main__`, and passed to it.
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
        execution.show_error()
        code = CHECKER_FAILED if arguments else 1
    return code if shut_down() else code or 120


def exit_code(code: object) -> int:
    """The process's exit code for the argument of `sys.exit`, printed if it is a message."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


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
        execution.show_error()
        return False
    return True
