"""Runs a study's arms: one run folder for each arm and seed; finished runs are kept."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tramontane.config import Config, parse, read_settings
from tramontane.errors import InputError
from tramontane.imports import command_of
from tramontane.placement.orphans import die_with_parent
from tramontane.studies.measures import FinishedRun
from tramontane.studies.plan import Plan
from tramontane.workplace import write_whole

LOG_LINES = 12  # shown of a run that failed
Finished = Callable[[str, int, int], None]  # name of a run, runs finished, runs in all


def run_study(plan: Plan, on_finished: Finished = lambda name, done, total: None) -> None:
    """Run every arm with every seed; finished runs are skipped, and unfinished ones resume. The
    caller owns the study's folder.

    As many runs as the cores allow run in parallel. They end with this process: a signal lets each
    take a checkpoint within its `checkpoint.grace`.

    Args:
        plan: the runs.
        on_finished: called after each run.

    Raises:
        InputError: invalid settings, before any run starts; runs with different settings in the
            folder; or a failed run, with the end of its output.
    """
    runs = [(folder, plan.settings(arm, seed, folder)) for arm, seed, folder in plan.runs()]
    first = []
    if plan.trajectories:
        first = [(plan.trajectories, plan.trajectories_settings())]
    for folder, settings in first + runs:
        check_same(folder, settings)
    todo = [(folder, settings) for folder, settings in runs if not finished(folder)]
    cores = plan.study.cores
    running: set[subprocess.Popen[bytes]] = set()
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // cores)) as pool:
        try:
            for folder, settings in first:
                if not finished(folder):
                    pool.submit(_run, folder, settings, cores, running).result()
            started = {
                pool.submit(_run, folder, found, cores, running): folder for folder, found in todo
            }
            for done, future in enumerate(as_completed(started), len(runs) - len(todo) + 1):
                future.result()
                folder = started[future]
                on_finished(f"{folder.parent.name}, {folder.name}", done, len(runs))
        except (KeyboardInterrupt, SystemExit):
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [*running]:
                process.terminate()  # then the block waits until each has taken its checkpoint
            raise
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def finished(folder: Path) -> bool:
    """True if the run in the folder came to its end."""
    return (folder / "summary.json").is_file()


def finished_runs(plan: Plan) -> dict[str, list[FinishedRun]]:
    """The finished runs of each arm, in order of their seeds; only seeds that all arms have.

    Runs with settings different from the plan's are skipped (`other_runs`).
    """
    study = plan.study
    arms: dict[str, list[FinishedRun]] = {arm: [] for arm in study.arms}
    others = set(other_runs(plan))
    if plan.trajectories in others:
        return arms
    for seed in range(plan.seeds):
        folders = {arm: plan.folder(arm, seed) for arm in arms}
        if all(finished(folder) and folder not in others for folder in folders.values()):
            for arm, folder in folders.items():
                arms[arm].append(FinishedRun(folder))
    if study.runner:
        return arms
    runs = [run for found in arms.values() for run in found]
    common = min((run.summary["training_seconds"] for run in runs), default=math.inf)
    return {arm: [replace(run, common_seconds=common) for run in arms[arm]] for arm in arms}


def other_runs(plan: Plan) -> list[Path]:
    """Folders of finished runs whose settings differ from the plan's: a different base or budget,
    or an arm that has changed since."""
    made = [(folder, plan.settings(arm, seed, folder)) for arm, seed, folder in plan.runs()]
    if plan.trajectories:
        made.append((plan.trajectories, plan.trajectories_settings()))
    return [folder for folder, now in made if finished(folder) and not _is_same(folder, now)]


def check_same(folder: Path, settings: dict[str, Any]) -> None:
    """Check that a run can continue in a folder, if it exists.

    Raises:
        InputError: the folder has a run with different settings.
    """
    if folder.is_dir() and not _is_same(folder, settings):
        raise InputError(
            f"{folder}: a run with different settings; name another folder (--out), or remove it"
        )


def _is_same(folder: Path, settings: dict[str, Any]) -> bool:
    """True if a run has these settings, wherever it lies."""
    if not (file := settings_file(folder)).is_file():
        return False
    then = read_settings(file)
    if "runner" in settings or "runner" in then:
        return then == settings
    configs = [parse(Config, found, str(folder)) for found in (then, settings)]
    # Paths may differ if the study's folder was moved or is named differently.
    dumps = [config.model_dump(mode="json", exclude={"run_dir"}) for config in configs]
    for found in dumps:
        trajectories = found["data"]["trajectories"]
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


def _run(
    folder: Path, settings: dict[str, Any], cores: int, running: set[subprocess.Popen[bytes]]
) -> None:
    """One run in a separate process, which is in `running` meanwhile: an error in one arm does not
    affect the others."""
    file, log = write_settings(folder, settings), folder.with_name(folder.name + ".log")
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command_of("tramontane.studies.arm", str(file)),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": str(cores), **os.environ},
            preexec_fn=die_with_parent,
        )
    running.add(process)
    code = process.wait()
    running.discard(process)
    if code or not finished(folder):
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise InputError(f"{folder}: the run failed ({code}); the end of {log}:\n{tail}")
