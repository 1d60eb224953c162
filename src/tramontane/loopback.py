"""Pages and endpoints served over HTTP, by default on this machine's loopback address."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tramontane.errors import InputError, install

if TYPE_CHECKING:
    import uvicorn

NEEDS = ("fastapi", "uvicorn")
HOST = "127.0.0.1"
SHUTDOWN_SECONDS = 3  # for answers under way when a server ends


def check_installed(what: str, extra: str = "serve") -> None:
    """Check that `what` has the packages of the extra `serve`; `extra` brings these and its others.

    Raises:
        InputError: they are not installed.
    """
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        raise InputError(f"{what} needs {' and '.join(missing)}; install: {install(extra)}")


class Address:
    """Where a server answers: a socket, and the key in its paths."""

    def __init__(self, listening: socket.socket) -> None:
        self.socket, self.key = listening, new_key()

    @property
    def base(self) -> str:
        """`http://HOST:PORT`."""
        host, port = self.socket.getsockname()[:2]
        return f"http://{host}:{port}"

    @property
    def url(self) -> str:
        """`http://HOST:PORT/KEY`."""
        return f"{self.base}/{self.key}"


def new_key() -> str:
    """A secret for an address."""
    return secrets.token_urlsafe(32)


@contextmanager
def listening(port: int, host: str = HOST) -> Iterator[Address]:
    """An address on which requests wait for a server; port 0 is any free one.

    Raises:
        InputError: the port is taken, or the host is not this machine's.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            place = f"port {port}" if host == HOST else f"{host}:{port}"
            of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
            other = "port" if of_port else "host, an address of this machine"
            raise InputError(f"{place}: {error.strerror}; choose another {other}") from None
        listener.listen()
        yield Address(listener)


def server(app: Any, *, ends_by_signal: bool = True) -> uvicorn.Server:
    """A server of an ASGI application; it ends with Ctrl-C if `ends_by_signal`."""
    import uvicorn

    class Deaf(uvicorn.Server):
        """Leaves signals to the process that it is part of."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    return (uvicorn.Server if ends_by_signal else Deaf)(config)
