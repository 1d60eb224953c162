"""A participant behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from tramontane.curation.backend import Answer, Prompt
from tramontane.curation.backend.endpoint import Endpoint
from tramontane.oversight.config import ModelConfig
from tramontane.oversight.transcript import Call, Reply, Transcript
from tramontane.oversight.wording import Wording


class RemoteAgent:
    """Sends each call as a separate request, `endpoint.concurrency` at once.

    Args:
        config: its `endpoint` is set.
        wording: templates of the prompts.

    Raises:
        InputError: the variable for the key is not set.
    """

    computes = False

    def __init__(self, config: ModelConfig, wording: Wording) -> None:
        assert config.endpoint is not None
        self.wording, self.concurrency = wording, config.endpoint.concurrency
        self._endpoint = Endpoint(config)
        self._tasks: queue.SimpleQueue[tuple[int, Prompt]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Answer | Exception]] = queue.SimpleQueue()
        self._stop = threading.Event()  # set by an error that concerns all tasks
        self._fatal: Exception | None = None  # kept, since a judged reward continues to ask
        self._lock = threading.Lock()
        self._threads = 0
        self._waiting = 0

    @property
    def waiting(self) -> int:
        return self._waiting

    def submit(self, ticket: int, key: str, call: Call, examples: Sequence[Transcript]) -> None:
        """See `Agent`.

        Raises:
            InputError: the server refused all requests before.
        """
        if self._fatal is not None:
            raise self._fatal
        prompt = Prompt(key, self.wording.prompt(call, examples))
        self._waiting += 1
        with self._lock:  # a thread that finds no task ends under this lock
            self._tasks.put((ticket, prompt))
            if self._threads == self.concurrency:
                return
            self._threads += 1
        # A daemon, so that an interrupted command does not wait for pending requests.
        threading.Thread(target=self._work, name="oversight-endpoint", daemon=True).start()

    def poll(self, seconds: float) -> list[tuple[int, Reply]]:
        """See `Agent`. `endpoint.timeout_s` and `retries` bound the wait for a reply."""
        replies: list[tuple[int, Reply]] = []
        wait = seconds
        while True:
            try:
                ticket, answer = self._done.get(timeout=wait) if wait else self._done.get_nowait()
            except queue.Empty:
                return replies
            if isinstance(answer, Exception):
                self._fatal = answer
                raise answer
            self._waiting -= 1
            replies.append((ticket, Reply(answer.text, answer.tokens, fault=answer.fault)))
            wait = 0.0

    def _work(self) -> None:
        """Ends when there are no tasks, or after an error that concerns all of them."""
        while not self._stop.is_set():
            with self._lock:
                try:
                    ticket, prompt = self._tasks.get_nowait()
                except queue.Empty:
                    self._threads -= 1
                    return
            try:
                self._done.put((ticket, self._endpoint.ask(prompt, 0, self._stop)))
            except Exception as error:  # raised again in the thread that polls
                self._stop.set()
                self._done.put((ticket, error))
