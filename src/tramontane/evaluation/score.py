"""Grade recorded responses with the same code as in training: a JSONL file in, a JSONL file out."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, TextIO

from tramontane.config import (
    BUILT_IN,
    Config,
    DomainConfig,
    load_config,
    parse_settings,
)
from tramontane.data.code import parse_tests
from tramontane.data.files import read_lines
from tramontane.errors import InputError
from tramontane.journals import parse_object
from tramontane.types import Problem, Verdict
from tramontane.verdicts.reasons import as_json
from tramontane.verifier import custom, references
from tramontane.verifier.custom import Response, failure_of
from tramontane.verifier.math.reference import stated
from tramontane.verifier.pool import VerifierPool
from tramontane.workplace import check_file, owned_file

logger = logging.getLogger("tramontane")
WINDOW = 256  # rows graded at once
STANDARD = "-"  # standard input, or output
KEYS = ("verifier.", "pipeline.l_max=", "pipeline.l_cache=")  # that overrides may set
ROW_FIELDS = (
    "id", "domain", "problem", "answer", "tests", "language", "response", "turns", "ending",
    "ending_reason",
)  # fmt: skip


@dataclass
class ScoreSummary:
    """Counts of verdicts by outcome and of the reasons of unscorable verdicts; the sum of rewards;
    a message for each unreadable row; the number of rows with each repeated id, or of groups where
    rewards are of a whole group."""

    outcomes: Counter[str] = field(default_factory=Counter)
    unscorable: Counter[str] = field(default_factory=Counter)
    reward: float = 0.0
    bad_rows: list[str] = field(default_factory=list)
    double_ids: Counter[str] = field(default_factory=Counter)

    def add(self, verdict: Verdict) -> None:
        self.outcomes[verdict.verdict] += 1
        self.reward += verdict.reward
        if verdict.verdict == "unscorable":
            self.unscorable[verdict.reason] += 1

    @property
    def scored(self) -> int:
        return sum(self.outcomes.values())

    @property
    def mean_reward(self) -> float:
        """Mean over the rows that could be scored."""
        return self.reward / max(self.scored - self.outcomes["unscorable"], 1)


def score(
    path: str | Path,
    out: str | Path | None = None,
    config: Config | str | Path | None = None,
    overrides: list[str] | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> ScoreSummary:
    """Grade the rows of a JSONL file (also gzip), in order, with the same code as in training.

    Args:
        path: a file, or `-` for standard input, with rows of `id`, `domain`, `problem`, `answer` or
            `tests`, `response`, and optionally `language` (ISO 639-1) and `response_tokens`. A
            conversation has `messages` (the chat; the assistant's are graded) or `turns` (as `eval`
            writes them) instead of the
            response, and is unscorable if its `ending` is a failure of its environment. For rewards
            of a whole group, consecutive rows with the same id are a group.
        out: file for rows of `id`, `reward`, `parts`, `verdict`, `reason`, `seconds` and `answer`
            (the extracted answer, null if there is none). Each is written as soon as all earlier
            rows are graded; an existing file is replaced. `-`: standard output. None: only the
            summary.
        config: a `Config` or the path of one. Its section `verifier` is used, with as many workers
            as cores by default, and, if it has a section `pipeline`, the length reward's `l_max`
            and `l_cache`.
        overrides: `verifier.key=value`, `pipeline.l_max=value` or `pipeline.l_cache=value` texts.
        progress: called with (rows done, rows in all); in all 0 of standard input.

    Unreadable rows are listed in `bad_rows` with their line numbers; the others are still graded.

    Raises:
        InputError: no such file or folder, no rows, a truncated or damaged file, or a verifier or
            reward that cannot be imported or fails; before anything is graded.
    """
    path = Path(path)
    settings = config if isinstance(config, Config) else _read(config, overrides or [])
    verifier, l_max, l_cache = settings.verifier, sys.maxsize, 0
    if "pipeline" in settings.model_fields_set:
        l_max, l_cache = settings.pipeline.l_max, settings.pipeline.l_cache
    if "workers" not in verifier.model_fields_set:
        verifier = verifier.model_copy(update={"workers": os.cpu_count() or 1})
    total = _check_files(path, out)
    summary = ScoreSummary()
    ids: Counter[str] = Counter()
    waiting: deque[tuple[str, Future[list[Verdict]]]] = deque()
    file = None if out is None or str(out) == STANDARD else Path(out)
    with (
        owned_file(file, "scored") if file is not None else nullcontext(),
        VerifierPool(verifier, l_max, l_cache) as pool,
        _sink(out) as sink,
    ):

        def finish(limit: int) -> None:
            while len(waiting) > limit:
                row_id, future = waiting.popleft()
                for verdict in future.result():
                    summary.add(verdict)
                    row = {"id": row_id, **as_json(verdict)}
                    sink.write(json.dumps(row, ensure_ascii=False) + "\n")
                if progress:
                    progress(summary.scored + len(summary.bad_rows), total)

        rows = _parsed_rows(path, verifier.domains, summary)
        first = list(islice(rows, WINDOW))
        pool.try_functions(problem for problem, _ in first)
        for warning in references.warnings(verifier, [p for p, _ in first], str(path)):
            logger.warning(warning)
        grouped = any(custom.of_group(reward) for reward in verifier.reward.custom)
        grouped |= bool(verifier.judge and verifier.judge.compares)
        for problem, responses in _groups(chain(first, rows), grouped):
            ids[problem.id] += 1
            waiting.append((problem.id, pool.score(problem, responses)))
            finish(WINDOW)
        finish(0)
    if not summary.scored and not summary.bad_rows:
        raise InputError("standard input: there are no rows in it")
    summary.double_ids = Counter({row_id: count for row_id, count in ids.items() if count > 1})
    return summary


def _read(config: str | Path | None, overrides: list[str]) -> Config:
    for override in overrides:
        if not override.startswith(KEYS):
            raise InputError(
                f"override {override!r}: only verifier.*, pipeline.l_max and pipeline.l_cache can "
                f"be set here"
            )
    if config is None:
        return parse_settings(Config, {}, overrides, "key=value")
    return load_config(config, overrides)


def _parsed_rows(
    path: Path, domains: Mapping[str, DomainConfig], summary: ScoreSummary
) -> Iterator[tuple[Problem, Response]]:
    """The rows of a file; unreadable ones go to `summary.bad_rows`."""
    for number, line in row_lines(path):
        try:
            problem, response = parse_row(line, domains)
        except InputError as error:
            summary.bad_rows.append(f"{path}:{number}: {error}")
            continue
        yield problem, response


def _groups(
    rows: Iterable[tuple[Problem, Response]], grouped: bool
) -> Iterator[tuple[Problem, list[Response]]]:
    """Consecutive rows with the same id, if `grouped`; else single rows."""
    if not grouped:
        yield from ((problem, [response]) for problem, response in rows)
        return
    for _, members in groupby(rows, key=lambda row: row[0].id):
        group = list(members)
        yield group[0][0], [response for _, response in group]


def _sink(out: str | Path | None) -> AbstractContextManager[TextIO]:
    """Where verdicts are written: line by line, so that a killed command leaves complete rows. Half
    a surrogate pair becomes a JSON escape."""
    if str(out) == STANDARD:
        return open(1, "w", 1, "utf-8", errors="backslashreplace", closefd=False)
    return open(out or os.devnull, "w", 1, "utf-8", errors="backslashreplace")


def _check_files(path: Path, out: str | Path | None) -> int:
    """Check that the files can be read and written; returns the number of rows, 0 if unknown."""
    if str(out) == STANDARD:
        out = None
    if str(path) == STANDARD:
        if out is not None:
            check_file(out)
        return 0
    if not path.is_file():
        raise InputError(f"{path}: no such file; - is standard input")
    if out is not None and Path(out).resolve() == path.resolve():
        raise InputError(f"{out}: the verdicts would overwrite the rows; give another file")
    if out is not None:
        check_file(out)
    if out is not None and Path(out).suffix == ".gz":
        raise InputError(f"{out}: the verdicts are plain JSONL; name a .jsonl file")
    total = sum(1 for _ in row_lines(path))
    if not total:
        raise InputError(f"{path}: there are no rows in it")
    return total


def row_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines; bytes that are not UTF-8 are passed on, so that `parse_object` can report
    them."""
    if str(path) != STANDARD:
        yield from read_lines(str(path), path, errors="surrogateescape")
        return
    with open(0, encoding="utf-8", errors="surrogateescape", closefd=False) as lines:
        yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def parse_row(
    line: str, domains: Mapping[str, DomainConfig] = BUILT_IN
) -> tuple[Problem, Response]:
    """Parse one line of input into its problem and the response.

    Args:
        line: the line.
        domains: the known domains (`verifier.domains`).

    Raises:
        InputError: not UTF-8, not JSON, an unknown domain, or a missing or wrongly typed field.
    """
    try:
        row = parse_object(line)
    except ValueError as error:
        raise InputError(str(error)) from None
    given = {name: row[name] for name in ("answer", "id") if name in row}
    if isinstance(row.get("answer"), int | float) and not isinstance(row["answer"], bool):
        row["answer"] = str(row["answer"])
    if isinstance(row.get("id"), int) and not isinstance(row["id"], bool):
        row["id"] = str(row["id"])
    turns = _turns(row)
    if turns is not None:
        row["response"] = "\n\n".join(text for text, _ in turns)
    domain = row.get("domain")
    if not isinstance(domain, str) or domain not in domains:
        raise InputError(f"domain must be one of {', '.join(domains)}, not {json.dumps(domain)}")
    needed: dict[str, type] = {"id": str, "problem": str, "response": str}
    needed |= {name: {"answer": str, "tests": dict}[name] for name in domains[domain].needs}
    for key, kind in needed.items():
        if not isinstance(row.get(key), kind):
            state = "missing" if row.get(key) is None else "of the wrong type"
            raise InputError(f"{key} is {state} (needed: {kind.__name__})")
    needs_tests = "tests" in needed
    tests = parse_tests(row["tests"], "tests") if needs_tests else None
    if needs_tests and not tests:
        raise InputError("tests is empty")
    language = row.get("language")
    if not isinstance(language, str | None):
        raise InputError("language is of the wrong type (needed: str)")
    # The `language` of a code row is its programming language, already known from tests and fence.
    spoken = language.lower() if language and len(language) == 2 else None
    tokens = 0 if row.get("response_tokens") is None else row["response_tokens"]
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        raise InputError("response_tokens is of the wrong type (needed: int, 0 or more)")
    answer = row.get("answer") if isinstance(row.get("answer"), str) else None
    if answer and domains[domain].verifier == "math":
        answer = stated(answer)  # as where problems are loaded
    rest = {name: value for name, value in row.items() if name not in ROW_FIELDS}
    problem = Problem(
        row["id"], domain, row["problem"], answer, tests, language=spoken, metadata=rest,
        renamed={name: value for name, value in given.items() if not isinstance(value, str)},
    )  # fmt: skip
    failure = failure_of(row.get("ending"), row.get("ending_reason", ""))
    return problem, Response(row["response"], tokens, turns=turns or (), failure=failure)


def _turns(row: Mapping[str, Any]) -> list[tuple[str, bool]] | None:
    """The turns of a conversation, none if it ended before the first; None for a response."""
    for name, text, calls in (("turns", "text", "calls"), ("messages", "content", "tool_calls")):
        found = row.get(name)
        if found is None or (name == "messages" and isinstance(row.get("response"), str)):
            continue
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            raise InputError(f"{name} is of the wrong type (needed: list of objects)")
        turns = [item for item in found if name == "turns" or item.get("role") == "assistant"]
        texts = [item.get(text) or "" for item in turns]
        begun = turns or row.get("ending")
        if not begun or not all(isinstance(said, str) for said in texts):
            raise InputError(f"{name} has no text of the model's in field {text!r}")
        return [(said, bool(item.get(calls))) for said, item in zip(texts, turns, strict=True)]
    return None
