"""Math answers → right, wrong or unscorable."""

from tramontane.verifier.math.grade import can_judge, can_read, judge_answer, warm_up
