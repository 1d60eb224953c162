"""Commands from a finished run to the next model: harvest and recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

import tramontane
from tramontane.cli.terminal import (
    CONTINUES,
    DATA,
    TRAIN,
    Overrides,
    app,
    console,
    if_stopped,
    say,
    show_table,
)
from tramontane.cli.training import Gpu, ModelShape, check_assumed, print_sizes
from tramontane.errors import InputError

if TYPE_CHECKING:
    from tramontane.config import Config
    from tramontane.recipes.recipe import Recipe


@app.command(rich_help_panel=DATA)
def harvest(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Any key of the harvest as key=value.", show_default=False),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="JSONL of prompts and responses, as `tramontane sft` reads it.")
    ] = Path("traces.jsonl"),
) -> None:
    """Harvest right traces of a finished run for supervised fine-tuning."""
    from tramontane.config import parse_settings
    from tramontane.recipes.config import HarvestConfig
    from tramontane.recipes.harvest import harvest as run_harvest

    found = run_harvest(run, out, parse_settings(HarvestConfig, {}, overrides or [], "harvest"))
    counts = {"recorded": found.completions, **found.left_out, "kept": found.kept}
    show_table(("completions", "number"), ((name, f"{n:,}") for name, n in counts.items()))
    say(
        f"early: up to update {found.early_updates} of {found.updates}, short: below "
        f"{found.short_tokens:,.0f} tokens; {found.rows:,} rows of {found.problems:,} problems, "
        f"on average {found.mean_tokens:,.0f} tokens and a pass rate of {found.mean_pass_rate:.2f}"
    )
    say(f"wrote {out}")


@app.command(rich_help_panel=TRAIN)
def recipe(
    name: Annotated[str, typer.Argument(help="medium (RL in stages) or small (SFT, then RL)")],
    config: Annotated[str, typer.Argument(help="A YAML file, e.g. configs/recipe_small_tiny.yaml")],
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the steps and the sizes of training, and stop.")
    ] = False,
    gpu: Gpu = None,
    model_shape: ModelShape = None,
) -> None:
    """Run one of the paper's recipes; the same command resumes an unfinished one."""
    from tramontane.config import load_section
    from tramontane.recipes.recipe import KINDS, run
    from tramontane.run.screen import LiveDisplay

    if name not in KINDS:
        raise InputError(f"recipe {name!r}: choose from {', '.join(KINDS)}")
    settings = load_section(KINDS[name], config, overrides)
    if dry_run:
        _print_steps(settings, gpu, model_shape)
        return
    check_assumed(gpu, model_shape)

    def announce(number: int, total: int, title: str, finished: bool) -> None:
        done = " [dim](done)[/]" if finished else ""
        console.print(f"[bold]{number}/{total}[/]  {escape(title)}{done}", highlight=False)

    with if_stopped(CONTINUES):
        run(settings, LiveDisplay, announce)
    report = Path(settings.out) / "report.md"
    say(report.read_text(encoding="utf-8").partition("\n## Steps")[0])
    say(f"the report, and a folder for each step: {settings.out}")


def _print_steps(settings: Recipe, gpu: str | None, model_shape: str | None) -> None:
    from tramontane.recipes.recipe import steps_of
    from tramontane.recipes.steps import check

    steps = steps_of(settings)
    if model_shape is None:
        check(settings, Path(settings.out), steps)
    for number, step in enumerate(steps, 1):
        say(f"{number}  {step.name}: {step.title}")
    trainings: list[Config] = []
    for step in steps:
        if step.training and step.training not in trainings:
            trainings.append(step.training)
            say(f"\n{step.name}:")
            print_sizes(tramontane.dry_run(step.training, gpu=gpu, model_shape=model_shape))
