"""Tramontane: asynchronous reinforcement learning with verifiable rewards.

An open implementation of Magistral's pipeline (arXiv 2506.10910). Every command is one call here:
`train`, `dry_run`, `sft`, `evaluate`, `compare`, `generate`, `score`, `audit`, `curate`, `plan`,
`fetch`, `doctor`, `vllm`, `study`.
Notable events are logged to the standard logger `tramontane`.
"""

import logging

# These modules share their names with commands. They are imported first, so that the names end up
# bound to the commands.
import tramontane.audit
import tramontane.doctor
import tramontane.sft
from tramontane.api import (
    audit,
    compare,
    curate,
    doctor,
    dry_run,
    evaluate,
    fetch,
    generate,
    plan,
    score,
    sft,
    study,
    train,
    vllm,
)
from tramontane.errors import InputError
from tramontane.types import Reward

__all__ = [
    "InputError",
    "Reward",
    "audit",
    "compare",
    "curate",
    "doctor",
    "dry_run",
    "evaluate",
    "fetch",
    "generate",
    "plan",
    "score",
    "sft",
    "study",
    "train",
    "vllm",
]
__version__ = "0.1.0"

# Without logging configured, warnings go to stderr, but not a run's events, which its screen shows.
logging.getLogger("tramontane.run").addHandler(logging.NullHandler())
