"""A small process that imports the workers' modules once, and forks every worker from there.

Started with a process's first worker, it ends with that process, and the workers end with it. It
has no threads, and imports only this package. A worker forked from it has the environment
variables, the search path and the current folder of the process that asks for it. A process that
forks others which use workers calls `divide` before: each then has a fork of the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tramontane.imports import command_of
from tramontane.interrupt import leave_to_controller
from tramontane.temporary import die_with_parent

MARK = "TRAMONTANE_WORKER"  # in the environment of a worker and of all that it starts
_UNMARKED = "0" * 32
REPLY_SECONDS = 120.0  # limit for the server to import a module and fork
KILL_SECONDS = 60.0  # limit for a killed process to be gone
_SIZE = struct.Struct("q")
_KILLED = -signal.SIGKILL  # the status of a worker whose server is gone


class Forked:
    """A worker as its user sees it, like a `subprocess.Popen`."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid, self._status = pid, status
        self._lock = threading.Lock()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the worker runs."""
        return self._wait(0)

    def wait(self, timeout: float) -> int:
        """The exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # meanwhile
                os.kill(self.pid, number)

    def _wait(self, seconds: float) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._status, select.POLLIN)
            if poll.poll(1000 * seconds):
                with self._lock:  # another thread may have read it meanwhile
                    if self.returncode is None:
                        self.returncode = self._read()
        return self.returncode

    def _read(self) -> int:
        ended = os.read(self._status, _SIZE.size)
        os.close(self._status)
        return _SIZE.unpack(ended)[0] if ended else _KILLED


class _Server:
    """A server of this process, started when it is needed, with variables beyond this process's."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None  # None also if another started it
        self._divided: socket.socket | None = None  # the link of the next fork of this process

    def fork(self, *asked: Any) -> Forked:
        """See `fork`. A server that was killed is replaced."""
        with self._lock:
            try:
                return self._ask(*asked)
            except OSError:
                self._end()
                return self._ask(*asked)

    def load(self, module: str) -> None:
        """See `load`."""
        with self._lock:
            if self._link is None:
                self._start()
            self._send([], module)

    def divide(self) -> None:
        """See `divide`. A server that is gone is not divided."""
        with self._lock, contextlib.suppress(OSError):
            if self._link is not None:
                ours, theirs = socket.socketpair()
                with theirs:
                    self._divided = ours
                    self._send([theirs.fileno()])

    def keep(self) -> None:
        """After a fork, in this process."""
        if self._divided:
            self._divided.close()
        self._divided = None

    def inherited(self) -> _Server | None:
        """After a fork, in the new process: the server that is its own, if there is one."""
        if self._link:
            self._link.close()
        if self._divided is None:
            return None
        server = _Server(self._variables)
        server._link = self._divided
        server._link.settimeout(REPLY_SECONDS)
        return server

    def _ask(self, command: Sequence[str], mark: str, output: int, *descriptor: int) -> Forked:
        if self._link is None:
            self._start()
        assert self._link
        environment = os.environ | self._variables
        ours, theirs = os.pipe()
        try:
            descriptors = [theirs, output, *descriptor]
            self._send(descriptors, command, mark, environment, sys.path, _folder())
            return Forked(_SIZE.unpack(_received(self._link, _SIZE.size))[0], ours)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)

    def _send(self, descriptors: Sequence[int], *request: Any) -> None:
        assert self._link
        data = pickle.dumps(request)
        if descriptors:
            socket.send_fds(self._link, [_SIZE.pack(len(data))], descriptors)
            self._link.sendall(data)
        else:
            self._link.sendall(_SIZE.pack(len(data)) + data)

    def _end(self) -> None:
        if self._link:
            self._link.close()  # which ends it
        if self._process:
            self._process.kill()
            self._process.wait(KILL_SECONDS)
        self._link = self._process = None

    def _start(self) -> None:
        self._link, theirs = socket.socketpair()
        self._link.settimeout(REPLY_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                command_of(__name__, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | self._variables | {MARK: _UNMARKED},
                start_new_session=True,
            )


_servers: dict[frozenset[tuple[str, str]], _Server] = {}  # by the variables


def fork(
    command: Sequence[str],
    mark: str,
    output: int,
    *descriptor: int,
    variables: Mapping[str, str] | None = None,
) -> Forked:
    """Fork a worker that runs like `python -m MODULE WORD… DESCRIPTOR`, in its own session.

    Args:
        command: the module and words. The module's `warm_up()`, if it has one, is called in the
            server before the first fork.
        mark: 32 characters that identify the worker and all that it starts, as the variable MARK.
        output: becomes the worker's standard output and standard error.
        descriptor: an open one, if any; the worker gets a copy.
        variables: of the environment, beyond this process's. Each choice has its own server, since
            libraries read them when they are imported.

    Raises:
        OSError: the server ended, as when the module cannot be imported; see stderr.
    """
    return _server(variables or {}).fork(command, mark, output, *descriptor)


def load(module: str, variables: Mapping[str, str] | None = None) -> None:
    """Start the server, if necessary, and have it import a module for the workers to come.

    Args:
        module: of this package.
        variables: as for `fork`.
    """
    _server(variables or {}).load(module)


def divide() -> None:
    """Right before this process forks itself: the fork gets servers of its own, which are forks of
    this process's. Without this it would start new ones, which import everything again."""
    for server in _servers.values():
        server.divide()


def _server(variables: Mapping[str, str]) -> _Server:
    return _servers.setdefault(frozenset(variables.items()), _Server(variables))


def _inherit() -> None:
    """In a fork of a process with servers, which are that process's alone."""
    inherited = {key: server.inherited() for key, server in _servers.items()}
    _servers.clear()
    _servers.update({key: server for key, server in inherited.items() if server})


def _keep() -> None:
    for server in _servers.values():
        server.keep()


os.register_at_fork(after_in_child=_inherit, after_in_parent=_keep)


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # deleted
        return "/"


def _received(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise OSError("the process that forks workers ended")
        data += part
    return data


# -------------------------------------------------------------------------------- the server's side


def main(descriptor: int) -> None:
    """Serve requests until the other side closes its end of the socket, or dies: what to run in a
    fork, with the descriptors of `Forked`'s status and of `fork`; a module to import; or nothing
    but the socket of another server."""
    leave_to_controller(signal.SIGTERM)
    link = socket.socket(fileno=descriptor)
    running: dict[int, int] = {}  # by process id, where its exit code is written
    signal.signal(signal.SIGCHLD, lambda *_: _report(running))
    loaded: set[str] = set()
    while True:
        descriptors, request = _asked(link)
        if request is None:
            return
        if not request:
            link = _divided(link, descriptors[0], running)
            continue
        module = request[0] if isinstance(request[0], str) else request[0][0]
        if module not in loaded:
            _load(module)
            loaded.add(module)
        if not descriptors:
            continue
        divide()  # the servers that a module has started for its workers
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if pid == 0:
            _become_worker(link, descriptors, running, *request)
            return
        running[pid] = descriptors[0]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        for descriptor in descriptors[1:]:
            os.close(descriptor)


def _divided(link: socket.socket, other: int, running: dict[int, int]) -> socket.socket:
    """Fork another server, without workers; returns the socket that this process serves: in the
    fork, `other`."""
    if os.fork():
        os.close(other)
        return link
    os.setsid()
    link.close()
    for status in running.values():
        os.close(status)
    running.clear()
    return socket.socket(fileno=other)


def _asked(link: socket.socket) -> tuple[list[int], tuple[Any, ...] | None]:
    """The next request with its descriptors; None once the other side is gone."""
    try:
        head, descriptors, *_ = socket.recv_fds(link, _SIZE.size, 3)
        return descriptors, pickle.loads(_received(link, _SIZE.unpack(head)[0])) if head else None
    except OSError:  # it died, with an answer that it had not read or in the middle of a request
        return [], None


def _load(module: str) -> None:
    """Import a module of this package with what its workers need; any other is the worker's."""
    if module.startswith(f"{__package__.partition('.')[0]}."):
        loaded = importlib.import_module(module)
        if hasattr(loaded, "warm_up"):
            loaded.warm_up()
    gc.collect()
    gc.freeze()  # a collection would copy the pages that forks share


def _report(running: dict[int, int]) -> None:
    """Write the exit codes of workers that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        end = running.pop(pid, None)
        if end is None:  # another server
            continue
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it
            os.write(end, _SIZE.pack(os.waitstatus_to_exitcode(status)))
        os.close(end)


def _become_worker(
    link: socket.socket, descriptors: list[int], running: dict[int, int], *request: Any
) -> None:
    """In a fork: leave the server behind, and run the module."""
    (module, *words), mark, environment, paths, folder = request
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    os.setsid()
    status, output, *rest = descriptors
    for other in (status, *running.values()):
        os.close(other)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    _remark(mark)
    os.environ.clear()
    os.environ.update(environment | {MARK: mark})
    os.chdir(folder)
    sys.path += [path for path in paths if path and path not in sys.path]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # type: ignore[attr-defined]
    link.sendall(_SIZE.pack(os.getpid()))  # it has its session: it can be killed
    link.close()
    sys.argv = [module, *words, *map(str, rest)]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _remark(mark: str) -> None:
    """Write the mark over the server's, in the memory that the system shows as its environment and
    that forks inherit."""
    if Path("/proc/self/environ").exists():
        find = ctypes.CDLL(None).getenv
        find.restype = ctypes.c_void_p
        ctypes.memmove(find(MARK.encode()), mark.encode(), len(_UNMARKED))


if __name__ == "__main__":
    # By its own name, as modules that start servers for their workers know it.
    importlib.import_module("tramontane.placement.warm").main(int(sys.argv[1]))
