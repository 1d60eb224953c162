"""Math answers → right, wrong or unscorable."""

from tramontane.verifier.math.grade import judge_answer, warm_up
