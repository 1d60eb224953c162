"""A run on machines that share no disk: one machine is switched off, and the controller is killed.

    make nodes            or: python -m chaos.nodes      (needs root)

The machines are Linux namespaces (`machines.py`), joined to one Ray cluster. Only the controller's
machine has the model and the run's folder. The two ranks of the trainer are on two machines. After
some updates the machine without the controller is switched off, without closing a connection, and
another takes its place: the run must continue by itself. Later the controller gets SIGKILL, and the
run is resumed. The promises are checked from the run's folder. Then the job files of
`configs/cluster` are run on such machines (`jobs.py`). The exit code is 1 if a promise broke.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from benchmarks.measure import Promise, finish, machine
from chaos import jobs
from chaos.cluster import BUILD, CONFIG, MODEL, NO_DASHBOARD, RUN, Site
from chaos.machines import Network, missing
from chaos.proof import prove
from chaos.runs import lines
from tramontane.models.names import numbered
from tramontane.run.manifest import damage

OFF_AT, KILL_AT = 3, 7  # updates after which a machine is switched off, the controller killed


def machine_lost() -> list[Promise]:
    """A machine is switched off, and the controller killed, in one run."""
    with Network() as network:
        proof = Site(network, "machine_lost")
        proof.start_ray(NO_DASHBOARD)
        other = proof.join()
        ray = ["placement.kind=ray", "placement.address=auto"]
        proof.start("tramontane", "train", CONFIG, f"run_dir={RUN}", *ray)
        proof.wait(lambda: proof.updates >= OFF_AT, f"update {OFF_AT} on two machines")
        private = [other.root / path.lstrip("/") for path in (MODEL, RUN, CONFIG)]
        shared = [str(path) for path in private if path.exists()]
        other.kill()
        off = time.monotonic()
        other = proof.join()
        events = proof.folder / "events.log"
        proof.wait(lambda: events.is_file() and "trainer restarted" in events.read_text(),
                   "trainer restarted after a machine was switched off")  # fmt: skip
        noticed = time.monotonic() - off
        proof.wait(lambda: proof.updates >= KILL_AT, f"update {KILL_AT} with another machine")
        proof.kill_controller()
        proof.start("tramontane", "train", "--resume", RUN)
        proof.wait((proof.folder / "summary.json").exists, "the end, after a resume")
        proof.controller.wait()
        left = [str(p) for m in (proof.head, other) for p in m.root.glob("tmp/tramontane-*/*/*")]
        shutil.copytree(proof.folder, BUILD / "run", ignore_dangling_symlinks=True)
        proof.log.close()
    return promises(BUILD / "run", shared, left, noticed)


def promises(run: Path, shared: list[str], left: list[str], noticed: float) -> list[Promise]:
    rows = lines(run / "workers.jsonl")
    received = [row for row in rows if "received" in row]
    models = [row for row in received if row["received"] == MODEL]
    states = [row for row in received if "/checkpoints/" in row["received"]]
    restarts = [row for row in rows if "restarted_from" in row]
    checkpoints = numbered(run / "checkpoints")
    faults = [f"{path.name}: {fault}" for path in checkpoints if (fault := damage(path))]
    ranks = {file.name[:3] for path in checkpoints for file in path.glob("trainer/__*.distcp")}
    return [
        Promise("the machines share no file of the run", f"{len(shared)} {shared}", not shared),
        Promise(
            "a machine that lacks the model or the trainer's state gets them from the controller",
            f"{len(models)} times a model, {len(states)} times a state, "
            f"{sum(row['bytes'] for row in received) / 2**20:.0f} MiB in all",
            bool(models and states),
        ),
        Promise(
            "checkpoints are whole, with the files of ranks on two machines",
            f"{len(checkpoints)}, faults: {faults}; files of {len(ranks)} ranks",
            bool(checkpoints) and not faults and len(ranks) == 2,
        ),
        Promise(
            "a machine that is switched off restarts the trainer, without a person",
            f"{len(restarts)} restarts, the first {noticed:.0f} s after the machine was off: "
            f"{[row['lost'][:90] for row in restarts]}",
            len(restarts) >= 1,
        ),
        Promise("no copy is left on a machine", f"{len(left)} {left}", not left),
        *prove(run),
    ]


def main() -> None:
    parts = {"machine_lost": machine_lost, "slurm": jobs.slurm, "rayjob": jobs.rayjob}
    parser = argparse.ArgumentParser(prog="python -m chaos.nodes")
    parser.add_argument("--only", choices=parts, action="append", help="run this part")
    only = parser.parse_args().only
    if reason := missing():
        sys.exit(reason)
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    found, seconds = list[Promise](), {}
    for name in only or parts:
        began = time.monotonic()
        found += parts[name]()
        seconds[name] = round(time.monotonic() - began)
    print()
    finish(Path(__file__).with_name("nodes.json"), {
        "machine": machine(), "seconds": seconds,
    }, found)  # fmt: skip


if __name__ == "__main__":
    main()
