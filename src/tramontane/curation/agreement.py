"""Votes of a problem's solutions on its tests (arXiv 2506.10910, section 4.1).

The paper runs all solutions on all tests, discards tests with low agreement, and relabels a test
with the modal output where agreement is high and the label loses. It gives no thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from tramontane.curation.config import CodeConfig
from tramontane.verifier.code.grade import same_output

Ballot = Sequence[str | None]  # each solution's output for one input; None where it failed
Fate = Literal["kept", "relabelled", "dropped", "added", "spared"]
RELIABLE = 0.5  # share of tests on which a solution must agree to get a vote


class Poll(NamedTuple):
    """The count of one ballot.

    Args:
        mode: the most common output; in a tie, the one equal to the label, else the first.
        votes: number of solutions that print the mode.
        second: number of solutions that print the next most common output.
        passed: number of solutions that print the label.
        confirmed: the mode is the label.
    """

    mode: str | None
    votes: int
    second: int
    passed: int
    confirmed: bool


def poll(ballot: Ballot, label: str | None, tests: dict[str, Any]) -> Poll:
    """Count outputs, merging those that the checker considers equal; the label has no vote."""
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


def steady(first: Sequence[Ballot], second: Sequence[Ballot]) -> list[list[str | None]]:
    """The ballots of two runs; an output that only one run printed counts as a failure."""
    return [
        [a if a == b else None for a, b in zip(once, again, strict=True)]
        for once, again in zip(first, second, strict=True)
    ]


def voters(ballots: Sequence[Ballot], labels: Sequence[str], tests: dict[str, Any]) -> list[int]:
    """Indices of the solutions trusted with a vote.

    A trusted solution prints, on at least half of the tests, the label or the output that more
    solutions print than any other. The other solutions are wrong, or do not run.
    """
    agreed = [0] * len(ballots[0])
    for ballot, label in zip(ballots, labels, strict=True):
        count = poll(ballot, label, tests)
        mode = count.mode if count.votes > count.second else None
        for i, output in enumerate(ballot):
            agreed[i] += output is not None and (
                _same(output, label, tests) or (mode is not None and _same(output, mode, tests))
            )
    return [i for i, count in enumerate(agreed) if count >= RELIABLE * len(ballots)]


def several_outputs(ballots: Sequence[Ballot], tests: dict[str, Any]) -> bool:
    """True if inputs seem to have several right outputs: solutions differ on more than a third of
    the tests, and of at least three that run, fewer than half agree on all tests. With wrong
    solutions among right ones, the right ones would agree.
    """
    runs = [run for run in zip(*ballots, strict=True) if None not in run]
    split = sum(poll(ballot, None, tests).second > 0 for ballot in ballots)
    if len(runs) < 3 or 3 * split <= len(ballots):
        return False
    groups: list[list[Ballot]] = []
    for run in runs:
        for group in groups:
            pairs = zip(run, group[0], strict=True)
            if all(a == b or _same(str(a), str(b), tests) for a, b in pairs):
                group.append(run)
                break
        else:
            groups.append([run])
    return 2 * max(map(len, groups)) < len(runs)


def fate(count: Poll, voting: int, config: CodeConfig) -> Fate:
    """The decision about a test with `voting` voting solutions."""
    if not count.votes or count.votes < config.agreement * voting:
        return "dropped"
    if count.confirmed:
        return "kept"
    return "relabelled" if not count.passed and decisive(count, voting, config) else "dropped"


def decisive(count: Poll, voting: int, config: CodeConfig) -> bool:
    """True if the mode has enough votes to become a label."""
    return count.votes >= max(config.min_votes, config.relabel_agreement * voting)


def with_checker(
    tests: dict[str, Any], ballots: Sequence[Ballot], tolerance: float | None
) -> dict[str, Any]:
    """The tests, with the float checker if they name no checker and need it.

    Tests need it if solutions spell a label's decimals differently (`0.5` and `0.50`), which a
    comparison of tokens would count as wrong.
    """
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
