"""The command that continues a run, such that a shell finds the user's own code, and the run that a
path means."""

from __future__ import annotations

import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tramontane.config.domains import CONSENT
from tramontane.config.yaml_text import read_yaml
from tramontane.verifier.functions import PICKLE

_PATH = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*[.:]\w+")  # of an import


def resume_command(folder: Path) -> str:
    """`tramontane train --resume FOLDER`, with the environment variables that the run's functions
    and classes need: consent to load those that were pickled, since they are not in a module, and
    the folders of modules that only this process can import."""
    config = folder / "config.yaml"
    values = [*_texts(read_yaml(config.read_bytes(), str(config)))] if config.is_file() else []
    # A pickled function belongs to the script, and may use modules beside it.
    pickled = any(value.startswith(PICKLE) for value in values)
    variables = {CONSENT: "1"} if pickled else {}
    paths = [*values, *(["__main__.script"] if pickled else [])]
    if folders := dict.fromkeys(filter(None, map(_folder, paths))):
        variables["PYTHONPATH"] = os.pathsep.join(folders)
    given = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
    return f"{given}tramontane train --resume {shlex.quote(str(folder))}"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for below in value.values() if isinstance(value, dict) else value:
            yield from _texts(below)


def _folder(path: str) -> str:
    """The folder from which this process has imported the module of a path, if another process
    started from here would not find it."""
    if not _PATH.fullmatch(path):
        return ""
    top = path.partition(":")[0].partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:
        return ""
    folder = Path(file).resolve().parent
    folder = folder.parent if Path(file).name == "__init__.py" else folder
    installed = {Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")}
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    is_installed = folder in installed or any("site-packages" in part for part in folder.parts)
    reached = folder in {Path.cwd(), *(Path(p).resolve() for p in given if p)}
    return "" if is_installed or reached or top == "tramontane" else str(folder)


def other_than_a_run(path: Path) -> str:
    """What is wrong with a path that should be a run's folder, and which run may be meant."""
    if not path.exists():
        return "it does not exist"
    if within := [p for p in list(path.parents)[:3] if (p / "config.yaml").is_file()]:
        return f"it is within one, {within[0]}: name that"
    if held := sorted(file.parent.name for file in path.glob("*/config.yaml")):
        return f"it holds {len(held)}, such as {held[0]}: name one of them"
    return "it has no config.yaml"
