"""Maths answers → right, wrong or unscorable."""

from tramontane.verifier.math.grade import Judgement, judge_answer, warm_up

__all__ = ["Judgement", "judge_answer", "warm_up"]
