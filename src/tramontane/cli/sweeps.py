"""The command for many runs: sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

import tramontane
from tramontane.cli.terminal import (
    CONTINUES,
    TRAIN,
    ConfigCommand,
    app,
    if_stopped,
    say,
    show_table,
)
from tramontane.errors import InputError


@app.command(rich_help_panel=TRAIN, cls=ConfigCommand)
def sweep(
    config: Annotated[str, typer.Argument(help="A YAML file, e.g. configs/quickstart.yaml")],
    keys: Annotated[
        list[str],
        typer.Argument(
            help="Config keys, each with its values: trainer.learning_rate=1e-4,3e-4 seed=0,1,2; "
            "with --random also ranges: trainer.learning_rate=log:1e-5..1e-3",
            show_default=False,
        ),
    ],
    random: Annotated[
        int | None,
        typer.Option(min=1, help="Draw so many combinations; each runs with every seed."),
    ] = None,
    draw_seed: Annotated[int, typer.Option(help="With --random: seed of the draws.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs; by default sweeps/NAME.")
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(min=1, help="Upper limit of the runs at a time; default: what fits."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="Check every run, list them, and start none.")
    ] = False,
) -> None:
    """Train with every combination of some keys' values, and compare the runs."""
    with if_stopped(CONTINUES):
        found = tramontane.sweep(
            config, keys, random=random, draw_seed=draw_seed, out=out, at_once=at_once,
            dry_run=dry_run,
            on_finished=lambda run, done, total: say(f"{done}/{total}  {run}"),
        )  # fmt: skip
    rows = [[escape(cell) for cell in row] for row in found.table.cells()]
    show_table([escape(name) for name in found.table.header], rows)
    if dry_run:
        runs = f"{len(rows)} run{'s' * (len(rows) != 1)}"
        say(f"{found.folder}: {runs}, {found.together} at a time")
        return
    say(f"the table: {found.folder / 'table.md'}, {found.folder / 'table.csv'}")
    say(f"curves and rollouts: tramontane view {found.folder}")
    if found.failed:
        raise InputError("\n".join(f"{name}: {text}" for name, text in found.failed.items()))
