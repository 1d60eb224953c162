"""Explains malformed completions: what is missing, how often, and a remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SHOWN = (1200, 400)  # characters shown of a long completion: of its start, of its end
REASONS = 5  # maximum number of listed reasons
FREQUENT = 0.5  # minimum share of malformed completions for an explanation

_SFT = (
    "a model that has never seen the format learns it first from a few hundred examples "
    "(tramontane sft, cold_start)"
)
_LONGER = "allow longer completions (pipeline.l_max, --max-tokens)"
# Remedies by the start of a reason; the first match counts.
REMEDIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "does not start with",
        (
            "ask for the format: data.system_prompt=magistral; the default leaves it to the chat "
            "template",
            "begin every response with the opening tag: data.response_prefix",
            "if the model thinks between other tags, name them in verifier.thinking_tags",
            _SFT,
        ),
    ),
    ("no match of the domain", ("describe the form in data.system_prompt or the prompts", _SFT)),
    ("no JSON", ("ask for JSON alone, in data.system_prompt or the prompts", _SFT)),
    ("JSON does not fit", ("give the schema in data.system_prompt or the prompts", _SFT)),
    ("no balanced", ("ask for \\boxed{} in the prompt: data.system_prompt=magistral", _SFT)),
    ("no fenced", ("ask for a fenced program: data.system_prompt=magistral", _SFT)),
    ("no ", (_LONGER, _SFT)),  # closing tag
    ("more than one", ("ask for the format: data.system_prompt=magistral", _SFT)),
)


@dataclass(frozen=True)
class Malformed:
    """Malformed completions of an evaluation.

    Args:
        reasons: number of completions by failed condition, the most frequent first.
        cut_off: number of malformed completions that reached the length limit.
        problem: statement of the example.
        example: text of a completion with the most frequent reason.
    """

    reasons: dict[str, int] = field(default_factory=dict)
    cut_off: int = 0
    problem: str = ""
    example: str = ""

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Malformed:
        """The malformed completions among the rows of an evaluation."""
        failed = [row for row in rows if row["verdict"] == "malformed"]
        if not failed:
            return cls()
        reasons = Counter(row["reason"] for row in failed)
        first = next(row for row in failed if row["reason"] == reasons.most_common(1)[0][0])
        return cls(
            reasons=dict(reasons.most_common()),
            cut_off=sum(row["finish_reason"] == "length" for row in failed),
            problem=first["problem"],
            example=first["text"],
        )

    def explain(self, completions: int) -> list[str]:
        """Lines that explain a result with many malformed completions; empty if there are few.

        Args:
            completions: number of completions in the evaluation.
        """
        count = sum(self.reasons.values())
        if not completions or count < FREQUENT * completions:
            return []
        reason = next(iter(self.reasons))
        lines = [f"{count:,} of {completions:,} completions lack the format and earn nothing:"]
        lines += [f"  {n:>6,}  {why}" for why, n in list(self.reasons.items())[:REASONS]]
        if self.cut_off:
            lines.append(f"  {self.cut_off:>6,}  of them were cut off at the length limit")
        lines.append(f"an example ({reason}), for: {' '.join(self.problem.split())[:200]}")
        lines += [f"  │ {line}" for line in excerpt(self.example).splitlines() or [""]]
        tries = remedies(reason, cut_off=self.cut_off > 0)
        return [*lines, "try, in this order:", *(f"  - {remedy}" for remedy in tries)]


def remedies(reason: str, *, cut_off: bool) -> list[str]:
    """Remedies for completions that are malformed for a given reason, the cheapest first.

    Args:
        reason: the failed condition.
        cut_off: completions reached the length limit.
    """
    found = next((texts for start, texts in REMEDIES if reason.startswith(start)), (_SFT,))
    return [text for text in found if cut_off or text != _LONGER]


def excerpt(text: str) -> str:
    """A completion; of a long one, its start and its end."""
    start, end = SHOWN
    if len(text) <= start + end:
        return text
    return f"{text[:start]}\n… {len(text) - start - end:,} characters …\n{text[-end:]}"
