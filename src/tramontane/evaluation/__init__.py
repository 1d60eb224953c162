"""Evaluation: pass@1, pass@k and maj@k, with 95 % intervals clustered by problem."""

from tramontane.evaluation.evaluate import EvaluationResult, Slice, summarize
from tramontane.statistics import Estimate, maj_at_k, mean_interval, pass_at_k
