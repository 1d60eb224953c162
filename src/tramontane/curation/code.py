"""Stage 5: programming problems whose tests can be trusted, asked for in Python and in C++.

The solutions that a problem comes with vote on its tests (`agreement`): tests with low agreement
go, labels that lose are replaced, and problems with few tests get more (`inputs`). Function tests
hold their labels within their code, so these stand or fall as a whole.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from tramontane.config import RewardConfig
from tramontane.curation.agreement import (
    Fate,
    decisive,
    fate,
    poll,
    steady,
    voters,
    with_checker,
)
from tramontane.curation.backend import Answer, Prompt
from tramontane.curation.backend.stage import ModelStage
from tramontane.curation.config import CodeConfig
from tramontane.curation.inputs import SOURCES, Proposal, questions, read_inputs
from tramontane.curation.rows import Row
from tramontane.data.code import Solution, parse_solutions
from tramontane.errors import InputError
from tramontane.types import Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.grade import NO_SANDBOX
from tramontane.verifier.code.trial import Trial, TrialOutput
from tramontane.verifier.pool import VerifierPool

BATCH = 50  # inputs of one sandbox
SPARE = 2  # candidates for each test that is wanted: many will not do
NONE = Proposal([], "")  # of a problem that no model was asked about
NAMES = {"python": "Python", "cpp": "C++"}
ASK = {
    "en": "Write the program in {}.",
    "fr": "Écris le programme en {}.",
    "es": "Escribe el programa en {}.",
    "it": "Scrivi il programma in {}.",
    "de": "Schreibe das Programm in {}.",
    "zh": "请用 {} 编写程序。",
    "ru": "Напиши программу на {}.",
}


class Code(ModelStage):
    """Tests tried on solutions; problems of other domains pass.

    A problem's result is written as soon as it is there, so that a stage that was killed runs no
    program again but those that it was at. A model that proposes inputs is asked before.

    Raises:
        InputError: no sandbox works here.
    """

    name = "code"

    def __init__(self, config: CodeConfig, folder: Path) -> None:
        super().__init__(config, folder)
        if sandbox.probe() == "rlimits" and not config.verifier.allow_unsandboxed:
            raise InputError(f"curate: stage code: {NO_SANDBOX}")
        self.pool: VerifierPool | None = None  # starts with the first problem that needs it
        # Threads only wait; one more than the workers has the next program ready.
        self.threads = ThreadPoolExecutor(config.verifier.workers + 1)
        self.journal = folder / "finished.jsonl"

    def decide(self, rows: Sequence[Row]) -> list[Row]:
        programs = {_key(row): row for row in rows if row.task.domain == "code"}
        proposed = self._proposed(rows, programs)
        finished = self._finished(programs.keys())
        missing = {key: row for key, row in programs.items() if key not in finished}
        if missing and self.pool is None:
            reward = RewardConfig(length=0, language=0)
            verifier = self.config.verifier.model_copy(update={"reward": reward})
            self.pool = VerifierPool(verifier, 1, 0)
        left = {
            self.threads.submit(self._judge, row, proposed.get(key, NONE)): key
            for key, row in missing.items()
        }
        with self.journal.open("a", encoding="utf-8") as file:
            for future in as_completed(left):
                key, decided = left[future], future.result()
                file.write(json.dumps([key, [row.dump() for row in decided]]) + "\n")
                file.flush()
                finished[key] = decided
        return [new for row in rows for new in finished.get(_key(row), [row])]

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        if self.pool is not None:
            self.pool.close()

    def _finished(self, keys: Set[str]) -> dict[str, list[Row]]:
        """What was decided of these rows before the process ended; the rest of the journal goes:
        another chunk's rows, and a line that broke off."""
        lines = self.journal.read_bytes().splitlines(keepends=True) if self.journal.exists() else []
        entries = [(line, *json.loads(line)) for line in lines if line.endswith(b"\n")]
        entries = [entry for entry in entries if entry[1] in keys]
        partial = self.journal.with_suffix(".partial")
        partial.write_bytes(b"".join(line for line, *_ in entries))
        partial.replace(self.journal)
        return {key: [Row.parse(text) for text in decided] for _, key, decided in entries}

    def _proposed(self, chunk: Sequence[Row], programs: dict[str, Row]) -> dict[str, Proposal]:
        """What the model proposes for each problem with few tests. All of it is written at once,
        so that a problem that was judged without an answer is not asked about again."""
        if self.config.model is None:
            return {}
        file = self.record(chunk, "proposed")
        if not file.is_file():
            asked = [(key, q) for key, row in programs.items() for q in self._questions(row.task)]
            answers: dict[str, dict[int, Answer]] = {key: {} for key, _ in asked}
            for place, [answer] in self.ask(chunk, [question for _, question in asked], 1):
                answers[asked[place][0]][place] = answer
            found = {
                key: read_inputs(programs[key].task, [given[i] for i in sorted(given)])
                for key, given in answers.items()
            }
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(found), encoding="utf-8")
            partial.replace(file)
        read = json.loads(file.read_text(encoding="utf-8"))
        return {key: Proposal(*proposal) for key, proposal in read.items()}

    def _questions(self, problem: Problem) -> list[Prompt]:
        tests = problem.tests
        few = tests and tests["type"] == "stdio" and len(tests["cases"]) < self.config.want_tests
        if not tests or not few or len(self._solutions(problem)) < self.config.min_votes:
            return []
        return questions(problem, SPARE * (self.config.want_tests - len(tests["cases"])))

    def _judge(self, row: Row, proposal: Proposal) -> list[Row]:
        tests, solutions = row.task.tests, self._solutions(row.task)
        if not tests:
            return [row.drop(self.name, "no_tests", "")]
        if not solutions:
            return [row.drop(self.name, "no_solutions", "none in Python or C++")]
        if tests["type"] == "stdio":
            return self._by_vote(row, tests, solutions, proposal)
        return self._as_a_whole(row, tests["type"].removesuffix("_assert"), solutions)

    def _solutions(self, problem: Problem) -> list[Solution]:
        solutions, most = parse_solutions(problem), self.config.max_solutions
        if most is None or len(solutions) <= most:
            return solutions
        return random.Random(f"solutions of {problem.id}").sample(solutions, most)

    def _by_vote(
        self, row: Row, tests: dict[str, Any], solutions: list[Solution], proposal: Proposal
    ) -> list[Row]:
        cases = tests["cases"]
        labels = [case["output"] for case in cases]
        ran = self._run(solutions, [case["input"] for case in cases])
        ballots = _ballots(ran)
        tests = with_checker(tests, ballots, self.config.float_tolerance)
        trusted = voters(ballots, labels, tests)
        said = f"{_count(cases, 'test')}, {_count(solutions, 'solution')}{_without(ran, trusted)}"
        if proposal.fault:
            said += f"; no inputs from the model: {proposal.fault}"
        if not trusted:
            return [row.drop(self.name, "no_agreement", said)]
        solutions = [solutions[i] for i in trusted]
        counts = [
            poll([ballot[i] for i in trusted], label, tests)
            for ballot, label in zip(ballots, labels, strict=True)
        ]
        fates = [fate(count, len(trusted), self.config) for count in counts]
        lost = [i for i, what in enumerate(fates) if what == "relabelled"]
        wanted = self.config.want_tests - sum(what != "dropped" for what in fates)
        enough = len(trusted) >= self.config.min_votes
        inputs = self._more_inputs(row.task, wanted, proposal) if enough else []
        asked = [*(cases[i]["input"] for i in lost), *inputs]
        twice = [_ballots(self._run(solutions, asked)) for _ in range(2)] if asked else [[], []]
        sure = steady(*twice)
        for i, ballot in zip(lost, sure[: len(lost)], strict=True):
            count = poll(ballot, labels[i], tests)
            if count.passed or not decisive(count, len(trusted), self.config):
                fates[i] = "dropped"
            else:
                labels[i] = count.mode
        added = []
        for text, ballot in zip(inputs, sure[len(lost) :], strict=True):
            count = poll(ballot, None, tests)
            if None not in ballot and decisive(count, len(trusted), self.config):
                added.append({"input": text, "output": count.mode})
        added = added[: max(wanted, 0)]
        decided = self._with_tests(row, tests, labels, fates, added, said)
        return [r.note(self.name, "no_inputs", said) if proposal.fault else r for r in decided]

    def _with_tests(
        self,
        row: Row,
        tests: dict[str, Any],
        labels: list[str],
        fates: list[Fate],
        added: list[dict[str, Any]],
        said: str,
    ) -> list[Row]:
        """The row with the tests that are left and those that were added."""
        cases, problem = tests["cases"], row.task
        at: dict[Fate, list[int]] = {"kept": [], "relabelled": [], "dropped": []}
        for i, what in enumerate(fates):
            at[what].append(i)
        left = [
            case | {"output": label}
            for case, label, what in zip(cases, labels, fates, strict=True)
            if what != "dropped"
        ]
        left += added
        notes = []
        if at["relabelled"]:
            old, new = cases[at["relabelled"][0]]["output"], labels[at["relabelled"][0]]
            notes.append(f"relabelled {_numbers(at['relabelled'])} ({_short(old)} → {_short(new)})")
        if at["dropped"]:
            notes.append(f"dropped {_numbers(at['dropped'])}")
        if added:
            notes.append(f"added {len(added)}")
        if tests.get("checker") != (problem.tests or {}).get("checker"):
            notes.append("decimals are compared as numbers")
        detail = "; ".join([said, *notes])
        if not left:
            return [row.drop(self.name, "no_agreement", detail)]
        if len(left) < self.config.min_tests:
            return [row.drop(self.name, "few_tests", detail)]
        reason = (
            "tests_relabelled" if at["relabelled"]
            else "tests_dropped" if at["dropped"]
            else "tests_added" if added
            else "float_checker" if notes
            else ""
        )  # fmt: skip
        metadata = dict(problem.metadata)
        if at["relabelled"]:
            metadata["relabelled_tests"] = [
                {"test": i + 1, "was": cases[i]["output"]} for i in at["relabelled"]
            ]
        changed = replace(problem, tests=tests | {"cases": left}, metadata=metadata)
        return self._asked(row, changed, reason, detail)

    def _as_a_whole(self, row: Row, language: str, solutions: list[Solution]) -> list[Row]:
        """Function tests are one test, without an output that could be voted on."""
        able = [s.code for s in solutions if s.language == language]
        if not able:
            return [row.drop(self.name, "no_solutions", f"none in {NAMES[language]}")]
        assert self.pool is not None
        self._prepare(solutions)
        responses = [(f"<think>-</think>\n{_fenced(language, code)}", 0) for code in able]
        verdicts = self.pool.score(row.task, responses).result()
        passed = sum(verdict.verdict == "right" for verdict in verdicts)
        if passed >= self.config.agreement * len(able):
            return [row]
        why = Counter(v.reason for v in verdicts if v.verdict != "right").most_common(1)[0][0]
        detail = f"{passed} of {_count(able, 'solution')} pass; {why}"
        return [row.drop(self.name, "no_agreement", detail)]

    def _asked(self, row: Row, problem: Problem, reason: str, detail: str) -> list[Row]:
        """The problem in its new form, once for each language where it leaves the choice."""
        free = problem.metadata.get("programming_language") in (None, "any")
        if not free or not self.config.languages:
            if problem == row.task:
                return [row]
            return [row.rewrite(self.name, reason, detail, problem)]
        first, *others = self.config.languages
        asked = _ask(problem, first)
        rows = [row.rewrite(self.name, reason or f"asked_in_{first}", detail, asked)]
        for language in others:
            copy = replace(_ask(problem, language), id=f"{problem.id}-{language}")
            rows.append(row.copy(self.name, f"asked_in_{language}", f"of {problem.id}", copy))
        return rows

    def _more_inputs(self, problem: Problem, wanted: int, proposal: Proposal) -> list[str]:
        sources = SOURCES | {"model": lambda problem, count: proposal.inputs[:count]}
        found: list[str] = []
        for name in self.config.inputs:
            found += sources[name](problem, max(0, SPARE * wanted - len(found)))
        return list(dict.fromkeys(found))

    def _run(self, solutions: list[Solution], inputs: list[str]) -> list[list[TrialOutput]]:
        """What each solution prints on each input."""
        assert self.pool is not None
        self._prepare(solutions)
        futures = [
            [
                self.pool.run(Trial(s.language, s.code, inputs[i : i + BATCH]))
                for i in range(0, len(inputs), BATCH)
            ]
            for s in solutions
        ]
        return [[ran for future in batches for ran in future.result()] for batches in futures]

    def _prepare(self, solutions: list[Solution]) -> None:
        """Compile the standard headers, once on a machine, before any program's time runs."""
        if shutil.which("g++") and any(s.language == "cpp" for s in solutions):
            sandbox.precompiled(sandbox.CPP_FLAGS)


def _key(row: Row) -> str:
    return f"{row.number} {row.copied_by}"


def _ballots(ran: list[list[TrialOutput]]) -> list[list[str | None]]:
    """By input, what each solution printed."""
    by_input = zip(*ran, strict=True)
    return [[None if one.failure else one.output for one in ballot] for ballot in by_input]


def _ask(problem: Problem, language: str) -> Problem:
    """The problem for one programming language."""
    line = ASK.get(problem.language or "en", ASK["en"]).format(NAMES[language])
    metadata = problem.metadata | {"programming_language": language}
    return replace(problem, problem=f"{problem.problem.rstrip()}\n\n{line}", metadata=metadata)


def _fenced(language: str, code: str) -> str:
    marks = "`" * max(3, 1 + max(map(len, re.findall("`+", code)), default=0))
    return f"{marks}{language}\n{code}\n{marks}"


# ---------------------------------------------------------------------------------- in the detail


def _count(things: Sequence[Any], name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def _without(ran: list[list[TrialOutput]], trusted: list[int]) -> str:
    """Which solutions have no vote, and what is wrong with the most of them."""
    out = [runs for i, runs in enumerate(ran) if i not in trusted]
    if not out:
        return ""
    failures = Counter(one.failure or "wrong output" for runs in out for one in runs)
    return f" ({len(out)} without a vote: {failures.most_common(1)[0][0]})"


def _numbers(places: list[int]) -> str:
    """Tests counted from 1, the first ten by number."""
    shown = ", ".join(str(i + 1) for i in places[:10])
    return f"test{'s' * (len(places) > 1)} {shown}" + (" …" if len(places) > 10 else "")


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 40 else text[:40] + "…")
