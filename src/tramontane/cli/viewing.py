"""Commands that show what runs have recorded: view."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tramontane.cli.terminal import LOOK, app, say


@app.command(rich_help_panel=LOOK)
def view(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or a folder of run folders, such as runs.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = False,
) -> None:
    """Show runs on a local page: curves, rollouts, groups, comparisons, audits, timeline."""
    from tramontane.view.server import view as serve

    def announce(address: str) -> None:
        say(address)
        say("Ctrl-C ends it")
        if browser:
            typer.launch(address)

    serve(runs, port, announce)
