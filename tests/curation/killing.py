"""Curations and scripts in processes that are killed, at an exact moment or from outside."""

import os
import runpy
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from tests import forked
from tests.forked import TIMEOUT_S, end
from tramontane.curation.config import CurateConfig
from tramontane.curation.pipeline import curate


def start(config: CurateConfig, killed_at: str | None = None) -> BaseProcess:
    """Curate in a process that kills itself when it is about to complete the file `killed_at`.

    A file is complete once it is renamed from its partial name. At that moment only the partial
    file exists, of which half is left, as if the kill had come while it was written.
    """
    return forked.start(_curate, config.model_dump_json(), killed_at)


def start_script(script: Path, arguments: list[str], killed_at: str | None = None) -> BaseProcess:
    """The same with a Python script, which runs as if its folder were Python's first path."""
    return forked.start(_run_script, str(script), arguments, killed_at)


def kill_once_written(process: BaseProcess, path: Path, lines: int = 0) -> None:
    """Kill a process as soon as a file holds something, or this number of whole lines."""
    deadline = time.monotonic() + TIMEOUT_S
    while not path.is_file() or not (content := path.read_bytes()) or content.count(b"\n") < lines:
        assert process.is_alive(), f"ended before {path.name} was written"
        assert time.monotonic() < deadline, f"no {path.name} within {TIMEOUT_S} s"
        time.sleep(0.001)
    os.kill(process.pid or 0, signal.SIGKILL)
    assert end(process) == -signal.SIGKILL


def _curate(config: str, killed_at: str | None) -> None:
    _kill_at(killed_at)
    torch.set_num_threads(1)
    curate(CurateConfig.model_validate_json(config))


def _run_script(script: str, arguments: list[str], killed_at: str | None) -> None:
    _kill_at(killed_at)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def _kill_at(file: str | None) -> None:
    def hook(event: str, args: tuple[object, ...]) -> None:
        if event == "os.rename" and file and str(args[1]).endswith(file):
            os.truncate(str(args[0]), os.path.getsize(str(args[0])) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
