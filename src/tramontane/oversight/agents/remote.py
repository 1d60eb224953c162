"""A participant behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from tramontane.asking import Answer, Prompt
from tramontane.asking.endpoint import Endpoint
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
        self.wording = wording
        self._endpoint = Endpoint(config)
        self._calls: dict[Future[Answer], int] = {}

    @property
    def waiting(self) -> int:
        return len(self._calls)

    def submit(self, ticket: int, key: str, call: Call, examples: Sequence[Transcript]) -> None:
        """See `Agent`.

        Raises:
            InputError: the server refused all requests before.
        """
        prompt = Prompt(key, self.wording.prompt(call, examples))
        self._calls[self._endpoint.ask(prompt)] = ticket

    def poll(self, seconds: float) -> list[tuple[int, Reply]]:
        """See `Agent`. `endpoint.timeout_s` and `retries` bound the wait for a reply."""
        replies = []
        for future in wait(self._calls, seconds, FIRST_COMPLETED).done:
            answer = future.result()
            reply = Reply(answer.text, answer.tokens, fault=answer.fault)
            replies.append((self._calls.pop(future), reply))
        return replies
