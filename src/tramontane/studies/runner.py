"""Runs a study's arms: one run folder for each arm and seed, finished ones are kept."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tramontane.config import Config, parse_settings, read_settings
from tramontane.errors import InputError
from tramontane.placement.orphans import die_with_parent
from tramontane.studies.arm import load_function
from tramontane.studies.measures import FinishedRun
from tramontane.studies.study import Study, base_config

FIXED_MINUTES = 0.5  # of a training run: its start and its evaluations
LEAST_SHARE = 0.01  # of the default budget
LOG_LINES = 12  # shown of a run that failed
Finished = Callable[[str, int, int], None]  # name of a run, runs finished, runs in all


@dataclass(frozen=True)
class Plan:
    """The runs of a study.

    Args:
        study: question, arms and claims.
        out: folder of the runs and the page.
        seeds: number of runs of each arm.
        share: share of the default budget that each run has: of its updates, or of the keys that
            the study names in `scaled`.
        base: file of the config that the arms change; None: that of `base_config`. Not for a study
            with a `runner`.
    """

    study: Study
    out: Path
    seeds: int
    share: float = 1.0
    base: Path | None = None

    def runs(self) -> Iterator[tuple[str, int, Path]]:
        """(arm, seed, folder) of each run; seed by seed, so that an early end leaves whole sets."""
        for seed in range(self.seeds):
            for arm in self.study.arms:
                yield arm, seed, self.out / arm / f"seed_{seed}"

    @property
    def trajectories(self) -> Path | None:
        """Folder of the run whose rollouts the arms learn from; None if the study has none."""
        return self.out / "trajectories" if self.study.trajectories else None

    def settings(self, arm: str, seed: int, folder: Path) -> dict[str, Any]:
        """Everything that determines one run, in JSON types; see `studies.arm`.

        Raises:
            InputError: the base cannot be read, an arm's keys are invalid, or there is no such
                function.
        """
        if self.study.runner is None:
            return self.arm_config(arm, seed, folder).model_dump(mode="json")
        if self.base is not None:
            raise InputError(f"{self.base}: the arms of this study do not change a config")
        load_function(self.study.runner)
        keys = {**self.study.base, **self.study.arms[arm]}
        keys |= {k: max(1, round(keys[k] * self.share)) for k in self.study.scaled if k in keys}
        measures = list(self.study.measures)
        return {"runner": self.study.runner, "keys": keys, "seed": seed, "measures": measures}

    def arm_config(self, arm: str, seed: int, folder: Path) -> Config:
        """The config of one run of a study without a `runner`.

        Raises:
            InputError: the base cannot be read, or an arm's keys are invalid.
        """
        changes = {**self.study.base, **self.study.arms[arm]}
        if self.trajectories and (sources := changes.get("data.trajectories.sources")):
            made = {"trajectories": str(self.trajectories)}
            changes["data.trajectories.sources"] = [made.get(name, name) for name in sources]
        changes |= {"seed": seed, "name": f"{arm}-{seed}", "run_dir": str(folder)}
        # All runs start from the same model: they measure it only where a figure compares to it.
        compares = any(measure.compares for measure in self.study.shown.values())
        changes |= {"evaluation.before": compares}
        return self._config(changes, f"arm {arm!r}")

    def trajectories_config(self) -> Config:
        """The config of the run whose rollouts the arms learn from.

        Raises:
            InputError: the base cannot be read, or a key is invalid.
        """
        changes = {**self.study.trajectories, "run_dir": str(self.trajectories)}
        changes |= {"evaluation.before": False}
        return self._config(changes, "trajectories")

    def _config(self, changes: dict[str, Any], where: str) -> Config:
        """The base with changes, and with its share of the updates."""
        texts = [f"{key}={_flow(value)}" for key, value in changes.items()]
        base = self.base or base_config()
        raw, origin = read_settings(base), f"{base}, {where}"
        config = parse_settings(Config, raw, texts, origin)
        # Stages keep their part of the updates.
        ends = [(stage.until and stage.until.updates) or 0 for stage in config.stages]
        ends = [max(1, round(end * self.share)) if end else 0 for end in ends]
        least = sum(ends) + 1
        updates = max(least, round(config.pipeline.updates * self.share))
        texts += [f"pipeline.updates={updates}"]
        if any(ends):
            stages = [s.model_dump(exclude_unset=True) for s in config.stages]
            for stage, end in zip(stages, ends, strict=True):
                stage |= {"until": {"updates": end}} if end else {}
            texts += [f"stages={_flow(stages)}"]
        return parse_settings(Config, raw, texts, origin)


def _flow(value: Any) -> str:
    """A value as YAML on one line, as overrides take it."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
    return text.removesuffix("...\n").strip()


def run_study(plan: Plan, on_finished: Finished = lambda name, done, total: None) -> None:
    """Run every arm with every seed; what an earlier call finished is kept, and a run that was
    stopped midway continues.

    As many runs go side by side as there are cores for. They end with this process.

    Args:
        plan: the runs.
        on_finished: called after each run.

    Raises:
        InputError: invalid settings, before any run starts; runs of other settings in the folder;
            or a run that failed, with the end of its output.
    """
    runs = [(folder, plan.settings(arm, seed, folder)) for arm, seed, folder in plan.runs()]
    first = []
    if plan.trajectories:
        first = [(plan.trajectories, plan.trajectories_config().model_dump(mode="json"))]
    for folder, settings in first + runs:
        _check_same(folder, settings)
    todo = [(folder, settings) for folder, settings in runs if not finished(folder)]
    cores = plan.study.cores
    for folder, settings in first:
        if not finished(folder):
            _run(folder, settings, cores)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // cores)) as pool:
        started = {pool.submit(_run, folder, found, cores): folder for folder, found in todo}
        try:
            for done, future in enumerate(as_completed(started), len(runs) - len(todo) + 1):
                future.result()
                folder = started[future]
                on_finished(f"{folder.parent.name}, {folder.name}", done, len(runs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def minutes_of(study: Study, seeds: int, share: float = 1.0) -> float:
    """Estimated minutes of a whole study on two cores, with a share of the default budget."""
    fixed, changing = _minutes(study, seeds)
    return fixed + changing * share


def share_of(studies: Iterable[Study], minutes: float, seeds: int) -> float:
    """The share of the default budget with which studies together take some minutes on two cores.

    Raises:
        InputError: too few minutes for the runs' starts and evaluations and `LEAST_SHARE`.
    """
    fixed, changing = np.sum([_minutes(study, seeds) for study in studies], axis=0)
    least = fixed + LEAST_SHARE * changing
    if minutes < least:
        raise InputError(
            f"budget of {minutes:g} minutes: the runs take {least:.1f} at least, mostly to start "
            f"and to be evaluated; give more minutes, or fewer seeds"
        )
    return float((minutes - fixed) / changing)


def _minutes(study: Study, seeds: int) -> tuple[float, float]:
    """(minutes at any budget, further minutes at the default budget) of a study on two cores."""
    runs = (len(study.arms) * seeds + bool(study.trajectories)) * min(study.cores, 2) / 2
    fixed = 0 if study.runner else min(FIXED_MINUTES, study.minutes / 2)
    return runs * fixed, runs * (study.minutes - fixed)


def finished(folder: Path) -> bool:
    """True if the run in the folder came to its end."""
    return (folder / "summary.json").is_file()


def finished_runs(study: Study, out: Path, seeds: int) -> dict[str, list[FinishedRun]]:
    """The finished runs of each arm, in order of their seeds; only seeds that all arms have.

    Args:
        study: the arms.
        out: folder of the study's runs.
        seeds: number of seeds that are looked for.
    """
    arms: dict[str, list[FinishedRun]] = {arm: [] for arm in study.arms}
    for seed in range(seeds):
        folders = {arm: out / arm / f"seed_{seed}" for arm in arms}
        if all(finished(folder) for folder in folders.values()):
            for arm, folder in folders.items():
                arms[arm].append(FinishedRun(folder))
    if study.runner:
        return arms
    runs = [run for found in arms.values() for run in found]
    common = min((run.summary["training_seconds"] for run in runs), default=math.inf)
    return {arm: [replace(run, common_seconds=common) for run in arms[arm]] for arm in arms}


def _check_same(folder: Path, settings: dict[str, Any]) -> None:
    file = settings_file(folder)
    if file.is_file() and yaml.safe_load(file.read_text()) != settings:
        raise InputError(
            f"{folder}: a run of other settings; name another folder (--out), or remove it"
        )


def settings_file(folder: Path) -> Path:
    """The file with a run's settings, next to its folder."""
    return folder.with_name(folder.name + ".yaml")


def _run(folder: Path, settings: dict[str, Any], cores: int) -> None:
    """One run, in a process of its own: a fault of one arm leaves the others alone."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    file, log = settings_file(folder), folder.with_name(folder.name + ".log")
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    with open(log, "ab") as output:
        code = subprocess.run(
            [sys.executable, "-m", "tramontane.studies.arm", str(file)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": str(cores), **os.environ},
            preexec_fn=die_with_parent,
        ).returncode
    if code or not finished(folder):
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise InputError(f"{folder}: the run failed ({code}); the end of {log}:\n{tail}")
