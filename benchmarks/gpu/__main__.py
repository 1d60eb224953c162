"""Measure this machine's GPU, and write the figures with their bounds as a page.

    python -m benchmarks.gpu [facts] [decode] [training] [loop] [--again] [--tiny] [--page]
                             [--out FOLDER]

Each part runs in its own process for ten minutes at most, without a network. Every figure is kept
in gpu.json as soon as it is measured: a command that was stopped continues, and one that is
repeated measures only what is missing or failed (`--again`: the parts named, or all, from the
start). What fails is recorded, and the part continues with what follows it.

Writes gpu.json next to the other benchmarks' reports and docs/gpu.md, or both into FOLDER.
`--tiny` rehearses everything on a CPU with tiny models, `--page` only draws the page. Exits with 2
if there is no GPU, and with 1 if a measurement failed or a promise is broken.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.gpu.bench import APART, Bench
from benchmarks.gpu.bounds import decode_bound, sheet
from benchmarks.gpu.decode import best_mode
from benchmarks.gpu.facts import ERROR_LIMIT, LAYERS
from benchmarks.gpu.page import TRL_SYNC, measured_rates, page, step_of
from benchmarks.gpu.training import SETTINGS
from benchmarks.measure import Promise, machine
from tramontane.placement import warm
from tramontane.temporary import die_with_parent

PARTS = ("facts", "decode", "training", "loop")
PART_SECONDS = 590.0
END_SECONDS = 60.0  # limit for a killed process to be gone
ROOT = Path(__file__).parents[2]
PATH = [str(ROOT / "benchmarks"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
VARIABLES = {"PYTHONPATH": os.pathsep.join(PATH), "HF_HUB_OFFLINE": "1"}  # of what measures
GOAL = "Qwen2.5-1.5B"
DECODE_GOAL, MFU_GOAL = 0.55, 0.40  # of the bandwidth at 64 rows, and of the peak
SYNCED = f"weights Qwen3-0.6B {APART}"


def items(part: str) -> dict[str, Callable[[Bench], dict[str, Any]]]:
    found: dict[str, Callable[[Bench], dict[str, Any]]]
    found = importlib.import_module(f"benchmarks.gpu.{part}").ITEMS
    return found


class Report:
    """gpu.json, written whole after each change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read()

    def read(self) -> None:
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else "{}"
        self.content: dict[str, Any] = {"items": {}} | json.loads(text)

    @property
    def items(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.content["items"]
        return found

    def write(self, **changes: Any) -> None:
        self.content |= changes
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)

    def missing(self, part: str) -> list[str]:
        """Items that were not measured yet, then those that failed."""
        names = [name for name in items(part) if "failed" in self.items.get(name, {"failed": ""})]
        return sorted(names, key=lambda name: name in self.items)


def measure(report: Report, names: list[str], part: str, bench: Bench) -> None:
    """In a process of its own: measure one item after another."""
    die_with_parent()
    torch.set_num_threads(1)
    for name in names:
        report.write(running=name)
        print(f"{part}: {name}", flush=True)
        began = time.perf_counter()
        found = items(part)[name](bench)
        report.items[name] = found | {"took": round(time.perf_counter() - began, 1)}
        print(f"    {json.dumps(report.items[name])}", flush=True)
        report.write(running=None)
        gc.collect()
        if not bench.tiny:
            torch.cuda.empty_cache()


def run(part: str, report: Report, bench: Bench) -> None:
    """Measure what is missing of a part, in as many processes as it takes: an item that fails ends
    its process.

    Raises:
        RuntimeError: a process ended before its first item.
    """
    deadline = time.monotonic() + PART_SECONDS
    todo = report.missing(part)
    for name in todo:
        report.items.pop(name, None)
    report.write()
    while todo and time.monotonic() < deadline:
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            process = start(part, todo, report, bench, errors)
            try:
                code = process.wait(deadline - time.monotonic())
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:  # also if this process is interrupted
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(END_SECONDS)
            errors.seek(0)
            lines = errors.read().strip().splitlines() or [f"exit code {code}"]
        report.read()
        if code == 0:
            return
        name = report.content.get("running")
        if name is None:
            raise RuntimeError("\n".join([f"{part} could not start:", *lines]))
        reason = lines[-1]
        if code is None:
            reason = f"not done when the part had taken {PART_SECONDS:.0f} s"
        report.items[name] = {"failed": reason}
        report.write(running=None)
        print("\n".join([*lines[-30:], f"    failed: {reason}"]), flush=True)
        todo = [name for name in todo if name not in report.items]


class Fork:
    """A fork of this process that measures, like a `subprocess.Popen`. It has the imports already,
    which may ask for a GPU: where there is one, no process may be forked after that."""

    def __init__(self, errors: IO[str], *measured: Any) -> None:
        sys.stdout.flush()
        warm.divide()
        fork = multiprocessing.get_context("fork")
        self._process = fork.Process(target=self._measure, args=(errors, *measured))
        self._process.start()
        self.pid = self._process.pid or 0

    @staticmethod
    def _measure(errors: IO[str], *measured: Any) -> None:
        os.setsid()
        os.chdir(ROOT)
        os.dup2(errors.fileno(), sys.stderr.fileno())
        os.environ.update(VARIABLES)  # for what it starts
        sys.path[:0] = PATH
        measure(*measured)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code


def start(
    part: str, todo: list[str], report: Report, bench: Bench, errors: IO[str]
) -> Fork | subprocess.Popen[str]:
    """Start a process that measures the items `todo`."""
    if not torch.cuda.is_available():
        return Fork(errors, report, todo, part, bench)
    command = [sys.executable, "-m", "benchmarks.gpu", part, "--items", json.dumps(todo)]
    command += ["--out", str(report.path.parent.resolve()), *bench.pick([], ["--tiny"])]
    return subprocess.Popen(
        command,
        stderr=errors,
        text=True,
        cwd=ROOT,
        env={**os.environ, **VARIABLES},
        start_new_session=True,
    )


def promises(report: dict[str, Any]) -> list[Promise]:
    """What the project promises of a GPU, for everything that was measured."""
    bench, found, made = Bench(tiny=False), report["items"], list[Promise]()
    rates, gpu = measured_rates(found), report["machine"].get("gpu", "")
    if "tests" in (tests := found.get("tests", {})):
        failed = tests["failures"] + tests["errors"]
        made.append(Promise("tests marked gpu pass", f"{failed} failed", failed == 0))
    for layer in LAYERS:
        if "forward" in (item := found.get(layer.label, {})):
            error = max(item["forward"], item["backward"])
            text = f"{layer.label}: relative errors below {ERROR_LIMIT}"
            made.append(Promise(text, f"{error:.4f}", error < ERROR_LIMIT))
    if step := step_of(found, GOAL, best_mode(), 64):
        bound = decode_bound(bench.shape(GOAL), step["rows"], step["context"], rates)
        share = 1e3 * bound / step["ms"]
        text = f"{GOAL} decodes 64 rows at {DECODE_GOAL:.0%} of the bandwidth or more"
        made.append(Promise(text, f"{share:.0%}", share >= DECODE_GOAL))
    peak = (sheet(gpu) or rates).flops
    for setting in SETTINGS:
        speed = found.get(setting.label, {}).get("tokens_per_second")
        if speed and setting.name == GOAL:
            share, text = speed * setting.flops(bench) / peak, f"{MFU_GOAL:.0%} MFU or more"
            made.append(Promise(f"{setting.label}: {text}", f"{share:.0%}", share >= MFU_GOAL))
        if speed and setting.published and "H100" in gpu:
            text = f"{setting.label}: ahead of prime-rl's {setting.published:,} tokens/s"
            made.append(Promise(text, f"{speed:,.0f}", speed > setting.published))
    if "arrive_ms" in (item := found.get(SYNCED, {})):
        sync = item["arrive_ms"] + item["pause_ms"]
        text = f"{SYNCED}: in use sooner than TRL's {TRL_SYNC:.0f} ms"
        made.append(Promise(text, f"{sync:.0f} ms", sync < TRL_SYNC))
    return made


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--again", action="store_true", help="measure from the start")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU")
    parser.add_argument("--page", action="store_true", help="only draw the page")
    parser.add_argument("--out", type=Path, help="folder of gpu.json and gpu.md")
    parser.add_argument("--items", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {unknown.pop()!r}; choose from {', '.join(PARTS)}")
    measures = not (args.items or args.page)
    if measures and not args.tiny and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} sees no NVIDIA GPU (tramontane doctor says more); --tiny "
            f"(make gpu TINY=1) rehearses on a CPU"
        )
    if args.tiny and not args.out:
        args.out = Path(tempfile.mkdtemp(prefix="gpu-rehearsal-"))
    return args


def main() -> None:
    args = arguments()
    bench, parts = Bench(args.tiny), args.parts or PARTS
    folder = args.out or ROOT / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(folder / "gpu.json")
    written = args.out / "gpu.md" if args.out else ROOT / "docs/gpu.md"
    if args.items:
        measure(report, args.items, *parts, bench)
        return
    if args.page:
        written.write_text(page(report.content), encoding="utf-8")
        return
    here = machine(bench.device) | {"tiny": args.tiny}
    if args.again:
        forgotten = {name for part in parts for name in items(part)}
        report.content["items"] = {n: x for n, x in report.items.items() if n not in forgotten}
    if report.items and report.content["machine"] != here:
        sys.exit(
            f"{report.path} has figures of {report.content['machine']}, not of {here}: keep this "
            f"machine's in a folder of their own (--out FOLDER), or measure all parts --again"
        )
    report.write(machine=here, date=date.today().isoformat(), running=None)
    for part in parts:
        run(part, report, bench)
        made = [] if args.tiny else promises(report.content)
        report.write(promises=[p._asdict() for p in made])
        written.write_text(page(report.content), encoding="utf-8")
    print(f"figures: {report.path}\npage: {written}")
    for promise, found, kept in made:
        print(f"{'kept  ' if kept else 'BROKEN'}  {promise}: {found}")
    for name, figures in report.items.items():
        for state in {"failed", "lacks"} & figures.keys():
            print(f"{state}  {name}: {figures[state]}")
    failed = any("failed" in figures for figures in report.items.values())
    sys.exit(failed or not all(p.kept for p in made))


if __name__ == "__main__":
    main()
