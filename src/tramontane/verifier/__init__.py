"""Completions → rewards: format, correctness, length, language (arXiv 2506.10910, section 2.2).

`VerifierPool` grades the completions of a group in worker processes that are killed from outside
when late; `grade` is what each worker does with one completion.
"""

from tramontane.verifier.pool import VerifierPool
from tramontane.verifier.reward import grade

__all__ = ["VerifierPool", "grade"]
