"""The last import of `tests.fork_server`, and of nothing else: each of its processes
has a fork of a server that has imported what verifiers' and environments' workers need."""

import gc
import os

# What a run imports after its start, and would import again in each process.
import torch.distributed.checkpoint._fsspec_filesystem  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import tramontane.trainer.objectives.magistral
import tramontane.view.report  # noqa: F401
from tests.forked_workers import serve_by_fork
from tramontane.placement import warm
from tramontane.run import columns

FORK_SERVER = os.getpid()


def divide() -> None:
    if os.getpid() == FORK_SERVER:  # not in its processes, which fork as those of a shell do
        warm.divide()


columns.warm_up()
# Each process would look at all that was imported, at the start of its run and at its end.
gc.collect()
gc.freeze()
serve_by_fork()
for module in ("tramontane.verifier.worker", "tramontane.environments.process"):
    warm.load(module)
os.register_at_fork(before=divide)
