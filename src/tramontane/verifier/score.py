"""Grade recorded responses: a JSONL file in, a JSONL file out, by the code that training uses."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tramontane.config import VerifierConfig
from tramontane.data.files import read_lines
from tramontane.errors import InputError
from tramontane.types import Problem, Verdict
from tramontane.verifier.pool import VerifierPool

WINDOW = 256  # rows being graded at once


@dataclass
class ScoreSummary:
    """What `score_file` did: verdicts by outcome, and the rows that it could not read."""

    outcomes: Counter[str] = field(default_factory=Counter)
    reward: float = 0.0
    bad_rows: list[str] = field(default_factory=list)

    @property
    def scored(self) -> int:
        return sum(self.outcomes.values())

    @property
    def mean_reward(self) -> float:
        """Over what could be scored."""
        return self.reward / max(self.scored - self.outcomes["unscorable"], 1)


def score_file(
    path: str | Path,
    out: str | Path | None = None,
    config: VerifierConfig | None = None,
    *,
    l_max: int | None = None,
    l_cache: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ScoreSummary:
    """Grade the rows of a JSONL file (also gzip), in order.

    Args:
        path: rows of `id`, `domain`, `problem`, `answer` or `tests`, `response`, and optionally
            `language` (ISO 639-1) and `response_tokens`.
        out: where rows of `id`, `reward`, `parts`, `verdict`, `reason`, `seconds` go.
        config: limits and weights.
        l_max: the length penalty's upper end in tokens; without it there is no penalty.
        l_cache: how far below `l_max` the penalty starts.
        progress: called with (rows done, rows in all).

    A row that cannot be read is listed in `bad_rows` with its line, and does not stop the rest.

    Raises:
        InputError: no such file or folder, or a file that is cut off, damaged, or not UTF-8;
            before anything is graded.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if out is not None and not Path(out).parent.is_dir():
        raise InputError(f"{out}: there is no folder {Path(out).parent}")
    if out is not None and Path(out).resolve() == path.resolve():
        raise InputError(f"{out}: the verdicts would overwrite the rows; give another file")
    total = sum(1 for _ in read_lines(str(path), path))
    summary = ScoreSummary()
    waiting: deque[tuple[str, Future[list[Verdict]]]] = deque()
    with (
        VerifierPool(config or VerifierConfig(), l_max or sys.maxsize, l_cache) as pool,
        open(out or os.devnull, "w", encoding="utf-8") as sink,
    ):

        def finish(limit: int) -> None:
            while len(waiting) > limit:
                row_id, future = waiting.popleft()
                _write(sink, row_id, future.result()[0], summary)
                if progress:
                    progress(summary.scored + len(summary.bad_rows), total)

        for number, line in read_lines(str(path), path):
            try:
                problem, response, tokens = parse_row(line)
            except InputError as error:
                summary.bad_rows.append(f"{path}:{number}: {error}")
                continue
            waiting.append((problem.id, pool.score(problem, [(response, tokens)])))
            finish(WINDOW)
        finish(0)
    return summary


def parse_row(text: str) -> tuple[Problem, str, int]:
    """One line of input: its problem, the response, and the response's length in tokens."""
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InputError("not an object")
    if isinstance(row.get("answer"), int | float) and not isinstance(row["answer"], bool):
        row["answer"] = str(row["answer"])
    if isinstance(row.get("id"), int):
        row["id"] = str(row["id"])
    domain = row.get("domain")
    if domain not in ("math", "code"):
        raise InputError(f'domain must be "math" or "code", not {json.dumps(domain)}')
    needed: dict[str, type] = {"id": str, "problem": str, "response": str}
    needed |= {"answer": str} if domain == "math" else {"tests": dict}
    for key, kind in needed.items():
        if not isinstance(row.get(key), kind):
            state = "missing" if row.get(key) is None else "of the wrong type"
            raise InputError(f"{key} is {state} (needed: {kind.__name__})")
    language = row.get("language")
    # Code rows name the programming language there: the tests and the fence say that already.
    spoken = language if isinstance(language, str) and len(language) == 2 else None
    tokens = row.get("response_tokens") or 0
    if not isinstance(tokens, int):
        raise InputError("response_tokens is of the wrong type (needed: int)")
    problem = Problem(
        row["id"], domain, row["problem"], row.get("answer"), row.get("tests"), language=spoken
    )
    return problem, row["response"], tokens


def _write(sink: IO[str], row_id: str, verdict: Verdict, summary: ScoreSummary) -> None:
    summary.outcomes[verdict.verdict] += 1
    summary.reward += verdict.reward
    row: dict[str, Any] = {"id": row_id, **verdict.to_dict()}
    del row["answer"]
    sink.write(json.dumps(row, ensure_ascii=False) + "\n")
