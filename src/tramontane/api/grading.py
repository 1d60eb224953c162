"""Grading of recorded responses, and curation of problem sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tramontane.errors import InputError

# torch takes seconds to import, and the config's classes 0.2 s: functions import what they need.
if TYPE_CHECKING:
    from tramontane.audit.findings import Audit
    from tramontane.config import Config, VerifierConfig
    from tramontane.evaluation.score import ScoreSummary


@dataclass(frozen=True)
class CurateResult:
    """A finished curation.

    Args:
        out: folder of the result.
        problems: the curated set, as JSONL that `data.train` reads.
        kept: problems in the set that no stage changed.
        rewritten: problems in the set that a stage changed.
        dropped: problems not in the set.
        report: path of `report.html`.
        summary: the content of `summary.json`.
    """

    out: Path
    problems: Path
    kept: int
    rewritten: int
    dropped: int
    report: Path
    summary: dict[str, Any]


def score(
    path: str | Path,
    out: str | Path | None = None,
    config: Config | str | Path | None = None,
    overrides: list[str] | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> ScoreSummary:
    """Grade recorded responses with the same code as in training; see `evaluation.score`.

    Args:
        path: rows as JSONL (also gzip).
        out: JSONL file for the verdicts; None: only the summary.
        config: a `Config` or the path of one. Its section `verifier` is used and, if it has a
            section `pipeline`, the length reward's `l_max` and `l_cache`.
        overrides: `verifier.key=value`, `pipeline.l_max=value` or `pipeline.l_cache=value` texts.
        progress: called with (rows done, rows in all).

    Raises:
        InputError: before anything is graded.
    """
    from tramontane.config import Config
    from tramontane.evaluation.score import score_file

    keys = ("verifier.*", "pipeline.l_max", "pipeline.l_cache")
    settings = config if isinstance(config, Config) else grading(config, overrides, keys)
    lengths = {}
    if "pipeline" in settings.model_fields_set:
        lengths = {"l_max": settings.pipeline.l_max, "l_cache": settings.pipeline.l_cache}
    return score_file(path, out, settings.verifier, progress=progress, **lengths)


def grading(
    config: str | Path | None, overrides: list[str] | None, keys: Sequence[str] = ("verifier.*",)
) -> Config:
    """The config of a grading command, from a YAML file and overrides.

    Args:
        config: a YAML file; a whole training config is accepted.
        overrides: `key.sub=value` texts.
        keys: the keys that the command reads; `section.*` means all keys of a section.

    Raises:
        InputError: see `config.load_section`; or an override that the command does not read.
    """
    from tramontane.config import Config, load_config, parse_settings

    for override in overrides or []:
        key = override.partition("=")[0]
        if key not in keys and f"{key.partition('.')[0]}.*" not in keys:
            raise InputError(f"override {override!r}: only {', '.join(keys)} can be set here")
    if config is None:
        return parse_settings(Config, {}, overrides or [], "key=value")
    return load_config(config, overrides)


def audit(
    path: str | Path,
    out: str | Path | None = None,
    *,
    rows: str | Path | None = None,
    sample: int = 1000,
    config: VerifierConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Find signs of reward hacking and verifier error; see `audit.audit`."""
    from tramontane.audit.audit import audit as run

    return run(path, out, rows=rows, sample=sample, config=config, progress=progress)


def curate(
    config: Any = None,
    overrides: list[str] | None = None,
    *,
    inputs: Sequence[str] = (),
    stages: Sequence[str] = (),
    against: Sequence[str] = (),
    out: str | Path | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> CurateResult:
    """Turn raw problem sets into a set worth training on; see `curation.pipeline.curate`.


    Args:
        config: a `CurateConfig` or the path of one; None means the defaults.
        overrides: `key.sub=value` overrides.
        inputs: files or datasets that replace the config's.
        stages: stages that replace the config's.
        against: evaluation sets that no problem may come from.
        out: folder of the result; an unfinished curation in it is resumed.
        progress: called with (stage, chunks done).

    Raises:
        InputError: before any work is done, except for an evaluation set that cannot be read.
    """
    from tramontane.config import load_section, parse_settings
    from tramontane.curation.config import CurateConfig
    from tramontane.curation.pipeline import curate as run

    if against and not stages and config is None:
        stages = ("deduplicate", "decontaminate", "filter")
    asked = {"inputs": list(inputs), "stages": list(stages), "decontaminate.against": list(against)}
    texts = [f"{key}={json.dumps(value)}" for key, value in asked.items() if value]
    texts = [*(overrides or []), *texts, *([] if out is None else [f"out={out}"])]
    if config is None:
        config = parse_settings(CurateConfig, {}, texts, "curate")
    elif not isinstance(config, CurateConfig):
        config = load_section(CurateConfig, config, texts)
    summary = run(config, progress)
    folder = Path(summary.pop("out"))
    return CurateResult(
        out=folder,
        problems=folder / "kept.jsonl",
        kept=summary["kept"],
        rewritten=summary["rewritten"],
        dropped=summary["dropped"],
        report=folder / "report.html",
        summary=summary,
    )
