"""This pipeline against TRL's GRPOTrainer on images: trained completion tokens per second, end to
end, and peak memory.

    python benchmarks/vs_trl_images.py [--rounds 3] [--updates 8] [--trl-updates 2]
                                       [--completions 256] [--trl-python PATH]
                                       [--trl JSON] [--ours JSON] [--timeout 600]

Both sides train `tiny_vision` on the playground's drawn sums, charts and tables, in groups of 16
with at most 128 new tokens, with the reward, the learning rate and the number type of `vs_trl.py`,
and with tower and projector frozen. `text` is the same model with the same problems in words: what
images cost is the time of a trained token beside that.

TRL has both cores (two threads); our side has one thread for each worker. The sides take turns in
one run, and each waits while the other works. Imports, loading and the first updates of each side
are not counted. Memory is the highest sum, over all processes of a side, of private memory and
shares of what is shared (Pss), twice a second during its turn; of TRL's since its process began.

Each turn is printed as it ends and kept in build/vs_trl_images.jsonl, so that the same command
resumes after one that was cut off. The script prints a table and writes vs_trl_images.json next to
this file; it fails if our side is not 2.5 times as fast on images.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import vs_trl
from measure import Promise, finish, machine, spread
from trl_process import TrlSide
from vs_trl import BUILD, HERE, THREADS, WARM_UP, Ended, our_turn
from vs_trl_task import GROUP, MAX_TOKENS, SEED

from tramontane.config import Config, parse
from tramontane.config.device import number_type
from tramontane.data.playground import problems
from tramontane.models.names import resolve

KINDS = ("drawn_sums", "drawn_bars", "drawn_tables")
SETS = ("images", "text")
PROMPTS = 2048
WANTED = 2.5


class Memory:
    """Peak memory of processes: of `root` and its descendants, but for those of `but`."""

    def __init__(self, root: int, but: int | None = None) -> None:
        self.root, self.but, self.peak = root, but, 0
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Memory:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()

    def _sample(self) -> None:
        while not self._done.wait(0.5):
            self.peak = max(self.peak, sum(map(_pss, self._processes())))

    def _processes(self) -> Iterator[int]:
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
                parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
        found = [self.root]
        for number in found:
            yield number
            found += [n for n, parent in parents.items() if parent == number and n != self.but]


def _pss(process: int) -> int:
    """Bytes of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
        return int(rollup.partition("\nPss:")[2].split()[0]) << 10
    return 0


def prepare(kind: str, folder: Path) -> None:
    """Write the problems, the same for both sides, and link the model."""
    (folder / "model").symlink_to(Path(resolve("tiny_vision")).absolute())
    rows = []
    for problem in problems("train", SEED, (1, 2), kinds=KINDS, count=PROMPTS):
        seen = {"problem": problem.problem, "image": problem.images[0]}
        told = {"problem": str(problem.metadata["text"])}
        rows.append((seen if kind == "images" else told) | {"answer": problem.answer})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("problems.jsonl", "prompts.jsonl"):
        (folder / name).write_text(text)


def our_config(folder: Path, run: Path, args: argparse.Namespace) -> Config:
    raw: dict[str, Any] = {
        "name": "vs_trl_images",
        "model": str(folder / "model"),
        "run_dir": str(run),
        "data": {"train": str(folder / "problems.jsonl"), "eval": None},
        "pipeline": {
            "n_batch": args.completions,
            "n_async": args.completions * 3 // 2,
            "max_staleness": 2,
            "updates": 10**6,
            "group_size": GROUP,
            "l_max": MAX_TOKENS,
            "l_cache": 0,
            "diversity": "none",
            "unscorable": "wrong",
        },
        "generator": {"steps_per_call": 8},
        "trainer": {"learning_rate": vs_trl.LEARNING_RATE, "microbatch_tokens": 2048},
        "verifier": {"reward": vs_trl.vowels(taught=False)},
        "checkpoint": {"every": 10**6},
    }
    for section, values in args.ours.items():
        raw[section] = raw.get(section, {}) | values
    return parse(Config, raw, "vs_trl_images.py")


def compare(kind: str, python: Path, args: argparse.Namespace, ended: Ended) -> dict[str, Any]:
    """Figures of all rounds on images, or on text."""
    ours, theirs = [], []
    with tempfile.TemporaryDirectory(prefix="vs_trl-") as name:
        folder = Path(name)
        prepare(kind, folder)
        settings = {
            "dtype": number_type("cpu").dtype, "checkpoint": str(folder / "model"),
            "prompts": str(folder / "prompts.jsonl"), "model": {}, "warm_up": WARM_UP,
            "updates": args.trl_updates, "threads": THREADS, "taught": False, "device": "cpu",
            "seed": SEED, "completions": args.completions, "group_size": GROUP,
            "max_tokens": MAX_TOKENS, "learning_rate": vs_trl.LEARNING_RATE,
            "microbatch": args.completions, **vs_trl.FASTEST, **args.trl,
        }  # fmt: skip
        side = TrlSide(python, settings, folder, args.timeout)
        process = side.start()
        with Memory(process.pid) as memory, side as trl:

            def ours_of(number: int) -> list[float]:
                config = our_config(folder, folder / f"run-{number}", args)
                with Memory(os.getpid(), process.pid) as own:
                    turn = our_turn(config, args.updates)
                return [*turn, own.peak / 2**20]

            for number in range(args.rounds):
                ours.append(ended.get((kind, number, "ours"), lambda: ours_of(number)))  # noqa: B023
                theirs.append(
                    ended.get((kind, number, "TRL"), lambda: [*trl.turn(), memory.peak / 2**20])
                )
    ratios = [a[0] / b[0] for a, b in zip(ours, theirs, strict=True)]
    return {
        "problems": kind,
        "trl_tokens_per_second": spread([turn[0] for turn in theirs]),
        "tokens_per_second": spread([turn[0] for turn in ours]),
        "ratio": spread(ratios, 2),
        "trl_mean_completion_tokens": round(mean(turn[1] for turn in theirs), 1),
        "mean_completion_tokens": round(mean(turn[1] for turn in ours), 1),
        "trl_peak_mib": round(max(turn[3] for turn in theirs)),
        "peak_mib": round(max(turn[3] for turn in ours)),
    }


def cost(rows: list[dict[str, Any]], side: str) -> float:
    """Microseconds of a trained token that images take."""
    seen, told = (1e6 / row[f"{side}tokens_per_second"]["median"] for row in rows)
    return round(seen - told, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=8, help="our updates in a turn")
    parser.add_argument("--trl-updates", type=int, default=2, help="TRL's updates in a turn")
    parser.add_argument("--completions", type=int, default=256, help="of an update")
    parser.add_argument("--trl-python", type=Path, help="an interpreter with TRL installed")
    parser.add_argument("--trl", type=json.loads, default={}, help="settings for TRL, as JSON")
    parser.add_argument(
        "--ours", type=json.loads, default={}, help="our config's sections, as JSON"
    )
    parser.add_argument("--timeout", type=float, default=600, help="seconds of TRL's turn, at most")
    args = parser.parse_args()
    # Our workers import the reward from here.
    os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    python = args.trl_python or vs_trl.trl_python(HERE / ".trl-venv")
    if absent := vs_trl.missing_for_trl(python, "cpu"):
        raise SystemExit("\n".join(["vs_trl_images.py cannot run here:", *absent]))
    torch.set_num_threads(THREADS)
    began = time.perf_counter()
    print("each turn: trained completion tokens/s, tokens a completion, seconds, peak MiB")
    ended = Ended(BUILD / "vs_trl_images.jsonl", sys.argv[1:])
    rows = [compare(kind, python, args, ended) for kind in SETS]
    for row in rows:
        print(json.dumps(row))
    costs = {"trl": cost(rows, "trl_"), "ours": cost(rows, "")}
    print(f"microseconds of a trained token that images take: {costs}")
    ended.forget()
    ratio = rows[0]["ratio"]
    found = f"{ratio['median']} ({ratio['lowest']}–{ratio['highest']})"
    promise = Promise(f"{WANTED} times TRL on images", found, ratio["median"] >= WANTED)
    report = {
        "command": sys.argv[1:], "minutes": round((time.perf_counter() - began) / 60, 1),
        "machine": machine(), "trl": vs_trl.TRL_VERSION, "rows": rows, "image_microseconds": costs,
    }  # fmt: skip
    finish(__file__, report, [promise])


if __name__ == "__main__":
    main()
