"""Runs the arms of studies: one run folder for each arm and seed; finished runs are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
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
SMOKE_SECONDS = 3600.0  # limit for all arms of the smoke test
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

    As many runs as the cores allow run in parallel. They end with this process: a signal lets each
    take a checkpoint, for which it has `GRACE_SECONDS`.

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
        todo = [folder for folder in settings if not RunFolder(folder).finished]
        _run_all({folder: settings[folder] for folder in todo}, plan, on_finished)
        return write_page(plan)


def _run_all(todo: dict[Path, Settings], plan: Plan, on_finished: Finished) -> None:
    cores, total = plan.study.cores, len(plan.study.arms) * plan.seeds
    running = _Running()
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // cores)) as pool:
        try:
            if (first := plan.trajectories) and first in todo:
                pool.submit(_run, first, todo.pop(first), cores, running).result()
            started = {
                pool.submit(_run, folder, settings, cores, running): folder
                for folder, settings in todo.items()
            }
            for done, future in enumerate(as_completed(started), total - len(todo) + 1):
                future.result()
                folder = started[future]
                on_finished(f"{folder.parent.name}, {folder.name}", done, total)
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                running.end(GRACE_SECONDS)
            raise


class _Running:
    """The processes of runs under way; different threads start them and end them."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock, self._ended = threading.Lock(), False

    def wait(self, start: Callable[[], subprocess.Popen[bytes]]) -> int:
        """Start a process, and wait for its end; returns its exit code."""
        with self._lock:
            if self._ended:
                return -signal.SIGTERM
            self._processes.add(process := start())
        code = process.wait()
        self._processes.discard(process)
        return code

    def end(self, seconds: float) -> None:
        """Have all processes end, and start no other; one that takes longer is killed."""
        with self._lock:
            self._ended, processes = True, [*self._processes]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + seconds
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def _run(folder: Path, settings: Settings, cores: int, running: _Running) -> None:
    """One run in a separate process: an error in one arm does not affect the others."""
    log = folder.with_name(folder.name + ".log")
    code = running.wait(partial(_start, [write_settings(folder, settings)], log, cores))
    if code or not RunFolder(folder).finished:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise InputError(f"{folder}: the run failed ({code}); the end of {log}:\n{tail}")


def _start(files: Iterable[Path], log: Path, cores: int = 1) -> subprocess.Popen[bytes]:
    with open(log, "ab") as output:
        return subprocess.Popen(
            command_of("tramontane.studies.arm", *map(str, files)),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": str(cores), **os.environ},
            preexec_fn=die_with_parent,
        )


def run_catalogue(
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
        plans: those of `catalogue.smoke_plans`.
        out: folder of the studies.

    Returns:
        What failed in a study, by its name; empty if all is well.

    Raises:
        subprocess.TimeoutExpired: the arms take longer than `SMOKE_SECONDS`.
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
    workers = [_start(files[number::count], logs[number]) for number in range(count)]
    for worker in workers:
        worker.wait(SMOKE_SECONDS)
    return logs
