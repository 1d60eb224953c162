"""The rungs of the sandbox that work on this machine, each tried once in a process of tests."""

from functools import cache

from tramontane.verifier.code import sandbox
from tramontane.verifier.code.sandbox.job import Rung


@cache
def why_not(rung: Rung) -> str:
    """What is wrong with a rung here, as `sandbox.why_not` says."""
    return sandbox.why_not(rung)
