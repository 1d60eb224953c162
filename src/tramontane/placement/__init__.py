"""Where workers run. A worker is a plain object; its handle here is all that the pipeline sees.

A handle runs the calls made on it one after another, in the order made, and lets the caller await
each: so `receive` takes effect between two polls, wherever the worker lives.
"""

from tramontane.placement.handle import (
    Handle,
    Limit,
    WorkerDied,
    WorkerLost,
    WorkerStalled,
    call,
    started,
)
from tramontane.placement.place import Placement, check, place
from tramontane.placement.ranks import ProcessRanks
from tramontane.placement.thread import ThreadHandle

__all__ = [
    "Handle",
    "Limit",
    "Placement",
    "ProcessRanks",
    "ThreadHandle",
    "WorkerDied",
    "WorkerLost",
    "WorkerStalled",
    "call",
    "check",
    "place",
    "started",
]
