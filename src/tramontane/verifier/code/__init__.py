"""Verdicts on programs: right, wrong or unscorable, by their tests, in a sandbox."""

from tramontane.verifier.code.grade import Judgement, draw_tests, judge, time_limit
from tramontane.verifier.code.trial import Trial, TrialOutput, run_trial

__all__ = [
    "Judgement",
    "Trial",
    "TrialOutput",
    "draw_tests",
    "judge",
    "run_trial",
    "time_limit",
]
