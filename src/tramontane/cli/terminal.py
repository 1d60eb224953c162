"""The command line application, its console, and code shared by commands."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

import tramontane
from tramontane import plugins
from tramontane.errors import InputError, missing_extra
from tramontane.interrupt import EXIT_SECONDS, leave_within, set_handler, terminate

if TYPE_CHECKING:
    from rich.progress import Progress

# Groups of commands in `tramontane --help`.
TRAIN, MEASURE, DATA, LOOK, RESEARCH = "Train", "Measure", "Data", "Look", "Research"
PACKAGES = "From installed packages"


class Commands(TyperGroup):
    """The commands of this package, and those that installed packages add."""

    @cached_property
    def others(self) -> dict[str, Any]:
        return plugins.offered(plugins.COMMANDS)

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in self.others if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by name; that of another package is imported here.

        Raises:
            InputError: no such command.
        """
        if own := super().get_command(ctx, cmd_name):
            return own
        if entry := self.others.get(cmd_name):
            return _mounted(cmd_name, plugins.load(entry))
        if remedy := plugins.remedy(plugins.COMMANDS, cmd_name):
            raise InputError(remedy)
        from tramontane.config import nearest  # 0.2 s

        near = nearest(cmd_name, self.list_commands(ctx))
        hint = f"did you mean {near!r}?" if near else "`tramontane --help` lists those installed"
        raise InputError(f"no command {cmd_name!r}; {hint}")


class ConfigCommand(TyperCommand):
    """A command whose arguments are a config and its keys; explains keys given as options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
        for number, text in enumerate(args):
            option, _, value = text.partition("=")
            if option.startswith("--") and option not in {*options, "--", "--help"}:
                _explain_option(option, value or " ".join(args[number + 1 : number + 2]), ctx)
        return list(super().parse_args(ctx, args))


def _explain_option(option: str, value: str, ctx: Any) -> None:
    """Refuse an option that is a key of the config, here or in another project."""
    from tramontane.config import Config
    from tramontane.config.peers import counterpart
    from tramontane.config.section import paths
    from tramontane.config.sft import SFTConfig

    if option == "--config" and any(each.name == "config" for each in ctx.command.params):
        raise InputError(f"--config: give the file without it: {ctx.command_path} {value}")
    known = paths(SFTConfig if ctx.info_name == "sft" else Config)
    name = option.removeprefix("--").replace("-", "_")
    found = counterpart(name, known)
    key = name if name in known else found.key if found else ""
    note = f" ({found.note})" if found and found.note else ""
    if key:
        value = "…" if note else value  # it may count something else
        raise InputError(f"{option}: a key of the config; write {key}={value or '…'}{note}")
    if found:
        raise InputError(f"{option}: a key of {found.peer}; there is no such key here{note}")


def _mounted(name: str, found: Any) -> Any:
    holder = typer.Typer()
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name, rich_help_panel=PACKAGES)
    else:
        holder.command(name, rich_help_panel=PACKAGES)(found)
    return typer.main.get_group(holder).commands[name]


app = typer.Typer(
    cls=Commands,
    help="Asynchronous reinforcement learning with verifiable rewards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
PIPE_WIDTH = 200  # columns of a table that does not go to a terminal, which has no width
console = Console()
CONTINUES = "the same command continues"
LINE_SECONDS = 30.0  # between progress lines in a log
# Rounds that an idle thread of GNU's OpenMP spins before it sleeps. By default it spins for
# milliseconds: two runs on the same cores then had 4 % of their speed each, and 45 % with this
# value.
SPIN_COUNT = "3000"
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Any config key as key.sub=value.", show_default=False)
]


def main() -> None:
    """Run a command; an error that the user can fix becomes one message and exit code 2.

    Ctrl-C exits with 130, SIGTERM with 143; threads left running by libraries do not keep the
    process alive.
    """
    set_handler(signal.SIGTERM, terminate)
    warnings.showwarning = partial(_show_warning, warnings.showwarning)
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded, later
    code: Any = 1
    try:
        app()
    except InputError as error:
        complain(str(error), "error:")
        code = 2
    except ModuleNotFoundError as error:
        if not (missing := missing_extra(error)):
            raise
        complain(missing, "error:")
        code = 2
    except KeyboardInterrupt:  # while the commands are put together; later, click answers it
        code = 130
    except SystemExit as end:
        code = end.code
    leave_within(EXIT_SECONDS, code if isinstance(code, int) else 0, of_exit=True)
    # `python -m` ends by SIGINT, whatever the code, if one interrupted the text that was executed
    # last; dataclasses execute some while they are imported.
    exec("")
    gc.freeze()  # else the interpreter takes libraries apart, object by object: a second with torch
    sys.exit(code)


def _show_warning(
    default: Callable[..., None],
    message: Warning | str,
    category: type[Warning],
    filename: str,
    *rest: Any,
) -> None:
    """Print a warning of ours as one line, without the place in the code that it comes from."""
    if category is UserWarning and Path(filename).is_relative_to(Path(tramontane.__file__).parent):
        complain(str(message), "warning:")
    else:
        default(message, category, filename, *rest)


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


@contextmanager
def progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar; yields a function of (done, total)."""
    with progress_bar() as shown:
        bar = shown.add_task(description, total=None)
        yield lambda done, total: shown.update(bar, completed=done, total=total)


@contextmanager
def if_stopped(text: str) -> Iterator[None]:
    """Say after Ctrl-C and SIGTERM what becomes of the work so far."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        complain(f"stopped; {text}")
        raise


def show_table(header: Iterable[str], rows: Iterable[Iterable[str]], **style: Any) -> None:
    """Print a table. Cells may have rich's markup."""
    table = Table(*header, **style)
    for row in rows:
        table.add_row(*row)
    print_table(table)


def print_table(table: Table) -> None:
    """Print a table in the terminal's width; elsewhere its cells stay whole."""
    (console if console.is_terminal else Console(width=PIPE_WIDTH)).print(table)


def say(text: str) -> None:
    """Print a text unwrapped, so that commands, paths and keys stay in one piece."""
    console.print(Text(text), soft_wrap=True)


def loading(name: str = "") -> None:
    """Say on a terminal that a command has begun, before it imports torch, which takes seconds."""
    if sys.stderr.isatty():
        complain(f"{name}: loading torch and the model …".removeprefix(": "))


def complain(text: str, label: str = "") -> None:
    """`say` on standard error, after a red label."""
    line = Text.assemble((label, "bold red"), " " if label else "", text)
    Console(stderr=True).print(line, soft_wrap=True)
