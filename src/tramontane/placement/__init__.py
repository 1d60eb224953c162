"""Where workers run. A worker is a plain object; its handle here is all that the pipeline sees.

A handle runs the calls made on it one after another, in the order made, and lets the caller await
each: so `receive` takes effect between two polls, wherever the worker lives. Nothing here imports
torch: verifier processes import this package, and have little memory.
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
