"""Places where workers run: threads, processes, Ray actors.

A worker is a plain object, and the pipeline sees only its handle. A handle runs calls one at a
time, in order, and lets the caller await each, so a `swap` of the weights takes effect between two
polls in every placement. Only background calls, in which a generator fetches weights, run
concurrently. torch is not imported here, so that verifier processes stay small.
"""

from tramontane.placement.files import Folder, written
from tramontane.placement.handle import (
    TRAINER,
    ConcurrentHandle,
    Handle,
    Limit,
    WaitTimeout,
    WeightsLost,
    WorkerDied,
    WorkerLost,
    call,
    release,
    started,
)
