"""Tramontane: asynchronous reinforcement learning with verifiable rewards.

An open implementation of Magistral's pipeline (arXiv 2506.10910). Every command is one call here:
`train`, `dry_run`, `sft`, `evaluate`, `generate`, `score`, `audit`, `curate`, `plan`, `doctor`.
Events that a user should know of go to the logger `tramontane` of the standard library.
"""

import logging

# Modules that share their names with commands: imported first, so that the names are the commands'.
import tramontane.audit
import tramontane.doctor
import tramontane.sft
from tramontane.api import (
    audit,
    curate,
    doctor,
    dry_run,
    evaluate,
    generate,
    plan,
    score,
    sft,
    train,
)
from tramontane.errors import InputError

__all__ = [
    "InputError",
    "audit",
    "curate",
    "doctor",
    "dry_run",
    "evaluate",
    "generate",
    "plan",
    "score",
    "sft",
    "train",
]
__version__ = "0.1.0"

# A program that sets up no logging gets no lines on stderr: the run's screen shows events already.
logging.getLogger("tramontane").addHandler(logging.NullHandler())
