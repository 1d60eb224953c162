"""Kills the processes of a run's workers from outside, found by the run's workers.jsonl."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.processes import second_of, starting, workers

STOP_SHARE = 0.15  # share of signals that are SIGSTOP, which only the heartbeat finds


class Killer:
    """Draws workers by a seed, kills them, and lists the signals sent in `kills` and in a file."""

    def __init__(self, folder: Path, seed: int, record: Path) -> None:
        self.folder, self.record = folder, record
        self.random = random.Random(seed)
        self.kills: list[dict[str, Any]] = []
        record.write_text("")

    def strike(self, names: Sequence[str], stop_share: float = STOP_SHARE) -> dict[str, Any] | None:
        """Kill, or stop, a random live worker among `names`; returns None if there is none."""
        processes = workers(self.folder)
        live = [n for n in names if n in processes and not self._was_struck(processes[n])]
        # Not twice in a row while it starts: a generator that never gets to work ends a run.
        in_start = starting(self.folder)
        live = [n for n in live if n not in in_start or not self._last_struck_in_start(n)]
        if not live:
            return None
        name = self.random.choice(sorted(live))
        # A vLLM generator has two processes, as have environments, and may lose either.
        process = self.random.choice([processes[name], *second_of(processes[name])])
        stops = name.startswith(("generator", "verifier")) and self.random.random() < stop_share
        number = signal.SIGSTOP if stops else signal.SIGKILL
        kill = {
            "time": round(time.time(), 3),
            "worker": name,
            "process": process,
            "starting": name in in_start,
            "signal": number.name,
        }
        try:
            os.kill(process, number)
        except ProcessLookupError:
            return None
        self.kills.append(kill)
        with self.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(kill) + "\n")
        return kill

    def _last_struck_in_start(self, name: str) -> bool:
        return [kill["starting"] for kill in self.kills if kill["worker"] == name][-1:] == [True]

    def _was_struck(self, process: int) -> bool:
        """True if the process, or its second, got a signal before; a stopped one lives until it is
        found."""
        struck = {kill["process"] for kill in self.kills}
        return not struck.isdisjoint([process, *second_of(process)])
