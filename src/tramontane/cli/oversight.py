"""Commands of oversight: a comparison of protocols, its generated data, and a judge's errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tramontane.cli.terminal import RESEARCH, Overrides, app, console, progress_bar, say


@app.command(rich_help_panel=RESEARCH)
def oversight(
    config: Annotated[Path, typer.Argument(help="YAML with questions, models and arms.")],
    overrides: Overrides = None,
) -> None:
    """Compare protocols for a weak judge to supervise strong agents; writes a page."""
    from tramontane.config import load_section
    from tramontane.oversight.compare import compare_protocols
    from tramontane.oversight.config import OversightConfig

    settings = load_section(OversightConfig, config, overrides)
    with progress_bar() as progress:
        bar = progress.add_task("discussing", total=None)
        found = compare_protocols(
            settings, lambda done, total: progress.update(bar, completed=done, total=total)
        )
    table = Table("arm", "accuracy", "95 %", "win rate", "unfinished")
    for name, figures in found.figures.items():
        accuracy, won = figures.accuracy, figures.win_rate
        table.add_row(
            name,
            f"{accuracy.value:.3f}",
            f"{accuracy.low:.3f}–{accuracy.high:.3f}",
            f"{won.value:.3f}" if won else "",
            str(figures.unfinished or ""),
        )
    console.print(table)
    say(f"the page, and every transcript: {settings.out}/oversight.html")


@app.command(rich_help_panel=RESEARCH)
def oversight_data(
    out: Annotated[Path, typer.Argument(help="Folder for the files; created if missing.")],
    config: Annotated[
        Path,
        typer.Argument(help="Comparison on `extractive:`, for its wording and kind of questions."),
    ],
    lessons: Annotated[
        int, typer.Option(min=1, help="Questions of the lessons; each is played in all protocols.")
    ] = 4000,
    drills: Annotated[int, typer.Option(min=1, help="Lookup drills.")] = 70_000,
    problems: Annotated[int, typer.Option(min=1, help="Problems to train on.")] = 2000,
    held_out: Annotated[int, typer.Option(min=1, help="Problems to evaluate with.")] = 200,
) -> None:
    """Write generated lessons for `sft`, and judged problems for `train`."""
    from tramontane.config import load_section
    from tramontane.errors import InputError
    from tramontane.oversight import lessons as writing
    from tramontane.oversight.config import OversightConfig
    from tramontane.oversight.drills import drills as draw_drills
    from tramontane.oversight.load import GENERATED
    from tramontane.workplace import owned_folder

    settings = load_section(OversightConfig, config)
    asked = settings.questions.extractive
    if settings.questions.source != GENERATED:
        raise InputError(
            f"{config}: questions.source: {settings.questions.source!r} has no lessons; name a "
            f"comparison on {GENERATED!r}"
        )
    drawn, wording = asked.model_dump(exclude={"split"}), settings.wording
    with owned_folder(out, "written"):
        series = draw_drills(0, drills, asked.languages)
        writing.write_lessons(out / "drills.jsonl", series)
        pairs = writing.lessons(0, lessons, wording=wording, **drawn)
        count = writing.write_lessons(out / "lessons.jsonl", pairs)
        writing.write_problems(out / "problems.jsonl", "train", 1, problems, wording, **drawn)
        writing.write_problems(out / "held_out.jsonl", "test", 0, held_out, wording, **drawn)
    say(
        f"in {out}: {drills:,} examples in drills.jsonl, {count:,} in lessons.jsonl, {problems:,} "
        f"problems in problems.jsonl, {held_out:,} in held_out.jsonl",
    )


@app.command(rich_help_panel=RESEARCH)
def judge_errors(
    run: Annotated[Path, typer.Argument(help="Folder of a run with a judged domain.")],
    domain: Annotated[str, typer.Option(help="Name of the judged domain.")] = "judged",
) -> None:
    """Check how often a judge used as a reward was wrong."""
    from rich.markdown import Markdown

    from tramontane.oversight.judge_errors import judge_errors as audit
    from tramontane.oversight.judge_errors import markdown

    console.print(Markdown(markdown(audit(run, domain))))
    say(f"written to {run}/judge_errors.md")
