"""Function tests: the program in one sandbox, its tests in another, joined by a socket.

Expected values and comparisons exist only in the tests' process. It calls the program's process
with plain values (`inside.program_side`), through the names that belong to the program
(`names_of`). The program can neither see the tests nor end them as passed: the verdict is how the
tests' process ended.

A test compares what the program returns, so the program must not supply what it is compared with.
The program owns the entry point and the names that the statement asks for. The tests own built-ins,
modules, what they import or define, and the usual names of the standard library (`isclose`,
`Counter`), imported or not. An undeclared name makes the tests unscorable.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import marshal
import re
import socket
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from tramontane.config import VerifierConfig
from tramontane.types import Judgment, Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.inside import wire

# Each process sleeps while the other runs. The tests have until their clock limit; the program may
# sleep twice as long as the tests may run and sleep. `_late` decides whose fault a timeout was.
PROGRAM_ASLEEP_FACTOR = 2 * sandbox.ASLEEP_FACTOR
PROGRAM_CLOCK_FACTOR = sandbox.CLOCK_FACTOR + 1  # a safeguard: the tests end earlier
LAST_RESULT_SECONDS = 5.0  # wait for the result of a program whose tests have ended
# Modules whose public names belong to the tests, in the order in which they are searched.
LIBRARIES = (
    "math", "collections", "itertools", "functools", "fractions", "decimal", "statistics", "copy",
    "datetime", "typing",
)  # fmt: skip
# Comparisons of packages that programs do not have.
_COMPARISONS = {
    "allclose", "approx", "array_equal", "assert_allclose", "assert_almost_equal",
    "assert_array_equal", "np", "numpy", "pd", "pytest",
}  # fmt: skip
# What tests wrap a result in.
_HELPERS = {
    "Counter", "abs", "all", "any", "deque", "dict", "float", "int", "isclose", "isinstance",
    "iter", "len", "list", "map", "max", "min", "print", "range", "repr", "round", "set", "sorted",
    "str", "sum", "tuple", "type", "zip",
}  # fmt: skip
CONVENTIONAL = {"Solution"}  # LeetCode's class, which some statements omit
_AWAITED = re.compile(r"\bawait\b|\basyncio\s*\.\s*(?:run|gather|get_event_loop|new_event_loop)\b")
_WORD = re.compile(r"[^\W\d]\w*")
_CALL = re.compile(r"([^\W\d]\w*)\s*\(")
_EXAMPLE = re.compile(r"^[ \t]*(?:assert\b|>>>).*$", re.MULTILINE)


def run_tests(program: str, prelude: str, problem: Problem, config: VerifierConfig) -> Judgment:
    """The judgment of a Python program under `tests.code`, which count as one test.

    Args:
        program: the source text.
        prelude: source that runs before it.
        problem: the problem with the tests, and the statement that may define helper functions.
        config: the limits.
    """
    tests = problem.tests or {}
    code = tests["code"]
    if _AWAITED.search(code):
        return Judgment("unscorable", "the tests await the program, which runs apart from them")
    names = names_of(code, problem.problem, tests.get("entry_point") or "")
    limits = sandbox.Limits(config.code_timeout_s, config.code_memory_mb)
    of_tests = limits._replace(asleep_factor=sandbox.CLOCK_FACTOR)
    of_program = limits._replace(
        asleep_factor=PROGRAM_ASLEEP_FACTOR, clock_factor=PROGRAM_CLOCK_FACTOR
    )
    tests_end, program_end = socket.socketpair()
    with tests_end, program_end:
        job = sandbox.Job([b""], of_program, channel=program_end.fileno())
        job.set_program(_with_helpers(program, problem), "python")
        job.prelude = prelude
        asking = [marshal.dumps(names._asdict() | {"code": code})]
        tests_job = sandbox.Job(asking, of_tests, channel=tests_end.fileno())
        rung = sandbox.probe()
        with sandbox.Sandbox(job, rung) as running, sandbox.Sandbox(tests_job, rung) as testing:
            program_end.close()  # the sandboxes have the ends; a copy would hide a closed one
            tests_end.close()
            return _verdict(running.results, testing.results, of_tests)


def _with_helpers(program: str, problem: Problem) -> str:
    """The program after the statement's complete functions that it uses but does not define."""
    if "from __future__" in program:  # which must come first
        return program
    used = set(re.findall(r"\w+", program)) - set(re.findall(r"\bdef\s+(\w+)", program))
    entry_point = (problem.tests or {}).get("entry_point") or ""
    helpers = helper_source(problem.problem, used, entry_point)
    return f"{helpers}\n{program}" if helpers else program


def _verdict(program: sandbox.Results, tests: sandbox.Results, limits: sandbox.Limits) -> Judgment:
    """The verdict, from how the tests' process ended, or the program if it ended first."""
    end = next(tests)
    if not end.failure:
        return Judgment("right", "", share=1.0)
    if end.is_unjudged and not end.is_clock:
        return Judgment("unscorable", end.failure)
    if end.code == wire.BROKEN:
        return Judgment("unscorable", end.failure.partition(": ")[2])
    if end.code == wire.GONE or end.is_clock:
        program_end = program.wait(LAST_RESULT_SECONDS)
        if end.is_clock or program_end.is_clock:
            return _late(end, program_end, limits)
        if program_end.is_unjudged:
            return Judgment("unscorable", program_end.failure)
        ended = program_end.code == 0
        return Judgment("wrong", "ended before its tests" if ended else program_end.failure)
    return Judgment("wrong", end.failure.removeprefix("exit code 1: "))


def _late(tests: sandbox.Result, program: sandbox.Result, limits: sandbox.Limits) -> Judgment:
    """The verdict on a function test in which a process was stopped while asleep, or by the clock.

    The program has used its time if the processes together ran, or slept simultaneously, for as
    long as one may run and sleep; otherwise they waited for a processor.
    """
    tests_awake = tests.times.clock - tests.times.asleep
    both_asleep = max(0.0, program.times.asleep - tests_awake)
    had = tests.times.processor + program.times.processor + both_asleep
    if had >= limits.seconds * sandbox.ASLEEP_FACTOR:
        return Judgment("wrong", f"timed out after {had:.2g} s, most of it asleep")
    return Judgment(
        "unscorable", f"the host was too busy to run it within {tests.times.clock:.2g} s"
    )


# ------------------------------------------------------------------------------------------ names


class Names(NamedTuple):
    """The names that tests use, by their owner."""

    program: frozenset[str]
    library: dict[str, str]  # the name of its module, by name
    used: frozenset[str] = frozenset()  # all names that the tests read
    entry_point: str = ""  # what `check(candidate)` is called with
    helpers: str = ""  # source of the statement's own functions


@lru_cache(maxsize=64)
def names_of(code: str, statement: str, entry_point: str) -> Names:
    """The owners of the names that the tests in `code` use.

    Args:
        code: the tests. If they do not parse, no name has an owner.
        statement: the problem's text.
        entry_point: the function that the problem asks for, or an expression that names it
            (`Solution().add`); may be empty.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Names(frozenset(), {})
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own = set(bound(tree))
    entries = set(_WORD.findall(entry_point))
    asked = set(_CALL.findall(_EXAMPLE.sub("", statement))) - _COMPARISONS
    shown = set(_CALL.findall(statement)) - _COMPARISONS
    defined = set(re.findall(r"\b(?:def|class)\s+([^\W\d]\w*)", statement))
    library = {name: module for name in used - own if (module := _module(name))}
    open_names = {x for x in used - own - library.keys() if not hasattr(builtins, x)}
    if not entries and not shown & open_names:
        entries = shown & called(tree)  # the tests call nothing else
    program = used & (entries | defined | CONVENTIONAL)
    if "check" in own - used:  # HumanEval's tests without the call
        entry_point = entry_point or (defined.pop() if len(defined) == 1 else "")
        program |= set(_WORD.findall(entry_point)[:1])
    caught = {x.id for x in _handled(tree) if re.search(rf"\b{x.id}\b", statement)}
    program |= open_names & (asked | caught)
    weak = (open_names & shown) - program
    program |= weak - _judging(tree, weak, program)
    if not (program or entry_point):
        asked_for = (called(tree) & open_names) - _COMPARISONS
        functions = {name for name in asked_for if not name[0].isupper()}
        if len(functions) == 1:  # MBPP's statements do not name the function, nor its classes
            classes = asked_for - functions
            program |= functions | (classes - _judging(tree, classes, functions))
        elif not called(tree) & open_names:
            program |= _only_library_name(tree, own, statement)
    library = {name: module for name, module in library.items() if name not in program}
    read = frozenset(
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    )
    helpers = helper_source(statement, used, entry_point)
    return Names(frozenset(program), library, read, entry_point, helpers)


def doing_nothing(problem: Problem, value: str = "None") -> str:
    """A program whose functions, and methods, of the names that the tests use return `value`; it
    prints nothing. Tests that it passes decide nothing."""
    tests = problem.tests or {}
    names = names_of(tests.get("code") or "", problem.problem, tests.get("entry_point") or "")
    return "".join(
        (
            f"class {name}:\n    def __init__(*a, **k): pass\n"
            f"    def __getattr__(self, name): return lambda *a, **k: {value}\n"
        )
        if name[0].isupper()
        else f"def {name}(*a, **k): return {value}\n"
        for name in sorted(names.program)
    )


def _only_library_name(tree: ast.AST, own: set[str], statement: str) -> set[str]:
    """The name of a built-in or of the library that alone can be the program's, in tests that call
    no others: the only one that they call, or the only one of these that the statement mentions,
    apart from helpers."""
    usual = called(tree) - own
    mentioned = usual & set(_WORD.findall(statement))
    candidates = (mentioned - _HELPERS, usual - _HELPERS, mentioned)
    names = next(filter(None, candidates), usual)
    return names if len(names) == 1 else set()


def bound(tree: ast.AST) -> Iterator[str]:
    """Names that the tests define, import or assign."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def _module(name: str) -> str | None:
    """The standard module with this name, or with this public name in it."""
    if name.startswith("_") or hasattr(builtins, name):
        return None
    if name in sys.stdlib_module_names:
        return name if importlib.util.find_spec(name) else None
    for module in LIBRARIES:
        loaded = importlib.import_module(module)
        if name in getattr(loaded, "__all__", dir(loaded)):
            return module
    return None


def called(node: ast.AST) -> set[str]:
    """The names that are called."""
    return {
        call.func.id
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }


def _handled(tree: ast.AST) -> Iterator[ast.Name]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            yield from (x for x in ast.walk(node.type) if isinstance(x, ast.Name))


def _judging(tree: ast.AST, weak: set[str], program: set[str]) -> set[str]:
    """Names that would decide the comparison: used beside or around a call of the program."""
    judging: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and called(node) & program:
            judging |= weak & {x.id for x in _outside(node, program) if isinstance(x, ast.Name)}
    return judging


def _outside(node: ast.AST, program: set[str]) -> Iterator[ast.AST]:
    """The nodes below `node`, except the arguments of calls of the program's functions."""
    yield node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in program:
        return
    for child in ast.iter_child_nodes(node):
        yield from _outside(child, program)


def helper_source(statement: str, used: set[str], entry_point: str) -> str:
    """The statement's complete functions and its imports, if `used` has one of the functions:
    a program that redefines them would decide its own tests.
    """
    blocks: list[str] = []
    for line in statement.splitlines():
        if line[:1] in ("", " ", "\t", ")") and blocks:
            blocks[-1] += "\n" + line
        else:
            blocks.append(line)
    kept, needed = [], False
    for block in blocks:
        if not block.startswith(("def ", "import ", "from ")):
            continue
        try:
            (node,) = ast.parse(block).body
        except (SyntaxError, ValueError):  # prose
            continue
        if isinstance(node, ast.FunctionDef):
            if node.name == entry_point or all(map(_is_empty, node.body)):
                continue
            needed = needed or node.name in used
        kept.append(block)
    return "\n".join(kept) if needed else ""


def _is_empty(node: ast.stmt) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant or isinstance(node, ast.Pass)
