"""The second rung of the sandbox ladder: `unshare`, `mount`, `chroot` and `setpriv`."""

from __future__ import annotations

import os

from tramontane.verifier.code.sandbox.job import BOX_MB
from tramontane.verifier.code.sandbox.system import DEVICES, SYSTEM, readable_paths

TOOLS = ["unshare", "mount", "chroot", "setpriv"]


def wrap(command: list[str], shown: list[tuple[str, str]], uid: int) -> list[str]:
    """The command, wrapped in its own namespaces and a root directory of bind mounts on a tmpfs.

    Args:
        command: starts the runner.
        shown: folders to show read-only, as (path inside, path outside).
        uid: the user that the runner becomes; 0 if the judge is not root.
    """
    # `setpriv` drops all capabilities that could escape the new root.
    user = f"--reuid {uid} --regid {uid} --clear-groups " if uid else ""
    run = " ".join(_quote(part) for part in command)
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
    for inside, outside in [*((p, p) for p in readable_paths()), *devices, *shown]:
        target = _quote(inside.lstrip("/"))
        if os.path.islink(outside) and outside in SYSTEM:
            lines.append(f"ln -s {_quote(os.readlink(outside))} {target}")
            continue
        folder = _quote(os.path.dirname(inside).lstrip("/") or ".")
        lines.append(f"mkdir -p {folder}")
        lines.append(f"mkdir -p {target}" if os.path.isdir(outside) else f": > {target}")
        lines.append(f"mount --rbind {_quote(outside)} {target}")
        if not outside.startswith("/dev/"):
            lines.append(f"mount -o remount,bind,ro {target}")
    return [*lines, "mount -o remount,bind,ro $root"]


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
