"""The parts of the system that every program may use: paths, devices, environment, interpreter."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tramontane.verifier.code.inside import runner

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"]
DEVICES = ["null", "zero", "full", "urandom", "random"]
_SETTINGS = ["/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"]
INSIDE = Path(runner.__file__).parent  # the folder of the code that runs in the sandbox
# A virtual environment's base interpreter, started without `site`, so that programs have the
# standard library and no packages, on every rung and machine.
INTERPRETER = getattr(sys, "_base_executable", None) or sys.executable
# The path is removed again: files next to `inside` must not shadow the standard library.
_START = (
    "import sys; sys.path.append({where!r}); import inside.runner as r; sys.path.pop(); r.main()"
)


def readable_paths(with_interpreter: bool = True) -> list[str]:
    """Paths that every program may read: the system's programs, and the judge's interpreter."""
    prefix = sys.base_prefix
    outside = with_interpreter and not (prefix.startswith("/usr/") or prefix == "/usr")
    return [path for path in (*SYSTEM, *_SETTINGS, *[prefix] * outside) if os.path.exists(path)]


def runner_command(interpreter: str, where: str) -> list[str]:
    """The command that starts `inside.runner` from the folder `where`, which holds `inside`."""
    return [interpreter, "-I", "-S", "-B", "-c", _START.format(where=where)]
