"""Stage `code`: programming problems with trustworthy tests, in Python and C++.

A problem's solutions vote on its tests (`agreement`): tests with low agreement are dropped, losing
labels are replaced, and problems with few tests get more (`inputs`). Function tests contain their
expected values in code, so they are kept or dropped together.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from tramontane.asking import Answer, Prompt
from tramontane.curation.agreement import (
    Case,
    most_telling,
    mutants,
    remarks,
    several_outputs,
    steady,
    voters,
    with_checker,
    with_fate,
)
from tramontane.curation.config import CodeConfig
from tramontane.curation.inputs import Proposal, mutations, questions, read_inputs
from tramontane.curation.judge import ReferenceJudge
from tramontane.curation.rows import ModelStage, Row
from tramontane.data.code import Solution, parse_solutions
from tramontane.errors import InputError
from tramontane.journals import Journal
from tramontane.types import PAPER_TAGS, Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.functions import doing_nothing
from tramontane.verifier.code.grade import MAX_TIMEOUTS, NO_SANDBOX, Trial, TrialOutput
from tramontane.verifier.code.idle import NEVER_CALL, NO_CHECK, why_idle
from tramontane.workplace import write_whole

BATCH = 50  # inputs per sandbox
WRONG_PROGRAMS = 20  # maximum used to select a problem's tests
SPARE = 2  # candidates per needed test, since many are rejected
NO_PROPOSAL = Proposal([], "")  # for problems not shown to a model
NAMES = {"python": "Python", "cpp": "C++"}
LANGUAGE_REQUEST = {
    "en": "Write the program in {}.",
    "fr": "Écris le programme en {}.",
    "es": "Escribe el programa en {}.",
    "it": "Scrivi il programma in {}.",
    "de": "Schreibe das Programm in {}.",
    "zh": "请用 {} 编写程序。",
    "ru": "Напиши программу на {}.",
}


class Code(ModelStage):
    """Checks tests by running solutions on them; problems of other domains pass.

    Each problem's result is written as soon as it is known, so a restarted stage repeats only the
    programs that were running when it was killed. A model that proposes inputs is asked before any
    program runs.

    Raises:
        InputError: no sandbox works here.
    """

    name = "code"

    def __init__(self, config: CodeConfig, folder: Path) -> None:
        super().__init__(config, folder)
        if sandbox.probe() == "rlimits" and not config.verifier.allow_unsandboxed:
            raise InputError(f"curate: stage code: {NO_SANDBOX}")
        self.judge = ReferenceJudge(config.verifier)
        # Threads only wait; one more than the workers has the next program ready.
        self.threads = ThreadPoolExecutor(config.verifier.workers + 1)

    def decide(self, rows: Sequence[Row]) -> list[Row]:
        verifier_of = self.config.verifier.verifier_of
        programs = {_key(row): row for row in rows if verifier_of(row.task.domain) == "code"}
        proposals = self._proposals(rows, programs)
        with Journal(self.record(rows, "finished")) as journal:
            finished = {
                key: [Row.load(json.loads(text)) for text in decided] for key, decided in journal
            }
            running = {
                self.threads.submit(self._curate, row, proposals.get(key, NO_PROPOSAL)): key
                for key, row in programs.items()
                if key not in finished
            }
            for future in as_completed(running):
                key, decided = running[future], future.result()
                journal.add((key, [row.dump() for row in decided]))
                finished[key] = decided
        return [new for row in rows for new in finished.get(_key(row), [row])]

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.judge.close()

    # ----------------------------------------------------------------------- asking a model

    def _proposals(self, chunk: Sequence[Row], programs: dict[str, Row]) -> dict[str, Proposal]:
        """The model's proposals for each problem with few tests.

        All proposals are written to one file, so that a problem judged without an answer is not
        asked about again.
        """
        if self.config.model is None:
            return {}
        file = self.record(chunk, "proposed")
        if not file.is_file():
            prompts = {
                (key, part): question
                for key, row in programs.items()
                for part, question in enumerate(self._questions(row.task))
            }
            answers = dict(self.ask(chunk, prompts, 1))
            of_rows: dict[str, list[Answer]] = defaultdict(list)
            for key, part in prompts:
                of_rows[key] += answers[key, part]
            found = {key: read_inputs(programs[key].task, of_rows[key]) for key in of_rows}
            write_whole(file, json.dumps(found))
        read = json.loads(file.read_text(encoding="utf-8"))
        return {key: Proposal(*proposal) for key, proposal in read.items()}

    def _questions(self, problem: Problem) -> list[Prompt]:
        tests = problem.tests
        few = tests and tests["type"] == "stdio" and len(tests["cases"]) < self.config.want_tests
        if not tests or not few or len(self._solutions(problem)) < self.config.min_votes:
            return []
        return questions(problem, SPARE * (self.config.want_tests - len(tests["cases"])))

    # --------------------------------------------------------------------------- one problem

    def _curate(self, row: Row, proposal: Proposal) -> list[Row]:
        tests, solutions = row.task.tests, self._solutions(row.task)
        if not tests:
            return [row.drop(self.name, "no_tests", "")]
        if reason := why_idle(tests, row.task.problem):
            return [row.drop(self.name, "idle_tests", reason)]
        if not solutions:
            return [row.drop(self.name, "no_solutions", "none in Python or C++")]
        if tests["type"] == "stdio" and tests.get("checker") != "program":
            return self._curate_cases(row, tests, solutions, proposal)
        return self._curate_whole(row, tests, solutions)

    def _solutions(self, problem: Problem) -> list[Solution]:
        solutions, limit = parse_solutions(problem), self.config.max_solutions
        if limit is None or len(solutions) <= limit:
            return solutions
        return random.Random(f"solutions of {problem.id}").sample(solutions, limit)

    def _curate_cases(
        self, row: Row, tests: dict[str, Any], solutions: list[Solution], proposal: Proposal
    ) -> list[Row]:
        """Vote on every test, then confirm new labels, and label new inputs, by a second vote."""
        cases = [Case(i, test, test["output"]) for i, test in enumerate(tests["cases"], 1)]
        ran = self._run(solutions, cases)
        ballots = _ballots(ran)
        tests = with_checker(tests, ballots, self.config.float_tolerance)
        if several_outputs(ballots, tests):
            again = steady(ballots, _ballots(self._run(solutions, cases, hash_seed=1)))
            if several_outputs(again, tests):  # else the outputs vary between runs
                detail = f"{_count(solutions, 'solution')} differ; give the row a checker program"
                return [row.drop(self.name, "several_outputs", detail)]
        trusted = voters(ballots, [case.source["output"] for case in cases], tests)
        remark = f"{_count(cases, 'test')}, {_count(solutions, 'solution')}{_without(ran, trusted)}"
        if proposal.fault:
            remark += f"; no inputs from the model: {proposal.fault}"
        if not trusted:
            return [row.drop(self.name, "no_agreement", remark)]
        for case, ballot in zip(cases, ballots, strict=True):
            case.vote([ballot[i] for i in trusted], tests, self.config)
        wanted = self.config.want_tests - sum(case.fate != "dropped" for case in cases)
        added: list[Case] = []
        if len(trusted) >= self.config.min_votes:
            inputs = self._new_inputs(row.task, wanted, proposal)
            added = [Case(0, {"input": text}) for text in inputs]
        if doubtful := [*with_fate(cases, "relabeled"), *added]:
            # Run twice more, since output that varies between runs cannot be a label.
            voting = [solutions[i] for i in trusted]
            first, second = (_ballots(self._run(voting, doubtful, hash_seed=n)) for n in (0, 1))
            for case, ballot in zip(doubtful, steady(first, second), strict=True):
                case.confirm(ballot, tests, self.config)
        kept = [case for case in cases if case.fate != "dropped"]
        wrong = self._wrong_programs(row.task, solutions, trusted)
        added = self._telling(with_fate(added, "added"), max(wanted, 0), wrong, tests, kept)
        if self.config.max_tests is not None:
            chosen = self._telling(kept, self.config.max_tests, wrong, tests)
            for case in kept:
                case.fate = case.fate if any(case is other for other in chosen) else "spared"
        decided = self._with_tests(row, tests, [*cases, *added], remark)
        return [r.note(self.name, "no_inputs", remark) if proposal.fault else r for r in decided]

    def _new_inputs(self, problem: Problem, wanted: int, proposal: Proposal) -> list[str]:
        found: list[str] = []
        for source in self.config.inputs:
            count = max(0, SPARE * wanted - len(found))
            new = mutations(problem, count) if source == "mutation" else proposal.inputs[:count]
            found += new
        return list(dict.fromkeys(found))

    def _wrong_programs(
        self, problem: Problem, solutions: list[Solution], trusted: list[int]
    ) -> list[Solution]:
        """Programs that tests should reject: the source's wrong ones, solutions without a vote, and
        mutants."""
        wrong = parse_solutions(problem, ("incorrect_solutions",))
        wrong += [s for i, s in enumerate(solutions) if i not in trusted]
        wrong = wrong[:WRONG_PROGRAMS]
        right = [solutions[i] for i in trusted]
        # Python's need no compiler.
        right = [s for s in right if s.language == "python"] or right
        return wrong + mutants(right, WRONG_PROGRAMS - len(wrong), f"mutants of {problem.id}")

    def _telling(
        self,
        cases: list[Case],
        count: int,
        wrong: list[Solution],
        tests: dict[str, Any],
        before: Sequence[Case] = (),
    ) -> list[Case]:
        """The `count` cases that best reject wrong programs, in addition to `before`."""
        if len(cases) <= count or not count:
            return cases[:count]
        asked = [*before, *cases]
        ballots = _ballots(self._run(wrong, asked, max_timeouts=1)) if wrong else [()] * len(asked)
        failed = [
            {i for i, output in enumerate(ballot) if not case.accepts(output, tests)}
            for case, ballot in zip(asked, ballots, strict=True)
        ]
        known, new = failed[: len(before)], failed[len(before) :]
        chosen = most_telling(new, [len(case.input) for case in cases], count, known)
        return [cases[i] for i in chosen]

    def _with_tests(
        self, row: Row, tests: dict[str, Any], cases: list[Case], remark: str
    ) -> list[Row]:
        """The row with the remaining tests, and the decision to keep, change or drop it."""
        problem, notes = row.task, remarks(cases)
        if tests.get("checker") != (problem.tests or {}).get("checker"):
            notes.append("decimals are compared as numbers")
        detail = "; ".join([remark, *notes])
        remaining = [case.test for case in cases if case.fate not in ("dropped", "spared")]
        if not remaining:
            return [row.drop(self.name, "no_agreement", detail)]
        if len(remaining) < self.config.min_tests:
            return [row.drop(self.name, "few_tests", detail)]
        relabeled = with_fate(cases, "relabeled")
        reason = (
            "tests_relabeled" if relabeled
            else "tests_dropped" if with_fate(cases, "dropped")
            else "tests_added" if with_fate(cases, "added")
            else "tests_chosen" if with_fate(cases, "spared")
            else "float_checker" if notes
            else ""
        )  # fmt: skip
        metadata = dict(problem.metadata)
        if relabeled:
            metadata["relabeled_tests"] = [
                {"test": case.number, "was": case.source["output"]} for case in relabeled
            ]
        changed = replace(problem, tests=tests | {"cases": remaining}, metadata=metadata)
        return self._in_each_language(row, changed, reason, detail)

    def _curate_whole(
        self, row: Row, tests: dict[str, Any], solutions: list[Solution]
    ) -> list[Row]:
        """Keep or drop as a whole tests without outputs to vote on: function tests, and tests with
        a checker program."""
        is_stdio = tests["type"] == "stdio"
        programs = [s for s in solutions if is_stdio or s.language == "python"]
        if not programs:
            return [row.drop(self.name, "no_solutions", "none in Python")]
        nothing = Solution("python", doing_nothing(row.task))
        tried = [*programs, nothing]
        responses = [(f"{PAPER_TAGS.around('-')}\n{_fenced(*s)}", 0) for s in tried]
        *verdicts, idle = self.judge.pool.score(row.task, responses).result()
        if idle.verdict == "right" or idle.reason in (NEVER_CALL, NO_CHECK):
            detail = idle.reason or "a program that does nothing passes them"
            return [row.drop(self.name, "idle_tests", detail)]
        passed = sum(verdict.verdict == "right" for verdict in verdicts)
        if passed >= self.config.agreement * len(programs):
            return self._in_each_language(row, row.task, "", "") if is_stdio else [row]
        failures = Counter(v.reason for v in verdicts if v.verdict != "right")
        detail = f"{passed} of {_count(programs, 'solution')} pass; {failures.most_common(1)[0][0]}"
        return [row.drop(self.name, "no_agreement", detail)]

    def _in_each_language(self, row: Row, problem: Problem, reason: str, detail: str) -> list[Row]:
        """The changed problem, once per programming language if it leaves the choice open."""
        free = problem.metadata.get("programming_language") in (None, "any")
        if not free or not self.config.languages:
            if problem == row.task:
                return [row]
            return [row.rewrite(self.name, reason, detail, problem)]
        first, *others = self.config.languages
        asked = _ask_for(problem, first)
        rows = [row.rewrite(self.name, reason or f"asked_in_{first}", detail, asked)]
        for language in others:
            copy = replace(_ask_for(problem, language), id=f"{problem.id}-{language}")
            rows.append(row.copy(self.name, f"asked_in_{language}", f"of {problem.id}", copy))
        return rows

    def _run(
        self,
        solutions: list[Solution],
        cases: list[Case],
        max_timeouts: int = MAX_TIMEOUTS,
        hash_seed: int = 0,
    ) -> list[list[TrialOutput]]:
        if shutil.which("g++") and any(s.language == "cpp" for s in solutions):
            # The standard headers, once per machine, before any program's time limit starts.
            sandbox.precompiled(sandbox.CPP_FLAGS)
        pool, inputs = self.judge.pool, [case.input for case in cases]
        futures = [
            [
                pool.run(Trial(s.language, s.code, inputs[i : i + BATCH], max_timeouts, hash_seed))
                for i in range(0, len(inputs), BATCH)
            ]
            for s in solutions
        ]
        return [[ran for future in batches for ran in future.result()] for batches in futures]


def _key(row: Row) -> str:
    return f"{row.number} {row.copied_by}"


def _ballots(ran: list[list[TrialOutput]]) -> list[list[str | None]]:
    """Runs by solution → outputs by input; None where the program failed."""
    return [[None if r.failure else r.output for r in runs] for runs in zip(*ran, strict=True)]


def _ask_for(problem: Problem, language: str) -> Problem:
    spoken = problem.language or "en"
    line = LANGUAGE_REQUEST.get(spoken, LANGUAGE_REQUEST["en"]).format(NAMES[language])
    metadata = problem.metadata | {"programming_language": language}
    return replace(problem, problem=f"{problem.problem.rstrip()}\n\n{line}", metadata=metadata)


def _fenced(language: str, code: str) -> str:
    marks = "`" * max(3, 1 + max(map(len, re.findall("`+", code)), default=0))
    return f"{marks}{language}\n{code}\n{marks}"


def _count(things: Sequence[Any], name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def _without(ran: list[list[TrialOutput]], trusted: list[int]) -> str:
    """The number of solutions without a vote, and their most common failure."""
    rejected = [runs for i, runs in enumerate(ran) if i not in trusted]
    if not rejected:
        return ""
    failures = Counter(r.failure or "wrong output" for runs in rejected for r in runs)
    return f" ({len(rejected)} without a vote: {failures.most_common(1)[0][0]})"
