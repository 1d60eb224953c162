"""Programs → right, wrong or unscorable, by their tests, in a sandbox."""

from tramontane.verifier.code.grade import (
    Judgement,
    Ran,
    Trial,
    draw_tests,
    judge,
    time_limit,
    try_out,
)

__all__ = ["Judgement", "Ran", "Trial", "draw_tests", "judge", "time_limit", "try_out"]
