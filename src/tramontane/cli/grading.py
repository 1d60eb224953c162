"""Commands that grade responses, and check problems and grades: score, audit and curate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tramontane import api
from tramontane.cli.terminal import DATA, LOOK, MEASURE, app, complain, console, progress_bar, say


@app.command(rich_help_panel=MEASURE)
def score(
    path: Annotated[
        Path,
        typer.Argument(
            help="JSONL (also gzip) rows with id, domain (math or code), problem, response, and "
            "answer (math) or tests (code); optionally language and response_tokens, which the "
            "length reward needs."
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
        Path | None, typer.Option(help="JSONL file for the verdicts; without it, only a summary.")
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
    """Grade recorded responses; exit code 1 when rows could not be read."""
    with progress_bar() as progress:
        bar = progress.add_task("grading", total=None)
        try:
            summary = api.score(
                path,
                out,
                config,
                overrides,
                progress=lambda done, total: progress.update(bar, completed=done, total=total),
            )
        except KeyboardInterrupt:
            kept = f"; {out} has the rows graded so far, and starting again replaces it"
            complain(f"stopped{kept if out else ''}")
            raise typer.Exit(130) from None
    table = Table("verdict", "rows", "share")
    rows = [(name, summary.outcomes[name]) for name in ("right", "wrong", "malformed")]
    rows += [("unscorable", summary.outcomes["unscorable"]), ("not read", len(summary.bad_rows))]
    total = sum(count for _, count in rows)
    for name, count in rows:
        table.add_row(name, f"{count:,}", f"{count / total:.1%}")
    table.add_row("mean reward", f"{summary.mean_reward:.3f}", "")
    console.print(table)
    for reason, count in summary.unscorable.most_common(5):
        say(f"unscorable: {count:,} × {reason}")
    if summary.double_ids:
        some = ", ".join(f"{row_id} ({n} rows)" for row_id, n in summary.double_ids.most_common(5))
        say(f"warning: {len(summary.double_ids):,} ids occur more than once: {some}")
    for line in summary.bad_rows:
        complain(line)
    if summary.bad_rows:
        raise typer.Exit(1)


@app.command(rich_help_panel=LOOK)
def audit(
    path: Annotated[Path, typer.Argument(help="A run folder, or a JSONL of rollouts.")],
    out: Annotated[Path | None, typer.Option(help="Folder for audit.md and audit.jsonl.")] = None,
    rows: Annotated[Path | None, typer.Option(help="Input of `score` that gave PATH.")] = None,
    sample: Annotated[int, typer.Option(min=0, help="Answers that other verifiers check.")] = 1000,
) -> None:
    """Find signs of reward hacking and verifier error in recorded rollouts; exit code 1 when
    rows could not be read."""
    with progress_bar() as progress:
        bar = progress.add_task("asking other verifiers", total=None)
        found = api.audit(
            path,
            out,
            rows=rows,
            sample=sample,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    table = Table("kind", "count", "share", "an example", show_lines=True)
    for kind in found.totals:
        examples = [
            f"{f.where}: {f.answer} for {f.reference} {f.detail}" for f in found.findings_of(kind)
        ]
        example = escape(examples[0][:200]) if examples else ""
        table.add_row(kind, str(len(examples)), found.share(kind), example)
    console.print(table)
    say(f"{found.completions:,} completions; every finding: {found.report}")
    for line in found.broken:
        complain(line)
    if found.broken:
        raise typer.Exit(1)


@app.command(rich_help_panel=DATA)
def curate(
    sources: Annotated[
        list[str],
        typer.Argument(help="A YAML file, or files and datasets; then any key.sub=value."),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder of the result.")] = None,
    stage: Annotated[
        list[str] | None, typer.Option(help="Only this stage; several are run in the order given.")
    ] = None,
    decontaminate: Annotated[
        list[str] | None, typer.Option(help="An evaluation set that no problem may come from.")
    ] = None,
) -> None:
    """Turn raw problem sets into one to train on; exit code 1 when rows could not be read."""
    overrides = [s for s in sources if "=" in s and not Path(s).exists()]
    inputs = [s for s in sources if s not in overrides]
    config = inputs.pop(0) if inputs and inputs[0].endswith((".yaml", ".yml")) else None
    with progress_bar() as progress:
        bars: dict[str, Any] = {}

        def show(name: str, chunks: int) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name, total=None)
            progress.update(bars[name], completed=chunks)

        result = api.curate(
            config,
            overrides,
            inputs=inputs,
            stages=stage or (),
            against=decontaminate or (),
            out=out,
            progress=show,
        )
    table = Table("after", "rows left", "dropped there")
    summary = result.summary
    for step in summary["stages"]:
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in step["dropped"].items())
        table.add_row(step["stage"], f"{step['left']:,}", dropped)
    console.print(table)
    say(f"{result.rewritten:,} rewritten; everything: {result.report}")
    for line in summary["malformed_rows"]:
        complain(line)
    if summary["malformed"]:
        raise typer.Exit(1)
