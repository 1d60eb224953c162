"""Commands that grade responses, and check problems and grades: score, verify, audit, curate."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

import tramontane
from tramontane.cli.terminal import (
    CONTINUES,
    DATA,
    LOOK,
    MEASURE,
    app,
    complain,
    if_stopped,
    progress,
    progress_bar,
    say,
    show_table,
)
from tramontane.errors import InputError
from tramontane.loopback import check_installed


@app.command(rich_help_panel=MEASURE)
def score(
    path: Annotated[
        Path,
        typer.Argument(
            help="JSONL (also gzip), or - for standard input: rows with id, domain (math or code), "
            "problem, response, and answer (math) or tests (code); optionally language and "
            "response_tokens, which the length reward needs."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="verifier.key=value; pipeline.l_max=TOKENS and pipeline.l_cache=TOKENS turn the "
            "length reward on.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="JSONL file for the verdicts, or - for standard output; without it, only a "
            "summary."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A YAML with a section `verifier`, such as a training config. A section "
            "`pipeline` gives l_max and l_cache of the length reward; without it, length is not "
            "graded."
        ),
    ] = None,
) -> None:
    """Grade recorded responses; exit code 1 if rows could not be read."""
    kept = f"{out} has the rows graded so far, and starting again replaces it"
    with if_stopped(kept if out else "nothing was written"), progress("grading") as show:
        quiet = "-" in (str(path), str(out))
        summary = tramontane.score(path, out, config, overrides, progress=None if quiet else show)
    if str(out) == "-":  # where a table would stand among the rows
        _end_with(summary.bad_rows)
        return
    names = ("right", "wrong", "malformed", "unscorable")
    counts = {name: summary.outcomes[name] for name in names} | {"not read": len(summary.bad_rows)}
    total = sum(counts.values())
    rows = [(name, f"{count:,}", f"{count / total:.1%}") for name, count in counts.items()]
    rows += [("mean reward", f"{summary.mean_reward:.3f}", "")]
    show_table(("verdict", "rows", "share"), rows)
    for reason, count in summary.unscorable.most_common(5):
        say(f"unscorable: {count:,} × {reason}")
    if summary.double_ids:
        some = ", ".join(f"{row_id} (× {n})" for row_id, n in summary.double_ids.most_common(5))
        say(f"warning: {len(summary.double_ids):,} ids occur more than once: {some}")
    _end_with(summary.bad_rows)


@app.command(rich_help_panel=MEASURE)
def verify(
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            help="ANSWER REFERENCE, and verifier.key=value; with --serve, only the latter.",
            show_default=False,
        ),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Answer requests of other programs over HTTP.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 0,
) -> None:
    """Grade a mathematical answer, as JSON; or serve verdicts to other trainers."""
    from tramontane.config import VerifierConfig, parse_settings
    from tramontane.verdicts.grader import verify as judged

    given = texts or []
    keys = [text.removeprefix("verifier.") for text in given if text.startswith("verifier.")]
    values = [text for text in given if not text.startswith("verifier.")]
    checked = parse_settings(VerifierConfig, {}, keys, "verifier.key=value")
    settings = checked.model_dump(exclude_unset=True)
    if len(values) != (0 if serve else 2):
        raise InputError("give --serve alone, or an ANSWER and a REFERENCE, each in quotes")
    if not serve:
        from tramontane.verdicts.reasons import as_json

        print(json.dumps(as_json(judged(*values, **settings)), ensure_ascii=False))
        return
    check_installed("the server")
    from tramontane.verdicts.server import serve as run

    run(settings, host, port, on_address=say)


@app.command(rich_help_panel=LOOK)
def audit(
    path: Annotated[Path, typer.Argument(help="A run folder, or a JSONL of rollouts.")],
    out: Annotated[Path | None, typer.Option(help="Folder for audit.md and audit.jsonl.")] = None,
    rows: Annotated[Path | None, typer.Option(help="Input of the `score` that wrote PATH.")] = None,
    sample: Annotated[
        int, typer.Option(min=0, help="Answers to check with other verifiers.")
    ] = 1000,
) -> None:
    """Find signs of reward hacking and verifier error in recorded rollouts; exit code 1 if rows
    could not be read."""
    with progress("asking other verifiers") as show:
        found = tramontane.audit(path, out, rows=rows, sample=sample, progress=show)
    table = []
    for kind in found.totals:
        examples = [
            f"{f.where}: "
            + (f"{f.answer} for {f.reference} " if f.reference is not None else "")  # not a program
            + f.detail
            for f in found.findings_of(kind)
        ]
        example = escape(examples[0][:200]) if examples else ""
        table.append((kind, str(len(examples)), found.share(kind), example))
    show_table(("kind", "count", "share", "an example"), table, show_lines=True)
    say(f"{found.completions:,} completions; every finding: {found.report}")
    _end_with(found.broken)


@app.command(rich_help_panel=DATA)
def curate(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="A YAML file, or files and datasets; then any key.sub=value, e.g. out=FOLDER."
        ),
    ],
) -> None:
    """Turn raw problem sets into one to train on; exit code 1 if rows could not be read."""
    overrides = [s for s in sources if "=" in s and not Path(s).exists()]
    inputs = [s for s in sources if s not in overrides]
    config = inputs.pop(0) if inputs and inputs[0].endswith((".yaml", ".yml")) else None
    with if_stopped(CONTINUES), progress_bar() as shown:
        bars: dict[str, Any] = {}

        def show(name: str, chunks: int) -> None:
            if name not in bars:
                bars[name] = shown.add_task(name, total=None)
            shown.update(bars[name], completed=chunks)

        result = tramontane.curate(config, overrides, inputs=inputs, progress=show)
    rows = []
    for step in result.summary["stages"]:
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in step["dropped"].items())
        rows.append((step["stage"], f"{step['left']:,}", dropped))
    show_table(("after", "rows left", "dropped there"), rows)
    say(f"{result.rewritten:,} rewritten; everything: {result.report}")
    _end_with(result.summary["malformed_rows"])


def _end_with(unread: list[str]) -> None:
    """Complain about rows that could not be read: of each kind the first, and how many follow."""
    kinds: dict[str, list[str]] = {}
    for line in unread:
        kind = re.sub(r"\"[^\"]*\"|'[^']*'|\d+", "…", line.partition(": ")[2])
        kinds.setdefault(kind, []).append(line)
    for first, *others in kinds.values():
        more = "1 more row" if len(others) == 1 else f"{len(others):,} more rows"
        complain(first + f" (and {more} like it)" * bool(others))
    if unread:
        raise typer.Exit(1)
