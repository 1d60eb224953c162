"""The command line's application, its console, and what several commands share."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import tramontane
from tramontane.errors import InputError

app = typer.Typer(
    help="Asynchronous reinforcement learning with verifiable rewards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Any config key as key.sub=value.", show_default=False)
]


def main() -> None:
    """Run a command; an error that the user can fix is one message and exit code 2."""
    # A line where a folder is taken over: no screen is open yet.
    logging.getLogger("tramontane.workplace").addHandler(logging.StreamHandler())
    try:
        app()
    except InputError as error:
        complain(f"[bold red]error:[/] {escape(str(error))}")
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tramontane {tramontane.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options of `tramontane` itself."""


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def complain(text: str) -> None:
    # Unwrapped: a path or a key in a message must stay one piece.
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


def escape(text: str) -> str:
    return text.replace("[", r"\[")
