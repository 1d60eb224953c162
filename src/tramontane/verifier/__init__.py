"""Completions → rewards: format, correctness, length, language (arXiv 2506.10910, section 2.2).

`VerifierPool` grades the completions of a group in worker processes that are killed from outside
when late; `grade` is what each worker does with one completion; `score_file` grades a JSONL file.
"""

from tramontane.verifier.pool import VerifierPool
from tramontane.verifier.reward import grade
from tramontane.verifier.score import score_file

__all__ = ["VerifierPool", "grade", "score_file"]
