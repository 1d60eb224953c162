"""A smoke test of the catalogue: every arm of every study, for a few updates on small batches.

The figures mean nothing; a config that does not run, or a measure that is not there, is found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tramontane.config import Config, parse
from tramontane.placement.orphans import die_with_parent
from tramontane.studies.page import write_page
from tramontane.studies.runner import Plan, finished, settings_file
from tramontane.studies.study import load_study, names

UPDATES = 2
BATCH_SHARE = 8  # of the arms' batch sizes
GROUP_SHARE = 4  # of the arms' group sizes
L_MAX = 128  # most completions are shorter, and the longest decides how long a batch takes
PROBLEMS = 4  # of evaluations
SHARE = 0.05  # of the default budget, for arms that are no training runs
SMOKE_SECONDS = 3600.0  # limit for all arms


def run_smoke(out: Path, chosen: list[str] | None = None) -> dict[str, str]:
    """Run every arm of the catalogue with one seed, and write the studies' pages.

    The arms share a process for each core, since importing torch takes longer than an arm.

    Args:
        out: folder of the studies; finished runs in it are kept.
        chosen: names of studies; None: all.

    Returns:
        What failed in a study, by its name; empty if all is well.

    Raises:
        subprocess.TimeoutExpired: the arms take longer than `SMOKE_SECONDS`.
    """
    plans = {
        name: Plan(load_study(name), out / Path(name).stem, seeds=1, share=SHARE)
        for name in chosen or names()
    }
    first, arms = [], []
    for plan in plans.values():
        if plan.trajectories:
            settings = plan.trajectories_config().model_dump(mode="json")
            first.append((plan.trajectories, shrunk(settings, str(plan.trajectories))))
        for arm, seed, folder in plan.runs():
            settings = plan.settings(arm, seed, folder)
            small = settings if plan.study.runner else shrunk(settings, str(folder))
            arms.append((folder, small))
    logs = [*_run_all(first, out / "trajectories"), *_run_all(arms, out / "smoke")]
    failed = {}
    for name, plan in plans.items():
        missing = [f"{arm}, seed {s}" for arm, s, folder in plan.runs() if not finished(folder)]
        if missing:
            failed[name] = f"{'; '.join(missing)}: see {', '.join(map(str, logs))}"
            continue
        try:
            write_page(plan)
        except Exception as error:  # a broken measure: the other studies are checked nevertheless
            failed[name] = f"its page: {error!r}"
    return failed


def _run_all(runs: Sequence[tuple[Path, dict[str, Any]]], log: Path) -> list[Path]:
    """Run what is not finished in a process for each core; returns their logs, `LOG_NUMBER.log`."""
    files = []
    for folder, settings in runs:
        if finished(folder):
            continue
        folder.parent.mkdir(parents=True, exist_ok=True)
        files.append(file := settings_file(folder))
        file.write_text(yaml.safe_dump(settings, sort_keys=False))
    count = min(os.cpu_count() or 1, len(files))
    logs = [log.with_name(f"{log.name}_{number}.log") for number in range(count)]
    workers = [_start(files[number::count], logs[number]) for number in range(count)]
    for worker in workers:
        worker.wait(SMOKE_SECONDS)
    return logs


def shrunk(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """The config of an arm with small batches, few updates and few problems to measure.

    Raises:
        InputError: the sizes contradict each other.
    """
    for section in (settings["pipeline"], *settings["stages"]):
        for key in ("n_batch", "n_minibatch", "n_async"):
            if section[key] is not None:
                section[key] = max(1, section[key] // BATCH_SHARE)
        if section["l_max"] is not None:
            section["l_max"] = min(L_MAX, section["l_max"])
    pipeline = settings["pipeline"]
    pipeline["group_size"] = max(2, pipeline["group_size"] // GROUP_SHARE)
    pipeline["updates"] = max(UPDATES, len(settings["stages"]))
    for stage in settings["stages"]:
        if stage["until"] is not None:
            stage["until"]["updates"] = 1
    for section in (settings["evaluation"], *settings["evaluation"]["also"].values()):
        section["problems"] = PROBLEMS
    config: dict[str, Any] = parse(Config, settings, where).model_dump(mode="json")
    return config


def _start(files: list[Path], log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tramontane.studies.arm", *map(str, files)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            preexec_fn=die_with_parent,
        )
