"""Run a program on its inputs in the best sandbox that works on this machine.

The rungs of the ladder, best first: `bubblewrap`; `namespaces`, the same with `unshare`, `mount`
and `setpriv`; `landlock`, for machines that allow no namespaces; `rlimits`, which is not a sandbox:
it only limits accidents, and requires the user's consent. In the first three a program can read
the system's programs and libraries and its own source, and write to a small private directory. It
has no network, cannot reach other processes, and gains no capabilities. If the judge is root, the
program runs as a user reserved for it.

One sandbox serves all inputs of a program (`inside.runner`). The judge outside receives the output
of each execution and compares: expected outputs never enter the sandbox.
"""

from tramontane.verifier.code.sandbox.job import (
    ASLEEP_FACTOR,
    CLOCK_FACTOR,
    COMPILE_SECONDS,
    COMPILERS,
    CPP_FLAGS,
    GRACE_SECONDS,
    RUNGS,
    Job,
    Limits,
    Rung,
    precompiled,
)
from tramontane.verifier.code.sandbox.running import Result, Results, Sandbox, probe, why_not
