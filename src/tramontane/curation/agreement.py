"""Which tests of a programming problem hold, by the votes of its solutions (arXiv 2506.10910,
section 4.1), and which of them tell right programs from wrong ones.

The paper runs all solutions on all tests, discards tests with low agreement, and relabels a test
with the modal output where agreement is high and the label loses. It gives no thresholds.

Training uses few tests of a problem (the paper: 20), and random ones let many wrong programs pass.
Wrong programs are those that the source or the votes call wrong, and mutants of right solutions:
one small change each, as in typical wrong submissions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Literal, NamedTuple

from tramontane.curation.config import CodeConfig
from tramontane.data.code import Solution
from tramontane.statistics import grouped
from tramontane.verifier.code.grade import same_output

Ballot = Sequence[str | None]  # each solution's output for one input; None where it failed
Fate = Literal["kept", "relabeled", "dropped", "added", "spared"]
RELIABLE = 0.5  # share of tests on which a solution must agree to get a vote
# Pattern and replacement, for Python and C++ alike. Every test detects a change that breaks
# everything, so that does not matter.
_CHANGES = [
    (r"<=", "<"), (r">=", ">"), (r"(?<![<>=!-])>(?![>=])", ">="), (r"(?<![<=])<(?![<=])", "<="),
    (r"(?<![<>=!])==(?!=)", "!="), (r"\bmax\b", "min"), (r"\bmin\b", "max"), (r"\band\b", "or"),
    (r"\bor\b", "and"), (r"&&", "||"), (r"\|\|", "&&"), (r"\babs\(", "("), (r"\bnot ", ""),
    (r"(?<=[\w\])] )\+(?= [\w(])", "-"), (r"(?<=[\w\])])\+(?=[\w(])", "-"),
    (r"\bsorted\(", "list("),
    (r"\bset\(", "list("), (r"\.sort\(\)", ".copy()"), (r"\[::-1\]", ""), (r"//", "/"),
    (r"\b(?:long long|int64_t)\b", "int"), (r"\bll\b", "int"), (r"\blong double\b", "float"),
    (r"\belif\b", "if"), (r"\belse if\b", "if"), (r"\bbreak\b", "pass"), (r"\bcontinue\b", "break"),
]  # fmt: skip
_NUMBER = re.compile(r"(?<![\w.])\d{1,9}(?![\w.])")


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
    outputs = [output for output in ballot if output is not None]
    groups = grouped(outputs, partial(_same, tests=tests))
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

    def alike(one: Ballot, other: Ballot) -> bool:
        pairs = zip(one, other, strict=True)
        return all(a == b or _same(str(a), str(b), tests) for a, b in pairs)

    return 2 * max(map(len, grouped(runs, alike))) < len(runs)


def fate(count: Poll, voting: int, config: CodeConfig) -> Fate:
    """The decision about a test with `voting` voting solutions."""
    if not count.votes or count.votes < config.agreement * voting:
        return "dropped"
    if count.confirmed:
        return "kept"
    return "relabeled" if not count.passed and decisive(count, voting, config) else "dropped"


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


# ------------------------------------------------------------------------- one test of a problem


@dataclass
class Case:
    """An input with its expected output, and the votes' decision about the pair.

    Args:
        number: position among the problem's tests, from 1; 0 for a generated input.
        source: the test as given in the problem; for a generated input, only `input`.
        label: the expected output; None until a vote labels a generated input.
        fate: the current decision. `relabeled` and `added` are provisional until `confirm`.
    """

    number: int
    source: dict[str, Any]
    label: str | None = None
    fate: Fate = "added"

    @property
    def input(self) -> str:
        """Standard input of the programs."""
        return str(self.source["input"])

    @property
    def test(self) -> dict[str, Any]:
        """The test with the voted label."""
        return self.source | {"output": self.label}

    def accepts(self, output: str | None, tests: dict[str, Any]) -> bool:
        """True if an output is as expected; None is a failure."""
        return output is not None and _same(output, str(self.label), tests)

    def vote(self, ballot: Ballot, tests: dict[str, Any], config: CodeConfig) -> None:
        """Decide about a given test from the trusted solutions' outputs."""
        self.fate = fate(poll(ballot, self.label, tests), len(ballot), config)

    def confirm(self, ballot: Ballot, tests: dict[str, Any], config: CodeConfig) -> None:
        """Label a relabeled or added test by a second, repeated vote, or drop it.

        A generated input is valid only if every solution accepts it.
        """
        count = poll(ballot, self.label, tests)
        unreadable = self.fate == "added" and None in ballot
        if count.passed or unreadable or not decisive(count, len(ballot), config):
            self.fate = "dropped"
        else:
            self.label = count.mode


def remarks(cases: Sequence[Case]) -> list[str]:
    """The changes, for a row's detail: `relabeled test 2 ('6' → '10')`, `added 3`."""
    relabeled, dropped, added, spared = (
        with_fate(cases, name) for name in ("relabeled", "dropped", "added", "spared")
    )
    lines = []
    if relabeled:
        old, new = relabeled[0].source["output"], relabeled[0].label or ""
        lines.append(f"relabeled {_numbers(relabeled)} ({_short(old)} → {_short(new)})")
    if dropped:
        lines.append(f"dropped {_numbers(dropped)}")
    if added:
        lines.append(f"added {len(added)}")
    if spared:
        lines.append(f"left out {len(spared)} that tell no more programs apart")
    return lines


def with_fate(cases: Sequence[Case], fate: Fate) -> list[Case]:
    """The cases with this fate."""
    return [case for case in cases if case.fate == fate]


# -------------------------------------------------------------- tests that tell programs apart


def mutants(solutions: Sequence[Solution], count: int, seed: str) -> list[Solution]:
    """Up to `count` programs, each a solution with one operator, name or number changed."""
    rng, programs = Random(seed), dict.fromkeys(solutions)
    places = [place for solution in solutions for place in _places(solution)]
    for solution, start, end, text in rng.sample(places, len(places)):
        if len(programs) == len(solutions) + count:
            break
        code = solution.code[:start] + text + solution.code[end:]
        programs.setdefault(Solution(solution.language, code))
    return list(programs)[len(dict.fromkeys(solutions)) :]


def most_telling(
    failed: Sequence[set[int]], sizes: Sequence[int], count: int, before: Sequence[set[int]] = ()
) -> list[int]:
    """`count` of the tests, in order: the one with the largest input, on which slow programs fail,
    then repeatedly the one that rejects most wrong programs not yet rejected.

    Args:
        failed: by test, the numbers of the wrong programs that fail on it.
        sizes: by test, the length of its input.
        count: number of tests to choose.
        before: the same for tests already chosen.
    """
    tests = range(len(failed))
    rarity = Counter(program for programs in (*failed, *before) for program in programs)
    found = Counter(program for programs in before for program in programs)
    chosen: list[int] = []

    def worth(test: int) -> tuple[bool, float, int, int]:
        largest = not chosen and not before and sizes[test] == max(sizes)
        # A program rejected by few tests counts most, and less each time it is rejected.
        gain = sum(1 / rarity[program] / 4 ** found[program] for program in failed[test])
        return largest, gain, sizes[test], -test

    while len(chosen) < min(count, len(failed)):
        best = max((test for test in tests if test not in chosen), key=worth)
        chosen.append(best)
        found.update(failed[best])
    return sorted(chosen)


def _same(output: str, expected: str, tests: dict[str, Any]) -> bool:
    return same_output(output.encode(), expected, tests)


def _numbers(cases: Sequence[Case]) -> str:
    """The tests' numbers, at most ten of them."""
    shown = ", ".join(str(case.number) for case in cases[:10])
    return f"test{'s' * (len(cases) > 1)} {shown}" + (" …" if len(cases) > 10 else "")


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 40 else text[:40] + "…")


def _places(solution: Solution) -> list[tuple[Solution, int, int, str]]:
    places = []
    for pattern, text in _CHANGES:
        spans = [match.span() for match in re.finditer(pattern, solution.code)]
        places += [(solution, *span, text) for span in spans]
    for match in _NUMBER.finditer(solution.code):
        near = int(match[0]) + 1, int(match[0]) - 1
        places += [(solution, *match.span(), str(number)) for number in near]
    return places
