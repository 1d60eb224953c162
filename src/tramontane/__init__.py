"""Tramontane: asynchronous reinforcement learning with verifiable rewards.

An open implementation of Magistral's pipeline (arXiv 2506.10910). Whatever a command does is one
call here: `train`, `sft`, `evaluate`, `generate`, `score`, `audit`,
`curate`, `plan`.
"""

# These rooms share their names with commands: imported first, so that the names are the commands'.
import tramontane.audit
import tramontane.sft
from tramontane.api import audit, curate, evaluate, generate, plan, score, sft, train
from tramontane.errors import InputError

__all__ = ["InputError", "audit", "curate", "evaluate", "generate", "plan", "score", "sft", "train"]
__version__ = "0.1.0"
