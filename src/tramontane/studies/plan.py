"""The planned runs of a study: the settings of each, the total minutes, and which are finished."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tramontane.config import Config, parse, parse_settings, read_settings
from tramontane.errors import InputError
from tramontane.run.folder import RunFolder
from tramontane.studies.measures import FinishedRun
from tramontane.studies.study import Study, base_config
from tramontane.sweeps.process import load_function
from tramontane.sweeps.settings import flow, is_same

FIXED_MINUTES = 0.5  # of a training run: its start and its evaluations
LEAST_SHARE = 0.01  # of the default budget

# The smoke test.
UPDATES = 2
BATCH_SHARE = 8  # of the arms' batch sizes
GROUP_SHARE = 4  # of the arms' group sizes
L_MAX = 128  # most completions are shorter, and the longest decides how long a batch takes
PROBLEMS = 4  # of evaluations


@dataclass(frozen=True)
class Plan:
    """The runs of a study.

    Args:
        study: question, arms and claims.
        out: folder of the runs and the page.
        seeds: number of runs of each arm, earlier seeds included.
        share: share of the default budget that each run has: of its updates, or of the keys that
            the study names in `scaled`.
        base: file of the config that the arms change; None: that of `base_config`. Not for a study
            with a `runner`.
        small: the runs are those of the smoke test: tiny batches, few updates.
        first: the first seed; those before it are recorded elsewhere.
    """

    study: Study
    out: Path
    seeds: int
    share: float = 1.0
    base: Path | None = None
    small: bool = False
    first: int = 0

    def runs(self) -> Iterator[tuple[str, int, Path]]:
        """(arm, seed, folder) of each run; seed by seed, so that an early end leaves complete
        sets."""
        for seed in range(self.first, self.seeds):
            for arm in self.study.arms:
                yield arm, seed, self.folder(arm, seed)

    def folder(self, arm: str, seed: int) -> Path:
        """Folder of a run."""
        return self.out / arm / f"seed_{seed}"

    @property
    def trajectories(self) -> Path | None:
        """Folder of the run whose rollouts the arms learn from; None if the study has none."""
        return self.out / "trajectories" if self.study.trajectories else None

    @property
    def samples(self) -> int:
        """Samples behind each share that the evaluation after training gives; 0 with a `runner`."""
        if self.study.runner:
            return 0
        evaluation = self.arm_config(next(iter(self.study.arms)), 0, self.out).evaluation
        return evaluation.problems * evaluation.samples

    @property
    def minutes(self) -> float:
        """Estimated minutes of all runs on two cores."""
        return minutes_of(self.study, self.seeds - self.first, self.share)

    @property
    def finished(self) -> int:
        """Number of the arms' runs that are finished."""
        return sum(RunFolder(folder).finished for _, _, folder in self.runs())

    def all_settings(self) -> dict[Path, dict[str, Any]]:
        """The settings of each run by its folder; the run that makes the trajectories comes first.

        Raises:
            InputError: see `settings`.
        """
        first = self.trajectories
        settings = {first: self.trajectories_settings()} if first else {}
        return settings | {folder: self.settings(arm, n, folder) for arm, n, folder in self.runs()}

    def settings(self, arm: str, seed: int, folder: Path) -> dict[str, Any]:
        """Everything that determines one run, in JSON types; see `sweeps.process`.

        Raises:
            InputError: the base cannot be read, an arm's keys are invalid, or there is no such
                function.
        """
        if self.study.runner is None:
            config = self.arm_config(arm, seed, folder).model_dump(mode="json")
            return shrunk(config, str(folder)) if self.small else config
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
        # All runs start from the same model, so they evaluate it only if a measure compares with
        # it.
        compares = any(measure.compares for measure in self.study.shown.values())
        changes |= {"evaluation.before": compares}
        return self._config(changes, f"arm {arm!r}")

    def trajectories_settings(self) -> dict[str, Any]:
        """The config, in JSON types, of the run whose rollouts the arms learn from.

        Raises:
            InputError: the base cannot be read, or a key is invalid.
        """
        changes = {**self.study.trajectories, "run_dir": str(self.trajectories)}
        changes |= {"evaluation.before": False}
        config = self._config(changes, "trajectories").model_dump(mode="json")
        return shrunk(config, "trajectories") if self.small else config

    def _config(self, changes: dict[str, Any], where: str) -> Config:
        """The base with changes, and with its share of the updates."""
        texts = [f"{key}={flow(value)}" for key, value in changes.items()]
        base = self.base or base_config()
        raw, origin = read_settings(base), f"{base}, {where}"
        config = parse_settings(Config, raw, texts, origin)
        # Stages keep their part of the updates.
        ends = [(stage.until and stage.until.updates) or 0 for stage in config.stages]
        ends = [max(1, round(end * self.share)) if end else 0 for end in ends]
        least = sum(ends) + 1
        updates = max(least, round(config.pipeline.updates * self.share))
        texts = [f"pipeline.updates={updates}"]  # `raw` has the others
        if any(ends):
            stages = [s.model_dump(exclude_unset=True) for s in config.stages]
            for stage, end in zip(stages, ends, strict=True):
                stage |= {"until": {"updates": end}} if end else {}
            texts += [f"stages={flow(stages)}"]
        return parse_settings(Config, raw, texts, origin)


def minutes_of(study: Study, seeds: int, share: float = 1.0) -> float:
    """Estimated minutes of a whole study on two cores, with a share of the default budget."""
    fixed, changing = _minutes(study, seeds)
    return fixed + changing * share


def share_of(studies: Iterable[Study], minutes: float, seeds: int) -> float:
    """The share of the default budget with which studies take the given total minutes on two cores.

    Raises:
        InputError: too few minutes for the runs' starts and evaluations and `LEAST_SHARE`, or no
            number of minutes; or studies with nothing that a budget could change.
    """
    fixed, changing = np.sum([_minutes(study, seeds) for study in studies], axis=0)
    if not changing:
        raise InputError("--budget: this study has no key that it could change (`scaled`)")
    if not math.isfinite(minutes):
        raise InputError(f"--budget {minutes}: give a number of minutes")
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
    if study.runner is None:
        fixed = min(FIXED_MINUTES, study.minutes / 2)
    else:
        fixed = study.fixed_minutes if study.scaled else study.minutes
    return runs * fixed, runs * (study.minutes - fixed)


def shrunk(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """The config of an arm with small batches, few updates and few problems to measure.

    Raises:
        InputError: the sizes contradict each other.
    """
    pipeline = settings["pipeline"]
    pipeline["group_size"] = max(2, pipeline["group_size"] // GROUP_SHARE)
    for section in (pipeline, *settings["stages"]):
        for key in ("n_batch", "n_minibatch", "n_async"):
            if section[key] is not None:
                section[key] = max(pipeline["group_size"], section[key] // BATCH_SHARE)
        if section["l_max"] is not None:
            section["l_max"] = min(L_MAX, section["l_max"])
    pipeline["updates"] = max(UPDATES, len(settings["stages"]))
    if settings["cold_start"] is not None:
        settings["cold_start"]["steps"] = UPDATES
    for stage in settings["stages"]:
        if stage["until"] is not None:
            stage["until"]["updates"] = 1
    for section in (settings["evaluation"], *settings["evaluation"]["also"].values()):
        section["problems"] = PROBLEMS
    config: dict[str, Any] = parse(Config, settings, where).model_dump(mode="json")
    return config


def finished_runs(plan: Plan) -> dict[str, list[FinishedRun]]:
    """The finished runs of each arm, in order of their seeds; only seeds that all arms have.

    Runs with settings different from the plan's are skipped (`other_runs`).
    """
    study = plan.study
    arms: dict[str, list[FinishedRun]] = {arm: [] for arm in study.arms}
    others = set(other_runs(plan))
    if plan.trajectories in others:
        return arms
    for seed in range(plan.first, plan.seeds):
        folders = {arm: plan.folder(arm, seed) for arm in arms}
        if all(RunFolder(folder).finished and folder not in others for folder in folders.values()):
            for arm, folder in folders.items():
                arms[arm].append(FinishedRun(folder))
    if study.runner:
        return arms
    runs = [run for of_arm in arms.values() for run in of_arm]
    common = min((run.summary["training_seconds"] for run in runs), default=math.inf)
    return {arm: [replace(run, common_seconds=common) for run in arms[arm]] for arm in arms}


def other_runs(plan: Plan) -> list[Path]:
    """Folders of finished runs whose settings differ from the plan's: a different base or budget,
    or an arm that has changed since."""
    made = plan.all_settings().items()
    return [f for f, now in made if RunFolder(f).finished and not is_same(f, now)]
