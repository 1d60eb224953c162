"""TRL's process for `vs_trl.py` and `vs_trl_images.py`, and the environment that it runs in."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from threading import Timer
from types import TracebackType
from typing import Any, NamedTuple

import torch

from tramontane.generator.vllm.environment import CPU_INDEX

HERE = Path(__file__).parent
# Not inherited by TRL's process, which keeps torch's own settings.
KERNELS = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
TRL_VERSION = "1.16.0"


class Turn(NamedTuple):
    """Figures of one side's turn."""

    tokens_per_second: float
    mean_tokens: float  # per completion
    seconds: float


class TrlSide:
    """TRL in a separate process, which starts with its first turn and works only in its turns."""

    def __init__(
        self, python: Path, settings: Mapping[str, Any], folder: Path, timeout: float
    ) -> None:
        self.timeout, self.folder = timeout, folder / "trl"
        self.folder.mkdir()
        settings = {**settings, "folder": str(self.folder)}
        (self.folder / "settings.json").write_text(json.dumps(settings))
        self.python, self.errors = python, self.folder / "stderr"
        self.process: subprocess.Popen[str] | None = None
        self.warm = False

    def __enter__(self) -> TrlSide:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def turn(self) -> Turn:
        process = self.process or self.start()
        assert process.stdin is not None
        if not self.warm:
            self._read(process)  # the line `ready`
            self.warm = True
        process.stdin.write("go\n")
        process.stdin.flush()
        answer = json.loads(self._read(process))
        lengths, seconds = answer["lengths"], answer["seconds"]
        return Turn(sum(lengths) / seconds, mean(lengths), seconds)

    def start(self) -> subprocess.Popen[str]:
        """The process, which begins with its warm-up."""
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [self.python, HERE / "trl_side.py", self.folder / "settings.json"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={k: v for k, v in os.environ.items() if k not in KERNELS},
            )
        return self.process

    def _read(self, process: subprocess.Popen[str]) -> str:
        """The next line of the process."""
        assert process.stdout is not None
        timer = Timer(self.timeout, process.kill)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        if not line:
            tail = self.errors.read_text(errors="replace")[-3000:]
            raise SystemExit(
                f"{tail}\nTRL's side ended, or was silent for {self.timeout:g} s (--timeout): the "
                f"end of its stderr is above"
            )
        return line


def trl_python(folder: Path) -> Path:
    """The interpreter of TRL's virtual environment, which is made if there is none."""
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.is_file():
        print(f"making {folder} with TRL {TRL_VERSION}, once", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet", "-c", HERE.parent / "constraints.txt"]
        # torch first, so that no other package chooses its build: the one that Tramontane has.
        build = [f"torch=={torch.__version__}", "--no-deps", "--extra-index-url", CPU_INDEX]
        for packages in (build, [f"trl=={TRL_VERSION}", "pillow"]):
            subprocess.run([*pip, *packages], check=True)
        ready.touch()
    return python


def missing_for_trl(python: Path, device: str) -> list[str]:
    """Everything that TRL's side needs and its interpreter lacks."""
    script = (
        "import datasets, PIL, torch, transformers, trl\n"
        f"assert trl.__version__ == {TRL_VERSION!r}, f'TRL {{trl.__version__}} is installed'\n"
        f"assert {device!r} != 'cuda' or torch.cuda.is_available(), 'torch sees no GPU'\n"
    )
    if not python.is_file():
        return [f"{python}: no such interpreter (--trl-python)"]
    done = subprocess.run([python, "-c", script], capture_output=True, text=True)
    if done.returncode == 0:
        return []
    reason = done.stderr.strip().splitlines()[-1]
    return [f"{python}: {reason}; TRL's side needs pillow and trl {TRL_VERSION}"]
