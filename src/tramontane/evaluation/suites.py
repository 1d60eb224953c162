"""Evaluations with a fixed protocol by name: `tramontane eval MODEL aime24`.

The protocols are the paper's (arXiv 2506.10910, section 5): temperature 0.7; top-p 1.0 for
mathematics and GPQA, 0.95 for programs; 40,000 tokens for AIME and LiveCodeBench, 32,000 otherwise;
64 samples of AIME and 16 of LiveCodeBench. It does not give the samples of the other sets: here,
sets of a few hundred problems get 4, larger ones 1. Options can replace every part.
"""

from __future__ import annotations

from typing import NamedTuple


class Suite(NamedTuple):
    """The protocol of one evaluation, as in `evaluation.settings.Sampling`. `data.catalog` has its
    problems under the suite's name."""

    samples: int
    max_tokens: int = 32_000
    top_p: float = 1.0
    temperature: float = 0.7


SUITES: dict[str, Suite] = {
    "aime24": Suite(64, max_tokens=40_000),
    "aime25": Suite(64, max_tokens=40_000),
    "aime26": Suite(64, max_tokens=40_000),
    "math500": Suite(4),
    "gsm8k": Suite(1),
    "olympiadbench": Suite(4),
    "gpqa": Suite(4),
    "livecodebench_v5": Suite(16, max_tokens=40_000, top_p=0.95),
    "livecodebench_v6": Suite(16, max_tokens=40_000, top_p=0.95),
    "humaneval": Suite(4, top_p=0.95),
    "mbpp": Suite(4, top_p=0.95),
    # Effects of training on other abilities.
    "ifeval": Suite(1),
    "ifeval_loose": Suite(1),
    "bfcl_simple": Suite(1),
    "bfcl_multiple": Suite(1),
    "bfcl_parallel": Suite(1),
    "bfcl_parallel_multiple": Suite(1),
    # The results list languages and levels, selected by `data.playground`.
    "playground": Suite(4, max_tokens=512),
}
