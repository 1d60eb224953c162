"""Places where workers run: threads, processes, Ray actors.

A worker is a plain object, and the pipeline sees only its handle. A handle runs calls one after
another, in the order in which they were made, and lets the caller await each. So `receive` takes
effect between two polls, in every placement. This file imports no torch: verifier processes import
the package with little memory.
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

__all__ = [
    "Handle",
    "Limit",
    "WorkerDied",
    "WorkerLost",
    "WorkerStalled",
    "call",
    "started",
]
