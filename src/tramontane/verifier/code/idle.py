"""Tests that cannot tell a right program from a wrong one, found without running them."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from tramontane.verifier.code.functions import bound, called, names_of

NEVER_CALL = "the tests never called the program"
NO_CHECK = "the tests check nothing"
NO_OUTPUT = "no test expects any output"
# Functions that raise or end the process where a check fails.
_CHECKING = re.compile(
    r"assert|raise|fail|exit|quit|abort|kill|check|verify|expect|valid|test|ensure"
)
_DYNAMIC = {"eval", "exec", "globals", "locals", "vars", "getattr", "__import__", "compile"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_DISCOVERED = re.compile(r"test|Test|check$|setup_")


def why_idle(tests: dict[str, Any] | None, statement: str) -> str:
    """Why tests pass every program, or every one that ends; empty if they may not.

    Args:
        tests: the tests of a problem, in the form of docs/data.md.
        statement: the problem's text.
    """
    if not tests:
        return ""
    if isinstance(code := tests.get("code"), str):
        return _why_idle(code, statement, tests.get("entry_point") or "")
    outputs = [case.get("output", "") for case in tests.get("cases") or []]
    is_compared = tests.get("checker") != "program"
    return NO_OUTPUT if outputs and is_compared and not any(map(str.strip, outputs)) else ""


@lru_cache(maxsize=64)
def _why_idle(code: str, statement: str, entry_point: str) -> str:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""  # found when the tests run
    nodes = list(_reached(tree))
    read = {node.id for node in nodes if isinstance(node, ast.Name)}
    names = names_of(code, statement, entry_point)
    declared = {*bound(tree), *names.library, *dir(builtins)}
    called_back = any(
        isinstance(n, _Function) and n.name == "check" and names.entry_point for n in nodes
    )
    if not called_back and not read - declared and not read & (names.program | _DYNAMIC):
        return NEVER_CALL
    own = {node.name for node in nodes if isinstance(node, _Function)}
    given = {*dir(builtins), *(names.program & called(tree))} - {*bound(tree)}
    return "" if any(_is_check(node, own, given) for node in nodes) else NO_CHECK


@lru_cache(maxsize=64)
def plainly_decide(code: str, statement: str, entry_point: str) -> bool:
    """True if the tests compare the program's result with a literal, and are so plain that this
    comparison certainly runs and counts: assertions, assignments, imports and functions that are
    discovered or called. Others may have a check that no program reaches or fails."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    nodes = list(ast.walk(tree))
    program = names_of(code, statement, entry_point).program | {"candidate"}
    assigned = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return (
        not assigned & program
        and all(isinstance(n, _PLAIN) for n in nodes if isinstance(n, ast.stmt))
        and all(_is_plain_function(n) for n in nodes if isinstance(n, ast.FunctionDef))
        and all(_is_plain_call(n, program) for n in nodes if isinstance(n, ast.Expr))
        and any(_compares(n, program) for n in nodes if isinstance(n, ast.Assert))
    )


_PLAIN = (ast.Assert, ast.Assign, ast.Import, ast.ImportFrom, ast.Expr, ast.FunctionDef)


def _is_plain_function(node: ast.FunctionDef) -> bool:
    return bool(_DISCOVERED.match(node.name)) and not node.decorator_list


def _is_plain_call(node: ast.Expr, program: frozenset[str]) -> bool:
    """True for a docstring, a call of the program, and a call of HumanEval's `check`."""
    match node.value:
        case ast.Constant():
            return True
        case ast.Call(ast.Name(name)):
            return name in program | {"check"}
    return False


def _compares(node: ast.Assert, program: frozenset[str]) -> bool:
    """True for `assert f(…) == literal`."""
    match node.test:
        case ast.Compare(ast.Call(ast.Name(name)), [ast.Eq()], [wanted]) if name in program:
            return not any(isinstance(x, ast.Name | ast.Call) for x in ast.walk(wanted))
    return False


def _reached(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that run: not those of functions and classes that nothing names or discovers, of
    `if False`, or of a `try` that hides every failure."""
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _Function | ast.ClassDef):
            is_method = isinstance(node, _Function) and not _at_top(tree, node)
            is_test = _DISCOVERED.match(node.name) or _is_test_case(node)
            if not (is_method or is_test or node.name in named):
                continue
        yield node
        if isinstance(node, ast.If) and isinstance(node.test, ast.Constant) and not node.test.value:
            waiting += node.orelse
        elif (isinstance(node, ast.Try) and any(map(_hides, node.handlers))) or (
            isinstance(node, ast.With) and any(map(_suppresses, node.items))
        ):
            hidden = (x for statement in node.body for x in ast.walk(statement))
            waiting += [x for x in hidden if isinstance(x, ast.expr)]
        else:
            waiting += ast.iter_child_nodes(node)


def _at_top(tree: ast.Module, node: ast.AST) -> bool:
    return any(node is statement for statement in tree.body)


def _is_test_case(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any("TestCase" in ast.unparse(b) for b in node.bases)


_FAILED = re.compile(r"\b(?:AssertionError|Exception|BaseException)\b")


def _hides(handler: ast.ExceptHandler) -> bool:
    """True for a handler that catches a failed assertion and goes on as if it had passed, perhaps
    with a message."""
    caught = ast.unparse(handler.type) if handler.type else "BaseException"
    return bool(_FAILED.search(caught)) and all(
        isinstance(x, ast.Pass | ast.Continue)
        or (isinstance(x, ast.Expr) and not _is_check(x.value, set(), set()))
        for x in handler.body
    )


def _suppresses(item: ast.withitem) -> bool:
    """True for `contextlib.suppress(AssertionError)`."""
    call = ast.unparse(item.context_expr)
    return "suppress(" in call and bool(_FAILED.search(call))


def _is_check(node: ast.AST, own: set[str], given: set[str]) -> bool:
    """True for a statement that can fail, and for calls that by their names can, except of the
    tests' `own` functions, whose statements count. `given` are the names of what is always true."""
    match node:
        case ast.Assert(test):
            return not _is_true(test, given)
        case ast.Raise(exc=error) if error:
            return not _ends_well(error)
        case ast.Call(func, args):
            name = ast.unparse(func)
            if name in own or not _CHECKING.search(name) or _ends_well(node):
                return False
            if name.endswith(("assertTrue", "assertIsNotNone", "assert_")):
                return not (args and _is_true(args[0], given))
            if name.endswith(("assertEqual", "assertIs", "assertEquals")):
                return len(args) < 2 or ast.dump(args[0]) != ast.dump(args[1])
            return True
    return isinstance(node, ast.Raise)


def _is_true(test: ast.expr, given: set[str]) -> bool:
    """True for a condition that holds whatever the program does."""
    match test:
        case ast.Constant(value):
            return bool(value)
        case ast.Tuple(elts):
            return bool(elts)
        case ast.Name(name):
            return name in given
        case ast.UnaryOp(ast.Not(), ast.Constant(value)):
            return not value
        case ast.BoolOp(ast.Or(), values):
            return any(_is_true(value, given) for value in values)
        case ast.BoolOp(ast.And(), values):
            return all(_is_true(value, given) for value in values)
        case ast.Compare(ast.Name(name), [ast.IsNot()], [ast.Constant(None)]):
            return name in given
        case ast.Compare(left, [ast.Eq() | ast.Is() | ast.LtE() | ast.GtE()], [right]):
            return ast.dump(left) == ast.dump(right)
        case ast.Call(ast.Name("callable"), [ast.Name(name)]):
            return name in given
        case ast.Call(ast.Name("isinstance"), [_, ast.Name("object")]):
            return True
    return False


def _ends_well(call: ast.expr) -> bool:
    """True for what ends the tests as passed: `sys.exit(0)`, `quit()`, `SystemExit`."""
    name = ast.unparse(call.func if isinstance(call, ast.Call) else call)
    code = call.args if isinstance(call, ast.Call) else []
    is_success = not code or (isinstance(code[0], ast.Constant) and code[0].value in (0, None))
    return is_success and bool(re.search(r"(?:^|[._])(?:exit|quit|SystemExit)$", name))
