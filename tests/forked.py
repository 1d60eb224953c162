"""Processes that tests kill, interrupt or limit: forks of `tests.fork_server`."""

import atexit
import os
import resource
import runpy
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection, arbitrary_address
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import tramontane
from tests.fork_server import START_METHOD, context, ensure_running
from tramontane.cli import main
from tramontane.config import Config
from tramontane.placement import ranks, warm

TIMEOUT_S = 600  # limit for a process to end, or to reach the moment of its kill
RANKS = "TESTS_START_METHOD_OF_RANKS"  # variable of a command


def start(target: Callable[..., None], *args: object) -> BaseProcess:
    """Call an importable function in a new process."""
    ensure_running()
    process = context.Process(target=target, args=args)
    process.start()
    return process


def end(process: BaseProcess) -> int:
    """Wait for a process; returns its exit code, the negative signal if it was killed."""
    process.join(TIMEOUT_S)
    assert process.exitcode is not None, f"still running after {TIMEOUT_S} s"
    return process.exitcode


def train_killed_at(config: str, update: int) -> None:
    """A run, by its config as JSON, that kills itself as soon as an update is recorded."""

    def kill(metrics: Mapping[str, Any]) -> None:
        if metrics["update"] == update:
            os.kill(os.getpid(), signal.SIGKILL)

    tramontane.train(Config.model_validate_json(config), quiet=True, on_update=kill)


class Command:
    """`tramontane ARGS`, or `python SCRIPT ARGS`, running in a process group of its own. Its ranks
    start as those of the tests do: with `forked_ranks`, from a fork of it before it begins.

    Args:
        args: words after `tramontane`, or the path of a script (`.py`) and its words.
        folder: its current folder; None: that of the tests.
        file_size: the largest file that the process may write, in bytes; None for any size.
        temporary: its TMPDIR; None: that of the tests.
        variables: of its environment, beyond those of the tests.
    """

    def __init__(
        self,
        *args: str,
        folder: Path | None = None,
        file_size: int | None = None,
        temporary: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._output, theirs = context.Pipe(duplex=False)
        environment = {RANKS: ranks.START_METHOD, **(variables or {})}
        if temporary is not None:
            environment["TMPDIR"] = str(temporary)
        place = str(folder or os.getcwd())
        self.process = start(_run_command, theirs, args, place, file_size, environment)
        theirs.close()
        self.pid = self.process.pid or 0
        self._text = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int:
        return end(self.process)

    @property
    def printed(self) -> str:
        """What was printed so far, errors included."""
        return self._text.decode(errors="replace")

    def communicate(self) -> str:
        """Wait for the end; returns all that was printed, errors included."""
        end(self.process)
        self._reader.join(TIMEOUT_S)
        return self._text.decode()

    def _read(self) -> None:
        while chunk := os.read(self._output.fileno(), 1 << 16):
            self._text += chunk


def _fork_server() -> None:
    """Make a fork of this process the server that a process of the tests' server would start anew,
    with all imports. Like what it forks, it stays in this process's group."""
    server = forkserver._forkserver
    with socket.socket(socket.AF_UNIX) as listener:
        address = arbitrary_address("AF_UNIX")
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive, ours = os.pipe()
        warm.divide()
        if pid := os.fork():
            os.close(alive)
            server._forkserver_address, server._forkserver_alive_fd = address, ours
            server._forkserver_pid = pid
            return
        os.close(ours)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as SIGINT, when the group gets it
        try:
            forkserver.main(listener.detach(), alive, [])
        finally:
            os._exit(0)


def _run_command(
    output: Connection,
    args: tuple[str, ...],
    folder: str,
    file_size: int | None,
    variables: Mapping[str, str],
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.update(variables)
    ranks.START_METHOD = os.environ.pop(RANKS)
    if ranks.START_METHOD == START_METHOD:
        _fork_server()
    tempfile.tempdir = None  # asked for again
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which background jobs ignore
    os.dup2(output.fileno(), sys.stdout.fileno())
    os.dup2(output.fileno(), sys.stderr.fileno())
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    script = args[0].endswith(".py")
    sys.argv = [*args] if script else ["tramontane", *args]
    try:
        if script:
            sys.path.insert(0, str(Path(args[0]).resolve().parent))
            runpy.run_path(args[0], run_name="__main__")
        else:
            main()
    finally:  # what a command of a shell does, in this order, and a forked process does not
        threading._shutdown()
        atexit._run_exitfuncs()
