"""One process of environments as a worker of a placement: killed from outside when it hangs,
replaced when it dies.

The process answers a late step itself, if it can. It is killed when it does not, e.g. because a
step holds the interpreter lock. Its conversations are then lost, and their calls are answered with
`Lost`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from tramontane.config import Config
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.protocol import Lost
from tramontane.environments.worker import Key
from tramontane.placement.process import WorkerProcess
from tramontane.temporary import temporary_folder

LATE_SECONDS = 10.0  # silence beyond a call's own limit after which the process counts as hung
READ_AT_ONCE = 256  # most answers that one exchange returns


class Call(NamedTuple):
    """A call of `EnvironmentWorker`: its number, a method, the conversation, further arguments, and
    the limit of the steps in it, in seconds."""

    number: int
    method: str
    key: Key
    arguments: tuple[Any, ...]
    limit_s: float


class EnvironmentHost:
    """Keeps a process that runs conversations of a run with the given config.

    The process gets the `encoder` from here: loading its tokenizer there would import torch, which
    takes seconds and which no environment needs.
    """

    def __init__(self, config: Config, encoder: PromptEncoder) -> None:
        self._config, self._encoder = config, encoder
        self._process = WorkerProcess(
            "environment worker", "tramontane.environments.process", "environment"
        )
        self._unanswered: dict[int, tuple[Call, float]] = {}  # by number, with the time it was sent
        self._folder = temporary_folder("environments")
        self._woken, self._waker = Pipe(duplex=False)
        self.restarts = 0

    def exchange(self, calls: Sequence[Call], seconds: float) -> tuple[list[tuple[int, Any]], int]:
        """Send calls, and wait at most `seconds` for an answer or a `wake`; returns (number,
        result) of each call answered, and how often the process was replaced.

        A result is that of the `EnvironmentWorker`, or `Lost`, or an exception: see `process`.

        Raises:
            InputError: the process cannot use the config's environments or tools.
            RuntimeError: no process can be started.
        """
        answers: list[tuple[int, Any]]
        answers = self._lose(self._process.stop()) if self._process.died else []
        connection = self._process.ready(self._settings)
        for call in calls:  # all before the first is sent: a process may end between two
            if call.method != "close":
                self._unanswered[call.number] = call, time.monotonic()
        try:
            for call in calls:
                connection.send((call.number, call.method, (call.key, *call.arguments)))
            wait([connection, self._woken], 0 if answers else seconds)
            while self._woken.poll():
                self._woken.recv_bytes()
            while len(answers) < READ_AT_ONCE and connection.poll():
                number, result = connection.recv()
                if self._unanswered.pop(number, None):  # nothing waits for a `close`
                    answers.append((number, result))
        except (EOFError, OSError):  # the process is gone
            answers += self._lose(self._process.stop())
        if late := self._late():
            self._process.stop()
            answers += self._lose("killed, since a step was late", late)
        return answers, self.restarts

    def wake(self) -> None:
        """End the wait of `exchange`, from another thread: there are new calls."""
        self._waker.send_bytes(b"")

    def close(self) -> None:
        """Kill the process."""
        self._process.stop()
        self._folder.cleanup()
        self._woken.close()
        self._waker.close()

    def _settings(self) -> tuple[Config, PromptEncoder, str]:
        return self._config, self._encoder, self._folder.name

    def _late(self) -> set[int]:
        now = time.monotonic()
        return {
            number
            for number, (call, sent) in self._unanswered.items()
            if now > sent + call.limit_s + LATE_SECONDS
        }

    def _lose(self, how: str, late: Sequence[int] | set[int] = ()) -> list[tuple[int, Lost]]:
        """The answers to all open calls after the end of the process."""
        lost = [(number, Lost(how, number in late)) for number in self._unanswered]
        self._unanswered.clear()
        self.restarts += 1
        return lost
