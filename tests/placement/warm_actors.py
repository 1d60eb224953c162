"""Processes that have imported what Ray's actors need, and fork them.

A user's actor is a fresh Python that imports Ray, torch and transformers: four seconds of processor
time. In the cluster of the tests the raylet starts `actor_launcher`, which passes its arguments,
environment, folder and streams to a process that has imported all but Ray. Ray reads its settings,
which job and which raylet it serves when it is imported, so this process has a fork for each pair,
which imports Ray and forks the actors. An actor dies with its launcher and with its raylet, and its
launcher ends as the actor does.
"""

import atexit
import contextlib
import gc
import marshal
import multiprocessing
import os
import runpy
import select
import selectors
import signal
import socket
import sys
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests import forked
from tests.placement.actor_launcher import SETUP, SIZE, SOCKET, STATUS
from tramontane.placement import warm
from tramontane.temporary import die_with_parent

LAUNCHER = str(Path(__file__).with_name("actor_launcher.py"))
JOB, RAYLET = "RAY_JOB_ID", "RAY_RAYLET_PID"  # variables of a raylet's processes


def start(folder: Path) -> BaseProcess:
    """Start the process, and say in the environment where it listens."""
    os.environ[SOCKET] = str(folder / "actors")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[SOCKET])
        listener.listen()
        return forked.start(serve, listener)


class Request(NamedTuple):
    """What a launcher asks for, as bytes, its standard streams and the link to it, if received."""

    content: bytes
    descriptors: list[int]

    @classmethod
    def received(cls, source: socket.socket) -> "Request":
        head, descriptors, *_ = socket.recv_fds(source, SIZE.size, 4)
        size = SIZE.unpack(head)[0] if head else 0
        return cls(source.recv(size, socket.MSG_WAITALL), descriptors)

    def send(self, server: socket.socket, link: int) -> None:
        socket.send_fds(server, [SIZE.pack(len(self.content))], [*self.descriptors, link])
        server.sendall(self.content)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def serve(listener: socket.socket) -> None:
    """Pass requests on, until the process that started this one ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    starter = multiprocessing.parent_process()
    assert starter is not None
    servers: dict[tuple[str, str], socket.socket] = {}
    while starter.sentinel not in select.select([listener, starter.sentinel], [], [])[0]:
        link, _ = listener.accept()
        request = Request.received(link)
        with contextlib.suppress(EOFError, OSError):  # it has ended, or its raylet
            _, variables, _ = marshal.loads(request.content)
            place = variables[JOB], variables[RAYLET]
            if place not in servers:
                servers[place], theirs = socket.socketpair()
                warm.divide()
                if os.fork() == 0:
                    for other in (listener, link, *servers.values()):
                        other.close()
                    request.close()
                    Server(theirs, variables).run()
                    return
                theirs.close()
            request.send(servers[place], link.fileno())
        request.close()
        link.close()


class Server:
    """Forks the actors of a job on a machine, which Ray finds in the environment."""

    def __init__(self, requests: socket.socket, variables: dict[str, str]) -> None:
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(variables)
        import tramontane.placement.actor  # noqa: F401  # and with it Ray

        gc.collect()
        gc.freeze()
        self._requests, self._running = requests, True
        self._raylet = os.pidfd_open(int(variables[RAYLET]))
        self._events = selectors.DefaultSelector()
        self._events.register(requests, selectors.EVENT_READ, self._fork)
        self._events.register(self._raylet, selectors.EVENT_READ, self._stop)

    def run(self) -> None:
        """Fork actors until the raylet ends; each then ends as its parent does."""
        while self._running:
            for key, _ in self._events.select():
                if key.fd in self._events.get_map():  # not of an actor that has just ended
                    key.data()

    def _stop(self) -> None:
        self._running = False

    def _fork(self) -> None:
        request = Request.received(self._requests)
        if not request.content:
            return self._stop()
        *streams, link = request.descriptors
        warm.divide()  # an actor may start workers, as any process
        actor = os.fork()
        if actor == 0:
            self._leave(link)
            return become(streams, *marshal.loads(request.content))
        Request(b"", streams).close()
        ended = os.pidfd_open(actor)
        self._events.register(
            ended, selectors.EVENT_READ, partial(self._report, actor, ended, link)
        )
        self._events.register(link, selectors.EVENT_READ, partial(self._kill, actor, link))

    def _kill(self, actor: int, link: int) -> None:
        """The launcher has ended."""
        self._events.unregister(link)
        os.kill(actor, signal.SIGKILL)

    def _report(self, actor: int, ended: int, link: int) -> None:
        """The actor has ended."""
        _, status = os.waitpid(actor, 0)
        with contextlib.suppress(BrokenPipeError):  # the launcher has, too
            os.write(link, STATUS.pack(os.waitstatus_to_exitcode(status)))
        for descriptor in (ended, link):
            with contextlib.suppress(KeyError):
                self._events.unregister(descriptor)
            os.close(descriptor)

    def _leave(self, link: int) -> None:
        """In an actor: close what is the server's."""
        die_with_parent()
        for descriptor in {link, *(key.fd for key in self._events.get_map().values())}:
            os.close(descriptor)
        self._events.close()
        self._running = False


def become(
    streams: list[int], arguments: list[str], variables: dict[str, str], folder: str
) -> None:
    """In a fork: run Ray's `default_worker.py` as the launcher was asked to, in a process group of
    its own: Ray ends an actor with its group."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    np.random.seed()
    sys.argv = [word for word in arguments if not word.startswith(SETUP)]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which a forked process skips
