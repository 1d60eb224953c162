"""Kills workers throughout a run and proves from its records that no promise broke.

    make chaos            or: python -m chaos [--seed N] [--kills 50] [--generator slots|vllm]
                                               [--updates N] [--conversations]

The run is the quickstart with all its updates, under Ray, with two generators and two verifiers.
Every few seconds a random generator or verifier gets SIGKILL, or SIGSTOP, which only the heartbeat
can find; every sixth update the trainer or the controller gets SIGKILL. The trainer restarts by
itself; after the controller's death the run is resumed with `--resume`. At random moments, a second
process begins or resumes the same run, and must be refused. The number of signals follows
the updates, so that a slow machine gets as many as a fast one. Processes are found by the run's
workers.jsonl. Then two short runs show that interrupted completions are as long as others
(`lengths.py`). Results go to chaos.json; the exit code is 1 if a promise broke.

With `--generator vllm` each generator has a second process, vLLM's, which is killed as often as the
first. Results go to chaos_vllm.json. With `--updates` the run has that many updates, no evaluation
and so no figures to reach. With `--conversations` each completion is a conversation with an
environment (`talk.py`), whose processes are killed too; the seed draws whether those that had begun
are replayed or start again. Results go to chaos_conversations.json.
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
from chaos.runs import GONE_SECONDS, Intruder, Run, lines, quickstart

BUILD = Path(__file__).parents[1] / "build" / "chaos"
KILL_SECONDS = (2.0, 6.0)  # range of the time between two signals
INTRUDE_SHARE = 0.3  # share of the moments between two signals at which a second process starts
UPDATES_BETWEEN_ENDS = 6  # between two kills of trainer or controller: three checkpoints
SURPLUS = 1.2  # signals sent per kill promised
MINUTES = 45.0
ENDS = ("controller", "trainer")  # a kill ends a session of the run
WORKERS = ("generator 0", "generator 1", "verifier 0", "verifier 1")
ENVIRONMENTS = ("environment 0", "environment 1")
FIGURES = {"pass_at_1": 0.93, "format_rate": 0.99, "language_rate": 0.97}


def config(args: argparse.Namespace) -> dict[str, Any]:
    raw = quickstart()
    if args.updates is not None:
        raw["pipeline"]["updates"] = args.updates
        raw["data"]["eval"] = None
    if args.conversations:
        raw["data"]["environment"] = "chaos.talk:Talk"
        replay = random.Random(args.seed).random() < 0.5
        raw["conversation"] = {"workers": len(ENVIRONMENTS), "replay": replay}
        raw["pipeline"]["l_max"] *= 3
    return raw | {
        "placement": {"kind": "ray"},
        "generator": {"workers": 2, "kind": args.generator},
        "verifier": {"workers": 2},
        "checkpoint": {"every": 2, "keep": 2},
        "timeouts": {"heartbeat": 10.0},
    }


def harass(
    run: Run, killer: Killer, kills: int, config: dict[str, Any], intruders: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Send signals until the run is finished, and start second processes on its folder, whose ends
    are added to `intruders`; returns each end of the controller and its cause."""
    updates = config["pipeline"]["updates"]
    workers = WORKERS + (ENVIRONMENTS if "conversation" in config else ())
    ends: list[dict[str, Any]] = []
    intruder: Intruder | None = None
    deadline = time.monotonic() + 60 * MINUTES
    targets: tuple[str, ...]
    done, struck = 0, 0  # updates (a resumed run does some again), and kills of ENDS
    while not run.finished:
        if time.monotonic() > deadline:
            sys.exit(f"not finished after {MINUTES:g} minutes; see {run.log}")
        if run.ended:
            last = killer.kills[-1]["worker"] if killer.kills else "nobody"
            seconds = run.gone()
            ends.append({"killed": last, "code": run.process.returncode, "gone_after": seconds})
            expected = last == "controller" and run.process.returncode != 0
            if not expected or seconds is None:
                return ends
            print(f"{last} killed at update {run.updates}; resuming", flush=True)
            run.resume()
            continue
        done = max(done, run.updates)
        if intruder and not intruder.running:
            if found := intruder.ended():
                intruders.append(found)
            intruder = None
        # Before the run owns its folder a second process would rightly become the owner.
        if run.owns and done and not intruder and killer.random.random() < INTRUDE_SHARE:
            intruder = Intruder(run, *killer.random.choice([run.begins, run.resumes]))
        if done // UPDATES_BETWEEN_ENDS > struck and done < updates:
            # An intruder that begins just when the controller dies would rightly own the folder.
            targets = tuple(name for name in ENDS if not intruder or name != "controller")
        elif len(killer.kills) * updates < SURPLUS * kills * (done + 1):
            targets = workers
        else:
            targets = ()
        if done and (kill := killer.strike(targets)):
            print(f"{len(killer.kills):3} {kill['signal']} {kill['worker']}", flush=True)
            struck += kill["worker"] in ENDS
            if kill["worker"] == "controller":
                run.process.wait(GONE_SECONDS)
        time.sleep(killer.random.uniform(*KILL_SECONDS))
    if intruder:
        intruder.wait()
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--generator", choices=["slots", "vllm"], default="slots")
    parser.add_argument("--updates", type=int, help="by default those of the quickstart")
    parser.add_argument("--conversations", action="store_true")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    shutil.rmtree(BUILD, ignore_errors=True)
    raw = config(args)
    began = time.monotonic()
    with Run(raw, BUILD / "whole") as run:
        killer = Killer(run.folder, args.seed, BUILD / "whole" / "kills.jsonl")
        intruders: list[dict[str, Any]] = []
        ends = harass(run, killer, args.kills, raw, intruders)
        last_wait = run.gone()
        remaining = run.remaining()
        finished = run.finished
    seconds = time.monotonic() - began
    promises = [finished_run(finished, ends, seconds, run)]
    promises += [killed(killer, args.kills, run, args.conversations)]
    promises += [refused(intruders), nothing_left(ends, last_wait, remaining)]
    report: dict[str, Any] = {}
    if finished:
        summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
        promises += prove(run.folder)
        promises += figures(summary) if not (args.updates or args.conversations) else []
        report = {"summary": summary}
    lengths_report, length_promises = lengths.compare(BUILD / "lengths", args.seed, args.generator)
    promises += length_promises
    print()
    name = "chaos.json" if args.generator == "slots" else f"chaos_{args.generator}.json"
    name = "chaos_conversations.json" if args.conversations else name
    finish(Path(__file__).with_name(name), {
        "machine": machine(), "seed": args.seed, "updates": raw["pipeline"]["updates"],
        "conversation": raw.get("conversation"),
        "seconds": round(seconds),
        "kills": killer.kills, "intruders": intruders, "ends": ends,
        "lengths": lengths_report, **report,
    }, promises)  # fmt: skip


def finished_run(finished: bool, ends: list[dict[str, Any]], seconds: float, run: Run) -> Promise:
    causes = ", ".join(f"{end['killed']} (exit code {end['code']})" for end in ends)
    restarts = sum("restarted_from" in row for row in lines(run.folder / "workers.jsonl"))
    return Promise(
        "the run comes to its end, resumed where the controller died",
        f"{run.updates} updates in {seconds / 60:.1f} minutes, {len(ends)} times resumed: "
        f"{causes or 'none'}; the trainer restarted by itself {restarts} times",
        finished,
    )


def killed(killer: Killer, kills: int, run: Run, conversations: bool) -> Promise:
    """The controller replaces each killed generator, verifier or environment, unless it was killed
    too."""
    kinds = ("generator", "verifier", "environment", "trainer", "controller")
    counts = {name: sum(k["worker"].startswith(name) for k in killer.kills) for name in kinds}
    stopped = sum(k["signal"] == "SIGSTOP" for k in killer.kills)
    events = run.folder / "events.log"
    replaced = events.read_text(encoding="utf-8").count("replaced:") if events.is_file() else 0
    return Promise(
        f"at least {kills} workers are killed{', environments among them' * conversations}",
        f"{len(killer.kills)} ({', '.join(f'{n} {name}s' for name, n in counts.items())}; "
        f"{stopped} of them stopped), {replaced} replaced",
        len(killer.kills) >= kills and counts["environment"] >= conversations,
    )


def refused(intruders: list[dict[str, Any]]) -> Promise:
    """The records show that these processes harmed nothing, as they do for the kills."""
    right = sum(found["code"] == 2 and found["refused"] for found in intruders)
    resumes = sum("--resume" in found["command"] for found in intruders)
    return Promise(
        "a second process on the folder of the living run is refused, by its owner's name",
        f"{right} of {len(intruders)} with exit code 2, {resumes} of them resumed",
        0 < right == len(intruders),
    )


def nothing_left(
    ends: list[dict[str, Any]], last_wait: float | None, remaining: list[str]
) -> Promise:
    waits = [end["gone_after"] for end in ends] + [last_wait]
    slowest = max((w for w in waits if w is not None), default=0.0)
    return Promise(
        "a controller that ends or is killed leaves no process behind",
        f"{len(remaining)} left {remaining}; all gone within {slowest:.1f} s of {len(waits)} ends",
        None not in waits and not remaining,
    )


def figures(summary: dict[str, Any]) -> list[Promise]:
    """The quickstart's figures reach those of the README, less the spread over seeds."""
    promises = []
    for key, minimum in FIGURES.items():
        measure = summary[key]["after"]
        value = measure["value"] if isinstance(measure, dict) else measure
        interval = isinstance(measure, dict) and f" [{measure['low']:.3f}, {measure['high']:.3f}]"
        name = key.replace("_at_", "@").replace("_", " ")
        promises.append(
            Promise(f"{name} reaches {minimum}", f"{value:.3f}{interval or ''}", value >= minimum)
        )
    return promises


if __name__ == "__main__":
    main()
