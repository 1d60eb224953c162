"""Which package may import which: docs/architecture.md as a test."""

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import chain

import pytest

from tests.paths import ROOT

SOURCE = ROOT / "src" / "tramontane"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ENTRY = "tramontane"  # the package itself: the functions of `import tramontane`

# From the ground up. A package may import those below its own layer, and none beside it.
LAYERS = (
    "errors imports pages statistics status temporary tokens",
    "types",
    "batches interrupt journals loopback plugins workplace",
    "models",
    "config",
    "keywords placement",
    "generator trainer verifier",  # workers, which do not import each other
    "data",
    "asking environments verdicts",
    "controller curation doctor sft",
    "evaluation planning",
    "run",
    "audit",
    "view",
    "start",
    "sweeps",
    "recipes",
    "studies",
    "tramontane",  # the functions of `import tramontane`
    "cli",
    "__main__",
)


def package_of(name: str) -> str:
    """The package, or the module beside the packages, that a module belongs to."""
    return [*name.split("."), ENTRY][1]


def imported(node: ast.AST) -> Iterator[str]:
    """Modules of ours that code imports when it runs, at once or later."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (module_of(f"{node.module}.{alias.name}") for alias in node.names)
    typing = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    inside = node.orelse if isinstance(node, ast.If) and typing else ast.iter_child_nodes(node)
    yield from chain.from_iterable(imported(n) for n in inside if not isinstance(n, ast.expr))


def module_of(name: str) -> str:
    """The module that a name is imported from: itself, or the one that defines it."""
    path = SOURCE.parent / name.replace(".", "/")
    return name if path.is_dir() or path.with_suffix(".py").is_file() else name.rpartition(".")[0]


@cache
def graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        ours = {module for module in imported(tree) if module.partition(".")[0] == ENTRY}
        found[name.removesuffix(".__init__")] = ours
    return found


def test_imports_point_down() -> None:
    layer_of = {name: number for number, layer in enumerate(LAYERS) for name in layer.split()}
    up = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in others
        if package_of(module) != package_of(other)
        and layer_of[package_of(module)] <= layer_of[package_of(other)]
    ]
    assert not up, "\n".join(up)


def test_no_module_imports_itself_through_others() -> None:
    [*TopologicalSorter(graph()).static_order()]


@pytest.mark.parametrize("module", ["controller/pipeline", "controller/ledger", "trainer/trainer"])
def test_the_loop_knows_no_feature_by_name(module: str) -> None:
    with (SOURCE / f"{module}.py").open("rb") as file:
        names = {t.string for t in tokenize.tokenize(file.readline) if t.type == tokenize.NAME}
    assert len(names) > 100
    assert not [n for n in names if re.search("teacher|distill|judge|canar|effort", n, re.I)]


def test_the_page_counts_the_packages() -> None:
    packages = {path.parent for path in SOURCE.glob("*/*.py")}
    assert f"there are {len(packages)}." in PAGE


def test_papers_import_the_public_modules_and_no_others() -> None:
    public = {ENTRY, *re.findall(rf"`({ENTRY}\.[\w.]+)`", PAGE)}
    used = {ENTRY}
    for path in ROOT.glob("papers/*/src/**/*.py"):
        found = set(imported(ast.parse(path.read_text(encoding="utf-8"))))
        ours = {module for module in found if module.partition(".")[0] == ENTRY}
        assert ours <= public, f"{path} imports {ours - public}"
        used |= ours
    assert used == public
