"""Tests that cannot tell a right program from a wrong one, found without running them."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from tramontane.verifier.code.functions import bound, names_of

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
    return "" if any(_is_check(node, own) for node in nodes) else NO_CHECK


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
            waiting += [x for x in ast.walk(ast.Module(node.body, [])) if isinstance(x, ast.expr)]
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
        or (isinstance(x, ast.Expr) and not _is_check(x.value, set()))
        for x in handler.body
    )


def _suppresses(item: ast.withitem) -> bool:
    """True for `contextlib.suppress(AssertionError)`."""
    call = ast.unparse(item.context_expr)
    return "suppress(" in call and bool(_FAILED.search(call))


def _is_check(node: ast.AST, own: set[str]) -> bool:
    """True for a statement that can fail, and for calls that by their names can, except of the
    tests' `own` functions, whose statements count."""
    if isinstance(node, ast.Assert):
        is_always_true = isinstance(node.test, ast.Tuple) and node.test.elts
        return not (is_always_true or isinstance(node.test, ast.Constant))
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        return name not in own and bool(_CHECKING.search(name))
    return isinstance(node, ast.Raise)
