"""The cost of recording long rollouts: the event loop's stalls, and the time of a checkpoint.

    python -m benchmarks.recording [--completions 2048] [--tokens 6000] [--repeats 3]
                                   [--against 738ba87]

An update of `--completions` completions of `--tokens` tokens, in groups of 16, goes through the
recorder of a run: rollouts, metrics, and a checkpoint with as many completions again pending, half
of them unfinished. The trainer's part of the checkpoint is excluded. A task that wakes every
millisecond measures how long the event loop stands still (`stall`, milliseconds); `record` and
`checkpoint` are seconds, and the sizes of their files megabytes. Then the same script measures the
commit `--against`, in a temporary checkout, where tokens were lists and rows were made on the
loop. Prints a table with ratios and their spread, writes recording.json next to this file, and
exits with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.measure import Promise, batch_settings, finish, machine, spread

GROUP, VERSIONS, TICK = 16, 4, 0.001
FIGURES = ("record_stall_ms", "record_s", "checkpoint_stall_ms", "checkpoint_s")
SIZES = ("rollouts_mb", "checkpoint_mb")
LEAST_RATIO = 20.0  # promised: of the stalls before and after


class Ticker:
    """Context manager: the longest time that the event loop stood still, in seconds."""

    async def __aenter__(self) -> Ticker:
        self.longest = 0.0
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(10 * TICK)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)
        self._task.cancel()

    async def _tick(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last - TICK), now


def make_groups(first: int, count: int, tokens: int, vocab: int) -> list[Any]:
    """Whole graded groups."""
    from tramontane.types import Completion, Group, Problem, Verdict

    rng, groups = random.Random(first), []
    versions = [i * VERSIONS // tokens for i in range(tokens)]
    for number in range(first, first + count):
        problem = Problem(f"p{number}", "math", "What is the sum of 1 and 2? " * 8, "3")
        completions, verdicts = [], []
        for index in range(GROUP):
            ids = [rng.randrange(10, vocab) for _ in range(tokens)]
            logprobs = [-rng.random() for _ in range(tokens)]
            text = "<think>" + " and so it is" * (tokens // 4) + "</think>\n\\boxed{3}"
            completions.append(
                Completion(number, index, [1] * 64, ids, logprobs, [*versions], "stop", text)
            )
            parts = {"format": 0.1, "correctness": 0.9, "length": 0.0, "language": 0.1}
            verdicts.append(Verdict(index % 2, parts, "right" if index % 2 else "wrong"))
        groups.append(Group(number, problem, completions, verdicts))
    return groups


async def measure(completions: int, tokens: int, folder: Path) -> dict[str, float]:
    """The figures of one update and one checkpoint."""
    from concurrent.futures import Future

    from tramontane.batches import Batch
    from tramontane.config import Config
    from tramontane.controller.ledger import Ledger
    from tramontane.controller.observer import Update
    from tramontane.run.measurement import Judges
    from tramontane.run.prepare import prepare
    from tramontane.run.recorder import Recorder
    from tramontane.run.screen import QuietScreen
    from tramontane.run.session import Session
    from tramontane.types import Completion, Group, SamplingParams
    from tramontane.verifier.pool import PoolStats

    class Trainer:
        name = "trainer"

        def submit(self, method: str, *args: Any) -> Future[Any]:
            if args:
                # The commit `--against` passes paths.
                path = args[0].path / args[0].part if hasattr(args[0], "part") else args[0]
                path.mkdir(parents=True)
                (path / "file").write_bytes(b"x")
            return self.release()

        def release(self, *_: Any) -> Future[Any]:
            done: Future[Any] = Future()
            done.set_result(True)
            return done

    config = Config.model_validate(
        {
            "run_dir": str(folder),
            "data": {"train": "playground:", "eval": None},
            "pipeline": {"n_batch": completions, "n_async": completions, "group_size": GROUP,
                         "l_max": 512, "l_cache": 64},
            "checkpoint": {"every": 1000},
        }
    )  # fmt: skip
    session = Session.open(config, QuietScreen())
    pool = SimpleNamespace(generated_tokens=0, busy_seconds=0.0, seconds_without_work=0.0)
    verifiers = SimpleNamespace(stats=lambda: PoolStats())
    recorder = Recorder(session, pool, Judges(verifiers, None), Trainer())  # type: ignore[arg-type]
    recorder._parity_due = False
    prepared = prepare(config)
    ledger = Ledger(config, prepared.problems, lambda problem: [1] * 64)
    count, vocab = completions // GROUP, 1000
    for group in make_groups(count, count, tokens, vocab):
        half = GROUP // 2
        pending = [
            Completion.requested(group.id, c.index, c.prompt_ids, 7, SamplingParams(tokens),
                                 token_ids=c.token_ids, logprobs=c.logprobs, versions=c.versions)
            for c in group.completions[half:]
        ]  # fmt: skip
        ledger.groups.add(
            Group(
                group.id, group.problem, group.completions[:half], [], deadline=2, requests=pending
            )
        )
    ledger.trained_version = 1
    settings = batch_settings(tokens, completions)
    batch = Batch(VERSIONS, make_groups(0, count, tokens, vocab), settings)
    update = Update(
        1, batch, [], {"trained_tokens": 1, "computed_tokens": 1, "skipped_steps": 0}, 0.0, 0.0
    )
    pipeline = SimpleNamespace(version=1, ledger=ledger)
    found: dict[str, float] = {}

    async def timed(name: str, work: Callable[[], Awaitable[Any]]) -> None:
        async with Ticker() as ticker:
            began = time.perf_counter()
            await work()
            found[f"{name}_s"] = time.perf_counter() - began
        found[f"{name}_stall_ms"] = 1e3 * ticker.longest

    await timed("record", lambda: recorder.trained(update, pipeline))  # type: ignore[arg-type]

    async def checkpoint() -> None:
        await recorder.checkpoint(pipeline)  # type: ignore[arg-type]
        if hasattr(recorder, "committed"):  # older versions commit within `checkpoint`
            await recorder.committed()

    await timed("checkpoint", checkpoint)
    found["rollouts_mb"] = _megabytes(folder / "rollouts")
    found["checkpoint_mb"] = _megabytes(folder / "checkpoints")
    return found


def _megabytes(folder: Path) -> float:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 2**20


def run(root: Path, args: argparse.Namespace) -> dict[str, float]:
    """Measure the code under `root`, in a process of its own."""
    here = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(sys.executable, __file__, "--measure", folder),
                *(f"--completions={args.completions}", f"--tokens={args.tokens}"),
            ],
            env=os.environ | {"PYTHONPATH": f"{root / 'src'}:{here}"},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
    return {key: float(value) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}


def promises(figures: dict[str, Any]) -> list[Promise]:
    return [
        Promise(
            f"{name}: the event loop's longest stall is at most a {LEAST_RATIO:g}th of before",
            f"{found['after']['highest']:,.0f} ms against {found['before']['lowest']:,.0f} ms",
            found["ratio"]["lowest"] >= LEAST_RATIO,
        )
        for name in ("record", "checkpoint")
        for found in [figures[f"{name}_stall_ms"]]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--completions", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", default="738ba87")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        folder = Path(args.measure) / "run"
        print(json.dumps(asyncio.run(measure(args.completions, args.tokens, folder))))
        return
    here = Path(__file__).resolve().parent.parent
    rows: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        git = ["git", "-C", str(here), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(old), args.against], check=True)
        try:
            for _ in range(args.repeats):
                rows["before"].append(run(old, args))
                rows["after"].append(run(here, args))
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)
    figures = {
        key: {when: spread([row[key] for row in found], 2) for when, found in rows.items()}
        | {
            "ratio": spread(
                [b[key] / a[key] for b, a in zip(rows["before"], rows["after"], strict=True)], 2
            )
        }
        for key in (*FIGURES, *SIZES)
    }
    print(f"{args.completions} completions of {args.tokens} tokens; median (range)")
    print(f"{'':>20} {'before':>26} {'after':>26} {'ratio':>24}")
    for key, values in figures.items():
        texts = [
            f"{v['median']:,.1f} ({v['lowest']:,.1f}–{v['highest']:,.1f})" for v in values.values()
        ]
        print(f"{key:>20} {texts[0]:>26} {texts[1]:>26} {texts[2]:>24}")
    report = {"machine": machine(), **vars(args), "figures": figures}
    del report["measure"]
    finish(__file__, report, promises(figures))


if __name__ == "__main__":
    main()
