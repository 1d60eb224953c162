"""The command line application, its console, and code shared by commands."""

from __future__ import annotations

import math
import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import tramontane
from tramontane.errors import InputError
from tramontane.run.interrupt import EXIT_SECONDS, leave_within, terminate

if TYPE_CHECKING:
    from rich.progress import Progress

app = typer.Typer(
    help="Asynchronous reinforcement learning with verifiable rewards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
LINE_SECONDS = 30.0  # between progress lines in a log
# Groups of commands in `tramontane --help`.
TRAIN, MEASURE, DATA, LOOK, RESEARCH = "Train", "Measure", "Data", "Look", "Research"
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Any config key as key.sub=value.", show_default=False)
]


def main() -> None:
    """Run a command; an error that the user can fix becomes one message and exit code 2.

    Ctrl-C exits with 130, SIGTERM with 143; threads left running by libraries do not keep the
    process alive.
    """
    signal.signal(signal.SIGTERM, terminate)
    code: Any = 1
    try:
        app()
    except InputError as error:
        complain(str(error), "error:")
        code = 2
    except SystemExit as end:
        code = end.code
    leave_within(EXIT_SECONDS, code if isinstance(code, int) else 0, of_exit=True)
    sys.exit(code)


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
    # Not for `--help`: 0.03 s.
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )

    class Lines(Progress):
        """Occasional progress lines on standard error, when there is no terminal."""

        printed = -math.inf

        def update(self, task_id: TaskID, **fields: Any) -> None:
            super().update(task_id, **fields)
            task, now = self._tasks[task_id], time.monotonic()
            if self.disable and task.total and now > self.printed + LINE_SECONDS:
                self.printed = now
                complain(f"{task.description}: {task.completed:,.0f} of {task.total:,.0f}")

    return Lines(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def say(text: str) -> None:
    """Print a text unwrapped, so that commands, paths and keys stay in one piece."""
    console.print(Text(text), soft_wrap=True)


def complain(text: str, label: str = "") -> None:
    """`say` on standard error, after a red label."""
    line = Text.assemble((label, "bold red"), " " if label else "", text)
    Console(stderr=True).print(line, soft_wrap=True)
