"""The workers' timeline: activities, weight updates, losses and starts."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from tramontane.errors import reading
from tramontane.journals import read_log

Row = dict[str, Any]
LONGEST = 20_000  # maximum number of activities on a page; the newest
EVENT = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (.*)$")


def timeline(run: Path, longest: int = LONGEST) -> Row:
    """The lanes of a run's workers, its events, and what the run did not record.

    Only the newest `longest` activities are shown. Times are seconds since the epoch. A lane has
    `activities` (activity, began, seconds), `versions` (time, version), `losses` (time, reason) and
    `starts` (times of its processes).
    """
    lanes: dict[str, Row] = {}

    def lane(name: str) -> Row:
        empty: Row = {"worker": name, "activities": [], "versions": [], "losses": [], "starts": []}
        return lanes.setdefault(name, empty)

    missing = []
    file = run / "timeline.jsonl"
    if not file.is_file():
        missing.append("steps and waits of the workers (this run has no timeline.jsonl)")
    with reading(file):
        activities = list(read_log(file))
        for row in activities[-longest:]:
            entry = {key: row[key] for key in ("activity", "began", "seconds")}
            lane(str(row["worker"]))["activities"].append(entry)
    with reading(file := run / "workers.jsonl"):
        for row in read_log(file):
            found = lane(str(row["worker"]))
            if "process" in row:
                found["starts"].append(row["time"])
            if "version" in row:
                found["versions"].append({"time": row["time"], "version": row["version"]})
            if "lost" in row:
                found["losses"].append({"time": row["time"], "reason": row["lost"]})
    drawn = [x for x in lanes.values() if x["activities"] or x["versions"] or x["losses"]]
    shown = sorted(drawn, key=lambda found: (_place(found["worker"]), found["worker"]))
    return {
        "lanes": shown,
        "events": events_of(run),
        "missing": missing,
        "left_out": max(0, len(activities) - longest),
    }


def _place(worker: str) -> int:
    kinds = ("controller", "trainer", "generator", "verifier")
    return next((n for n, kind in enumerate(kinds) if worker.startswith(kind)), len(kinds))


def events_of(run: Path) -> list[Row]:
    """The entries of `events.log`: warnings, losses of workers, stages. Further lines of an entry
    are indented.

    Raises:
        InputError: the file cannot be read.
    """
    file = run / "events.log"
    found: list[Row] = []
    with reading(file):
        whole = file.read_text("utf-8", errors="replace") if file.is_file() else ""
    lines = whole.splitlines()
    for line in lines:
        if match := EVENT.match(line):
            seconds = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S"))
            found.append({"time": seconds, "text": match[2]})
        elif found:
            found[-1]["text"] += "\n" + line.strip()
    return found
