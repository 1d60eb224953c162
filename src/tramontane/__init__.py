"""Tramontane: asynchronous reinforcement learning with verifiable rewards.

An open implementation of Magistral's pipeline (arXiv 2506.10910). Whatever a command does is one
call here: `train`, `sft`, `evaluate`, `generate`, `score`.
"""

from tramontane.api import evaluate, generate, score, sft, train
from tramontane.errors import InputError

__all__ = ["InputError", "evaluate", "generate", "score", "sft", "train"]
__version__ = "0.1.0"
