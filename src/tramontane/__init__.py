"""Tramontane: asynchronous reinforcement learning with verifiable rewards.

An open implementation of Magistral's pipeline (arXiv 2506.10910). Every command is one call here:
`train`, `sweep`, `dry_run`, `sft`, `evaluate`, `compare`, `generate`, `score`, `audit`, `curate`,
`plan`, `fetch`, `push`, `doctor`, `serve`, `vllm`, `study`. Each is imported when it is first used:
torch takes seconds. Notable events are logged to the standard logger `tramontane`.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from tramontane.errors import VERSION, InputError, importing
from tramontane.keywords import answering
from tramontane.types import Reward

if TYPE_CHECKING:
    from tramontane.audit.audit import audit
    from tramontane.curation.pipeline import curate
    from tramontane.doctor import doctor
    from tramontane.evaluation.measure import compare, evaluate, generate, serve
    from tramontane.evaluation.score import score
    from tramontane.generator.vllm.environment import set_up as vllm
    from tramontane.models.fetch import fetch
    from tramontane.planning.plan import plan
    from tramontane.run.publish import push
    from tramontane.start import dry_run, sft, train
    from tramontane.studies.runner import study
    from tramontane.sweeps.sweep import sweep

__version__ = VERSION

_FUNCTIONS = {
    "audit": "audit.audit:audit",
    "compare": "evaluation.measure:compare",
    "curate": "curation.pipeline:curate",
    "doctor": "doctor:doctor",
    "dry_run": "start:dry_run",
    "evaluate": "evaluation.measure:evaluate",
    "fetch": "models.fetch:fetch",
    "generate": "evaluation.measure:generate",
    "plan": "planning.plan:plan",
    "push": "run.publish:push",
    "score": "evaluation.score:score",
    "serve": "evaluation.measure:serve",
    "sft": "start:sft",
    "study": "studies.runner:study",
    "sweep": "sweeps.sweep:sweep",
    "train": "start:train",
    "vllm": "generator.vllm.environment:set_up",
}
__all__ = ["InputError", "Reward", *_FUNCTIONS]

# Three modules have the name of a command. Imported later, they would replace it here.
for _name in ("audit", "doctor", "sft"):
    importlib.import_module(f"tramontane.{_name}")
    del globals()[_name]


def __getattr__(name: str) -> Any:
    """Import a command's function."""
    if name not in _FUNCTIONS:
        raise AttributeError(f"module 'tramontane' has no attribute {name!r}")
    module, _, function = _FUNCTIONS[name].partition(":")
    with importing():
        found = answering(name, getattr(importlib.import_module(f"tramontane.{module}"), function))
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Without logging configured, warnings go to stderr, but not a run's events, which its screen shows.
logging.getLogger("tramontane.run").addHandler(logging.NullHandler())
