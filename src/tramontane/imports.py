"""Import of users' modules by path, and interpreters that find what this one finds."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def search_current_folder() -> None:
    """Let imports search the current folder, after all others; not if it is a run's, which may come
    from elsewhere."""
    here = os.getcwd()
    if here not in sys.path and not holds_run(here):
        sys.path.append(here)


def holds_run(folder: str | os.PathLike[str]) -> bool:
    """True if a folder is a run's, whose files are data: no code in it is imported or started."""
    return os.path.isfile(f"{folder}/config.yaml") and os.path.isdir(f"{folder}/checkpoints")


def import_module(path: str) -> Any:
    """Import a module, if need be from the current folder.

    Raises:
        ModuleNotFoundError: no such module, or one that it imports is missing.
    """
    search_current_folder()
    return importlib.import_module(path)


def command_of(module: str, *arguments: str) -> list[str]:
    """The command that runs a module, as `python -m` does, in an interpreter that finds all that
    this one finds, but the user's folder last: a `dis.py` there is not the library's."""
    paths = [path for path in sys.path if path]
    start = (
        "import sys; sys.path[:] = filter(None, sys.path); "
        f"sys.path += [path for path in {paths!r} if path not in sys.path]; "
        f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", start, *arguments]
