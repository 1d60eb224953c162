"""A worker for `WorkerProcess` whose tasks fork, as a user's functions do."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from typing import Any

from tramontane.placement.process import serve


def _asleep(_: int) -> None:
    time.sleep(60)


def _pool() -> list[Any]:
    """Ends the sleeping children with SIGTERM, and waits for them."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map_async(_asleep, range(2))
        return pool.map_async(abs, []).get()


def _terminated() -> list[int]:
    """Exit codes of children that get SIGTERM as soon as they exist."""
    codes = []
    for _ in range(20):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join()
        codes.append(child.exitcode)
    return codes


def _returns() -> int:
    """A child that leaves its function by an exception, as after a forgotten `os._exit`."""
    child = os.fork()
    if child == 0:
        raise RuntimeError("in the child")
    os.waitpid(child, 0)
    return os.getpid()


def _program() -> int:
    program = subprocess.Popen(["sleep", "60"])
    program.terminate()
    return program.wait()


TASKS = {"pool": _pool, "terminated": _terminated, "returns": _returns, "program": _program}


def _answer(name: str) -> list[Any]:
    if name == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
        return ["alive"]
    try:
        return [TASKS[name]()]
    except RuntimeError as error:  # as a verdict on a reward that raised
        return [str(error)]


if __name__ == "__main__":
    serve(int(sys.argv[1]), lambda config, folder: _answer)
