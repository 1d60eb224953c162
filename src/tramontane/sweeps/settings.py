"""The settings of a run, in a file next to its folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from tramontane.config import Config, parse, read_settings
from tramontane.errors import InputError
from tramontane.workplace import write_whole


def flow(value: Any) -> str:
    """A value as YAML on one line, as overrides take it."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
    return text.removesuffix("...\n").strip()


def function_name(runner: str | None) -> str | None:
    """The name of a runner's function, which identifies its results: its module may move."""
    return runner and runner.rpartition(":")[2]


def check_same(folder: Path, settings: dict[str, Any]) -> None:
    """Check that a run can continue in a folder, if it exists.

    Raises:
        InputError: the folder has a run with different settings.
    """
    if folder.is_dir() and not is_same(folder, settings):
        raise InputError(
            f"{folder}: a run with different settings; name another folder (--out), or remove it"
        )


def is_same(folder: Path, settings: dict[str, Any]) -> bool:
    """True if a run has these settings, wherever it lies."""
    if not (file := settings_file(folder)).is_file():
        return False
    then = read_settings(file)
    if "runner" in settings or "runner" in then:
        runners = {function_name(dumped.get("runner")) for dumped in (then, settings)}
        return len(runners) == 1 and then | {"runner": ""} == settings | {"runner": ""}
    configs = [parse(Config, dumped, str(folder)) for dumped in (then, settings)]
    # Paths may differ if the study's folder was moved or is named differently.
    dumps = [config.model_dump(mode="json", exclude={"run_dir"}) for config in configs]
    for dumped in dumps:
        trajectories = dumped["data"]["trajectories"]
        if trajectories:
            trajectories["sources"] = [Path(source).name for source in trajectories["sources"]]
    return dumps[0] == dumps[1]


def settings_file(folder: Path) -> Path:
    """The file with a run's settings, next to its folder."""
    return folder.with_name(folder.name + ".yaml")


def write_settings(folder: Path, settings: dict[str, Any]) -> Path:
    """Write a run's settings next to its folder, as a whole or not at all; returns the file."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = settings_file(folder)
    write_whole(file, yaml.safe_dump(settings, sort_keys=False))
    return file
