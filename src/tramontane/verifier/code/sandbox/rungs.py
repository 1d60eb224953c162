"""The rungs of the sandbox ladder: how each shows a program the system and hides everything else.

`inside.namespaces` makes namespaces and a root directory; bubblewrap does the same where only it
may. Landlock needs no namespaces: its locks are in `inside.lockdown`, and the runner's children
apply them.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tramontane.verifier.code.inside import lockdown, runner
from tramontane.verifier.code.sandbox.job import BOX_MB

TOOLS = {"bubblewrap": ["bwrap"]}
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "LANG": "C.UTF-8",
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
# The current folder is no place to import from. The path of `inside` is removed again: files next
# to it must not shadow the standard library.
_START = (
    "import sys; del sys.path[0]; sys.path.append({!r}); import inside.{} as x; sys.path.pop(); "
    "x.main()"
)


def readable_paths(with_interpreter: bool = True) -> list[str]:
    """Paths that every program may read: the system's programs, and the judge's interpreter."""
    prefix = sys.base_prefix
    outside = with_interpreter and not (prefix.startswith("/usr/") or prefix == "/usr")
    return [path for path in (*SYSTEM, *_SETTINGS, *[prefix] * outside) if os.path.exists(path)]


def python_command(module: str, interpreter: str, where: str) -> list[str]:
    """The command that starts a module of `inside`, which is in the folder `where`."""
    # Not -I, which would ignore the hash seed.
    return [interpreter, "-s", "-S", "-B", "-c", _START.format(where, module)]


def environment(hash_seed: int) -> dict[str, str]:
    """The variables of a sandbox. With one hash seed for all, a verdict does not depend on the
    process that gives it, although a program may print a set."""
    return ENVIRONMENT | {"PYTHONHASHSEED": str(hash_seed)}


def wrap_in_bubblewrap(
    command: list[str], shown: list[tuple[str, str]], uid: int, variables: dict[str, str]
) -> list[str]:
    """The command, wrapped in namespaces and a root directory by bubblewrap.

    Args:
        command: starts the runner.
        shown: folders to show read-only, as (path inside, path outside).
        uid: the user that the runner becomes; 0 if the judge is not root.
        variables: the environment variables.
    """
    if uid:
        # The runner becomes a real user, so that the process limit applies.
        separate = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
        separate += ["--unshare-cgroup-try", "--cap-drop", "ALL"]
        separate += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # dropped once used
    else:
        separate = ["--unshare-all", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    bwrap = shutil.which("bwrap", path=ENVIRONMENT["PATH"]) or "bwrap"
    line = [bwrap, "--die-with-parent", "--as-pid-1", "--clearenv", *separate]
    for name, value in variables.items():
        line += ["--setenv", name, value]
    # /tmp comes first: an interpreter may itself live under it.
    line += ["--perms", "0777", "--size", str(BOX_MB << 20), "--tmpfs", "/tmp"]
    for path in readable_paths():
        if os.path.islink(path) and path in SYSTEM:
            line += ["--symlink", os.readlink(path), path]
            continue
        for parent in reversed(Path(path).parents[:-1]):  # bwrap would create them with mode 0700
            line += ["--perms", "0755", "--dir", str(parent)]
        line += ["--ro-bind", path, path]
    for inside, outside in shown:
        line += ["--ro-bind", outside, inside]
    line += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/"]
    return [*line, "--chdir", "/", *command]


def root_directory() -> dict[str, Any]:
    """The plan of the root directory that sandboxes see, for `inside.namespaces`."""
    links = [("/dev/fd", "/proc/self/fd")]
    links += [(f"/dev/{name}", f"fd/{n}") for n, name in enumerate(("stdin", "stdout", "stderr"))]
    links += [(p, os.readlink(p)) for p in SYSTEM if os.path.islink(p)]
    linked = {path for path, _ in links}
    shown = [path for path in readable_paths() if path not in linked]
    devices = [f"/dev/{name}" for name in DEVICES]
    own = ["/proc", "/dev", "/tmp", "/program", "/headers"]
    return {
        "folders": [*own, *filter(os.path.isdir, shown)],
        "files": [path for path in [*shown, *devices] if not os.path.isdir(path)],
        "links": links,
        "binds": [(path, False) for path in shown] + [(path, True) for path in devices],
    }


def why_no_landlock() -> str:
    """Why this machine's Landlock is unsuitable; "" if it is suitable."""
    if not lockdown.supported():
        return f"no table of system calls for {os.uname().machine}"
    if (version := lockdown.landlock_version()) < lockdown.LANDLOCK_NEEDED:
        return f"the kernel has Landlock {max(version, 0)}, 3 is needed (Linux 6.2)"
    return ""


def interpreter() -> str:
    """The judge's interpreter, or the system's if the judge is root and the programs' user cannot
    reach the judge's, for example in root's own folder."""
    if os.geteuid() != 0:
        return INTERPRETER
    open_to_all = all(parent.stat().st_mode & 1 for parent in Path(INTERPRETER).resolve().parents)
    path = ENVIRONMENT["PATH"]
    return INTERPRETER if open_to_all else shutil.which("python3", path=path) or INTERPRETER


def reachable_files(folder: Path, headers: Path | None) -> tuple[list[str], list[str]]:
    """The paths that a program with its files in `folder` may read, and the devices."""
    own = [str(path) for path in (folder, INSIDE, headers) if path]
    system = readable_paths(with_interpreter=interpreter() == INTERPRETER)
    return [*system, *own], [f"/dev/{name}" for name in DEVICES]
