"""Evaluations with a fixed protocol by name: `tramontane eval MODEL aime24`.

The protocols are the paper's (arXiv 2506.10910, section 5): temperature 0.7; top-p 1.0 for
mathematics and GPQA, 0.95 for programs; 40,000 tokens for AIME and LiveCodeBench, 32,000 otherwise;
64 samples of AIME and 16 of LiveCodeBench. It does not give the samples of the other sets: here,
sets of a few hundred problems get 4, larger ones 1. Options can replace every part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Suite:
    """The protocol of one evaluation.

    Args:
        data: source of the problems, usually a short name (`data.catalog`).
        samples: completions of each problem.
        max_tokens: longest completion, in tokens.
        top_p: probability mass that is sampled from.
        temperature: sampling temperature.
    """

    data: str
    samples: int
    max_tokens: int = 32_000
    top_p: float = 1.0
    temperature: float = 0.7

    @property
    def sampling(self) -> dict[str, Any]:
        """The protocol's part of `evaluation.checkpoint.Sampling`."""
        return {
            "samples": self.samples,
            "max_tokens": self.max_tokens,
            "top_p": self.top_p,
            "temperature": self.temperature,
        }


SUITES: dict[str, Suite] = {
    "aime24": Suite("aime24", samples=64, max_tokens=40_000),
    "aime25": Suite("aime25", samples=64, max_tokens=40_000),
    "aime26": Suite("aime26", samples=64, max_tokens=40_000),
    "math500": Suite("math500", samples=4),
    "gsm8k": Suite("gsm8k", samples=1),
    "olympiadbench": Suite("olympiadbench", samples=4),
    "gpqa": Suite("gpqa", samples=4),
    "livecodebench_v5": Suite("livecodebench_v5", samples=16, max_tokens=40_000, top_p=0.95),
    "livecodebench_v6": Suite("livecodebench_v6", samples=16, max_tokens=40_000, top_p=0.95),
    "humaneval": Suite("humaneval", samples=4, top_p=0.95),
    "mbpp": Suite("mbpp", samples=4, top_p=0.95),
    # Effects of training on other abilities.
    "ifeval": Suite("ifeval", samples=1),
    "ifeval_loose": Suite("ifeval_loose", samples=1),
    "bfcl_simple": Suite("bfcl_simple", samples=1),
    "bfcl_multiple": Suite("bfcl_multiple", samples=1),
    "bfcl_parallel": Suite("bfcl_parallel", samples=1),
    "bfcl_parallel_multiple": Suite("bfcl_parallel_multiple", samples=1),
    # The results list languages and levels, selected by `data.playground`.
    "playground": Suite("playground:", samples=4, max_tokens=512),
}


def suite_of(source: str) -> Suite | None:
    """The suite for `NAME` or `NAME@FILE`; None for any other source of problems."""
    return SUITES.get(source.partition("@")[0])


def source_of(source: str) -> str:
    """The source of problems for `NAME` or `NAME@FILE`; any other source unchanged."""
    name, _, file = source.partition("@")
    suite = SUITES.get(name)
    if suite is None:
        return source
    return f"{suite.data}@{file}" if file else suite.data
