"""Commands, studies and configs that other installed packages add, by their entry points.

| group | an entry is |
|---|---|
| `tramontane.commands` | a function or a Typer app, which becomes the command of the entry's name |
| `tramontane.studies` | a package whose folder has the study `NAME.yaml`, by the study's name |
| `tramontane.configs` | a `Section`, which `tramontane config NAME` describes |

Entry points are read when they are needed, and a package is imported when its entry is used.
docs/your-study.md has an example of such a package.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tramontane.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMANDS, STUDIES, CONFIGS = "tramontane.commands", "tramontane.studies", "tramontane.configs"
_CLONE = Path(__file__).parents[2]  # if the package is installed from a clone, as editable


def offered(group: str) -> dict[str, EntryPoint]:
    """The entries of a group by name, in alphabetical order."""
    from importlib.metadata import entry_points  # 0.03 s

    return {entry.name: entry for entry in sorted(entry_points(group=group), key=lambda e: e.name)}


def load(entry: EntryPoint) -> Any:
    """The object of an entry.

    Raises:
        InputError: its package cannot be imported, or has no such object.
    """
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        package = entry.dist.name if entry.dist else entry.value
        raise InputError(f"{entry.name}: the package {package} does not load: {error}") from error


def remedy(group: str, name: str) -> str | None:
    """How to install the package in the clone's `papers/` that has an entry; None if none has."""
    for project in sorted(_CLONE.glob("papers/*/pyproject.toml")):
        _, _, rest = project.read_text(encoding="utf-8").partition(f'."{group}"]')
        if f"\n{name} = " in rest.partition("\n[")[0]:
            command = f"{sys.executable} -m pip install {project.parent}"
            return f"{name} is in a package of its own, which is not installed: {command}"
    return None
