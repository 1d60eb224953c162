"""Runs the page on this machine's loopback address."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tramontane import loopback
from tramontane.errors import InputError

if TYPE_CHECKING:
    from tramontane.view.runs import Run


def view(paths: list[Path], port: int = 0, on_address: Callable[[str], None] | None = None) -> None:
    """Show runs on a local page until `Ctrl-C`.

    Args:
        paths: run folders, or folders of run folders.
        port: port on the loopback address; 0: any free one.
        on_address: called with the page's address once it answers.

    Raises:
        InputError: the extra `view` is not installed, no run folder there, or the port is taken.
    """
    loopback.check_installed("the page", "view")
    from tramontane.view.runs import load_runs

    runs = load_runs(paths)
    # In parallel with the import of the server's modules, which takes as long.
    threading.Thread(target=_read_rollouts, args=(runs,), daemon=True).start()
    logs = threading.Thread(target=_read_logs, args=(runs,), daemon=True)
    logs.start()
    from tramontane.view.app import make_app

    logs.join()

    with loopback.listening(port) as address:
        if on_address:
            on_address(f"{address.url}/")
        loopback.server(make_app(runs, address.key)).run(sockets=[address.socket])


def _read_logs(runs: list[Run]) -> None:
    """What the table of runs shows first."""
    from tramontane.view.runs import side_by_side
    from tramontane.view.table import curve

    for row in side_by_side(runs).rows:
        with suppress(OSError):  # the page names a damaged file where it is needed
            curve(Path(row["path"]), "reward")


def _read_rollouts(runs: list[Run]) -> None:
    for run in runs:
        with suppress(InputError):  # the page names a damaged file where it is needed
            run.rollouts.table()
