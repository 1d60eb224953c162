"""What a worker process and its children print: each line goes to the logger `tramontane.printed`,
which shows it on standard error; a run also keeps it in its folder."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("tramontane.printed")
logger.propagate = False  # not events of this program
if logging.lastResort:  # standard error as it is at that moment
    logger.addHandler(logging.lastResort)

CHUNK = 1 << 16  # bytes read at once; no less than a pipe holds
BURST, PER_SECOND = 256 << 10, 32 << 10  # bytes relayed of a process, at once and in the long run
AGAIN = BURST / 4  # bytes of room after which a process that exceeded it is relayed again
LINE_COST = 32  # bytes that a line counts beyond its own
CLOSE_SECONDS = 5.0  # limit to show what an ended process has printed
MAX_KEPT = 10_000  # lines that wait for an actor's next answer, or for a run's folder
MAX_LOG = 16 << 20  # bytes of a run's file


class Relay:
    """Relays what is written to the descriptor `writing`, line by line, under a label.

    A process that prints more than its share never waits: the excess is read and dropped, and its
    size is said.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._reading, self.writing = os.pipe()
        self._ended, self._end = os.pipe()
        self._line, self._dropped = b"", 0
        self._room, self._time = float(BURST), time.monotonic()
        name = f"what the {label} prints"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Relay what was written until now, and end, even if a child still holds the pipe."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, with all that held the pipe
            os.write(self._end, b".")
        os.close(self._end)
        self._thread.join(CLOSE_SECONDS)  # no longer: standard error may be blocked

    def _serve(self) -> None:
        """Waits for text; unblocked by `close`, and by the end of all that hold the pipe."""
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        poll.register(self._ended, select.POLLIN)
        closing = False
        while not closing:
            ready = [descriptor for descriptor, _ in poll.poll()]
            closing = self._ended in ready
            if self._reading in ready:
                chunk = os.read(self._reading, CHUNK)
                closing = closing or not chunk
                self._take(chunk)
        self._show(self._line)
        self._say_dropped()
        os.close(self._reading)
        os.close(self._ended)

    def _take(self, chunk: bytes) -> None:
        now = time.monotonic()
        self._room = min(BURST, self._room + (now - self._time) * PER_SECOND)
        self._time = now
        if self._dropped and self._room < AGAIN:
            self._dropped += len(chunk)
            return
        self._say_dropped()
        *lines, self._line = (self._line + chunk).split(b"\n")
        if len(self._line) > CHUNK:
            lines, self._line = [*lines, self._line], b""
        for number, line in enumerate(lines):
            self._room -= len(line) + LINE_COST
            if self._room < 0:
                self._dropped = len(b"\n".join([*lines[number:], self._line]))
                self._line = b""
                return
            self._show(line + b"\n")

    def _show(self, line: bytes) -> None:
        if line:  # of a progress bar, the state that it reached
            shown = line.rstrip(b"\r\n").rpartition(b"\r")[2].decode(errors="replace")
            logger.warning("%s: %s", self._label, printable(shown, keep="\t"))

    def _say_dropped(self) -> None:
        if self._dropped:
            limit = f"more than {PER_SECOND >> 10} KiB a second"
            logger.warning("%s: … %d bytes dropped (%s)", self._label, self._dropped, limit)
            self._dropped = 0


def printable(text: str, keep: str = "") -> str:
    """Replace control characters: the text of a model may contain escape sequences."""
    return "".join(c if c.isprintable() or c in keep else "·" for c in text)


def print_by_line(descriptor: int = 1) -> None:
    """In a worker process: send each line on its way once it is complete, so that a kill loses
    none, and let no text make `print` fail.

    Args:
        descriptor: of standard output.
    """
    sys.stdout = open(descriptor, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
    os.environ["PYTHONUNBUFFERED"] = "1"  # of children, which may be killed


def flush() -> None:
    """Send what was printed of a line on its way, as `print(text, end="")` leaves it."""
    if not sys.stdout.closed:
        sys.stdout.flush()


class PrintedLog(logging.Handler):
    """Within a `with` block, adds what is printed to a file, up to MAX_LOG bytes.

    Args:
        path: of the file.
        begun: True once the file may be made; until then the last lines are kept for it.
    """

    def __init__(self, path: Path, begun: Callable[[], bool]) -> None:
        super().__init__()
        form = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
        self.setFormatter(form)
        self._path, self._begun, self._full = path, begun, False
        self._lines: deque[str] = deque(maxlen=MAX_KEPT)

    def __enter__(self) -> PrintedLog:
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger.removeHandler(self)
        if self._lines and self._begun():
            self._write()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))
        if self._begun():
            try:
                self._write()
            except OSError:  # a full disk ends the run where it loses work, not here
                self.handleError(record)

    def _write(self) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            while self._lines and not self._full:
                file.write(self._lines.popleft() + "\n")
                self._full = file.tell() > MAX_LOG
                if self._full:
                    file.write(f"… no more is kept beyond {MAX_LOG >> 20} MiB\n")


class Told(NamedTuple):
    """A result of an actor, and what its worker's processes have printed meanwhile."""

    result: Any
    lines: list[str]


class Kept(logging.Handler):
    """In an actor: keeps what is printed until it is taken, in place of showing it."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=MAX_KEPT)
        logger.handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def told(self, result: Any) -> Any:
        """The result, as `Told` if there is something to tell."""
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        return Told(result, lines) if lines else result


def result_of(answer: Any) -> Any:
    """The result in an actor's answer; logs what was printed meanwhile."""
    if not isinstance(answer, Told):
        return answer
    for line in answer.lines:
        logger.warning("%s", line)
    return answer.result
