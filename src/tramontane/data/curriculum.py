"""Which problem comes next: the stage's slice of the data, without what is solved or too hard now.

The paper's curriculum (arXiv 2506.10910) adds harder problems as the model improves, and
removes those that it solves. Each problem's record in this run is kept with it, and its standing
follows from that alone: nothing else has to be remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from tramontane.config import Config, DataConfig
from tramontane.data.files import read_rows
from tramontane.data.stream import ProblemStream
from tramontane.errors import InputError
from tramontane.types import Problem, Verdict


@dataclass
class Record:
    """What a run knows of one problem.

    `visits` are groups, `attempts` completions that could be judged, `solved` those that were
    right. `all_solved` and `none_solved` count the newest visits in a row of which that is true.
    `version` and `stage` are those of the last visit.
    """

    visits: int = 0
    attempts: int = 0
    solved: int = 0
    all_solved: int = 0
    none_solved: int = 0
    version: int = 0
    stage: int = 0


class Curriculum:
    """The problems of a run, stage by stage.

    Stages with the same source go on in it where the one before stopped. A problem is known by its
    id, in whatever source it stands.

    Args:
        stages: the config as it stands in each stage.

    Raises:
        InputError: as `ProblemStream`; pass rates or records that an endless source cannot have;
            or a stage that selects by pass rates of which there are none, or none in its range.
    """

    def __init__(self, stages: Sequence[Config]) -> None:
        self._data = [config.data for config in stages]
        self._rules = self._data[0].curriculum  # no stage has its own
        self._streams: dict[str, ProblemStream] = {}
        for config in stages:
            if config.data.train not in self._streams:
                self._streams[config.data.train] = ProblemStream(config.data, config.seed)
        self._recorded = [_recorded(data) for data in self._data]
        self._records: dict[str, Record] = {}
        self._retired: set[str] = set()
        self._resting: set[str] = set()  # of these, some may be due to come back
        for number, data in enumerate(self._data):
            self._check(number, data, f"stages.{number}.data" if len(stages) > 1 else "data")

    @property
    def streams(self) -> list[ProblemStream]:
        """One a source."""
        return list(self._streams.values())

    def next(self, stage: int, version: int) -> Problem | None:
        """The next problem of a stage, while the model is at `version`; None where none is left.

        Those that rest come back before that.
        """
        stream = self._streams[self._data[stage].train]
        if stream.problems is None:
            return stream.next()
        for _ in range(2):
            for _ in range(2 * len(stream.problems)):  # at least one whole epoch
                problem = stream.next()
                if self._wanted(problem, stage, version):
                    return problem
            if not self._resting:
                break
            for id in self._resting:
                self._records[id].none_solved = 0
            self._resting.clear()
        return None

    def note(self, problem: Problem, verdicts: Sequence[Verdict], stage: int, version: int) -> None:
        """Record what became of a problem, of a group that was graded at `version`."""
        if self._streams[self._data[stage].train].problems is None:
            return
        judged = [v for v in verdicts if v.verdict != "unscorable"]
        solved = sum(v.verdict == "right" for v in judged)
        r = self._records.setdefault(problem.id, Record())
        r.visits += 1
        r.attempts += len(judged)
        r.solved += solved
        if judged:  # else the visit says nothing
            r.all_solved = r.all_solved + 1 if solved == len(judged) == len(verdicts) else 0
            r.none_solved = r.none_solved + 1 if not solved else 0
        r.version, r.stage = version, stage
        self._file(problem.id, r)

    def counts(self, stage: int, version: int) -> dict[str, int]:
        """Problems that were visited, that are retired, and that rest; empty where none ever is."""
        if self._rules.retire_after is None and self._rules.too_hard is None:
            return {}
        resting = sum(self._rests(id, stage, version) for id in self._resting)
        return {
            "problems_visited": len(self._records),
            "problems_retired": len(self._retired),
            "problems_resting": resting,
        }

    def records(self) -> Iterator[dict[str, Any]]:
        """The record of each problem visited, with its pass rate, for people and other runs."""
        for id, r in self._records.items():
            rate = r.solved / r.attempts if r.attempts else None
            row = {"id": id, "pass_rate": rate, "samples": r.attempts, "visits": r.visits}
            yield row | {"solved": r.solved, "version": r.version, "retired": id in self._retired}

    def state(self) -> dict[str, Any]:
        """Where all streams stand and what is known, as JSON can hold it."""
        return {
            "streams": {train: stream.state() for train, stream in self._streams.items()},
            "records": {id: astuple(record) for id, record in self._records.items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            InputError: as `ProblemStream.load_state`.
        """
        for train, stream in self._streams.items():
            stream.load_state(state["streams"][train])
        self._records = {id: Record(*values) for id, values in state["records"].items()}
        self._retired.clear()
        self._resting.clear()
        for id, record in self._records.items():
            self._file(id, record)

    def _file(self, id: str, record: Record) -> None:
        """Put a problem where its record says."""
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

    def _wanted(self, problem: Problem, stage: int, version: int) -> bool:
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
        problems = self._streams[data.train].problems
        rules = self._rules
        if problems is None and (data.selects or rules.retire_after or rules.too_hard):
            what = where if data.selects else "data.curriculum"
            raise InputError(
                f"{what}: {data.train!r} has no end, so no problem comes twice and none has a "
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


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _within(rate: Any, data: DataConfig) -> bool:
    """Whether a pass rate is in the slice; one that is not known yet is."""
    if not _is_rate(rate):
        return True
    low = 0.0 if data.min_pass_rate is None else data.min_pass_rate
    high = 1.0 if data.max_pass_rate is None else data.max_pass_rate
    return bool(low <= rate <= high)


def _recorded(data: DataConfig) -> dict[str, Any]:
    """Rates by id that `pass_rates` names.

    Raises:
        InputError: it cannot be read.
    """
    if data.pass_rates is None:
        return {}
    if not Path(data.pass_rates).is_file():
        raise InputError(f"data.pass_rates {data.pass_rates!r}: no such file")
    return {str(row.get("id")): row.get("pass_rate") for _, row in read_rows(data.pass_rates)}
