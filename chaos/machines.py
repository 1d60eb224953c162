"""Machines that share neither disk nor network interface: sets of Linux namespaces.

A machine has its own network interface, processes, host name, `/tmp`, `/dev/shm` and home folder.
All see the computer's disk, with the programs, read-only. Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

START_SECONDS = 30.0  # limit for the namespaces of a machine
COMMAND_SECONDS = 180.0  # limit for `ray start` on a busy computer
TOOLS = ("ip", "unshare", "nsenter", "mount")
ADDRESS = "10.77.0."
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
SET_UP = """
set -e
mount --make-rprivate /
for folder in /tmp /dev/shm; do mount -t tmpfs private "$folder"; done
mkdir /tmp/home
printf '%s\n' "$2" > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
mount -o remount,bind,ro /
hostname "$1"
ip link set lo up
touch /tmp/ready
exec sleep infinity
"""


def missing() -> str | None:
    """The reason why machines cannot be made here; None if they can."""
    if os.getuid() != 0:
        return "needs root, to make network namespaces"
    if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"needs {', '.join(lacking)}"
    if Path(sys.prefix).is_relative_to("/tmp"):
        return f"needs Python outside /tmp, of which each machine has its own: {sys.prefix}"
    probe = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "true"]
    if subprocess.run(probe, capture_output=True).returncode:
        return "no namespaces can be made here"
    return None


class Network:
    """A switch, and machines that are plugged into it, at 10.77.0.1, 10.77.0.2, …"""

    def __init__(self) -> None:
        self.switch = f"tramon{os.getpid()}"[:15]
        self.machines: list[Machine] = []

    def __enter__(self) -> Network:
        _run(["ip", "link", "add", self.switch, "type", "bridge"])
        _run(["ip", "link", "set", self.switch, "up"])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for machine in self.machines:
            machine.kill()
        _run(["ip", "link", "del", self.switch])

    def machine(self) -> Machine:
        """Switch a new machine on."""
        self.machines.append(Machine(self.switch, len(self.machines) + 1))
        return self.machines[-1]


class Machine:
    """One set of namespaces; everything in it ends with its first process."""

    def __init__(self, switch: str, number: int) -> None:
        self.name, self.address = f"machine-{number}", f"{ADDRESS}{number}"
        # As Debian writes it: to itself, a machine has an address that no other can reach.
        names = [(f"{ADDRESS}{n}", f"machine-{n}") for n in range(1, 10) if n != number]
        names += [("127.0.0.1", "localhost"), ("127.0.1.1", self.name)]
        hosts = "\n".join(f"{address} {name}" for address, name in names)
        spaces = ["--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
        self._outer = subprocess.Popen(
            ["unshare", *spaces, "--mount-proc", "sh", "-c", SET_UP, "sh", self.name, hosts],
            stderr=subprocess.DEVNULL,
        )
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        _wait(lambda: bool(children.read_text().strip()))
        self.first = int(children.read_text())  # process
        self.root = Path(f"/proc/{self.first}/root")  # its files, seen from outside
        _wait((self.root / "tmp/ready").exists)
        self._plug = f"{switch}p{number}"[-15:]
        _run(["ip", "link", "add", self._plug, "type", "veth", "peer", "name", "eth0",
              "netns", str(self.first)])  # fmt: skip
        _run(["ip", "link", "set", self._plug, "master", switch, "up"])
        self.run(["ip", "address", "add", f"{self.address}/24", "dev", "eth0"])
        self.run(["ip", "link", "set", "eth0", "up"])
        self.run(["ip", "route", "add", "default", "dev", "eth0"])

    def start(
        self, command: Sequence[str], log: IO[bytes] | int, environment: Mapping[str, str] = {}
    ) -> subprocess.Popen[bytes]:
        """Start a command on the machine, in the current folder of the computer."""
        inside = ["nsenter", "--target", str(self.first), "--net", "--mount", "--pid", "--uts",
                  "--ipc", f"--wd={os.getcwd()}"]  # fmt: skip
        variables = {**os.environ, "HOME": "/tmp/home", "TMPDIR": "/tmp", "PATH": PATH}
        return subprocess.Popen(
            [*inside, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**variables, **environment},
            start_new_session=True,
        )

    def run(self, command: Sequence[str], environment: Mapping[str, str] = {}) -> str:
        """Run a command on the machine; returns what it prints.

        Raises:
            RuntimeError: it failed, or took too long.
        """
        process = self.start(command, subprocess.PIPE, environment)
        printed, _ = process.communicate(timeout=COMMAND_SECONDS)
        if process.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)} failed:\n{printed.decode()}")
        return printed.decode()

    def mount(self, folder: Path, path: str) -> None:
        """Attach a folder of the computer, as a volume that the machine may write to."""
        self.run(["mkdir", "-p", path])
        self.run(["mount", "--bind", str(folder), path])
        self.run(["mount", "-o", "remount,bind,rw", path])

    def kill(self) -> None:
        """Switch the machine off, as if its plug were pulled: no connection is closed."""
        if self._outer.poll() is not None:
            return
        subprocess.run(["ip", "link", "set", self._plug, "down"], capture_output=True)
        os.kill(self.first, signal.SIGKILL)
        self._outer.wait()
        subprocess.run(["ip", "link", "del", self._plug], capture_output=True)


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, timeout=COMMAND_SECONDS)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("a machine did not start")
        time.sleep(0.02)
