"""Runs the stages of a curation over its rows, chunk by chunk; finished work is never repeated.

OUT/config.yaml      the config of the curation
OUT/inputs.json      sizes and modification times of the input files
OUT/work/N-STAGE/    a file for each chunk of rows: every row with its decision after that stage
OUT/kept.jsonl decisions.jsonl report.md report.html summary.json      at the end, instead of work/

Each stage reads the previous stage's chunks. A chunk is written to a temporary file and renamed, so
it is complete or absent. A killed curation resumes at the first missing chunk, and its results do
not depend on where it was killed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from tramontane.config import load_section, parse_settings
from tramontane.curation.code import Code
from tramontane.curation.config import CurateConfig
from tramontane.curation.difficulty import Difficulty, Regrade
from tramontane.curation.duplicates import Decontaminate, Deduplicate
from tramontane.curation.format_filter import FormatFilter
from tramontane.curation.load import STAGE, check_inputs, read_problems
from tramontane.curation.report import Tally, write_report
from tramontane.curation.review import Review
from tramontane.curation.rows import Row, Stage
from tramontane.curation.translate import Translate
from tramontane.data.files import read_rows
from tramontane.data.load import RowRules
from tramontane.errors import InputError
from tramontane.workplace import HIDDEN, owned_folder, whole_file, write_whole

_KINDS = Deduplicate, Decontaminate, FormatFilter, Review, Difficulty, Regrade, Translate, Code
STAGES: dict[str, type[Stage]] = {stage.name: stage for stage in _KINDS}
Progress = Callable[[str, int], None]


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


def curate(
    config: CurateConfig | str | Path | None = None,
    overrides: list[str] | None = None,
    *,
    inputs: Sequence[str] = (),
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> CurateResult:
    """Turn raw problem sets into a set worth training on.

    Args:
        config: a `CurateConfig`, to which the other arguments do not apply, or the path of one;
            None means the defaults.
        overrides: `key.sub=value` overrides.
        inputs: files or datasets that replace the config's.
        out: folder of the result; an unfinished curation in it is resumed.
        progress: called with (stage, chunks done).

    Raises:
        InputError: before any work is done, except for an evaluation set that cannot be read: no
            inputs or output folder, a folder with something else or another curation, or inputs
            that changed since the start.
    """
    texts = list(overrides or [])
    texts += [f"inputs={json.dumps(list(inputs))}"] if inputs else []
    texts += [] if out is None else [f"out={out}"]
    if config is None:
        config = parse_settings(CurateConfig, {}, texts, "curate")
    elif not isinstance(config, CurateConfig):
        config = load_section(CurateConfig, config, texts)
    if config.out is None:
        raise InputError("curate: no output folder; give one as out=FOLDER")
    folder = Path(config.out)
    with owned_folder(folder, "curated"):
        summary = _curate(config, folder, progress or (lambda stage, chunks: None))
    return CurateResult(
        out=folder,
        problems=folder / "kept.jsonl",
        kept=summary["kept"],
        rewritten=summary["rewritten"],
        dropped=summary["dropped"],
        report=folder / "report.html",
        summary=summary,
    )


def _curate(config: CurateConfig, out: Path, report: Progress) -> dict[str, Any]:
    _open(config, out)
    done = out / "summary.json"
    if not done.is_file():
        folders = [out / "work" / f"{n}-{name}" for n, name in enumerate((STAGE, *config.stages))]
        _load(config, folders[0], report)
        for name, before, folder in zip(config.stages, folders, folders[1:], strict=False):
            _run(name, config, before, folder, report)
        _finish(config, out, folders)
    shutil.rmtree(out / "work", ignore_errors=True)
    summary: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
    return summary


def _open(config: CurateConfig, out: Path) -> None:
    """Check that the output folder holds this curation, or start it."""
    prints = check_inputs(config.inputs, config.fields)
    for name in config.stages:
        prints |= STAGES[name].check(getattr(config, name))
    wanted = config.model_dump(mode="json", exclude={"out"})
    if (out / "config.yaml").is_file():
        held = load_section(CurateConfig, out / "config.yaml").model_dump(
            mode="json", exclude={"out"}
        )
        if differing := [key for key in wanted if wanted[key] != held[key]]:
            raise InputError(
                f"{out}: holds a curation with different {', '.join(differing)}; to continue that "
                f"curation, give the same settings; else name another folder, or remove this one"
            )
        if json.loads((out / "inputs.json").read_text(encoding="utf-8")) != prints:
            raise InputError(
                f"{out}: an input has changed since this curation began; remove the folder to "
                f"begin again, or name another"
            )
        return
    if any(p.name not in ("inputs.json", *HIDDEN) and p.suffix != ".tmp" for p in out.iterdir()):
        raise InputError(f"{out}: not an empty folder, and not a curation; name another")
    write_whole(out / "inputs.json", json.dumps(prints, indent=1) + "\n")
    text = yaml.safe_dump(wanted | {"out": str(out)}, sort_keys=False, allow_unicode=True)
    write_whole(out / "config.yaml", text)


def _load(config: CurateConfig, folder: Path, progress: Progress) -> None:
    """Inputs → chunks. The file `end` marks that all inputs were read."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "end").is_file():
        return
    chunk = _finished(folder)
    rules = RowRules(config.fields, config.domain, config.domains, False, "fields")
    rows = read_problems(config.inputs, rules, config.split, chunk * config.chunk_rows)
    while batch := list(islice(rows, config.chunk_rows)):
        _write_rows(folder, chunk, batch)
        chunk += 1
        progress(STAGE, chunk)
    write_whole(folder / "end", "")


def _run(name: str, config: CurateConfig, before: Path, folder: Path, progress: Progress) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    first, count = _finished(folder), _finished(before)
    if first == count:
        return
    with closing(STAGES[name](getattr(config, name), folder)) as stage:
        stage.restore(first)
        for chunk in range(first, count):
            rows = [row for row in _rows(before, chunk) if row.decision != "dropped"]
            if rows:
                rows = stage.decide(rows)
                stage.save(chunk)
            _write_rows(folder, chunk, rows)
            progress(name, chunk + 1)


def _finish(config: CurateConfig, out: Path, folders: list[Path]) -> None:
    """Write the results from every row's last decision, in the order of the input."""
    tally = Tally((STAGE, *config.stages))
    with whole_file(out / "kept.jsonl") as kept, whole_file(out / "decisions.jsonl") as decisions:
        for row in _final_rows(folders):
            tally.add(row)
            if row.decision != "dropped":
                kept.write(json.dumps(_flat(row), ensure_ascii=False).encode() + b"\n")
            shown = {"id": row.problem.id if row.problem else None, "source": row.where}
            shown |= {k: getattr(row, k) for k in ("stage", "decision", "reason", "detail")}
            decisions.write(json.dumps(shown, ensure_ascii=False).encode() + b"\n")
    summary = tally.summary()
    for name, text in write_report(tally, config).items():
        write_whole(out / name, text)
    write_whole(out / "summary.json", json.dumps(summary, indent=1, ensure_ascii=False) + "\n")


def _final_rows(folders: list[Path]) -> Iterator[Row]:
    *earlier, last = folders
    for chunk in range(_finished(last)):
        rows = [r for f in earlier for r in _rows(f, chunk) if r.decision == "dropped"]
        yield from sorted([*rows, *_rows(last, chunk)], key=lambda row: (row.number, row.copied_by))


def _flat(row: Row) -> dict[str, Any]:
    """A kept problem as one flat object, which `data.train` and another curation can read."""
    problem = row.task
    fields = {
        name: value
        for name, value in vars(problem).items()
        if name not in ("metadata", "where", "renamed") and value not in (None, [])
    }
    # The metadata may use a field's name for a value that is invalid for the field.
    rest = {f"source_{k}" if k in fields else k: v for k, v in problem.metadata.items()}
    return fields | rest


# ------------------------------------------------------------------------------------- chunks


def _part(folder: Path, chunk: int) -> Path:
    return folder / f"part-{chunk:06d}.jsonl"


def _finished(folder: Path) -> int:
    """Number of finished chunks, which are written in order."""
    return sum(1 for _ in folder.glob("part-*.jsonl"))


def _rows(folder: Path, chunk: int) -> Iterator[Row]:
    part = _part(folder, chunk)
    if part.stat().st_size:  # else an earlier stage dropped all rows
        yield from (Row.load(fields) for _, fields in read_rows(str(part)))


def _write_rows(folder: Path, chunk: int, rows: Iterable[Row]) -> None:
    write_whole(_part(folder, chunk), "".join(row.dump() for row in rows))
