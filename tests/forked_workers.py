"""Servers of workers (`placement.warm`) that are forks of `tests.fork_server`.

A worker whose function imports torch, or a run of a study, then starts in milliseconds instead of
the seconds that its imports take. Everything after the imports is as in a fresh server.
"""

import atexit
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests import forked
from tramontane.placement import warm


@contextmanager
def served() -> Iterator[None]:
    """Meanwhile, this process's servers are forks, and end after it."""
    before = dict(warm._servers)
    warm._servers.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm._Server, "_start", _start)
        yield
    for server in warm._servers.values():
        server._end()
    warm._servers.clear()
    warm._servers.update(before)


def _start(server: warm._Server) -> None:
    server._link, theirs = socket.socketpair()
    server._link.settimeout(warm.REPLY_SECONDS)
    with theirs:
        forked.start(_serve, theirs, dict(server._variables))


def _serve(link: socket.socket, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    os.setsid()
    # Usually there already, where the system shows it: see `forked.start`.
    os.environ.setdefault(warm.MARK, warm._UNMARKED)
    try:
        warm.main(link.detach())
    finally:
        atexit._run_exitfuncs()  # in a worker, which is a fork of this process


def serve_by_fork() -> None:
    """For `tests.warmed`: the server of this process's workers, without imports of its own."""
    _fork(warm._server({}))


_start_anew = warm._Server._start


def _start_by_fork(server: warm._Server) -> None:
    """In a server: for the workers of what it forks, as of a sweep's runs. No fork where a thread
    or a variable is in the way."""
    if server._variables or threading.active_count() > 1:
        _start_anew(server)
    else:
        _fork(server)


def _fork(server: warm._Server) -> None:
    """Start a server as a fork of this process."""
    server._link, theirs = socket.socketpair()
    server._link.settimeout(warm.REPLY_SECONDS)
    if os.fork():
        theirs.close()
        return
    server._link.close()
    warm._servers.clear()
    warm._Server._start = _start_by_fork  # type: ignore[method-assign]
    code: object = 0
    try:
        _serve(theirs, {})
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
