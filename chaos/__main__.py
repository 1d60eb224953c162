"""Kills workers through a whole run and proves from its records that nothing came of it.

    make chaos            or: python -m chaos [--seed N] [--kills 50]

The quickstart, all its updates, under Ray with two generators and two verifiers. Every few seconds
a random generator or verifier gets SIGKILL, or SIGSTOP, so that only the heartbeat can find it;
every sixth update the trainer or the whole controller gets one, and the run goes on by `--resume`.
Blows keep step with the updates, so that a slow machine gets as many as a fast one. Who is which
process is read from the run's workers.jsonl. Then two short runs show that interrupted completions
are as long as others (`lengths.py`). Written to chaos.json; exit code 1 where a promise broke.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Promise, finish, machine
from chaos import lengths
from chaos.kill import Killer
from chaos.proof import prove
from chaos.runs import GONE_SECONDS, Run, quickstart

BUILD = Path(__file__).parents[1] / "build" / "chaos"
EVERY = (2.0, 6.0)  # seconds between two blows
SIXTH = 6  # updates between two deaths of trainer or controller: three checkpoints
SPARE = 1.2  # more blows than promised, since some hit who is dead already
MINUTES = 45.0
WORKERS = ("generator 0", "generator 1", "verifier 0", "verifier 1")
FIGURES = {"pass_at_1": 0.93, "format_rate": 0.99, "language_rate": 0.97}


def config() -> dict[str, Any]:
    return quickstart() | {
        "placement": {"kind": "ray"},
        "generator": {"workers": 2},
        "verifier": {"workers": 2},
        "checkpoint": {"every": 2, "keep": 2},
        "timeouts": {"heartbeat": 10.0},
    }


def harass(run: Run, killer: Killer, kills: int) -> list[dict[str, Any]]:
    """Until the run is finished; returns each end of a controller, and how it came about."""
    updates = config()["pipeline"]["updates"]
    ends: list[dict[str, Any]] = []
    deadline = time.monotonic() + 60 * MINUTES
    mortal: tuple[str, ...]
    done = 0  # updates; a resumed run does some again
    while not run.finished:
        if time.monotonic() > deadline:
            sys.exit(f"not finished after {MINUTES:g} minutes; see {run.log}")
        if run.ended:
            last = killer.kills[-1]["worker"] if killer.kills else "nobody"
            seconds = run.gone()
            ends.append({"killed": last, "code": run.process.returncode, "gone_after": seconds})
            expected = last in ("controller", "trainer") and run.process.returncode != 0
            if not expected or seconds is None:
                return ends
            print(f"{last} killed at update {run.updates}; resuming", flush=True)
            run.resume()
            continue
        done = max(done, run.updates)
        if done // SIXTH > len(ends) and done < updates:
            mortal = ("controller", "trainer")
        elif len(killer.kills) * updates < SPARE * kills * (done + 1):
            mortal = WORKERS
        else:
            mortal = ()
        if done and (kill := killer.strike(mortal)):
            print(f"{len(killer.kills):3} {kill['signal']} {kill['worker']}", flush=True)
            if kill["worker"] in ("controller", "trainer"):
                run.process.wait(GONE_SECONDS)
        time.sleep(killer.random.uniform(*EVERY))
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--kills", type=int, default=50)
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    shutil.rmtree(BUILD, ignore_errors=True)
    began = time.monotonic()
    with Run(config(), BUILD / "whole") as run:
        killer = Killer(run.folder, args.seed, BUILD / "whole" / "kills.jsonl")
        ends = harass(run, killer, args.kills)
        after = run.gone()
        left = run.left()
        finished = run.finished
    seconds = time.monotonic() - began
    promises = [ended(finished, ends, seconds, run), struck(killer, args.kills, run)]
    promises.append(gone(ends, after, left))
    report: dict[str, Any] = {}
    if finished:
        summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
        promises += [*prove(run.folder), *figures(summary)]
        report = {"summary": summary}
    lengths_report, more = lengths.compare(BUILD / "lengths", args.seed)
    promises += more
    print()
    finish(Path(__file__).with_name("chaos.json"), {
        "machine": machine(), "seed": args.seed, "seconds": round(seconds),
        "kills": killer.kills, "ends": ends, "lengths": lengths_report, **report,
    }, promises)  # fmt: skip


def ended(finished: bool, ends: list[dict[str, Any]], seconds: float, run: Run) -> Promise:
    how = ", ".join(f"{end['killed']} (exit code {end['code']})" for end in ends)
    return Promise(
        "the run comes to its end, resumed where trainer or controller died",
        f"{run.updates} updates in {seconds / 60:.1f} minutes, {len(ends)} times resumed: {how}",
        finished,
    )


def struck(killer: Killer, kills: int, run: Run) -> Promise:
    """Each generator or verifier that was hit is missed by the controller, unless that died too."""
    by = {name: sum(k["worker"].startswith(name) for k in killer.kills)
          for name in ("generator", "verifier", "trainer", "controller")}  # fmt: skip
    stopped = sum(k["signal"] == "SIGSTOP" for k in killer.kills)
    events = run.folder / "events.log"
    replaced = events.read_text(encoding="utf-8").count("replaced:") if events.is_file() else 0
    return Promise(
        f"at least {kills} workers are killed",
        f"{len(killer.kills)} ({', '.join(f'{n} {name}s' for name, n in by.items())}; {stopped} "
        f"of them stopped), {replaced} replaced",
        len(killer.kills) >= kills,
    )


def gone(ends: list[dict[str, Any]], after: float | None, left: list[str]) -> Promise:
    waits = [end["gone_after"] for end in ends] + [after]
    slowest = max((w for w in waits if w is not None), default=0.0)
    return Promise(
        "a controller that ends or is killed leaves no process behind",
        f"{len(left)} left {left}; all gone within {slowest:.1f} s of {len(waits)} ends",
        None not in waits and not left,
    )


def figures(summary: dict[str, Any]) -> list[Promise]:
    """The quickstart's, as README has them, with room for the spread over seeds."""
    promises = []
    for key, least in FIGURES.items():
        measure = summary[key]["after"]
        value = measure["value"] if isinstance(measure, dict) else measure
        interval = isinstance(measure, dict) and f" [{measure['low']:.3f}, {measure['high']:.3f}]"
        name = key.replace("_at_", "@").replace("_", " ")
        promises.append(
            Promise(f"{name} reaches {least}", f"{value:.3f}{interval or ''}", value >= least)
        )
    return promises


if __name__ == "__main__":
    main()
