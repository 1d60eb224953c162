"""Selects the next problem: from the stage's slice of the data, neither solved nor too hard.

The paper's curriculum (arXiv 2506.10910) adds harder problems as the model improves, and removes
solved ones. Whether a problem is retired, resting or available follows from its record in this run;
there is no other state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tramontane.config import Config, DataConfig
from tramontane.data.files import read_rows
from tramontane.data.load import generated
from tramontane.data.stream import ProblemStream
from tramontane.errors import InputError
from tramontane.types import Problem, Verdict


class Record(NamedTuple):
    """A run's results on one problem. Never changed in place, since checkpoints are written from
    shallow copies of all records."""

    visits: int = 0  # graded groups
    attempts: int = 0  # judged completions
    solved: int = 0  # right completions
    all_solved: int = 0  # latest consecutive visits that were all right
    none_solved: int = 0  # latest consecutive visits without a right completion
    version: int = 0  # weight version at the last visit
    stage: int = 0  # stage of the last visit


class Curriculum:
    """The problems of a run, stage by stage.

    A stage continues in its source where the previous stage with the same source stopped. A
    problem's record belongs to its id, regardless of the source.

    Args:
        stages: the resolved config of each stage.

    Raises:
        InputError: the errors of `ProblemStream`; an endless source with selection by pass rate or
            with `curriculum` rules; a stage whose source has no pass rates, or none within its
            range.
    """

    def __init__(self, stages: Sequence[Config]) -> None:
        self._data = [config.data for config in stages]
        self._seed = stages[0].seed
        self._rules = self._data[0].curriculum  # the same in all stages
        self._sources = [_source(data, self._data[0]) for data in self._data]
        self._streams: dict[str, ProblemStream] = {}
        for config, source in zip(stages, self._sources, strict=True):
            if source not in self._streams:
                self._streams[source] = ProblemStream(
                    config.data, config.seed, config.verifier.domains
                )
        self._recorded = [_recorded(data) for data in self._data]
        self._records: dict[str, Record] = {}
        self._retired: set[str] = set()
        self._resting: set[str] = set()  # `_rests` determines which of these are due again
        for number, data in enumerate(self._data):
            self._check(number, data, f"stages.{number}.data" if len(stages) > 1 else "data")

    @property
    def streams(self) -> list[ProblemStream]:
        """One stream per source."""
        return list(self._streams.values())

    def next(self, stage: int, version: int) -> Problem | None:
        """The next problem of a stage, with the model at `version`; None if none remains.

        Resting problems return before the source counts as exhausted. The problem's level of
        effort, if the stage has any, depends only on the seed and the position in the stream, so a
        resumed run draws the same one.
        """
        stream, data = self._streams[self._sources[stage]], self._data[stage]
        problem = self._next(stream, stage, version)
        if problem is None or not (shares := data.effort_shares):
            return problem
        draw = Random(f"{self._seed}/effort/{stream.epoch}/{stream.position}")
        (level,) = draw.choices([*shares], [*shares.values()])
        return data.at_efforts([problem], [level])[0]

    def _next(self, stream: ProblemStream, stage: int, version: int) -> Problem | None:
        if stream.problems is None:
            return stream.next()
        for _ in range(2):
            for _ in range(2 * len(stream.problems)):  # at least one whole epoch
                problem = stream.next()
                if self._available(problem, stage, version):
                    return problem
            if not self._resting:
                break
            for id in self._resting:
                self._records[id] = self._records[id]._replace(none_solved=0)
            self._resting.clear()
        return None

    def selected(self, stage: int) -> int:
        """Number of problems that a stage starts with, of a finite source."""
        problems = self._streams[self._sources[stage]].problems or ()
        return sum(self._available(problem, stage, 0) for problem in problems)

    def note(self, problem: Problem, verdicts: Sequence[Verdict], stage: int, version: int) -> None:
        """Record the verdicts of a problem's group that was graded at `version`."""
        if self._streams[self._sources[stage]].problems is None:
            return
        judged = [v for v in verdicts if v.verdict != "unscorable"]
        solved = sum(v.verdict == "right" for v in judged)
        r = self._records.get(problem.id, Record())
        all_solved, none_solved = r.all_solved, r.none_solved
        if judged:  # a visit without judged completions changes nothing
            all_solved = all_solved + 1 if solved == len(judged) == len(verdicts) else 0
            none_solved = none_solved + 1 if not solved else 0
        self._records[problem.id] = record = Record(
            visits=r.visits + 1,
            attempts=r.attempts + len(judged),
            solved=r.solved + solved,
            all_solved=all_solved,
            none_solved=none_solved,
            version=version,
            stage=stage,
        )
        self._classify(problem.id, record)

    def counts(self, stage: int, version: int) -> dict[str, int]:
        """Counts of visited, retired and resting problems; empty without rules for them."""
        if self._rules.retire_after is None and self._rules.too_hard is None:
            return {}
        resting = sum(self._rests(id, stage, version) for id in self._resting)
        return {
            "problems_visited": len(self._records),
            "problems_retired": len(self._retired),
            "problems_resting": resting,
        }

    def records(self) -> Iterator[dict[str, Any]]:
        """The record of each visited problem, with its pass rate, for users and other runs."""
        records, retired = dict(self._records), set(self._retired)

        def row(id: str, r: Record) -> dict[str, Any]:
            rate = r.solved / r.attempts if r.attempts else None
            row = {"id": id, "pass_rate": rate, "samples": r.attempts, "visits": r.visits}
            return row | {"solved": r.solved, "version": r.version, "retired": id in retired}

        return (row(id, record) for id, record in records.items())

    def state(self) -> dict[str, Any]:
        """The positions of all streams, and all records, in JSON types."""
        return {
            "streams": {source: stream.state() for source, stream in self._streams.items()},
            "records": dict(self._records),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue at `state`.

        Raises:
            InputError: the errors of `ProblemStream.load_state`.
        """
        for source, stream in self._streams.items():
            stream.load_state(state["streams"][source])
        self._records = {id: Record(*values) for id, values in state["records"].items()}
        self._retired.clear()
        self._resting.clear()
        for id, record in self._records.items():
            self._classify(id, record)

    def _classify(self, id: str, record: Record) -> None:
        """Retire a problem or let it rest, according to its record."""
        rules = self._rules
        if rules.retire_after is not None and record.all_solved >= rules.retire_after:
            self._retired.add(id)
        if rules.too_hard is not None and record.none_solved >= rules.too_hard.after:
            self._resting.add(id)
        else:
            self._resting.discard(id)

    def _rests(self, id: str, stage: int, version: int) -> bool:
        rule = self._rules.too_hard
        if rule is None or id not in self._resting:
            return False
        record = self._records[id]
        if rule.return_after == "stage":
            return record.stage == stage
        return version < record.version + rule.return_after

    def _available(self, problem: Problem, stage: int, version: int) -> bool:
        if problem.id in self._retired or self._rests(problem.id, stage, version):
            return False
        data = self._data[stage]
        if not data.selects:
            return True
        rate = self._recorded[stage].get(problem.id, problem.metadata.get("pass_rate"))
        if data.pass_rate == "running" and (record := self._records.get(problem.id)):
            rate = record.solved / record.attempts if record.attempts else rate
        return _within(rate, data)

    def _check(self, number: int, data: DataConfig, where: str) -> None:
        """Check that a stage's source has the pass rates and records that its rules need."""
        problems = self._streams[self._sources[number]].problems
        rules = self._rules
        if problems is None and (data.selects or rules.retire_after or rules.too_hard):
            key = where if data.selects else "data.curriculum"
            raise InputError(
                f"{key}: {data.train!r} has no end, so no problem comes twice and none has a "
                f"record; give data.limit, or leave pass rates and data.curriculum out"
            )
        if problems is None or not data.selects:
            return
        rates = [self._recorded[number].get(p.id, p.metadata.get("pass_rate")) for p in problems]
        known = [rate for rate in rates if _is_rate(rate)]
        if data.pass_rate == "recorded" and len(known) < len(problems):
            raise InputError(
                f"{where}: {len(problems) - len(known)} of {len(problems)} problems of "
                f"{data.train!r} have no pass_rate to select by; measure it with "
                f"`tramontane curate` (difficulty), name a run's problems.jsonl in "
                f"{where}.pass_rates, or take the running one ({where}.pass_rate: running)"
            )
        if not any(_within(rate, data) for rate in rates):
            raise InputError(
                f"{where}: of {len(problems)} problems of {data.train!r} none has a pass rate from "
                f"{data.min_pass_rate or 0:g} to "
                f"{1 if data.max_pass_rate is None else data.max_pass_rate:g}; widen "
                f"min_pass_rate and max_pass_rate"
            )


def _source(data: DataConfig, first: DataConfig) -> str:
    """A key for a stage's source: stages with the same source share a stream."""
    if generated(data.train)[0] != "playground" or data.playground == first.playground:
        return data.train
    return f"{data.train} {data.playground.model_dump_json()}"


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _within(rate: Any, data: DataConfig) -> bool:
    """True if a pass rate is within the slice, or not yet known."""
    if not _is_rate(rate):
        return True
    low = 0.0 if data.min_pass_rate is None else data.min_pass_rate
    high = 1.0 if data.max_pass_rate is None else data.max_pass_rate
    return bool(low <= rate <= high)


def _recorded(data: DataConfig) -> dict[str, Any]:
    """Pass rates by problem id, from the file `pass_rates`; empty without one."""
    if data.pass_rates is None:
        return {}
    if not Path(data.pass_rates).is_file():
        raise InputError(f"data.pass_rates {data.pass_rates!r}: no such file")
    return {str(row.get("id")): row.get("pass_rate") for _, row in read_rows(data.pass_rates)}
