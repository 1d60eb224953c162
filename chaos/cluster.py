"""A Ray cluster of machines that share no disk, and a run with its controller on the first."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from chaos.machines import COMMAND_SECONDS, Machine, Network
from chaos.runs import lines
from tramontane.models.loading import resolve

BUILD = Path(__file__).parents[1] / "build" / "nodes"
# On the first machine alone.
MODEL, RUN, CONFIG = "/tmp/model", "/tmp/runs/run", "/tmp/config.yaml"
# Four workers fill two machines: a rank of the trainer takes three CPUs, any other worker one.
RAY_OPTIONS = ("--num-cpus=4", "--num-gpus=0", "--object-store-memory=200000000")
NO_DASHBOARD = "--include-dashboard=false"
RAY_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
MINUTES = 12.0  # limit for the whole run
UPDATES = 10


def config() -> dict[str, Any]:
    """A run whose workers fill two machines: 2 × 3 CPUs for the trainer, 2 for the others."""
    return {
        "name": "nodes",
        "model": MODEL,
        "data": {
            "train": "playground:",
            "eval": None,
            "playground": {"levels": [1, 2], "languages": ["en", "fr"]},
        },
        "pipeline": {
            "updates": UPDATES,
            "n_async": 32,
            "n_batch": 16,
            "group_size": 4,
            "max_staleness": 2,
            "l_max": 96,
            "l_cache": 32,
        },
        "trainer": {"ranks": 2, "learning_rate": 1e-5, "microbatch_tokens": 2048},
        "verifier": {"workers": 1},
        "placement": {"trainer": {"cpus": 3}},
        "checkpoint": {"every": 2, "keep": 2},
        "timeouts": {"heartbeat": 10.0},
    }


class Site:
    """Machines, and the process of a run on the first of them, which has the model and a config.

    Args:
        network: joins the machines.
        name: names the log of the processes.
        folder: the run's folder on the computer's disk, which outlives the machines, as a volume
            does; None: on the first machine's own disk.
    """

    def __init__(self, network: Network, name: str, folder: Path | None = None) -> None:
        self.network, self.began = network, time.monotonic()
        self.head = network.machine()
        shutil.copytree(resolve("tiny"), self.on_head(MODEL))
        written = yaml.safe_dump(config(), sort_keys=False)
        self.on_head(CONFIG).write_text(written, encoding="utf-8")
        if folder is not None:
            self.head.mount(folder.parent, str(Path(RUN).parent))
        self.folder = folder or self.on_head(RUN)
        self.log = (BUILD / f"{name}.log").open("ab")
        self.controller: subprocess.Popen[bytes]

    def on_head(self, path: str) -> Path:
        """A path of the first machine, seen from outside."""
        return self.head.root / path.lstrip("/")

    def start_ray(self, *options: str, environment: Mapping[str, str] = {}) -> None:
        """Start a cluster on the first machine, with further options and variables."""
        command = ["ray", "start", "--head", "--port=6379", *RAY_OPTIONS, *options]
        self.head.run(command, {**RAY_VARIABLES, **environment})

    def join(self) -> Machine:
        """Switch on a further machine, which joins the cluster."""
        joined = self.network.machine()
        address = f"--address={self.head.address}:6379"
        joined.run(["ray", "start", address, *RAY_OPTIONS], RAY_VARIABLES)
        return joined

    def start(self, *command: str, environment: Mapping[str, str] = {}) -> None:
        """Start the run on the first machine."""
        self.controller = self.head.start(command, self.log.fileno(), environment)

    @property
    def updates(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition, as long as the controller runs.

        Raises:
            SystemExit: the controller ended, or the time limit has passed.
        """
        while not condition():
            if self.controller.poll() is not None or time.monotonic() - self.began > 60 * MINUTES:
                sys.exit(f"no {what}; see {self.log.name}")
            time.sleep(0.2)
        print(f"{time.monotonic() - self.began:5.0f} s  {what}", flush=True)

    def kill_controller(self) -> int:
        """Kill the controller; returns the exit code of the command that `start` started."""
        rows = lines(self.folder / "workers.jsonl")
        process = [row["process"] for row in rows if row["worker"] == "controller"][-1]
        self.head.run(["kill", "-KILL", str(process)])
        return self.controller.wait(COMMAND_SECONDS)
