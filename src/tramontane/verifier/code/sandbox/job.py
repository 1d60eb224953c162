"""A sandbox's job: a program, its inputs, and its limits."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from tramontane.verifier.code.sandbox.headers import precompiled

Rung = Literal["bubblewrap", "namespaces", "landlock", "rlimits"]
RUNGS: tuple[Rung, ...] = ("bubblewrap", "namespaces", "landlock", "rlimits")  # best first
OUTPUT_BYTES = 16 * 1024 * 1024  # maximum output of one execution
BOX_MB = 64  # size of the private directory
PROCESSES = 64  # maximum at once, threads included
GRACE_SECONDS = 2.0  # allowance for the sandbox, beyond an execution's limit
CPP_FLAGS = ("-std=c++20", "-O2")


class Limits(NamedTuple):
    """Limits of one execution."""

    seconds: float
    memory_mb: int


COMPILER_LIMITS = Limits(10.0, 2048)
COMPILE_SECONDS = COMPILER_LIMITS.seconds


@dataclass
class Job:
    """A program and its inputs. Each input is one execution.

    `folder` holds the program's source, and is the only folder of the judge's that the program
    sees. Either `source` names a Python file in it, or `compiler` makes the program `{box}/main`
    from its `main.cpp`, with `headers` readable. With a `channel`, the execution is one half of a
    function test: the program if there is a source, else its tests.
    """

    folder: Path
    inputs: list[bytes]
    limits: Limits  # per execution; the compiler has COMPILER_LIMITS
    source: str | None = None
    compiler: list[str] = field(default_factory=list)
    headers: Path | None = None
    keep_going: bool = False  # continue after a failed execution
    channel: int | None = None  # a socket, passed to the program as `inside.descriptors.CHANNEL`

    def compile_with(self, *flags: str) -> None:
        """Make the program from `main.cpp`, by g++ with these flags."""
        self.headers = precompiled(flags)
        headers = ["-I", "{headers}"] if self.headers else []
        gpp = shutil.which("g++") or "g++"
        self.compiler = [gpp, *flags, *headers, "-pipe", "-o", "{box}/main", "{folder}/main.cpp"]
