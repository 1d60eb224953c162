"""The process that forks sandboxes: a bare interpreter that has imported, once, what they need.

`sandbox.server` starts one for a rung. It never reads a job: a fork does, in namespaces of its own
where the rung has them. So every sandbox begins as a copy of the same process, and nothing passes
from one to the next.
"""

from __future__ import annotations

import _socket

# Loaded for the forks: the halves of function tests, and what most programs import.
import bisect  # noqa: F401
import gc
import marshal
import math  # noqa: F401
import os
import signal
import struct
import sys

from . import execution, processes, program_side, records, runner, session, tests_side  # noqa: F401
from .namespaces import Namespaces

LINK = 3  # becomes the socket to the judge
MESSAGE = struct.Struct("!q")  # FORK, or a sandbox to end; its process id, or a negative errno
FORK = 0
MOST_DESCRIPTORS = 4  # job, results, errors, and the channel of a function test


def main() -> None:
    """Fork and end sandboxes as asked, until the judge closes the socket, or dies.

    Standard input has the number of the socket, and the plan of a root directory (see
    `Namespaces.build`), or None for rungs that have none.
    """
    own, plan = marshal.loads(records.read_block(0))
    os.dup2(own, LINK)  # descriptors that arrive have higher numbers
    if own != LINK:
        os.close(own)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    spaces = None
    if plan is not None:
        spaces = Namespaces(LINK)
        spaces.build(plan)
    elif sys.platform == "linux":
        processes.prctl(processes.DUMPABLE, 0)  # programs may run as the same user
    gc.collect()
    gc.freeze()  # a collection would copy the pages that forks share
    link = _socket.socket(fileno=LINK)
    answer = 0
    while True:
        try:
            link.sendall(MESSAGE.pack(answer))
            asked, descriptors = _received(link)
        except OSError:
            return
        if not asked:
            return
        target = MESSAGE.unpack(asked)[0]
        answer = _end(target) if target else _fork(descriptors, spaces)


def _received(link: _socket.socket) -> tuple[bytes, list[int]]:
    space = _socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)
    asked, ancillary, *_ = link.recvmsg(MESSAGE.size, space)
    return asked, [fd for *_, data in ancillary for (fd,) in struct.iter_unpack("i", data)]


def _fork(descriptors: list[int], spaces: Namespaces | None) -> int:
    try:
        pid = spaces.fork() if spaces else execution.fork()
    except OSError as error:
        pid = -(error.errno or 1)
    if pid == 0:
        _become_sandbox(descriptors, spaces)
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _end(pid: int) -> int:
    processes.kill_quietly(os.kill, pid)
    return os.waitpid(pid, 0)[0]  # until its namespaces' other processes are gone too


def _become_sandbox(descriptors: list[int], spaces: Namespaces | None) -> None:
    """In a fork: leave the server behind, and run the job."""
    code = 1
    try:  # whatever happens, this process must not continue as a second server
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(len(descriptors), max(descriptors) + 1)
        if sys.platform == "linux":
            processes.prctl(processes.PDEATHSIG, signal.SIGKILL)
            processes.prctl(processes.NAME, b"sandbox")
        place = marshal.loads(records.read_block(0))
        if command := place["command"]:
            os.execvp(command[0], command)
        if spaces:
            spaces.isolate(place)
        else:
            os.chdir(place["box"])
        runner.main()
        code = 0
    except BaseException:
        execution.show_error()
    finally:
        os._exit(code)
