"""Harnesses: external programs that talk to the model over HTTP, in conversations that are trained
on.

A harness is a class with `run(problem, base_url)`, sync or async, which talks to the model at
`base_url` as to OpenAI's API and returns a reward or None. It may start a program of any kind that
does the talking. Each conversation has an address of its own, served by the process of its
environment. A request is answered by the next turn of its conversation, in whichever generator,
with the run's own sampling. A request that extends the chat so far, or its tokens, continues the
conversation token for token; any other begins a new sequence of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tramontane import loopback
from tramontane.config import Config
from tramontane.data.prompts import PromptEncoder, Tool
from tramontane.environments import wire
from tramontane.environments.answers import ChatAnswer, Choice, shown_tokens, token_answer
from tramontane.environments.calls import Message as Parsed
from tramontane.environments.endpoint import make_app
from tramontane.environments.loading import Reply
from tramontane.environments.running import EnvironmentFailed, Runner
from tramontane.types import Completion, Message, Problem
from tramontane.verifier import functions

MODEL = "tramontane"  # name of the model for harnesses


@dataclass
class _Asked:
    """A request of a harness, and its answer once there is one."""

    body: wire.ChatRequest | wire.TokenRequest
    answer: asyncio.Future[tuple[Parsed, Completion]]


class Line:
    """The endpoint of one conversation, where requests wait for turns."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._tags, self._tokenizer = encoder.tags, encoder.tokenizer
        self.requests: asyncio.Queue[_Asked] = asyncio.Queue()

    def models(self) -> dict[str, Any]:
        """`/v1/models`."""
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0}]}

    async def chat(self, body: wire.ChatRequest, gone: Callable[[], Awaitable[bool]]) -> Response:
        """`/v1/chat/completions`."""
        if body.stop_token_ids:
            raise HTTPException(400, "inside a run, `stop_token_ids` is not supported in a chat")
        sampled, turn = await self._turn(body, body)
        message = wire.readable(sampled, self._tags)
        show = partial(shown_tokens, self._tokenizer)
        answer = ChatAnswer(body, turn.prompt_ids, lambda _: message, show, self._tags, None)
        choice = Choice(turn, turn.finish_reason)
        if not body.stream:
            return JSONResponse(answer.whole([choice]))

        async def choices() -> AsyncGenerator[list[Choice], None]:
            yield [choice]

        return StreamingResponse(answer.stream(choices()), media_type="text/event-stream")

    async def generate(
        self, body: wire.TokenRequest, gone: Callable[[], Awaitable[bool]]
    ) -> Response:
        """`/inference/v1/generate`. The turn ends where the run's do, so clients may send the stops
        of their model."""
        if not all(0 <= token < len(self._tokenizer) for token in body.token_ids):
            raise HTTPException(400, "tokens outside the model's vocabulary")
        _, turn = await self._turn(body, body.sampling_params)
        return JSONResponse(token_answer(body, [Choice(turn, turn.finish_reason)]))

    async def _turn(
        self, body: wire.ChatRequest | wire.TokenRequest, sampling: wire.SamplingRequest
    ) -> tuple[Parsed, Completion]:
        """The model's next turn: its message, and the turn by itself."""
        if sampling.n > 1 or sampling.stop:
            raise HTTPException(400, "inside a run, `n` is 1 and `stop` is not supported")
        asked = _Asked(body, asyncio.get_running_loop().create_future())
        self.requests.put_nowait(asked)
        try:
            return await asked.answer
        except asyncio.CancelledError:
            raise HTTPException(410, "the conversation has ended") from None


class Switchboard:
    """The server of a process of environments, with an address for each conversation; it starts
    with the first."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self._base = ""
        self._open = ExitStack()
        self._serving: asyncio.Task[None] | None = None

    def connect(self, line: Line) -> str:
        """A `base_url` whose requests reach this line."""
        if self._serving is None:
            address = self._open.enter_context(loopback.listening(0))
            self._base = address.base
            server = loopback.server(
                make_app(lambda key: self.lines.get(key)), ends_by_signal=False
            )
            self._serving = asyncio.create_task(server.serve(sockets=[address.socket]))
        key = loopback.new_key()
        self.lines[key] = line
        return f"{self._base}/{key}/v1"

    def disconnect(self, line: Line) -> None:
        """Forget a line."""
        for key in [key for key, other in self.lines.items() if other is line]:
            del self.lines[key]


class HarnessHost:
    """The harness of one conversation; see `loading.Host`.

    Attributes:
        asked: messages of its last request.
        posted: the tokens of its last request, if that was a token request.
        tools: those of its last request.
        restarted: True if that request does not continue the conversation so far.
    """

    def __init__(
        self,
        harness: Callable[..., Any],
        runner: Runner,
        switchboard: Switchboard,
        encoder: PromptEncoder,
    ) -> None:
        self._harness, self._switchboard = harness, switchboard
        self._runner = runner.of_conversation()
        self._encoder, self._line = encoder, Line(encoder)
        self._open: _Asked | None = None
        self._running: asyncio.Future[Any] | None = None
        self.asked: list[wire.ChatMessage] = []
        self.posted: list[int] = []
        self.tools: list[Tool] = []
        self.restarted = False

    async def start(
        self, problem: Problem, seed: int, config: Config | None = None
    ) -> list[Message]:
        """Start the harness, and wait for its first request.

        Raises:
            EnvironmentFailed: it raised an exception, or returned without a request.
        """
        run = (await self._runner.run(self._harness)).run
        base_url = self._switchboard.connect(self._line)
        self._running = asyncio.ensure_future(self._runner.run(run, problem, base_url))
        if (body := await self._next()) is None:
            raise EnvironmentFailed(f"{run.__qualname__} returned without a request to the model")
        self._take(body)
        return []

    async def step(self, message: Parsed, turn: Completion) -> Reply:
        """Answer the harness, and wait for its next request or its reward.

        Raises:
            EnvironmentFailed: it raised an exception, or returned neither a number nor None.
        """
        assert self._open is not None
        if not self._open.answer.done():
            self._open.answer.set_result((message, turn))
        if (body := await self._next()) is None:
            assert self._running is not None
            value = self._running.result()
            reward = functions.number(value, bools=True)
            if value is not None and reward is None:
                raise EnvironmentFailed(f"run returned {value!r:.80}, not a finite number or None")
            return Reply([], reward, done=True)
        known, tools = self.asked, self.tools
        self._take(body)
        if self.posted:
            tokens = [*turn.prompt_ids, *turn.token_ids]
            count = len(tokens)
            self.restarted = self.posted[:count] != tokens
            if self.restarted:
                return Reply([])
            text = str(self._encoder.tokenizer.decode(self.posted[count:]))
            return Reply([Message(role="user", content=text)])
        count, said = len(known), self.asked[len(known) : len(known) + 1]
        self.restarted = not (
            known
            and self.asked[:count] == known
            and tools == self.tools
            and said
            and _repeats(said[0], wire.readable(message, self._encoder.tags))
        )
        if self.restarted:
            return Reply([])
        put = wire.answers(said[0], self.asked[count + 1 :])
        return Reply([Message(role=m["role"], content=m["content"]) for m in put])

    def _take(self, body: wire.ChatRequest | wire.TokenRequest) -> None:
        if isinstance(body, wire.TokenRequest):
            self.asked, self.tools, self.posted = [], [], body.token_ids
        else:
            self.asked, self.tools, self.posted = body.messages, body.described, []

    async def _next(self) -> wire.ChatRequest | wire.TokenRequest | None:
        """The harness's next request; None if it has returned."""
        assert self._running is not None
        waiting = asyncio.ensure_future(self._line.requests.get())
        try:
            await asyncio.wait({waiting, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                self._running.result()  # raises what it raised
                return None
            self._open = waiting.result()
            return self._open.body
        finally:
            waiting.cancel()

    async def final_reward(self) -> float | None:
        """None: a conversation that ends before its harness returns has no reward."""
        return None

    async def close(self) -> None:
        """End the conversation: requests of the harness are refused from now on."""
        self._switchboard.disconnect(self._line)
        if self._running is not None:
            self._running.cancel()
        if self._open is not None:
            self._open.answer.cancel()
        while not self._line.requests.empty():
            self._line.requests.get_nowait().answer.cancel()
        self._runner.end()


def _repeats(said: wire.ChatMessage, message: Parsed) -> bool:
    """True if a message in a chat is the one that was answered."""
    calls = [(call.function.name, call.function.arguments) for call in said.tool_calls or ()]
    return (
        said.role == "assistant"
        and said.content.strip() == message.content.strip()
        and calls == [(call.name, call.arguments) for call in message.calls]
    )
