"""This process's servers, which fork sandboxes (`inside.server`): one for each rung and hash seed,
started with its first sandbox. A server ends with this process, and its sandboxes with it."""

from __future__ import annotations

import atexit
import marshal
import os
import resource
import signal
import socket
import subprocess
import tempfile
import threading
import time

from tramontane.verifier.code.inside.server import FORK, MESSAGE
from tramontane.verifier.code.sandbox import rungs
from tramontane.verifier.code.sandbox.job import Rung

ENDED = "the process that forks sandboxes has ended"
ENDING_SECONDS = 0.2  # within which a killed server is seen to have ended
REPLY_SECONDS = 60.0  # limit for a server to start, to fork a sandbox, or to end one


class Server:
    """A process that forks the sandboxes of a rung, with one hash seed. Raises `OSError` if it
    cannot start; the message is what it printed."""

    def __init__(self, rung: Rung, hash_seed: int) -> None:
        self._lock = threading.Lock()
        self._link, theirs = socket.socketpair()
        self._link.settimeout(REPLY_SECONDS)
        plan = rungs.root_directory() if rung == "namespaces" else None
        program = rungs.interpreter() if rung == "landlock" else rungs.INTERPRETER
        with theirs, tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as errors:
            content = marshal.dumps((theirs.fileno(), plan))
            stdin.write(len(content).to_bytes(8, "big") + content)
            stdin.seek(0)
            self._process = subprocess.Popen(
                rungs.python_command("server", program, str(rungs.INSIDE.parent)),
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd="/",
                env=rungs.environment(hash_seed),
                start_new_session=True,
                preexec_fn=_prepare,
                pass_fds=[theirs.fileno()],
            )
            try:
                self._answer()
            except ConnectionError as error:
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines()
                raise OSError(lines[-1] if lines else str(error)) from error

    def fork(self, descriptors: list[int]) -> int:
        """Fork a sandbox that has these descriptors, from 0 on; returns its process id, as the
        server sees it. Raises `OSError` if the host has no process or memory left."""
        return self._ask(FORK, descriptors)

    def end(self, pid: int) -> None:
        """Kill a sandbox, and wait until it is gone."""
        self._ask(pid, [])

    def is_alive(self) -> bool:
        """False if the server has ended; waits a moment, since its sandboxes end with it, and may
        be seen to end before it."""
        deadline = time.monotonic() + ENDING_SECONDS
        while self._link.fileno() >= 0 and self._process.poll() is None:
            if time.monotonic() > deadline:
                return True
            time.sleep(0.01)
        return False

    def close(self) -> None:
        """End the server, and all of its sandboxes."""
        self._link.close()
        try:
            self._process.wait(REPLY_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """In a fork of this process: leave the server to the process that started it."""
        self._link.close()
        self._process.returncode = 0

    def _ask(self, question: int, descriptors: list[int]) -> int:
        with self._lock:
            if self._link.fileno() < 0:
                raise ConnectionError(ENDED)
            socket.send_fds(self._link, [MESSAGE.pack(question)], descriptors)
            return self._answer()

    def _answer(self) -> int:
        """The server's answer. Raises `ConnectionError` if it has ended, or is ended here because
        it does not answer; `OSError` if it could not do what was asked."""
        try:
            data = self._link.recv(MESSAGE.size, socket.MSG_WAITALL)
        except TimeoutError:
            data = b""
        if len(data) < MESSAGE.size:
            self.close()
            raise ConnectionError(ENDED)
        answer = int(MESSAGE.unpack(data)[0])
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        return answer


def _prepare() -> None:
    """Give the new process an ordinary shell's settings, whatever the judge's are."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.umask(0o022)
    # The memory limit also limits the stack. A finite stack limit would apply to every thread.
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (most, most))


_servers: dict[tuple[Rung, int], Server] = {}
_lock = threading.Lock()


def fork(rung: Rung, hash_seed: int, descriptors: list[int]) -> tuple[Server, int]:
    """Fork a sandbox (see `Server.fork`); a server that has ended is replaced."""
    with _lock:
        for _ in range(2):
            if (server := _servers.get((rung, hash_seed))) is None:
                server = _servers[rung, hash_seed] = Server(rung, hash_seed)
            try:
                return server, server.fork(descriptors)
            except ConnectionError:
                _servers.pop((rung, hash_seed)).close()
    raise ConnectionError(ENDED)


@atexit.register
def close() -> None:
    """End this process's servers."""
    with _lock:
        while _servers:
            _servers.popitem()[1].close()


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    while _servers:
        _servers.popitem()[1].forget()


os.register_at_fork(after_in_child=_forget)
