"""A Python session: an execution that runs one piece of code after another and keeps variables.

Between two pieces all its processes are stopped, so the time limits apply to each piece by itself,
and a session that waits for the next one uses no processor time.
"""

from __future__ import annotations

import _ast
import _socket
import io
import os
import select
import sys
from typing import Any

from . import execution, processes, records

_UNLIMITED = 1e6  # seconds; the system's limit of processor time covers a process's whole life
_GO = b"."  # sent to a session: run the code; sent back: it has ended


class Session(execution.Execution):
    """The runner's side of a session."""

    def serve(self, job: int, results: int) -> None:
        """Run the blocks of `job`, each with a record in `results`, until there are no more, or
        the session ends by itself or breaks a limit."""
        each, self.limits = self.limits, {**self.limits, "seconds": _UNLIMITED}
        link, its_end = (s.detach() for s in _socket.socketpair())
        self.channel = its_end
        pid = self.begin(b"", converse)
        os.close(its_end)
        self.channel, self.limits = None, each
        if pid < 0:
            records.send_record(results, (records.HOST, b"", b""), self.seconds)
            return
        processes.pause_rest(self.settings)
        while code := records.read_block(job):
            status = self._run(pid, link, code)
            if status is not None:
                records.send_record(results, self.end(pid, status), self.seconds)
                return
            output = records.read_file(self.streams[1], int(self.limits["output_bytes"]))
            records.send_record(results, (0, output, b""), self.seconds)
        self.end(pid, 0)

    def _run(self, pid: int, link: int, code: bytes) -> int | None:
        """Run a piece of code; returns why the session ended, None if it has not."""
        for stream in self.streams:  # the session shares the positions in them
            os.ftruncate(stream, 0)
            os.lseek(stream, 0, os.SEEK_SET)
        os.pwrite(self.streams[0], code, 0)
        self.times = processes.Times()
        self.times.look(self._processes())
        before = self.times.processor
        limits = {k: self.limits[k] + before for k in ("seconds", "asleep_seconds")}
        limits["clock_seconds"] = self.limits["clock_seconds"]
        processes.resume_rest(self.settings)
        reason = 0
        try:
            os.write(link, _GO)
        except OSError:  # the session closed its end
            reason = records.ENDED
        while not reason:
            if select.select([link], [], [], processes.POLL_SECONDS)[0]:
                if os.read(link, 1):
                    processes.pause_rest(self.settings)
                    pids = self._processes()
                    self.times.look(pids)
                    reason = self._excess(pids)  # the code may end before the checks below
                    if reason:
                        break
                    self.times.processor -= before
                    return None
                if not processes.has_ended(pid, processes.POLL_SECONDS):
                    reason = records.ENDED
            if processes.has_ended(pid, 0):
                break
            pids = self._processes()
            self.times.look(pids)
            reason = reason or processes.excess_time(self.times, limits) or self._excess(pids)
        if reason:
            processes.kill_quietly(os.kill, pid)
        _, status, usage = os.wait4(pid, 0)
        self.times.finish(usage)
        self.times.processor -= before
        return reason or status or records.ENDED


# ------------------------------------------------------------------------- the program's side


def converse(_: list[str]) -> int:
    """Run what the runner asks for, until it closes the channel; the output of each piece, its
    errors included, is the content of standard output."""
    os.dup2(1, 2)
    sys.stdin = io.StringIO()
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    own = os.getpid()
    while os.read(records.CHANNEL, 1):
        # A new one each time: the last code may have closed it.
        file = io.BufferedWriter(io.FileIO(1, "w", closefd=False))
        output = sys.stdout = sys.stderr = io.TextIOWrapper(file, "utf-8", "replace")
        run_piece(records.read_file(0, sys.maxsize).decode(errors="replace"), names)
        if not output.closed:
            output.flush()
        if os.getpid() != own:  # a fork that the code made
            os._exit(0)
        os.write(records.CHANNEL, _GO)
    return 0


def run_piece(source: str, names: dict[str, Any]) -> None:
    """Run a piece of code; prints the value of its last expression, or the traceback."""
    place = "<session>"
    try:
        tree: Any = compile(source, place, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
        last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], _ast.Expr) else []
        exec(compile(tree, place, "exec", dont_inherit=True), names)
        if last:  # printed like at the prompt of an interpreter
            exec(compile(_ast.Interactive(last), place, "single", dont_inherit=True), names)
    except BaseException:  # SystemExit too: the session continues
        execution.show_error()
