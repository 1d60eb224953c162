"""Completions → rewards: format, correctness, length, language (arXiv 2506.10910, section 2.2).

`grade` grades one completion; `VerifierPool` grades groups in worker processes that are killed from
outside when late.
"""

from tramontane.verifier.pool import VerifierPool, try_functions
from tramontane.verifier.reward import grade

__all__ = ["VerifierPool", "grade", "try_functions"]
