"""Runs the arms of studies: one run folder for each arm and seed; finished runs are kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tramontane.errors import InputError
from tramontane.run.folder import RunFolder
from tramontane.studies.plan import Plan, share_of
from tramontane.studies.registry import register
from tramontane.studies.study import config_of, load_study
from tramontane.sweeps.runner import Job, Needs, job_of, measure, work
from tramontane.sweeps.settings import check_same, settings_file, write_settings
from tramontane.temporary import exit_of
from tramontane.workplace import owned_folder

# Pages are drawn by matplotlib, which takes a second to import.
if TYPE_CHECKING:
    from tramontane.studies.page import Result

Settings = dict[str, Any]  # of a run
Finished = Callable[[str, int, int], None]  # name of a run, runs finished, runs in all


def study(
    name: str,
    *,
    seeds: int = 3,
    budget: float | None = None,
    base: str | Path | None = None,
    out: str | Path = "studies",
    on_finished: Finished | None = None,
) -> Result:
    """Run the arms of a study and judge its claims; see docs/studies.md.

    Finished runs in the folder are kept, and an unfinished one resumes.

    Args:
        name: a study that is shipped, or the path of a study's YAML file.
        seeds: runs of each arm.
        budget: total minutes of all runs, which sets the number of updates (estimated from a run's
            time on two cores); None: the base's updates.
        base: the config that the arms change; None: the tiny base on the playground. Not for a
            study with a `runner`.
        out: folder for the studies' runs and pages.
        on_finished: called with (run, runs finished, runs in all).

    Raises:
        InputError: no such study or base, an invalid key of an arm, runs with different settings in
            the folder, a failed run, or another process working in the folder.
    """
    found = load_study(name)
    share = 1.0 if budget is None else share_of([found], budget, seeds)
    plan = Plan(found, Path(out) / Path(name).stem, seeds, share, Path(base) if base else None)
    return run_study(plan, on_finished or (lambda run, done, total: None))


def run_study(plan: Plan, on_finished: Finished) -> Result:
    """Run every arm with every seed, and write the study's page. Finished runs are skipped, and
    unfinished ones resume.

    Runs end with this process; see `sweeps.runner.work`.

    Args:
        plan: the runs.
        on_finished: called after each run.

    Raises:
        InputError: see `study`; of a failed run, with the end of its output.
    """
    with owned_folder(plan.out, "studied"):
        from tramontane.studies.page import write_page  # needs matplotlib: known before the runs

        settings = plan.all_settings()
        for folder, found in settings.items():
            check_same(folder, found)
        register(plan.out, plan.study, config_of(plan.study, plan.base))
        todo = {f: found for f, found in settings.items() if not RunFolder(f).finished}
        first = {f: todo.pop(f) for f in [plan.trajectories] if f in todo}
        total = len(plan.study.arms) * plan.seeds
        done = total - len(todo)

        def ended(job: Job, code: int) -> None:
            nonlocal done
            folder = job.files[0].with_suffix("")
            if code or not RunFolder(folder).finished:
                text = f"{folder}: the run failed ({exit_of(code)}); the end of {job.log}"
                raise InputError(f"{text}:\n{job.tail}")
            if folder != plan.trajectories:
                done += 1
                on_finished(f"{folder.parent.name}, {folder.name}", done, total)

        for runs in (first, todo):
            _run(plan, runs, ended)
        return write_page(plan)


def _run(plan: Plan, runs: Mapping[Path, Settings], ended: Callable[[Job, int], None]) -> None:
    """Run some of a study's runs, as many in parallel as the machine holds."""
    files = [write_settings(folder, found) for folder, found in runs.items()]
    if plan.study.runner or not files:  # the memory of a function is not known
        needs, room = dict.fromkeys(files, Needs(plan.study.cores)), None
    else:
        measured = measure(files, plan.study.cores)
        if measured.errors:
            raise InputError("\n".join(f"{f}: {text}" for f, text in measured.errors.items()))
        needs, room = dict(measured.needs), measured.room()
    work([job_of(folder, needs[settings_file(folder)]) for folder in runs], ended, room)


def run_all(
    plans: Mapping[str, Plan],
    on_finished: Callable[[str, str, int, int], None] = lambda study, run, done, total: None,
) -> dict[str, str]:
    """Run several studies in order. A study that fails does not stop the others.

    Args:
        plans: the plan of each study by its name.
        on_finished: called after each run with (study, run, runs finished, runs in all).

    Returns:
        The error of each study that failed, by name.
    """
    failed = {}
    for name, plan in plans.items():
        try:
            run_study(plan, partial(on_finished, name))
        except InputError as error:
            failed[name] = str(error)
        except Exception as error:  # a broken measure must not stop the other studies
            failed[name] = f"{error!r}"
    return failed


def run_smoke(plans: Mapping[str, Plan], out: Path) -> dict[str, str]:
    """Run every arm of some studies, and write their pages; finished runs in the folder are kept.

    The arms share a process for each core, since importing torch takes longer than an arm.

    Args:
        plans: those of `reproduction.smoke_plans`.
        out: folder of the studies.

    Returns:
        What failed in a study, by its name; empty if all is well.
    """
    from tramontane.studies.page import write_page

    with owned_folder(out, "tested"):
        arms = {folder: found for p in plans.values() for folder, found in p.all_settings().items()}
        trajectories = [plan.trajectories for plan in plans.values() if plan.trajectories]
        first = {folder: arms.pop(folder) for folder in trajectories}
        logs = _run_together(first, out / "trajectories") + _run_together(arms, out / "smoke")
        failed = {}
        for name, plan in plans.items():
            missing = [f"{a}, seed {s}" for a, s, f in plan.runs() if not RunFolder(f).finished]
            if missing:
                failed[name] = f"{'; '.join(missing)}: see {', '.join(map(str, logs))}"
                continue
            try:
                write_page(plan)
            except Exception as error:  # a broken measure: other studies are checked
                failed[name] = f"its page: {error!r}"
        return failed


def _run_together(runs: Mapping[Path, Settings], log: Path) -> list[Path]:
    """Run the unfinished arms in one process per core; returns their logs, `LOG_NUMBER.log`."""
    todo = {folder: found for folder, found in runs.items() if not RunFolder(folder).finished}
    files = [write_settings(folder, found) for folder, found in todo.items()]
    count = min(os.cpu_count() or 1, len(files))
    logs = [log.with_name(f"{log.name}_{number}.log") for number in range(count)]
    work([Job(files[n::count], log) for n, log in enumerate(logs)], lambda job, code: None)
    return logs
