"""Kills ranks of the trainer throughout a run, most of them while they write a checkpoint.

    python -m chaos.ranks [--seed N] [--kills 8] [--placements thread ray shared]

In each placement, a short run with two ranks takes a checkpoint after every update; in `shared`,
which is `thread` otherwise, the ranks share each row (`trainer.context_parallel`). A random rank
gets SIGKILL, at a random time or a few milliseconds after a checkpoint was begun. Each time the
trainer must restart by itself from the newest checkpoint, and every folder that has the name of a
checkpoint must be complete. At most two kills fall on the same checkpoint, as many as
`trainer.max_restarts` allows. The other promises are checked from the run's folder (`proof.py`).
Results go to ranks.json; the exit code is 1 if a promise broke.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM

from benchmarks.measure import Promise, finish, machine
from chaos.cluster import config as cluster_config
from chaos.processes import workers
from chaos.proof import prove
from chaos.runs import Run, lines
from tramontane.models.loading import load_model
from tramontane.models.names import numbered, resolve
from tramontane.run.folder import RunFolder
from tramontane.run.manifest import damage

BUILD = Path(__file__).parents[1] / "build" / "ranks"
TEN_HEADS = BUILD / "ten_heads"
RANKS = 2
SHARED = "shared"
KILLS_PER_CHECKPOINT = 2
AIMED_SHARE = 0.75  # of kills: at a rank that writes a checkpoint
WRITE_SECONDS = 0.05  # range of the delay between the start of a checkpoint and an aimed kill
WORK_SECONDS = 5.0  # range of the delay of any other kill
MINUTES = 20.0  # limit for one run

Found = TypeVar("Found")


def config(placement: str, kills: int) -> dict[str, Any]:
    raw = cluster_config()
    raw["pipeline"]["updates"] = 4 + 2 * kills  # more than the kills need
    return raw | {
        "name": "ranks",
        "model": str(TEN_HEADS) if placement == SHARED else "tiny",
        "trainer": raw["trainer"]
        | {
            "ranks": RANKS,
            "context_parallel": RANKS if placement == SHARED else 1,
            "max_restarts": KILLS_PER_CHECKPOINT,
        },
        "placement": {"kind": "thread" if placement == SHARED else placement},
        "checkpoint": {"every": 1, "keep": 2},
    }


def save_ten_heads(folder: Path) -> None:
    """Save `tiny`, which has five heads, with five more of zeros: two ranks can share them."""
    model = load_model("tiny", torch.float32, "cpu")
    config = copy.deepcopy(model.config)
    config.head_dim = config.hidden_size // config.num_attention_heads
    config.num_attention_heads = config.num_key_value_heads = 10
    wider = AutoModelForCausalLM.from_config(config)
    tensors = wider.state_dict()
    for name, tensor in model.state_dict().items():
        tensors[name].zero_()[tuple(map(slice, tensor.shape))] = tensor
    shutil.copytree(resolve("tiny"), folder)
    wider.save_pretrained(folder)


class Harm:
    """Kills ranks of a run one after another, and looks at its checkpoints after each."""

    def __init__(self, run: Run, seed: int) -> None:
        self.run, self.random = run, random.Random(seed)
        self.kills: list[dict[str, Any]] = []
        self.damaged: list[str] = []
        self._deadline = time.monotonic() + 60 * MINUTES

    def strike(self) -> bool:
        """Kill a random rank, and wait for the trainer's restart; False once the run has ended."""
        name = f"trainer rank {self.random.randrange(RANKS)}"
        if self._wait(lambda: workers(self.run.folder).get(name)) is None:
            return False
        if self.random.random() < AIMED_SHARE:
            if self._wait(lambda: self._begun() is not None) is None:
                return False
            delay = self.random.uniform(0, WRITE_SECONDS)
        else:
            delay = self.random.uniform(0, WORK_SECONDS)
        time.sleep(delay)
        process = workers(self.run.folder).get(name)
        if process is None:
            return not self.run.ended
        # A stopped process writes nothing while its files are looked at.
        os.kill(process, signal.SIGSTOP)
        kill = {"worker": name, "update": self.run.updates, "newest": self._newest()} | (
            self._files_of(int(name[-1]))
        )
        os.kill(process, signal.SIGKILL)
        self.kills.append(kill)
        restarted = self._wait(lambda: len(self.restarts()) >= len(self.kills))
        self.damaged += self._damaged()
        print(f"{len(self.kills):3} {kill}", flush=True)
        return restarted is not None

    def wait_for_checkpoint(self) -> None:
        """Wait for a newer checkpoint than there was at the last kill."""
        newest = self.kills[-1]["newest"]
        self._wait(lambda: self._newest() > newest)

    def wait_for_the_end(self) -> None:
        self._wait(lambda: self.run.ended)

    def restarts(self) -> list[dict[str, Any]]:
        return [r for r in lines(self.run.folder / "workers.jsonl") if "restarted_from" in r]

    def _files_of(self, rank: int) -> dict[str, bool]:
        """What the rank has written of the checkpoint that is not committed: `begun` if there is
        one, `written` if all files of the rank are there."""
        partial = self._begun()
        written = partial is not None and (partial / "trainer" / f"checksums_{rank}").exists()
        return {"begun": partial is not None, "written": written}

    def _begun(self) -> Path | None:
        """The checkpoint of which ranks write their state now."""
        found = self.run.folder.glob("checkpoints/*.partial")
        return next((path for path in found if (path / "trainer").is_dir()), None)

    def _newest(self) -> int:
        return RunFolder(self.run.folder).newest_version

    def _damaged(self) -> list[str]:
        faults = [(path, damage(path)) for path in numbered(self.run.folder / "checkpoints")]
        # The run deletes the oldest meanwhile.
        return [f"{path.name}: {fault}" for path, fault in faults if fault and path.exists()]

    def _wait(self, found: Callable[[], Found]) -> Found | None:
        """Wait until `found` returns something; None once the run has ended.

        Raises:
            SystemExit: the time limit has passed.
        """
        while not (value := found()):
            if time.monotonic() > self._deadline:
                sys.exit(f"not finished after {MINUTES:g} minutes; see {self.run.log}")
            if self.run.ended:
                return None
            time.sleep(0.001)
        return value


def harass(placement: str, kills: int, seed: int) -> tuple[list[Promise], list[dict[str, Any]]]:
    """One run; returns its promises and the kills."""
    if placement == SHARED:
        save_ten_heads(TEN_HEADS)
    with Run(config(placement, kills), BUILD / placement) as run:
        harm = Harm(run, seed)
        while len(harm.kills) < kills and harm.strike():
            if len(harm.kills) % KILLS_PER_CHECKPOINT == 0:
                harm.wait_for_checkpoint()
        harm.wait_for_the_end()
        finished, code, remaining = run.finished, run.process.returncode, run.gone()
    restarts = harm.restarts()
    begun = sum(kill["begun"] for kill in harm.kills)
    within = sum(kill["begun"] and not kill["written"] for kill in harm.kills)
    older = [
        f"{restart['restarted_from']} < {kill['newest']}"
        for kill, restart in zip(harm.kills, restarts, strict=False)
        if restart["restarted_from"] < kill["newest"]
    ]
    promises = [
        Promise(
            "ranks are killed, some of them while they write a checkpoint",
            f"{len(harm.kills)}, {begun} of them while a checkpoint was being written, {within} "
            f"before the rank had written its files",
            len(harm.kills) >= kills and within > 0,
        ),
        Promise(
            "the trainer restarts by itself after each kill, and the run comes to its end",
            f"{len(restarts)} restarts, {run.updates} updates, exit code {code}",
            finished and code == 0 and len(restarts) == len(harm.kills),
        ),
        Promise(
            "a checkpoint is complete or absent after each kill",
            f"{len(harm.damaged)} damaged {harm.damaged}",
            not harm.damaged,
        ),
        Promise(
            "each restart begins with the newest checkpoint that was there at the kill, or a newer",
            f"{len(older)} older {older}",
            not older,
        ),
        Promise(
            "no process is left behind",
            f"{'some left' if remaining is None else f'all gone within {remaining:.1f} s'}",
            remaining is not None,
        ),
        *(prove(run.folder) if finished else []),
    ]
    named = [p._replace(promise=f"{placement}: {p.promise}") for p in promises]
    return named, harm.kills


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.ranks")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--kills", type=int, default=8, help="in each placement")
    placements = ["thread", "ray", SHARED]
    parser.add_argument("--placements", nargs="+", choices=placements, default=placements)
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    shutil.rmtree(BUILD, ignore_errors=True)
    promises, kills, seconds = list[Promise](), {}, {}
    for placement in args.placements:
        began = time.monotonic()
        found, kills[placement] = harass(placement, args.kills, args.seed)
        promises += found
        seconds[placement] = round(time.monotonic() - began)
    print()
    finish(Path(__file__), {
        "machine": machine(), "seed": args.seed, "seconds": seconds, "kills": kills,
    }, promises)  # fmt: skip


if __name__ == "__main__":
    main()
