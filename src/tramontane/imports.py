"""Imports users' modules by path, and starts interpreters with the same search path."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def search_current_folder() -> None:
    """Let imports search the current folder, after all others; not if it is a run's, which may be
    untrusted."""
    here = os.getcwd()
    if here not in sys.path and not holds_run(here):
        sys.path.append(here)


def holds_run(folder: str | os.PathLike[str]) -> bool:
    """True if a folder is a run's: its files are data, so no code in it is imported or run."""
    return os.path.isfile(f"{folder}/config.yaml") and os.path.isdir(f"{folder}/checkpoints")


def import_module(path: str) -> Any:
    """Import a module, if necessary from the current folder.

    Raises:
        ModuleNotFoundError: no such module, or it imports a missing one.
    """
    search_current_folder()
    return importlib.import_module(path)


def command_of(module: str, *arguments: str) -> list[str]:
    """The command that runs a module like `python -m`, in an interpreter with this one's search
    path, but with the user's folder last: a `dis.py` there must not shadow the library's."""
    paths = [path for path in sys.path if path]
    start = (
        "import sys; sys.path[:] = filter(None, sys.path); "
        f"sys.path += [path for path in {paths!r} if path not in sys.path]; "
        f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", start, *arguments]
