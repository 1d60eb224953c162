"""A sweep: one run for each cell of a grid of config values, in one folder."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from tramontane.config import Config, parse_settings, read_settings
from tramontane.errors import InputError, importing
from tramontane.run.folder import RunFolder
from tramontane.sweeps.grid import Axis, axis_of, cell_name, cells_of
from tramontane.sweeps.runner import Job, Measured, job_of, measure, measured, work
from tramontane.sweeps.settings import check_same, settings_file, write_settings
from tramontane.temporary import exit_of
from tramontane.view.table import Table, flattened, table_of
from tramontane.workplace import owned_folder, write_whole

OWN = ("name", "run_dir")  # keys that the sweep sets
OnFinished = Callable[[str, int, int], None]  # name of a run, runs finished, runs in all


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, after it.

    Args:
        folder: has a folder for each run, and the table as `table.md` and `table.csv`.
        table: the runs, their results, and the keys that differ.
        failed: the end of the log of each run that failed, by its name.
        together: runs at a time, at the start.
    """

    folder: Path
    table: Table
    failed: Mapping[str, str]
    together: int


def sweep(
    config: str | Path,
    keys: str | Sequence[str],
    *,
    random: int | None = None,
    draw_seed: int = 0,
    out: str | Path | None = None,
    at_once: int | None = None,
    dry_run: bool = False,
    on_finished: OnFinished | None = None,
) -> Sweep:
    """Train with every combination of some keys' values, as many runs at a time as this machine
    holds; see docs/sweeps.md. Finished runs are kept, and unfinished ones resume. A run that fails
    does not stop the others.

    Args:
        config: the path of a config.
        keys: `key=value,value` texts, e.g. `seed=0,1,2`; with `random` also `key=LOW..HIGH` and
            `key=log:LOW..HIGH`.
        random: number of combinations to draw; each runs with every `seed`.
        draw_seed: seed of the draws.
        out: folder of the runs; None: `sweeps/NAME`, by the config's name.
        at_once: upper limit of the runs at a time; None: only the machine's.
        dry_run: check everything, and start no run.
        on_finished: called with (run, runs finished, runs in all).

    Raises:
        InputError: before any run starts: the invalid cells, a run that would not fit into memory,
            runs with different settings in the folder, or another process working in it.
    """
    keys = [keys] if isinstance(keys, str) else keys
    raw, axes = read_settings(config), [axis_of(text) for text in keys]
    out = Path(out or Path("sweeps") / str(raw.get("name") or Path(config).stem))
    cells = _configs(raw, axes, cells_of(axes, random, draw_seed), str(config), out)
    with owned_folder(out, "swept"):
        for folder, settings in cells.items():
            check_same(folder, settings)
        todo = {f: settings for f, settings in cells.items() if not RunFolder(f).finished}
        found, together = _checked(todo, at_once, dry_run)
        if dry_run:
            _remove_unused(todo)
            return Sweep(
                out, table_of({f: flattened(config) for f, config in cells.items()}), {}, together
            )
        failed: dict[str, str] = {}
        done = len(cells) - len(todo)

        def ended(job: Job, code: int) -> None:
            nonlocal done
            folder = job.files[0].with_suffix("")
            if code or not RunFolder(folder).finished:
                text = f"the run failed ({exit_of(code)}); the end of {job.log}"
                failed[folder.name] = f"{text}:\n{job.tail}"
            done += 1
            if on_finished:
                on_finished(folder.name, done, len(cells))

        if found:
            cores = max(1, (os.cpu_count() or 1) // together)
            needs = {f: replace(n, cores=max(n.cores, cores)) for f, n in found.needs.items()}
            jobs = [job_of(folder, needs[settings_file(folder)]) for folder in todo]
            work(jobs, ended, found.room(at_once))
        table = table_of(dict.fromkeys(cells))
        write_whole(out / "table.md", table.markdown())
        write_whole(out / "table.csv", table.csv())
    return Sweep(out, table, failed, together)


def _configs(
    raw: dict[str, Any],
    axes: Sequence[Axis],
    cells: Sequence[Mapping[str, str]],
    where: str,
    out: Path,
) -> dict[Path, dict[str, Any]]:
    """The config of each cell, in JSON types, by its folder.

    Raises:
        InputError: the errors of all cells.
    """
    if own := [axis.key for axis in axes if axis.key in OWN]:
        raise InputError(f"{own[0]}: set by the sweep; name its folder with --out")
    configs: dict[Path, dict[str, Any]] = {}
    written: dict[Path, str] = {}
    faults: dict[str, list[str]] = {}  # names of cells by error
    for cell in cells:
        texts = [f"{key}={value}" for key, value in cell.items()]
        try:
            config = parse_settings(Config, copy.deepcopy(raw), texts, where)
        except InputError as error:
            for line in str(error).splitlines():
                faults.setdefault(line, []).append(cell_name(axes, cell))
            continue
        dumped = config.model_dump(mode="json")
        name = cell_name(axes, {key: _value(dumped, key, text) for key, text in cell.items()})
        folder = out / name
        if folder in configs:
            same = f"the same run as {written[folder]}: remove one of the two values"
            faults.setdefault(same, []).append(cell_name(axes, cell))
        written[folder] = cell_name(axes, cell)
        configs[folder] = dumped | {"name": f"{config.name}-{name}", "run_dir": str(folder)}
    _refuse(faults, len(cells))
    return configs


def _value(config: Mapping[str, Any], key: str, text: str) -> Any:
    """The value of a key in a config; the text that was given where it has keys of its own."""
    value: Any = config
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return text if isinstance(value, dict) else value


def _refuse(faults: Mapping[str, Sequence[str]], total: int) -> None:
    """Raise the errors, each with its cells."""
    lines = []
    for fault, cells in faults.items():
        others = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        of = "every cell" if len(cells) == total > 1 else f"cell {cells[0]}{others}"
        lines.append(f"{of}: {fault}")
    if lines:
        if total == 1:  # what was meant as several values may be one
            lines.append("several values of a key are separated by commas: seed=0,1,2")
        raise InputError("no run was started:\n" + "\n".join(lines))


def _checked(
    todo: Mapping[Path, dict[str, Any]], at_once: int | None, here: bool
) -> tuple[Measured | None, int]:
    """What the runs need, and how many of them run at a time at the start. Checked in this process
    (`here`), which then keeps torch's memory, or in one of its own.

    Raises:
        InputError: the errors of all runs that cannot start.
    """
    if not todo:
        return None, 0
    files = [write_settings(folder, settings) for folder, settings in todo.items()]
    if here:
        with importing():
            from tramontane.sweeps.needs import needs

        found = measured(needs(1, [*map(str, files)]))
    else:
        found = measure(files)
    faults: dict[str, list[str]] = {}
    for file, text in found.errors.items():
        faults.setdefault(text, []).append(file.stem)
    if faults:
        _remove_unused(todo)
    _refuse(faults, len(files))
    room = found.room(at_once)
    together = sum(1 for _ in takewhile(lambda f: room.take(found.needs[f]) is not None, files))
    return found, together


def _remove_unused(folders: Iterable[Path]) -> None:
    """Remove the settings of runs that were not begun."""
    for folder in folders:
        if not folder.exists():
            settings_file(folder).unlink()
