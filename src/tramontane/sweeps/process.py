"""Runs in a separate process: `python -m tramontane.sweeps.process RUN.yaml …`.

With `--needs FILE CORES` before them, only writes what the runs need of the machine (`needs`).

A file holds the run's settings: a config of `tramontane train`, or the function that runs a study's
arm with its keys and seed. The run's folder is the file's path without `.yaml`. A folder with
`summary.json` is finished; the same command continues any other.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tramontane.config import Config, parse, read_settings
from tramontane.config.device import VISIBLE, machine
from tramontane.config.domains import import_path
from tramontane.errors import InputError
from tramontane.interrupt import leave
from tramontane.pages import json_values
from tramontane.placement import warm
from tramontane.start import train_or_resume
from tramontane.sweeps.runner import NEEDS
from tramontane.verifier import functions
from tramontane.workplace import write_whole

# (the arm's keys, seed, folder) -> the run's measures by name.
RunArm = Callable[[dict[str, Any], int, Path], Mapping[str, float]]


def warm_up() -> None:
    """What every run imports, before the first is forked; see `placement.warm`. Not those with
    GPUs: a process that has asked for one cannot be forked."""
    if not os.environ.get(VISIBLE):
        import tramontane.run.train  # noqa: F401
        from tramontane.run import columns

        columns.warm_up()
    warm.load("tramontane.verifier.worker")  # of which each run has a fork


def load_function(path: str) -> RunArm:
    """The function at `package.module:function`, if necessary from the current folder.

    Raises:
        InputError: no such module or function.
    """
    functions.check(import_path(path), f"runner {path!r}", lambda function: "")
    function: RunArm = functions.load(import_path(path))
    return function


def run(file: Path) -> None:
    """Run to the end, or resume a stopped run.

    Raises:
        InputError: invalid settings, or missing measures.
    """
    settings, folder = read_settings(file), file.with_suffix("")
    if "runner" in settings:
        _call(settings, folder)
    # Without a report, which would take a part of the budget.
    elif not train_or_resume(parse(Config, settings, str(folder)), report=False).finished:
        sys.exit(130)


def _call(settings: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    returned = load_function(settings["runner"])(settings["keys"], settings["seed"], folder)
    measures = {name: float(value) for name, value in returned.items()}
    if missing := [name for name in settings["measures"] if name not in measures]:
        raise InputError(f"{settings['runner']} returned no {', '.join(missing)}")
    minutes = (time.monotonic() - started) / 60
    summary = {"measures": json_values(measures), "minutes": minutes, "machine": machine()}
    write_whole(folder / "summary.json", json.dumps(summary, indent=1))


def main(files: list[str]) -> int:
    """Run one after the other; returns the exit code, 2 if one of them failed."""
    if files[0] == NEEDS:
        from tramontane.sweeps.needs import needs

        _, found, cores, *files = files
        Path(found).write_text(json.dumps(needs(int(cores), files)))
        return 0
    code = 0
    for file in files:
        try:
            run(Path(file))
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            code = 2
        except Exception:
            traceback.print_exc()  # the others still run
            code = 2
    return code


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except (KeyboardInterrupt, SystemExit) as end:  # by a signal; what is done is saved
        # The interpreter would free every object of torch first: tens of seconds on busy cores.
        leave(end.code if isinstance(end, SystemExit) and isinstance(end.code, int) else 130)
    sys.exit(status)
