"""The server whose forks are the processes of tests, and the processes that they start.

It imports the package once, for all of them. xdist's processes collect in half the time, and a
process that is to be killed, interrupted or limited starts in milliseconds.
"""

import atexit
import multiprocessing
import os
import shlex
import sys
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

SERVER = "TRAMONTANE_TEST_FORK_SERVER"  # the variable with the address of a server to share
START_METHOD = "forkserver"
context = multiprocessing.get_context(START_METHOD)
context.set_forkserver_preload(
    [
        "pytest",
        "hypothesis",
        "datasets",
        "peft",
        "scipy.stats",
        "tests.curation.killing",
        "tramontane.cli",
        "tramontane.asking.endpoint",
        "tramontane.run.train",
        "tramontane.sft.sft",
        "tests.warmed",
    ]
)


def ensure_running() -> None:
    """Start the server if there is none."""
    from tramontane.placement import warm

    # As the environment that the system shows of the server, and of all its forks, for `_remark`.
    with mock.patch.dict(os.environ, {warm.MARK: warm._UNMARKED}):
        forkserver.ensure_running()


def address() -> str:
    """Where the server listens; it is started if there is none."""
    ensure_running()
    return str(forkserver._forkserver._forkserver_address)


def python() -> str:
    """A command that does with `-c CODE ARGS` what Python does, in a fork of this server."""
    os.environ[SERVER] = address()
    return shlex.join([sys.executable, __file__])


def share(address: str) -> None:
    """Use a server that another process has started."""
    server = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # it lives as its starter does
    server.ensure_running = resource_tracker.ensure_running
    forkserver.ensure_running = server.ensure_running


def launch(code: str, *args: str) -> int:
    """Run code in a fork of the shared server, with this process's streams; returns its exit code,
    the negative signal if it was killed."""
    share(os.environ[SERVER])
    streams = [Connection(os.dup(number)) for number in range(3)]
    process = context.Process(target=run, args=(code, args, streams, dict(os.environ)))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def run(
    code: str, args: tuple[str, ...], streams: list[Connection], environment: dict[str, str]
) -> None:
    """What Python does with `-c`."""
    import numpy as np

    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    np.random.seed()
    share(os.environ[SERVER])
    sys.argv = ["-c", *args]
    try:
        exec(code, {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()  # which a forked process skips


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    from tests import fork_server

    sys.exit(fork_server.launch(*sys.argv[sys.argv.index("-c") + 1 :]))
