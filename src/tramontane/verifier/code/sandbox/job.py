"""A sandbox's job: a program, its inputs, and its limits; and the precompiled header of C++."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

Rung = Literal["namespaces", "bubblewrap", "landlock", "rlimits"]
RUNGS: tuple[Rung, ...] = ("namespaces", "bubblewrap", "landlock", "rlimits")  # best first
OUTPUT_BYTES = 16 * 1024 * 1024  # maximum output of one execution
BOX_MB = 64  # size of the private directory
PROCESSES = 64  # maximum at once, threads included
GRACE_SECONDS = 2.0  # for a sandbox to end once asked to
ANSWER_SECONDS = 10.0  # for a sandbox to start and to report, beyond an execution's clock
ASLEEP_FACTOR = 2.0  # time that an execution may run and sleep, as a multiple of its processor time
CLOCK_FACTOR = 10.0  # likewise by the clock, for hosts with several programs per processor
TOOL_SECONDS = 120.0  # limit for g++ to print its version or compile a header
CPP_FLAGS = ("-std=c++20", "-O2")
COMPILERS = {"cpp": ("g++", *CPP_FLAGS), "c": ("gcc", "-std=gnu17", "-O2")}  # by language
SUFFIXES = {"python": "py", "cpp": "cpp", "c": "c"}


class Limits(NamedTuple):
    """Limits of one execution.

    `seconds` are of processor time, summed over its processes. `asleep_factor` and `clock_factor`
    are multiples of it: the time that it may run and sleep together, and the time by the clock,
    which includes waiting for a processor on a busy host.
    """

    seconds: float
    memory_mb: int
    asleep_factor: float = ASLEEP_FACTOR
    clock_factor: float = CLOCK_FACTOR

    @property
    def asleep_seconds(self) -> float:
        return self.seconds * self.asleep_factor

    @property
    def clock_seconds(self) -> float:
        return self.seconds * self.clock_factor


COMPILER_LIMITS = Limits(10.0, 2048)
COMPILE_SECONDS = COMPILER_LIMITS.clock_seconds  # longest by the clock


@functools.cache
def precompiled(flags: tuple[str, ...]) -> Path | None:
    """A folder with `bits/stdc++.h` compiled with these flags; None if g++ has no such header.

    The folder is made once and kept in the user's cache, or in the system's for root, since
    programs then run as another user.
    """
    version = subprocess.run(
        ["g++", "--version"], capture_output=True, text=True, timeout=TOOL_SECONDS
    ).stdout
    second = "#include_next <bits/stdc++.h>\n"  # for a program that includes the header twice
    kind = (flags, version, os.uname().machine, second, "readable")
    key = hashlib.sha256(repr(kind).encode()).hexdigest()[:16]
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path("/var/cache" if os.geteuid() == 0 else users)
    folder = cache / "tramontane" / f"headers-{key}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    (made / "bits").mkdir()
    (made / "bits" / "stdc++.h").write_text(second)
    (made / "empty.hpp").write_text("#include <bits/stdc++.h>\n")
    target = str(made / "bits" / "stdc++.h.gch")
    command = ["g++", *flags, "-x", "c++-header", "-o", target, str(made / "empty.hpp")]
    if subprocess.run(command, capture_output=True, timeout=TOOL_SECONDS).returncode != 0:
        shutil.rmtree(made)
        return None  # then programs that include the header do not compile either
    for path in (folder.parent, made, *made.rglob("*")):  # programs may run as another user
        path.chmod(0o755 if path.is_dir() else 0o644)
    try:
        made.rename(folder)  # atomic: the folder is complete or absent
    except OSError:  # another worker was faster
        shutil.rmtree(made)
    return folder


@dataclass
class Job:
    """A program and its inputs. Each input is one execution.

    `files` has the program's files by name, which it finds in `{folder}`. Either `source` names a
    Python file among them, or `compiler` makes the program `{box}/main`
    from its source, with `headers` readable. With a `channel`, the execution is one half of a
    function test: the program if there is a source, else its tests. With `has_files`, each input is
    a marshaled dict of files by name: they are written to the execution's directory, and their
    names are the program's arguments. `prelude` is Python source that runs before a Python program,
    in its namespace. A session has no source and no inputs: it runs what `Sandbox.run` gives it.
    """

    inputs: list[bytes]
    limits: Limits  # per execution; the compiler has COMPILER_LIMITS
    source: str | None = None
    compiler: list[str] = field(default_factory=list)
    headers: Path | None = None
    keep_going: bool = False  # continue after a failed execution
    prelude: str = ""
    has_files: bool = False
    channel: int | None = None  # a socket, passed to the program as `inside.records.CHANNEL`
    is_session: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    hash_seed: int = 0  # of Python, on which the order of sets depends

    def write(self, name: str, text: str) -> None:
        """Add one of the program's files."""
        self.files[name] = text.encode(errors="replace")

    def set_program(self, text: str, language: str) -> None:
        """Add the program's source, and set how it runs."""
        self.write(f"main.{SUFFIXES[language]}", text)
        if language == "python":
            self.source = "main.py"
            return
        name, *flags = COMPILERS[language]
        inputs = [f"{{folder}}/main.{SUFFIXES[language]}", *["-lm"] * (language == "c")]
        self.headers = precompiled(CPP_FLAGS) if language == "cpp" else None
        headers = ["-I", "{headers}"] if self.headers else []
        compiler = shutil.which(name) or name
        self.compiler = [compiler, *flags, *headers, "-pipe", "-o", "{box}/main", *inputs]
