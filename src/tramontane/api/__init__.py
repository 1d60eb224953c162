"""Every command as one Python call, for notebooks and scripts: `import tramontane`.

A function takes one keyword for each flag of its command.
"""

from tramontane.api.grading import CurateResult, audit, curate, grading, score
from tramontane.api.planning import doctor, plan
from tramontane.api.sampling import compare, evaluate, generate
from tramontane.api.studies import study
from tramontane.api.training import Display, dry_run, fetch, sft, train, vllm

__all__ = [
    "CurateResult",
    "Display",
    "audit",
    "compare",
    "curate",
    "doctor",
    "dry_run",
    "evaluate",
    "fetch",
    "generate",
    "grading",
    "plan",
    "score",
    "sft",
    "study",
    "train",
    "vllm",
]
