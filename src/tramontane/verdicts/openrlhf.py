"""OpenRLHF's rewards: `--reward.remote_url` (`--remote_rm_url` in older versions) takes the path of
a Python file with `reward_func`, such as one line, `from tramontane.verdicts.openrlhf import
reward_func`; or the address of `tramontane verify --serve` with the path `/openrlhf`.

A completion that cannot be judged has reward 0 and `unscorable` 1 in the logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tramontane.types import Verdict
from tramontane.verdicts.grader import Grader, Kind, Sample


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: Any
) -> dict[str, Any]:
    """Rewards of mathematical answers; float32 tensors [number of queries].

    Args:
        queries: prompts with their completions.
        prompts: the prompts alone.
        labels: the references, the data's `input.label_key`.
    """
    import torch  # OpenRLHF has it; only this function needs it

    found = scores(Grader("math").grade(samples(queries, prompts, labels)))
    logs = {name: torch.tensor(values) for name, values in found["extra_logs"].items()}
    rewards = torch.tensor(found["rewards"])
    return {"rewards": rewards, "scores": rewards, "extra_logs": logs}


def samples(
    queries: Sequence[str],
    prompts: Sequence[str],
    labels: Sequence[Any],
    kind: Kind = "math",
) -> list[Sample]:
    """A request as samples; of `code`, the labels are tests."""
    # What stands before the prompt are special tokens.
    texts = [
        query[query.find(prompt) + len(prompt) :] if prompt in query else query
        for query, prompt in zip(queries, prompts, strict=True)
    ]
    if kind == "code":
        triples = zip(texts, prompts, labels, strict=True)
        return [Sample(text, None, label, prompt) for text, prompt, label in triples]
    return [
        Sample(text, None if label is None else str(label), None, prompt)
        for text, prompt, label in zip(texts, prompts, labels, strict=True)
    ]


def scores(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The answer to a request, as plain numbers."""
    rewards = [verdict.reward for verdict in verdicts]
    unscorable = [float(verdict.verdict == "unscorable") for verdict in verdicts]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"unscorable": unscorable}}
