"""Opening many runs on the page of `tramontane view`, in Chromium.

    python -m benchmarks.many_runs [--runs 200] [--updates 40] [--repeats 5]

Makes `--runs` runs of `--updates` updates, with the configs, metrics, evaluations and summaries of
finished ones, but no rollouts. Then each repeat starts the command and a new browser, and measures,
in seconds: `command`, until the address is printed, which is mostly imports of Python; `open`, from
the request for the page until the table has a row for each run and the chart its curves; `group`,
from the choice of a key until the grouped table is there; `table` and `curve`, the answers alone;
and of `open`, the processor time of the command (`server`) and of the page's main thread (`page`).
Prints a table, writes many_runs.json next to this file, and exits with 1 if the promise is broken.
Needs Chromium and playwright.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.descendants import used_so_far
from benchmarks.measure import Promise, finish, machine, spread
from benchmarks.view import get
from tramontane.config import Config, parse
from tramontane.run.folder import RunFolder

OPEN_SECONDS = 1.0  # promised
FIGURES = [f"figure_{n}" for n in range(45)]  # as many as an update has
SEEDS = 5  # runs with the same learning rate


def make_runs(folder: Path, runs: int, updates: int) -> None:
    """Finished runs that differ in learning rate and seed."""
    draws = random.Random(0)
    for number in range(runs):
        rate, seed = f"{(1 + number // SEEDS) * 1e-5:.3g}", number % SEEDS
        raw = {"model": "tiny", "name": f"run-{number}", "seed": seed}
        raw |= {"data": {"train": "playground:"}, "trainer": {"learning_rate": float(rate)}}
        run = RunFolder(folder / f"learning_rate={rate},seed={seed}")
        run.path.mkdir(parents=True)
        run.write_config(parse(Config, raw | {"pipeline": {"updates": updates}}, "benchmark"))
        for update in range(1, updates + 1):
            figures = {name: draws.random() for name in ("reward", *FIGURES)}
            run.log({"update": update, "wall_seconds": 9.0 * update, **figures})
        passed = {"value": draws.random(), "low": 0.1, "high": 0.9}
        for when in ("before", "after"):
            run.log_evaluation({"when": when, "set": "held_out", "pass_at_1": passed})
        run.write_json("summary.json", {"wall_seconds": 9.0 * updates, "machine": "as made up"})


def measure(folder: Path, runs: int) -> dict[str, float]:
    """The seconds of one start of the command and the browser."""
    began = time.monotonic()
    command = [sys.executable, "-m", "tramontane", "view", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            found = {"command": time.monotonic() - began} | in_browser(address, runs, process.pid)
            for name in ("table", "curve"):
                began = time.monotonic()
                get(address, f"api/{name}", **({"metric": "reward"} if name == "curve" else {}))
                found[name] = time.monotonic() - began
        finally:
            process.terminate()
    return found


def in_browser(address: str, runs: int, server: int) -> dict[str, float]:
    """The seconds until the page shows the runs, and then their groups."""
    from playwright.sync_api import sync_playwright

    found: dict[str, float] = {}
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = chromium.new_page()
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        used = used_so_far(server)
        began = time.monotonic()
        page.goto(address, wait_until="commit")
        page.wait_for_selector(f".runs-table tbody tr >> nth={runs - 1}")
        page.wait_for_selector(".chart canvas")
        found["open"] = time.monotonic() - began
        found["server"] = used_so_far(server) - used
        metrics = session.send("Performance.getMetrics")["metrics"]
        found["page"] = next(m["value"] for m in metrics if m["name"] == "TaskDuration")
        began = time.monotonic()
        page.get_by_label("Group by").select_option("trainer.learning_rate")
        page.wait_for_selector(f".runs-table .swatch >> nth={-(-runs // SEEDS) - 1}")
        found["group"] = time.monotonic() - began
        chromium.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_runs(folder, args.runs, args.updates)
        rows = [measure(folder, args.runs) for _ in range(args.repeats)]
    figures = {key: spread([row[key] for row in rows], 3) for key in rows[0]}
    print(f"{args.runs} runs of {args.updates} updates; seconds, median (range)")
    for key, value in figures.items():
        print(f"{key:>8} {value['median']:6.2f} ({value['lowest']:.2f}–{value['highest']:.2f})")
    opened = figures["open"]["median"]
    text = f"{args.runs} runs open in under {OPEN_SECONDS:g} s"
    promise = Promise(text, f"{opened:.2f} s", opened < OPEN_SECONDS)
    finish(__file__, {"machine": machine(), **vars(args), "figures": figures}, [promise])


if __name__ == "__main__":
    main()
