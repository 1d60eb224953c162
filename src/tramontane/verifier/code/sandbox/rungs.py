"""The rungs of the sandbox ladder: how each shows a program the system and hides everything else.

bubblewrap builds namespaces and a root directory; `unshare`, `mount`, `chroot` and `setpriv` do the
same in its absence. Landlock needs no namespaces: its locks are in `inside.lockdown`, and the
runner's children apply them.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from shlex import quote

from tramontane.verifier.code.inside import lockdown, runner
from tramontane.verifier.code.sandbox.job import BOX_MB, Job

TOOLS = {"bubblewrap": ["bwrap"], "namespaces": ["unshare", "mount", "chroot", "setpriv"]}
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


def wrap_in_bubblewrap(command: list[str], shown: list[tuple[str, str]], uid: int) -> list[str]:
    """The command, wrapped in namespaces and a root directory by bubblewrap.

    Args:
        command: starts the runner.
        shown: folders to show read-only, as (path inside, path outside).
        uid: the user that the runner becomes; 0 if the judge is not root.
    """
    if uid:
        # The runner becomes a real user, so that the process limit applies.
        separate = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
        separate += ["--unshare-cgroup-try", "--cap-drop", "ALL"]
        separate += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # dropped once used
    else:
        separate = ["--unshare-all", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    line = ["bwrap", "--die-with-parent", "--as-pid-1", "--clearenv", *separate]
    for name, value in ENVIRONMENT.items():
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


def wrap_in_namespaces(command: list[str], shown: list[tuple[str, str]], uid: int) -> list[str]:
    """The command, wrapped in namespaces and a root directory of bind mounts on a tmpfs; arguments
    as for `wrap_in_bubblewrap`."""
    # `setpriv` drops all capabilities that could escape the new root.
    user = f"--reuid {uid} --regid {uid} --clear-groups " if uid else ""
    run = " ".join(quote(part) for part in command)
    enter = f"exec chroot . setpriv {user}--no-new-privs --bounding-set=-all --inh-caps=-all {run}"
    script = "\n".join([*_root_directory(shown), enter])
    separate = ["--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child=KILL"]
    if not uid:
        separate += ["--user", "--map-root-user"]
    return ["unshare", *separate, "sh", "-c", script]


def _root_directory(shown: list[tuple[str, str]]) -> list[str]:
    """Shell commands that mount the root directory and enter it."""
    lines = ["set -e", "root=/sys", "mount -t tmpfs -o size=1m,mode=755 tmpfs $root", "cd $root"]
    lines += ["mkdir -p proc dev tmp", "ln -s /proc/self/fd dev/fd"]
    lines += [f"ln -s fd/{n} dev/{name}" for n, name in enumerate(("stdin", "stdout", "stderr"))]
    lines += [f"mount -t tmpfs -o size={BOX_MB}m,mode=777,nosuid,nodev tmpfs tmp"]
    lines += ["mount -t proc -o nosuid,nodev,noexec proc proc"]
    devices = [(f"/dev/{name}", f"/dev/{name}") for name in DEVICES]
    folders, targets, mounts = set[str](), list[str](), list[str]()
    for inside, outside in [*((p, p) for p in readable_paths()), *devices, *shown]:
        target = quote(inside.lstrip("/"))
        if os.path.islink(outside) and outside in SYSTEM:
            targets.append(f"ln -s {quote(os.readlink(outside))} {target}")
            continue
        if os.path.isdir(outside):
            folders.add(target)
        else:
            folders.add(quote(os.path.dirname(inside).lstrip("/") or "."))
            targets.append(f": > {target}")
        mounts.append(f"mount --rbind {quote(outside)} {target}")
        if not outside.startswith("/dev/"):
            mounts.append(f"mount -o remount,bind,ro {target}")
    # One process for all folders: each costs as much as a test.
    lines += [f"mkdir -p {' '.join(sorted(folders))}", *targets, *mounts]
    return [*lines, "mount -o remount,bind,ro $root"]


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


def reachable_files(job: Job) -> tuple[list[str], list[str]]:
    """The paths that a program may read, and the devices."""
    headers = [str(job.headers)] if job.headers else []
    system = readable_paths(with_interpreter=interpreter() == INTERPRETER)
    return [*system, str(job.folder), str(INSIDE), *headers], [f"/dev/{name}" for name in DEVICES]
