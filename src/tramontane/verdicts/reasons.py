"""Why a verdict is what it is, as one of a few names that stay; `Verdict.reason` is for people."""

from __future__ import annotations

import re
from dataclasses import asdict
from enum import Enum
from typing import Any

from tramontane.types import Verdict
from tramontane.verifier import functions


class Reason(str, Enum):
    """The kind of a verdict's reason."""

    RIGHT = "right"
    DIFFERENT = "different"  # another value than the reference, or another output
    REFUSED = "refused"  # an answer that is not judged: hedged, unreadable, too long, no program
    FAILED = "failed"  # a program that raised, did not compile, failed an assertion, or was stopped
    LATE = "late"  # a time limit was exceeded
    MALFORMED = "malformed"  # the format failed, and nothing else was graded
    REFERENCE = "reference"  # unscorable: the reference or the tests cannot be used
    FUNCTION = "function"  # unscorable: a function of the user's failed
    MACHINE = "machine"  # unscorable: a worker died, or this machine lacks a sandbox or a compiler


_LATE = re.compile(r"\btimed out\b")
_DIFFERENT = re.compile(
    r"not the reference|\bwrong output\b|boxes that differ|unevaluated|rewards [\d.]|not followed:"
)
_FAILED = re.compile(
    r"^(?:test \d+|does not compile|exit code|killed |\w*(?:Error|Exception|Interrupt)\b"
    r"|(?:needed|printed|started|wrote) more than|continued after|hid what|ended "
    r"|\d+ of \d+ tests)"
)
_REFERENCE = re.compile(r"\b(?:reference|the tests|no tests|checker)\b")


def reason_of(verdict: Verdict) -> Reason:
    """The kind of a verdict's reason."""
    text = verdict.reason
    if verdict.verdict in ("right", "malformed"):
        return Reason(verdict.verdict)
    if verdict.verdict == "unscorable" and functions.failed(text):
        return Reason.FUNCTION
    if _LATE.search(text):
        return Reason.LATE
    if verdict.verdict == "unscorable":
        return Reason.REFERENCE if _REFERENCE.search(text) else Reason.MACHINE
    if _DIFFERENT.search(text):
        return Reason.DIFFERENT
    return Reason.FAILED if _FAILED.match(text) else Reason.REFUSED


def as_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON: its fields, and `kind`, which of `Reason` its reason is."""
    return asdict(verdict) | {"kind": reason_of(verdict).value}
