"""A run of `tramontane train` in a separate process, with all processes that it starts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from chaos.processes import command, marked
from tramontane.workplace import Owner

GONE_SECONDS = 180.0  # limit for a killed controller's processes; Ray's agents are slow


def quickstart() -> dict[str, Any]:
    config = yaml.safe_load(Path("configs/quickstart.yaml").read_text(encoding="utf-8"))
    return dict(config)


class Run:
    """One run folder and the processes that work on it, which carry a mark in their environment, so
    that orphans are found too."""

    def __init__(self, config: dict[str, Any], build: Path) -> None:
        self.folder, self.log = build / "run", build / "output.log"
        build.mkdir(parents=True, exist_ok=True)
        self._config = build / "config.yaml"
        raw = config | {"run_dir": str(self.folder)}
        self._config.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
        self._mark = ("TRAMONTANE_CHAOS", f"{os.getpid()}-{build.name}")
        self.begins = ("train", str(self._config))
        self.resumes = ("train", "--resume", str(self.folder))
        self.process = self._start(*self.begins)

    def resume(self) -> None:
        self.process = self._start(*self.resumes)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def owns(self) -> bool:
        """Whether this process owns the folder: after a resume that takes seconds."""
        owner = Owner.read(self.folder / ".lock")
        return owner is not None and owner.process == self.process.pid

    @property
    def summarized(self) -> bool:
        return (self.folder / "summary.json").is_file()

    @property
    def finished(self) -> bool:
        return self.summarized and self.ended

    @property
    def updates(self) -> int:
        """Updates recorded; those after the last checkpoint count until the run is resumed."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0

    def gone(self, seconds: float = GONE_SECONDS) -> float | None:
        """Wait until no process of the run is left; returns the time, or None after `seconds`."""
        began = time.monotonic()
        while self.remaining():
            if time.monotonic() - began > seconds:
                return None
            time.sleep(0.1)
        return time.monotonic() - began

    def remaining(self) -> list[str]:
        """Commands of the run's processes that still run."""
        return [re.sub(r"\s+", " ", command(pid))[:80] for pid in self._processes()]

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _processes(self) -> Sequence[int]:
        return marked("=".join(self._mark))

    def _start(self, *args: str) -> subprocess.Popen[bytes]:
        with self.log.open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tramontane", *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | dict([self._mark]),
                start_new_session=True,
            )


class Intruder:
    """A second command on the folder of a live run, which it has to leave alone.

    Args:
        run: the run, whose controller nobody kills while the command runs.
        args: words after `tramontane`.
    """

    def __init__(self, run: Run, *args: str) -> None:
        self.args, self._run, self._owner = args, run, run.process
        self._log = run.log.with_name("intruder.log")
        with self._log.open("w") as log:
            command = [sys.executable, "-m", "tramontane", *args]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def ended(self) -> dict[str, Any] | None:
        """How the command ended, and whether it was refused with the owner's name; None while it
        runs, or if the run ended first, so that there was nothing to refuse. An owner that has
        written the summary gives the folder up before its process ends."""
        if self.running or self._owner.poll() is not None or self._run.summarized:
            return None
        here = f"{Path.cwd()}/"
        message = self._log.read_text(encoding="utf-8").strip().replace(here, "")
        return {
            "command": " ".join(self.args[:2]).replace(here, ""),
            "code": self._process.returncode,
            "refused": f"by process {self._owner.pid} on" in message,
            "message": re.sub(r" on \S+ since ", " on HOST since ", message)[-300:],
        }

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> None:
        """Wait for the end, which comes soon: the command is refused at once."""
        self._process.wait(GONE_SECONDS)


def lines(file: Path) -> list[dict[str, Any]]:
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [json.loads(line) for line in text.splitlines()]
