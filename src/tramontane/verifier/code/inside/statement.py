"""Helper functions that a problem's statement defines, for the tests that use them."""

from __future__ import annotations

from types import CodeType
from typing import Any

_ONLY_AST = 0x400  # flag of `compile`; the module `ast` imports slowly


def names_used(code: CodeType) -> set[str]:
    """The names that the code reads, attributes among them."""
    inner = [names_used(x) for x in code.co_consts if isinstance(x, CodeType)]
    return {x for x in code.co_names if not x.startswith("__")}.union(*inner)


def helper_source(statement: str, names: set[str], entry_point: str) -> str:
    """The statement's complete functions and its imports, if `names` has one of the functions.

    The tests take these functions from the statement: a program that redefines them would decide
    its own tests.
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
            (node,) = compile(block, "<statement>", "exec", _ONLY_AST).body  # type: ignore[attr-defined]
        except (SyntaxError, ValueError):  # prose
            continue
        if block.startswith("def "):
            if node.name == entry_point or all(map(_is_empty, node.body)):
                continue
            needed = needed or node.name in names
        kept.append(block)
    return "\n".join(kept) if needed else ""


def _is_empty(node: Any) -> bool:
    """True for `pass`, `...` or a docstring."""
    name, value = type(node).__name__, type(getattr(node, "value", None)).__name__
    return name == "Pass" or (name == "Expr" and value == "Constant")
