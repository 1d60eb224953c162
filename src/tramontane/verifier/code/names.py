"""Determines who owns the names in a function test: the program, the library, or nobody.

A test compares what the program returns, so the program must not supply what it is compared with.
The program owns the entry point and the names that the statement asks for. The tests own built-ins,
modules, what they import or define, and the usual names of the standard library (`isclose`,
`Counter`), imported or not. An undeclared name makes the tests unscorable.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

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
CONVENTIONAL = {"Solution"}  # LeetCode's class, which some statements omit
_WORD = re.compile(r"[^\W\d]\w*")
_CALL = re.compile(r"([^\W\d]\w*)\s*\(")
_EXAMPLE = re.compile(r"^[ \t]*(?:assert\b|>>>).*$", re.MULTILINE)


class Names(NamedTuple):
    """The names that tests use, by their owner."""

    program: frozenset[str]
    library: dict[str, str]  # the name of its module, by name
    helpers: str = ""  # source of the statement's own functions


@lru_cache(maxsize=64)
def names_of(code: str, statement: str, entry_point: str) -> Names:
    """The owners of the names that the tests in `code` use.

    Args:
        code: the tests. If they do not parse, no name has an owner.
        statement: of the problem.
        entry_point: the function that the problem asks for, or an expression that names it
            (`Solution().add`); may be empty.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Names(frozenset(), {})
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own = set(_bound(tree))
    entries = set(_WORD.findall(entry_point))
    asked = set(_CALL.findall(_EXAMPLE.sub("", statement))) - _COMPARISONS
    shown = set(_CALL.findall(statement)) - _COMPARISONS
    defined = set(re.findall(r"\b(?:def|class)\s+([^\W\d]\w*)", statement))
    library = {name: module for name in used - own if (module := _module(name))}
    open_names = {x for x in used - own - library.keys() if not hasattr(builtins, x)}
    if not entries and not shown & open_names:
        entries = shown & _called(tree)  # the tests call nothing else
    program = used & (entries | defined | CONVENTIONAL)
    caught = {x.id for x in _handled(tree) if re.search(rf"\b{x.id}\b", statement)}
    program |= open_names & (asked | caught)
    weak = (open_names & shown) - program
    program |= weak - _judging(tree, weak, program)
    library = {name: module for name, module in library.items() if name not in program}
    return Names(frozenset(program), library, helper_source(statement, used, entry_point))


def _bound(tree: ast.AST) -> Iterator[str]:
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


def _called(node: ast.AST) -> set[str]:
    return {
        call.func.id
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }


def _handled(tree: ast.AST) -> Iterator[ast.Name]:
    """The names of exceptions that the tests catch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            yield from (x for x in ast.walk(node.type) if isinstance(x, ast.Name))


def _judging(tree: ast.AST, weak: set[str], program: set[str]) -> set[str]:
    """Names that would decide what the program is compared with: only an example of the statement
    calls them, and the tests use them beside or around a call of the program."""
    if not weak:
        return set()
    judging: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and _called(node) & program:
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
    """The statement's complete functions and its imports, if `used` has one of the functions.

    The tests use the statement's versions: a program that redefines them would decide its own
    tests.
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
    """True for `pass`, `...` or a docstring."""
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant or isinstance(node, ast.Pass)
