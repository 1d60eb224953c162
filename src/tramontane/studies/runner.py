"""Runs the arms of studies: one run folder for each arm and seed; finished runs are kept."""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tramontane.errors import InputError
from tramontane.imports import command_of
from tramontane.interrupt import GRACE_SECONDS
from tramontane.run.folder import RunFolder
from tramontane.studies.plan import Plan, check_same, share_of, write_settings
from tramontane.studies.registry import register
from tramontane.studies.study import config_of, load_study
from tramontane.temporary import die_with_parent
from tramontane.workplace import owned_folder

# Pages are drawn by matplotlib, which takes a second to import.
if TYPE_CHECKING:
    from tramontane.studies.page import Result

LOG_LINES = 12  # shown of a run that failed
POLL_SECONDS = 0.2  # between two looks at the processes
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

    Runs end with this process: a signal lets each take a checkpoint, for which it has
    `GRACE_SECONDS`.

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

        def ended(files: Sequence[Path], code: int) -> None:
            nonlocal done
            folder = files[0].with_suffix("")
            if code or not RunFolder(folder).finished:
                log = files[0].with_suffix(".log")
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
                raise InputError(f"{folder}: the run failed ({code}); the end of {log}:\n{tail}")
            if folder != plan.trajectories:
                done += 1
                on_finished(f"{folder.parent.name}, {folder.name}", done, total)

        for runs in (first, todo):
            files = [write_settings(folder, found) for folder, found in runs.items()]
            jobs = [([file], file.with_suffix(".log")) for file in files]
            _work(jobs, plan.study.cores, ended)
        return write_page(plan)


def _work(
    jobs: Iterable[tuple[Sequence[Path], Path]],
    cores: int,
    ended: Callable[[Sequence[Path], int], None],
) -> None:
    """Run a process for each job, as many in parallel as this machine's cores allow. If one of them
    fails, or this process is interrupted, the others end.

    Args:
        jobs: files of the settings of a process's arms, and its log.
        cores: of each process.
        ended: called with a job's files and exit code; raises an exception if it failed.
    """
    waiting, running = deque(jobs), dict[subprocess.Popen[bytes], Sequence[Path]]()
    try:
        while waiting or running:
            while waiting and len(running) < max(1, (os.cpu_count() or 1) // cores):
                files, log = waiting.popleft()
                running[_start(files, log, cores)] = files
            time.sleep(POLL_SECONDS)
            for process in [process for process in running if process.poll() is not None]:
                ended(running.pop(process), process.returncode)
    finally:
        end(running, GRACE_SECONDS)


def end(processes: Collection[subprocess.Popen[bytes]], seconds: float) -> None:
    """End processes; one that takes longer is killed."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def _start(files: Iterable[Path], log: Path, cores: int) -> subprocess.Popen[bytes]:
    """A process for some arms: an error in one does not affect the others."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            command_of("tramontane.studies.arm", *map(str, files)),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": str(cores), **os.environ},
            preexec_fn=die_with_parent,
        )


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
    jobs = [(files[number::count], log) for number, log in enumerate(logs)]
    _work(jobs, 1, lambda files, code: None)
    return logs
