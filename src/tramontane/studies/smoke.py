"""A smoke test of the catalogue: every arm of every study, for a few updates on small batches.

The results are meaningless; it detects configs that do not run and missing measures.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tramontane.imports import command_of
from tramontane.placement.orphans import die_with_parent
from tramontane.studies.page import write_page
from tramontane.studies.plan import Plan
from tramontane.studies.runner import finished, write_settings
from tramontane.studies.study import load_study, names
from tramontane.workplace import owned_folder

SHARE = 0.05  # of the default budget, for arms that are not training runs
SMOKE_SECONDS = 3600.0  # limit for all arms


def smoke_plans(out: Path, chosen: list[str] | None = None) -> dict[str, Plan]:
    """The plan of each study of the smoke test, by name: one seed, and small runs."""
    return {
        name: Plan(load_study(name), out / Path(name).stem, seeds=1, share=SHARE, small=True)
        for name in chosen or names()
    }


def run_smoke(plans: Mapping[str, Plan], out: Path) -> dict[str, str]:
    """Run every arm of some studies, and write their pages.

    The arms share a process for each core, since importing torch takes longer than an arm.

    Args:
        plans: those of `smoke_plans`.
        out: folder of the studies; finished runs in it are kept.

    Returns:
        What failed in a study, by its name; empty if all is well.

    Raises:
        subprocess.TimeoutExpired: the arms take longer than `SMOKE_SECONDS`.
    """
    with owned_folder(out, "tested"):
        return _run_smoke(plans, out)


def _run_smoke(plans: Mapping[str, Plan], out: Path) -> dict[str, str]:
    first, arms = [], []
    for plan in plans.values():
        if plan.trajectories:
            first.append((plan.trajectories, plan.trajectories_settings()))
        for arm, seed, folder in plan.runs():
            arms.append((folder, plan.settings(arm, seed, folder)))
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
    """Run the unfinished arms in one process per core; returns their logs, `LOG_NUMBER.log`."""
    files = []
    for folder, settings in runs:
        if finished(folder):
            continue
        files.append(write_settings(folder, settings))
    count = min(os.cpu_count() or 1, len(files))
    logs = [log.with_name(f"{log.name}_{number}.log") for number in range(count)]
    workers = [_start(files[number::count], logs[number]) for number in range(count)]
    for worker in workers:
        worker.wait(SMOKE_SECONDS)
    return logs


def _start(files: list[Path], log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        return subprocess.Popen(
            command_of("tramontane.studies.arm", *map(str, files)),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            preexec_fn=die_with_parent,
        )
