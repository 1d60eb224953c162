"""Measures the growth of a long run: `make soak`, or `python -m chaos.soak --minutes 60`.

The tiny base trains on small batches until the time is up, under Ray with a worker killed every
half minute (`--kind ray`, the default), or in one process (`--kind thread`), with slots or with
vLLM (`--generator vllm`). Memory, files and threads of all its processes are sampled every five
seconds. Generator 0, verifier 0, the trainer and the controller live as long as the run. In the
pipeline's state of the newest checkpoint, unfinished groups are counted, and the size of the rest
is measured (`ledger`). The learning rate is close to zero, so that an hour's last update does the
same work as its first. Results go to soak.json (soak_thread.json, soak_vllm.json); the exit code
is 1 if something grows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.measure import Promise, finish, machine
from chaos.kill import Killer
from chaos.processes import command, marked, second_of, tree, usage, workers
from tramontane.models.names import numbered

SAMPLE_SECONDS = 5.0
KILL_SECONDS = 30.0
END_SECONDS = 300.0
WARM_UP = 1 / 3  # share of the time: caches fill, Ray starts workers, the heap grows
FEWEST = 24  # samples that are judged; two minutes
JUDGED_MINUTES = 60.0  # what the promises are made for
POINTS = 60  # points of each series in the report
MIB = 2**20

# Maximum growth in an hour, by the slope after the warm-up.
SUM_SHARE = 0.02  # share, for all processes that live as long as the run
WORKER_MIB = 24.0  # for each of these processes
LEDGER_SHARE = 0.10
COUNT = 4.0  # files, threads, …: maximum of the second half less that of the first
# Ray's log monitor keeps the logs of dead workers open, up to this number.
LOG_FILES = 200

RAY = ("log_monitor", "monitor.py", "dashboard.py", "DashboardAgent", "RuntimeEnvAgent",
       "gcs_server", "raylet")  # fmt: skip


def config(kind: str, generator: str, folder: Path) -> dict[str, Any]:
    raw = yaml.safe_load(Path("configs/quickstart.yaml").read_text(encoding="utf-8"))
    raw["data"]["eval"] = None
    raw["pipeline"] |= {"updates": 1_000_000, "n_async": 96, "n_batch": 64, "diversity": "none"}
    raw["trainer"]["learning_rate"] = 1e-9
    return raw | {
        "run_dir": str(folder),
        "placement": {"kind": kind},
        "generator": {"workers": 2, "kind": generator},
        "verifier": {"workers": 2},
        "checkpoint": {"every": 25, "keep": 2},
        "timeouts": {"heartbeat": 10.0},
    }


def sample(root: int, folder: Path) -> dict[str, float]:
    """Resources of all processes of the run at one moment, by role."""
    names = {pid: name for name, pid in workers(folder).items()}
    pids = tree(root)
    for pid, parent in pids.items():
        if parent in names and "verifier" in names[parent]:
            names[pid] = f"grader of {names[parent]}"
        elif parent in names and pid in second_of(parent):
            names[pid] = f"vllm of {names[parent]}"
    found: dict[str, float] = {"processes": 0, "files": 0, "threads": 0, "memory": 0, "store": 0}
    sessions = set()
    for pid in pids:
        use, line = usage(pid), command(pid)
        if use is None:
            continue
        role = names.get(pid) or next((r for r in RAY if r in line), "others")
        if option := re.search(r"--session[-_]dir=(\S+)", line):
            sessions.add(Path(option[1]))
        found["processes"] += 1
        for key in ("files", "threads", "memory", "store"):
            found[key] += getattr(use, key) if (key, role) != ("files", "log_monitor") else 0
        found[f"private {role}"] = found.get(f"private {role}", 0) + use.private
        found[f"files {role}"] = found.get(f"files {role}", 0) + use.files
        found[f"threads {role}"] = found.get(f"threads {role}", 0) + use.threads
    if taken := numbered(folder / "checkpoints"):
        state = json.loads((taken[-1] / "pipeline.json").read_bytes())
        found["groups"] = len(state.pop("groups"))
        found["ledger"] = len(json.dumps(state))
    found["disk run"] = _bytes(folder)
    found["disk ray"] = sum(map(_bytes, sessions))
    return found


def _bytes(folder: Path) -> int:
    done = subprocess.run(["du", "-sb", str(folder)], capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0]) if done.stdout else 0


def _lasting(key: str) -> bool:
    """True for the memory of a process that lives as long as the run."""
    return key.startswith("private ") and not key.endswith((" 1", " others", " lasting"))


def slope(seconds: np.ndarray, values: np.ndarray) -> float:
    """Growth of a series in an hour: the median of the slopes between all pairs (Theil–Sen) of
    half-minute means, so that neither an outlier nor a short burst decides."""
    edges = np.arange(seconds[0], seconds[-1] + 30, 30)
    which = np.digitize(seconds, edges)
    t = np.array([seconds[which == w].mean() for w in np.unique(which)])
    v = np.array([values[which == w].mean() for w in np.unique(which)])
    i, j = np.triu_indices(len(t), 1)
    return float(np.median((v[j] - v[i]) / (t[j] - t[i])) * 3600)


def judge(rows: list[dict[str, float]]) -> tuple[dict[str, dict[str, float]], list[Promise]]:
    """Median and hourly growth of each series after the warm-up and the first checkpoint, and the
    promises about them.

    Raises:
        SystemExit: too few samples are left.
    """
    rows = [row for row in rows[int(len(rows) * WARM_UP) :] if "groups" in row]
    if len(rows) < FEWEST:
        sys.exit(
            f"{len(rows)} samples after the warm-up and the first checkpoint, {FEWEST} are needed: "
            f"give it more --minutes"
        )
    for row in rows:
        row["private lasting"] = sum(v for k, v in row.items() if _lasting(k))
    seconds = np.array([row["seconds"] for row in rows])
    figures: dict[str, dict[str, float]] = {}
    for key in dict.fromkeys(k for row in rows for k in row if k != "seconds"):
        have = np.array([key in row for row in rows])
        if have.sum() < len(rows) / 2:
            continue
        values = np.array([row.get(key, 0.0) for row in rows])
        figures[key] = {
            "median": float(np.median(values[have])),
            "lowest": float(values[have].min()),
            "highest": float(values[have].max()),
            "per_hour": slope(seconds[have], values[have]),
        }
    promises = []

    def hold(key: str, limit: float, unit: str, scale: float = 1.0) -> None:
        found = figures[key]
        promises.append(Promise(
            f"{key} grows by at most {limit / scale:,.4g} {unit} an hour",
            f"{found['per_hour'] / scale:+,.4g} (median {found['median'] / scale:,.5g})",
            found["per_hour"] <= limit,
        ))  # fmt: skip

    for key in figures:
        if _lasting(key):
            hold(key, WORKER_MIB * MIB, "MiB", MIB)
    hold("private lasting", SUM_SHARE * figures["private lasting"]["median"], "MiB", MIB)
    if figures["store"]["median"] > MIB:
        hold("store", SUM_SHARE * figures["store"]["median"], "MiB", MIB)
    half = len(rows) // 2
    for key in ("processes", "files", "threads", "groups"):
        first, second = (max(row[key] for row in part) for part in (rows[:half], rows[half:]))
        promises.append(Promise(
            f"the maximum of {key} in the second half is at most {COUNT:g} above that of the first",
            f"{first:.0f} and {second:.0f}", second <= first + COUNT,
        ))  # fmt: skip
    if logs := figures.get("files log_monitor"):
        promises.append(Promise(
            f"Ray's log monitor has no more than {LOG_FILES} files of dead workers open",
            f"{logs['highest']:.0f} with its own", logs["highest"] < LOG_FILES + 50,
        ))  # fmt: skip
    hold("ledger", LEDGER_SHARE * figures["ledger"]["median"], "bytes")
    return figures, promises


def watch(
    run: subprocess.Popen[bytes], folder: Path, killer: Killer, seconds: float, kill: bool
) -> tuple[list[dict[str, float]], bool]:
    """Sample until the time is up or the run ends; returns the samples, and True if it lasted."""
    rows: list[dict[str, float]] = []
    began = time.monotonic()
    next_kill = began + 2 * KILL_SECONDS
    while (now := time.monotonic()) < began + seconds and run.poll() is None:
        if kill and now >= next_kill:
            killer.strike(["generator 1", "verifier 1"])
            next_kill += KILL_SECONDS
        if (folder / "metrics.jsonl").exists():
            rows.append({"seconds": round(now - began, 1)} | sample(run.pid, folder))
            with (folder.parent / "samples.jsonl").open("a", encoding="utf-8") as series:
                series.write(json.dumps(rows[-1]) + "\n")
        time.sleep(max(0.0, SAMPLE_SECONDS - (time.monotonic() - now)))
    return rows, run.poll() is None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.soak")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--kind", choices=["ray", "thread"], default="ray")
    parser.add_argument("--generator", choices=["slots", "vllm"], default="slots")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    name = "soak" if args.kind == "ray" else f"soak_{args.kind}"
    name += "" if args.generator == "slots" else f"_{args.generator}"
    build = Path(__file__).parents[1] / "build" / name
    subprocess.run(["rm", "-rf", str(build)], check=True)
    build.mkdir(parents=True)
    folder = build / "run"
    file = build / "config.yaml"
    file.write_text(yaml.safe_dump(config(args.kind, args.generator, folder)), encoding="utf-8")
    mark = f"TRAMONTANE_SOAK={os.getpid()}"
    with (build / "output.log").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "tramontane", "train", str(file)],
            stdout=log,
            stderr=log,
            env=os.environ | dict([mark.split("=")]),
            start_new_session=True,
        )
    killer = Killer(folder, args.seed, build / "kills.jsonl")
    try:
        rows, survived = watch(run, folder, killer, 60 * args.minutes, args.kind == "ray")
        if survived:
            run.send_signal(signal.SIGINT)
        code = run.wait(END_SECONDS)
        time.sleep(SAMPLE_SECONDS)
        left = [command(pid) for pid in marked(mark)]
    finally:
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    minutes = (rows[-1]["seconds"] - rows[0]["seconds"]) / 60
    figures, promises = judge(rows)
    grown = (rows[-1]["disk run"] - rows[0]["disk run"]) / minutes
    thin = {key: [round(row[key], 1) for row in rows[:: max(1, len(rows) // POINTS)] if key in row]
            for key in figures}  # fmt: skip
    promises += [
        Promise("the run lasts, and Ctrl-C ends it", f"exit code {code}",
                survived and code == 130),
        Promise("it leaves no process behind", f"{len(left)} {left}", not left),
    ]  # fmt: skip
    print(f"{'':24}{'median':>12}{'lowest':>12}{'highest':>12}{'an hour':>12}")
    for key, row in figures.items():
        scale = MIB if key.split()[0] in ("memory", "private", "store", "disk") else 1
        print(f"{key:24}" + "".join(f"{row[k] / scale:12,.2f}" for k in row))
    print(
        f"{len(metrics):,} updates in {minutes:.0f} minutes, {len(killer.kills)} workers killed; "
        f"the run folder grows by {grown / MIB:.1f} MiB a minute"
    )
    if args.minutes < JUDGED_MINUTES:
        print(f"shorter than {JUDGED_MINUTES:.0f} minutes: part of the warm-up counts as growth")
    finish(Path(__file__).with_name(f"{name}.json"), {
        "machine": machine(), "kind": args.kind, "generator": args.generator, "seed": args.seed,
        "minutes": round(minutes, 1),
        "updates": len(metrics), "kills": len(killer.kills),
        "disk_bytes_per_minute": round(grown), "figures": figures, "samples": thin,
    }, promises)  # fmt: skip


if __name__ == "__main__":
    main()
