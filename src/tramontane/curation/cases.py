"""One test of a programming problem, from the first vote on it to the curated set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tramontane.curation.agreement import Ballot, Fate, decisive, fate, poll
from tramontane.curation.config import CodeConfig
from tramontane.verifier.code.grade import same_output


@dataclass
class Case:
    """An input with its expected output, and the votes' decision about the pair.

    Args:
        number: position among the problem's tests, from 1; 0 for a generated input.
        source: the test as given in the problem; for a generated input, only `input`.
        label: the expected output; None until a vote labels a generated input.
        fate: the current decision. `relabelled` and `added` are provisional until `confirm`.
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
        return output is not None and same_output(output.encode(), str(self.label), tests)

    def vote(self, ballot: Ballot, tests: dict[str, Any], config: CodeConfig) -> None:
        """Decide about a given test from the trusted solutions' outputs."""
        self.fate = fate(poll(ballot, self.label, tests), len(ballot), config)

    def confirm(self, ballot: Ballot, tests: dict[str, Any], config: CodeConfig) -> None:
        """Label a relabelled or added test by a second, repeated vote, or drop it.

        A generated input is valid only if every solution accepts it.
        """
        count = poll(ballot, self.label, tests)
        unreadable = self.fate == "added" and None in ballot
        if count.passed or unreadable or not decisive(count, len(ballot), config):
            self.fate = "dropped"
        else:
            self.label = count.mode


def remarks(cases: Sequence[Case]) -> list[str]:
    """The changes, for a row's detail: `relabelled test 2 ('6' → '10')`, `added 3`."""
    relabelled, dropped, added, spared = (
        with_fate(cases, name) for name in ("relabelled", "dropped", "added", "spared")
    )
    found = []
    if relabelled:
        old, new = relabelled[0].source["output"], relabelled[0].label or ""
        found.append(f"relabelled {_numbers(relabelled)} ({_short(old)} → {_short(new)})")
    if dropped:
        found.append(f"dropped {_numbers(dropped)}")
    if added:
        found.append(f"added {len(added)}")
    if spared:
        found.append(f"left out {len(spared)} that tell no more programs apart")
    return found


def with_fate(cases: Sequence[Case], fate: Fate) -> list[Case]:
    """The cases with this fate."""
    return [case for case in cases if case.fate == fate]


def _numbers(cases: Sequence[Case]) -> str:
    """The tests' numbers, at most ten of them."""
    shown = ", ".join(str(case.number) for case in cases[:10])
    return f"test{'s' * (len(cases) > 1)} {shown}" + (" …" if len(cases) > 10 else "")


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 40 else text[:40] + "…")
