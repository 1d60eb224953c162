"""Runs the page on this machine's loopback address."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tramontane.errors import InputError, install

if TYPE_CHECKING:
    from tramontane.view.runs import Run

NEEDS = ("fastapi", "uvicorn")
HOST = "127.0.0.1"
TOKEN_BYTES = 32


def view(paths: list[Path], port: int = 0, on_address: Callable[[str], None] | None = None) -> None:
    """Show runs on a local page until `Ctrl-C`.

    Args:
        paths: run folders, or folders of run folders.
        port: port on the loopback address; 0: any free one.
        on_address: called with the page's address once it answers.

    Raises:
        InputError: the extra `view` is not installed, no run folder there, or the port is taken.
    """
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        raise InputError(f"the page needs {' and '.join(missing)}; install: {install('view')}")
    from tramontane.view.runs import load_runs

    runs = load_runs(paths)
    # In parallel with the import of the server's modules, which takes as long.
    threading.Thread(target=_read_rollouts, args=(runs,), daemon=True).start()
    import uvicorn

    from tramontane.view.app import make_app

    token = secrets.token_urlsafe(TOKEN_BYTES)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
        except OSError as error:
            raise InputError(f"port {port}: {error.strerror}; choose another with --port") from None
        listening.listen()  # from now on, requests wait for the server
        if on_address:
            on_address(f"http://{HOST}:{listening.getsockname()[1]}/{token}/")
        config = uvicorn.Config(
            make_app(runs, token), log_level="warning", access_log=False, server_header=False
        )
        uvicorn.Server(config).run(sockets=[listening])


def _read_rollouts(runs: list[Run]) -> None:
    for run in runs:
        with suppress(InputError):  # the page names a damaged file where it is needed
            run.rollouts.table()
