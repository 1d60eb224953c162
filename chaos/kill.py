"""Kills workers of a run from outside: real processes, by what the run wrote down about them."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.processes import starting, workers

HANG = 0.15  # of the blows to generators and verifiers: stopped, for the heartbeat to find


class Killer:
    """Draws victims by a seed and keeps a list of its blows, in `kills` and in a file."""

    def __init__(self, folder: Path, seed: int, record: Path) -> None:
        self.folder, self.record = folder, record
        self.random = random.Random(seed)
        self.kills: list[dict[str, Any]] = []
        record.write_text("")

    def strike(self, names: Sequence[str], hang: float = HANG) -> dict[str, Any] | None:
        """Kill, or stop, one of these workers that lives; nothing where none does."""
        processes = workers(self.folder)
        there = [n for n in names if n in processes and not self._struck(processes[n])]
        # One may be hit once while it starts, but a generator that never comes to work ends a run.
        young = starting(self.folder)
        there = [n for n in there if n not in young or not self._hit_young(n)]
        if not there:
            return None
        name = self.random.choice(sorted(there))
        stops = name.startswith(("generator", "verifier")) and self.random.random() < hang
        number = signal.SIGSTOP if stops else signal.SIGKILL
        kill = {
            "time": round(time.time(), 3),
            "worker": name,
            "process": processes[name],
            "starting": name in young,
            "signal": number.name,
        }
        try:
            os.kill(processes[name], number)
        except ProcessLookupError:
            return None
        self.kills.append(kill)
        with self.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(kill) + "\n")
        return kill

    def _hit_young(self, name: str) -> bool:
        return [kill["starting"] for kill in self.kills if kill["worker"] == name][-1:] == [True]

    def _struck(self, process: int) -> bool:
        """One that is stopped lives until it is found."""
        return any(kill["process"] == process for kill in self.kills)
