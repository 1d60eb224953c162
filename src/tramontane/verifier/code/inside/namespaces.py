"""Namespaces for sandboxes, and the root directory that they see (Linux).

The server is the first process of a process namespace, with a mount namespace in which the root
directory is built once. Each sandbox is the first process of a namespace of its own, and has its
own mounts, network and queues. Without root all this is in a user namespace, and each sandbox in
another one inside it, where it has no power over the mounts.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

from . import execution, lockdown, processes

ROOT = "/sys"  # where the root directory is mounted; any folder will do
_NEWNS, _NEWUTS, _NEWIPC = 0x20000, 0x4000000, 0x8000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT = 1, 2, 4, 8, 32
_BIND, _REC, _SLAVE, _RELATIME = 1 << 12, 1 << 14, 1 << 19, 1 << 21
_ST_RELATIME = 1 << 12
_KEPT = _NOSUID | _NODEV | _NOEXEC | 1 << 10 | 1 << 11  # flags that a remount must repeat
_LIBC = ctypes.CDLL(None, use_errno=True)


class Namespaces:
    """The server's namespaces. Made in a new process, the first in them: the one before waits for
    its end, and ends with it.

    Args:
        link: a descriptor for the new process alone.
    """

    def __init__(self, link: int) -> None:
        uid, gid = os.geteuid(), os.getegid()
        self._of_user = uid != 0
        _call("unshare", _NEWPID | _NEWNS | (_NEWUSER if self._of_user else 0))
        if self._of_user:
            _map_user("/proc", uid, gid)
        # Mounts that the host makes later are seen here; those made here are not seen there.
        _mount("none", "/", "", _REC | _SLAVE)
        if pid := os.fork():
            os.close(link)
            os.waitpid(pid, 0)
            os._exit(0)
        processes.prctl(processes.PDEATHSIG, signal.SIGKILL)
        self._pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def build(self, plan: dict[str, Any]) -> None:
        """Mount the root directory of all sandboxes, read-only.

        Args:
            plan: `folders` and `files` to make, empty; `links` (path, target); `binds`, what to
                show of the system (path, whether programs may write to it).
        """
        _mount("tmpfs", ROOT, "tmpfs", 0, "size=1m,mode=755")
        for path in plan["folders"]:
            os.makedirs(ROOT + path, exist_ok=True)
        for path in plan["files"]:
            os.makedirs(os.path.dirname(ROOT + path), exist_ok=True)
            os.close(os.open(ROOT + path, os.O_CREAT))
        for path, target in plan["links"]:
            os.symlink(target, ROOT + path)
        for path, is_writable in plan["binds"]:
            _bind(path, path, is_writable)
        _mount("none", ROOT, "", _REMOUNT | _BIND | _RDONLY)

    def fork(self) -> int:
        """Fork the first process of a new process namespace; otherwise as `execution.fork`."""
        _call("unshare", _NEWPID)
        pid = execution.fork()
        if pid:
            _call("setns", self._pids, _NEWPID)  # the next one is not made inside this one
        return pid

    def isolate(self, place: dict[str, Any]) -> None:
        """Enter the other namespaces and the root directory, in a sandbox's first process.

        Args:
            place: `files`, the content of the folder /program by name; `headers`, a folder to show
                as /headers, or None; `box_bytes`, the size of /tmp.
        """
        _call("unshare", _NEWNS | _NEWNET | _NEWIPC | _NEWUTS)
        safe = _NOSUID | _NODEV
        _mount("tmpfs", f"{ROOT}/tmp", "tmpfs", safe, f"size={place['box_bytes']},mode=777")
        _mount("proc", f"{ROOT}/proc", "proc", safe | _NOEXEC)
        if place["files"]:
            _mount("tmpfs", f"{ROOT}/program", "tmpfs", safe, "mode=755")
            for name, content in place["files"].items():
                with open(f"{ROOT}/program/{name}", "wb") as file:
                    file.write(content)
            _mount("none", f"{ROOT}/program", "", _REMOUNT | _BIND | _RDONLY | safe)
        if place["headers"]:
            _bind(place["headers"], "/headers", is_writable=False)
        if self._of_user:
            _call("unshare", _NEWUSER)  # not possible after chroot
            _map_user(f"{ROOT}/proc", 0, 0)
        os.chdir(ROOT)
        os.chroot(".")
        lockdown.drop_bounding_set()


def _map_user(proc: str, uid: int, gid: int) -> None:
    """Make this process root in its new user namespace, and there alone."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"{proc}/self/{name}", "w") as file:
            file.write(text)


def _bind(path: str, inside: str, is_writable: bool) -> None:
    target = ROOT + inside
    _mount(path, target, "", _BIND | _REC)
    if not is_writable:
        flags = os.statvfs(target).f_flag
        relative = _RELATIME if flags & _ST_RELATIME else 0
        _mount("none", target, "", _REMOUNT | _BIND | _RDONLY | flags & _KEPT | relative)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _call(
        "mount", *map(str.encode, (source, target, kind)), ctypes.c_ulong(flags), options.encode()
    )


def _call(name: str, *arguments: Any) -> None:
    if getattr(_LIBC, name)(*arguments) < 0:
        number = ctypes.get_errno()
        what = b" ".join(a for a in arguments[:2] if isinstance(a, bytes)).decode()
        raise OSError(number, f"{name} {what}: {os.strerror(number)}".replace(" :", ":"))
