"""Math answers → right, wrong or unscorable."""

from tramontane.verifier.math.grade import can_judge, judge_answer, warm_up
