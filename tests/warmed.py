"""The last import of the fork server of `tests.forked`, and of nothing else: each of its processes
has a fork of a server that has imported what verifiers' and environments' workers need."""

import gc
import os

from tramontane.placement import warm

FORK_SERVER = os.getpid()


def divide() -> None:
    if os.getpid() == FORK_SERVER:  # not in its processes, which fork as those of a shell do
        warm.divide()


for module in ("tramontane.verifier.worker", "tramontane.environments.process"):
    warm.load(module)
os.register_at_fork(before=divide)
# Each process would look at all that was imported, at the start of its run and at its end.
gc.collect()
gc.freeze()
