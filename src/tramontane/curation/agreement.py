"""What the solutions of a problem say about its tests, by vote (arXiv 2506.10910, section 4.1).

The paper runs all solutions on all tests, discards tests with low agreement, and relabels a test
with the modal output where agreement is high and the label loses. It prints no thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from tramontane.curation.config import CodeConfig
from tramontane.verifier.code.grade import same_output

Ballot = Sequence[str | None]  # what each solution prints on one input; None where it failed
Fate = Literal["kept", "relabelled", "dropped"]
RELIABLE = 0.5  # share of the tests on which a solution must agree to have a vote


class Poll(NamedTuple):
    """The count of one ballot.

    Args:
        mode: what most print; of several as common what the label says, else the first.
        votes: how many print the mode.
        second: how many print the next most common.
        passed: how many print the label.
        confirmed: whether the mode is the label.
    """

    mode: str | None
    votes: int
    second: int
    passed: int
    confirmed: bool


def poll(ballot: Ballot, label: str | None, tests: dict[str, Any]) -> Poll:
    """Count what is the same to the problem's checker; the label itself is no vote."""
    groups: list[list[str]] = []
    for output in ballot:
        if output is None:
            continue
        near = (g for g in groups if output == g[0] or _same(output, g[0], tests))
        if (group := next(near, None)) is not None:
            group.append(output)
        else:
            groups.append([output])
    if not groups:
        return Poll(None, 0, 0, 0, False)
    right = [label is not None and _same(group[0], label, tests) for group in groups]
    order = sorted(range(len(groups)), key=lambda i: (-len(groups[i]), not right[i], i))
    passed = sum(len(group) for group, passes in zip(groups, right, strict=True) if passes)
    second = len(groups[order[1]]) if len(order) > 1 else 0
    return Poll(groups[order[0]][0], len(groups[order[0]]), second, passed, right[order[0]])


def steady(once: Sequence[Ballot], again: Sequence[Ballot]) -> list[list[str | None]]:
    """The ballots of two runs, without what a program printed in only one of them."""
    return [
        [a if a == b else None for a, b in zip(first, second, strict=True)]
        for first, second in zip(once, again, strict=True)
    ]


def voters(ballots: Sequence[Ballot], labels: Sequence[str], tests: dict[str, Any]) -> list[int]:
    """The solutions that can be trusted with a vote: on at least half of the tests they print the
    label, or what more print than anything else. The others are wrong, or do not run."""
    agreed = [0] * len(ballots[0])
    for ballot, label in zip(ballots, labels, strict=True):
        count = poll(ballot, label, tests)
        mode = count.mode if count.votes > count.second else None
        for i, output in enumerate(ballot):
            agreed[i] += output is not None and (
                _same(output, label, tests) or (mode is not None and _same(output, mode, tests))
            )
    return [i for i, count in enumerate(agreed) if count >= RELIABLE * len(ballots)]


def fate(count: Poll, voting: int, config: CodeConfig) -> Fate:
    """What becomes of a test on which so many had a vote."""
    if not count.votes or count.votes < config.agreement * voting:
        return "dropped"
    if count.confirmed:
        return "kept"
    return "relabelled" if not count.passed and decisive(count, voting, config) else "dropped"


def decisive(count: Poll, voting: int, config: CodeConfig) -> bool:
    """Whether the mode can become a label."""
    return count.votes >= max(config.min_votes, config.relabel_agreement * voting)


def with_checker(
    tests: dict[str, Any], ballots: Sequence[Ballot], tolerance: float | None
) -> dict[str, Any]:
    """The tests, which name no checker, with the one for floats where solutions print a label's
    decimals in another way (`0.5` and `0.50`), and would be wrong to a comparison of tokens."""
    if tolerance is None or "checker" in tests:
        return tests
    lenient = tests | {"checker": "float", "float_tolerance": tolerance}
    for case, ballot in zip(tests["cases"], ballots, strict=True):
        label = case["output"]
        if "." in label and any(
            output is not None and _same(output, label, lenient) and not _same(output, label, tests)
            for output in ballot
        ):
            return lenient
    return tests


def _same(output: str, expected: str, tests: dict[str, Any]) -> bool:
    return same_output(output.encode(), expected, tests)
