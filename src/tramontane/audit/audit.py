"""The audit of recorded rollouts, from a run folder or a file to a page of findings.

Rows are read one at a time (`recorded`), and only data for the findings are kept (`collect`), so
the audit of a long run fits in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from tramontane.audit import recorded
from tramontane.audit.collect import Collector
from tramontane.audit.disputes import find_disputes
from tramontane.audit.findings import KINDS, Audit, page_of, write_page
from tramontane.config import VerifierConfig, parse, read_settings
from tramontane.errors import InputError
from tramontane.verifier import references
from tramontane.workplace import owned_file

logger = logging.getLogger("tramontane")


def audit(
    path: str | Path,
    out: str | Path | None = None,
    *,
    rows: str | Path | None = None,
    sample: int = 1000,
    config: VerifierConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Search recorded rollouts for reward hacking and verifier errors.

    Writes `audit.md` and `audit.jsonl` into the run folder, or `audit_NAME.md` and
    `audit_NAME.jsonl` next to a file NAME.jsonl. A row that is not a rollout is listed in `broken`;
    the other rows are still read.

    Args:
        path: a run folder, or a JSONL file (also gzip): rollouts, an evaluation, or the output of
            `score`.
        out: a different folder to write to.
        rows: the input of `score`, if `path` is its output.
        sample: maximum number of distinct pairs of answer and reference shown to the other
            verifiers.
        config: workers and limits of the other verifiers, and the thinking tags of a file's
            responses; a run folder has its own.
        progress: called with (pairs judged, all pairs).

    Raises:
        InputError: there are no rollouts in `path`, `out` is not a folder, or another process
            writes the audit.
    """
    path = Path(path)
    folder = Path(out) if out is not None else (path if path.is_dir() else path.parent)
    file = page_of(path, folder)
    with owned_file(file, "written"):
        result = _audit(path, rows, sample, config, progress)
        write_page(path.resolve().name, file, result)
    return result


def _audit(
    path: Path,
    rows: str | Path | None,
    sample: int,
    config: VerifierConfig | None,
    progress: Callable[[int, int], None] | None,
) -> Audit:
    graded_by, file = config or VerifierConfig(), path / "config.yaml"
    if file.is_file():  # the run's own section
        graded_by = parse(VerifierConfig, read_settings(file).get("verifier", {}), str(file))
    collector, broken = Collector(graded_by), list[str]()
    for rollout in recorded.read(path, rows, broken):
        collector.add(rollout)
    if not collector.verdicts:
        raise InputError(broken[0] if broken else f"{path}: there are no rows in it")
    result = collector.result()
    result.broken = broken
    if rows is not None:
        result.warnings = references.warnings(graded_by, recorded.problems(rows), str(rows))
        for warning in result.warnings:
            logger.warning(warning)
    find_disputes(collector.pairs, result, sample, config or VerifierConfig(), progress)
    order = list(KINDS)
    result.findings.sort(key=lambda f: order.index(f.kind))  # stable: keeps file and line order
    return result
