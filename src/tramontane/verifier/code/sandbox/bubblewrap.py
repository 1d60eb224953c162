"""The first rung of the sandbox ladder: bubblewrap builds the namespaces and the root directory."""

from __future__ import annotations

import os
from pathlib import Path

from tramontane.verifier.code.sandbox.job import BOX_MB
from tramontane.verifier.code.sandbox.system import ENVIRONMENT, SYSTEM, readable_paths

TOOLS = ["bwrap"]


def wrap(command: list[str], shown: list[tuple[str, str]], uid: int) -> list[str]:
    """The command, wrapped in a sandbox.

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
