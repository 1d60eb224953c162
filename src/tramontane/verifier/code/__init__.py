"""Verdicts on programs: right, wrong or unscorable, by their tests, in a sandbox."""

from tramontane.verifier.code.grade import Trial, TrialOutput, judge, run_trial, time_limit
