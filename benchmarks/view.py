"""Opening and searching a large run on the page of `tramontane view`.

    python -m benchmarks.view [--updates 400] [--groups 16] [--size 16] [--tokens 200]
                              [--repeats 3] [--folder FOLDER]

Makes a run of `--updates` files, each with `--groups` groups of `--size` completions, which have
`--tokens` tokens and about 900 characters on average; with `--folder`, the run stays there for the
next time. Then each repeat starts the command and measures, in seconds: `command`, until it prints
the address, which is mostly Python's imports; `open`, from there until the page, the run's
description, all narrow columns of the rollouts and the first 50 rows with their texts have arrived;
and each search, until it has seen all files (`answer` is the longest that a single answer took).
Prints a table, writes view.json next to this file, and exits with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np
import yaml

from benchmarks.measure import Promise, finish, machine, spread

OPEN_SECONDS, SEARCH_SECONDS = 2.0, 1.0  # promised
TEXT = (
    "so then the sum is first we add carry one and multiply wait check again because therefore "
    "total number of apples minus plus equals answer think long guess about"
)
SEARCHES: dict[str, dict[str, Any]] = {
    "verdict and reward": {"verdict": "wrong", "reward": "..0.5", "language": "fr"},
    "version and length": {"version": 17, "tokens": "150..250"},
    "reason": {"reason": "differs", "sort": "advantage"},
    "common text": {"text": "carry one"},
    "rare text": {"text": "zebra crossing"},
    "problem": {"problem": "What is 17 + 4"},
    "text in some updates": {"text": "apples minus", "update": "100..150"},
}


def make_run(folder: Path, args: argparse.Namespace) -> None:
    """A run with rollouts only."""
    from tramontane.run.folder import RunFolder
    from tramontane.types import Completion, Group, Problem, TrainedFigures, Verdict

    rng, numbers = random.Random(0), np.random.default_rng(0)
    words = TEXT.split()
    sentences = [
        " ".join(rng.choices(words, k=rng.randint(6, 12))) + f" {rng.randint(0, 999)}."
        for _ in range(20_000)
    ]
    run = RunFolder(folder)
    run.rollouts.mkdir(parents=True)
    config = {"name": "large", "model": "tiny", "pipeline": {"updates": args.updates}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))

    def completion(group: int, index: int, update: int) -> Completion:
        count = rng.randrange(args.tokens // 2, args.tokens * 3 // 2)
        ids = numbers.integers(10, 2000, count, dtype=np.int32)
        logprobs = -numbers.random(count, dtype=np.float32)
        versions = np.full(count, max(0, update - 2), np.int32)
        versions[rng.randrange(count) :] = update - 1
        thoughts = " ".join(rng.choices(sentences, k=max(1, count // 12)))
        rare = " zebra crossing" if rng.random() < 1e-4 else ""
        text = f"<think>{thoughts}{rare}</think>\n\\boxed{{3}}"
        ints, floats = array("i", ids.tobytes()), array("f", logprobs.tobytes())
        spans = array("i", versions.tobytes())
        return Completion(group, index, [1], ints, floats, spans, "stop", text)

    for update in range(1, args.updates + 1):
        groups = []
        for number in range((update - 1) * args.groups, update * args.groups):
            statement = (
                f"What is {rng.randrange(99)} + {rng.randrange(99)}? {rng.choice(sentences)}"
            )
            problem = Problem(
                f"p-{rng.randrange(4000)}", "math", statement, "3",
                language=rng.choice(["en", "fr", "de"]), difficulty=rng.randrange(1, 5),
            )  # fmt: skip
            completions = [completion(number, i, update) for i in range(args.size)]
            right = [rng.random() < 0.5 for _ in completions]
            verdicts = [
                Verdict(float(r), {"correctness": float(r)}, "right" if r else "wrong",
                        "" if r else "the answer differs", 0.01, "3")
                for r in right
            ]  # fmt: skip
            trained = [p + 0.01 for c in completions for p in c.logprobs]
            advantages = array("d", numbers.normal(size=args.size).tobytes())
            learned = TrainedFigures(advantages, array("f", trained))
            groups.append((Group(number, problem, completions, verdicts, learned), None))
        run.write_rollouts(update, groups, ["correctness"])
        run.log({"update": update, "wall_seconds": 9.0 * update, "reward": rng.random()})


def get(address: str, name: str, **params: Any) -> Any:
    with urlopen(f"{address}{name}?{urlencode(params)}", timeout=120) as answer:
        content = answer.read()
    return json.loads(content) if name.startswith("api/") else content


def measure(folder: Path) -> dict[str, float]:
    """The seconds of one start of the command."""
    began = time.monotonic()
    command = [sys.executable, "-m", "tramontane", "view", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        ready = time.monotonic()
        found = {"command": ready - began}
        for name in ("", "app.js", "uPlot.iife.min.js", "style.css", "api/runs"):
            get(address, name)
        get(address, "api/metrics", run=0)
        get(address, "api/facets", run=0)
        get(address, "api/rollouts", run=0)
        found["open"] = time.monotonic() - ready
        for name, query in SEARCHES.items():
            found[name], longest = 0.0, 0.0
            while True:
                start = time.monotonic()
                answer = get(address, "api/rollouts", run=0, **query)
                longest = max(longest, time.monotonic() - start)
                found[name] += time.monotonic() - start
                if answer["done"]:
                    break
            found["answer"] = max(found.get("answer", 0.0), longest)
        process.terminate()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("updates", 400), ("groups", 16), ("size", 16), ("tokens", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "run"
        if not (folder / "config.yaml").is_file():
            make_run(folder, args)
        rows = [measure(folder) for _ in range(args.repeats)]
    figures = {key: spread([row[key] for row in rows], 3) for key in rows[0]}
    count = args.updates * args.groups * args.size
    print(f"{count:,} completions in {args.updates} files; seconds, median (range)")
    for key, value in figures.items():
        print(f"{key:>22} {value['median']:7.2f} ({value['lowest']:.2f}–{value['highest']:.2f})")
    slowest = max(SEARCHES, key=lambda name: figures[name]["median"])
    promises = [
        Promise(
            f"the page opens {count:,} completions in under {OPEN_SECONDS:g} s",
            f"{figures['open']['median']:.2f} s",
            figures["open"]["median"] < OPEN_SECONDS,
        ),
        Promise(
            f"every search ends in under {SEARCH_SECONDS:g} s",
            f"{figures[slowest]['median']:.2f} s ({slowest})",
            figures[slowest]["median"] < SEARCH_SECONDS,
        ),
    ]
    report = {"machine": machine(), **vars(args), "folder": None, "figures": figures}
    finish(__file__, report, promises)


if __name__ == "__main__":
    main()
