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
import hmac
import resource
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any

from fastapi import HTTPException

from tramontane import loopback
from tramontane.config import Config
from tramontane.data.prompts import PromptEncoder, Tool
from tramontane.environments import wire
from tramontane.environments.answers import ChatAnswer, Choice, shown_tokens
from tramontane.environments.calls import Parsed
from tramontane.environments.endpoint import (
    Choices,
    ContextExceeded,
    Endpoint,
    check_images,
    make_app,
)
from tramontane.environments.running import EnvironmentFailed, Runner
from tramontane.environments.session import Reply, unlike
from tramontane.models.images import Limits
from tramontane.types import Completion, Ending, Message, Problem
from tramontane.verifier import functions

MODEL = "tramontane"  # name of the model for harnesses
ENDED = "the conversation has ended"
MAX_WITHDRAWN = 16  # requests in a row that a harness may give up, before it is blamed


Body = wire.ChatRequest | wire.TokenRequest


class _Asked:
    """A request of a harness; several clients may wait for its answer."""

    def __init__(self, body: Body) -> None:
        self.body, self.clients = body, 0
        self.answer: asyncio.Future[tuple[Parsed, Completion]]
        self.answer = asyncio.get_running_loop().create_future()

    @property
    def withdrawn(self) -> bool:
        """True if nobody waits for the answer any more."""
        return not self.clients

    def refuse(self, error: HTTPException) -> None:
        """Answer with an error, unless it was answered."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # perhaps nobody waits


async def _only(turn: Completion) -> Choices:
    """A turn as the only choice."""
    yield [Choice(turn, turn.finish_reason)]


class Line(Endpoint):
    """The endpoint of one conversation, where requests wait for turns.

    Args:
        encoder: makes the prompts.
        limits: `data.images`, of what is decoded of an image.
    """

    def __init__(self, encoder: PromptEncoder, limits: Limits) -> None:
        self.encoder, self._limits = encoder, limits
        self._before: Completion | None = None  # the last turn; tokens so far may be of images
        self.key = ""
        self._unanswered: list[_Asked] = []
        self._named = len(encoder.tokenizer)
        self._nameless = set[int]()  # sampled tokens of a padded vocabulary, which have no text
        self.requests: asyncio.Queue[_Asked] = asyncio.Queue()
        # Holds an exception of this package.
        self.fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def model(self) -> dict[str, Any]:
        return {"id": MODEL}

    def failed(self, error: Exception) -> None:
        if not self.fault.done():
            self.fault.set_exception(error)

    async def sampled(self, body: wire.ChatRequest) -> tuple[ChatAnswer, Choices]:
        """The next turn, which is already whole."""
        if body.stop_token_ids:
            raise HTTPException(400, "inside a run, `stop_token_ids` is not supported in a chat")
        check_images(body.images, self._limits)
        said, turn = await self._turn(body, body)
        message = wire.readable(said, self.encoder.tags)
        show = partial(shown_tokens, self.encoder.tokenizer)
        answer = ChatAnswer(body, turn.prompt_ids, lambda _: message, show, self.encoder.tags, None)
        return answer, _only(turn)

    async def continued(self, body: wire.TokenRequest) -> Choices:
        """The next turn. It ends where the run's do, so clients may send the stops of their
        model."""
        seen = [*self._before.prompt_ids, *self._before.token_ids] if self._before else []
        extends = body.token_ids[: len(seen)] == seen
        self.check_token_ids(body.token_ids[len(seen) if extends else 0 :])
        if not all(0 <= token < self._named or token in self._nameless for token in body.token_ids):
            raise HTTPException(400, "tokens outside the model's vocabulary")
        return _only((await self._turn(body, body.sampling_params))[1])

    async def _turn(self, body: Body, sampling: wire.SamplingRequest) -> tuple[Parsed, Completion]:
        """The model's next turn: its message, and the turn by itself. A request that repeats one
        under way, as clients do that gave up waiting, gets the same."""
        if sampling.n > 1 or sampling.stop:
            raise HTTPException(400, "inside a run, `n` is 1 and `stop` is not supported")
        self._unanswered = [asked for asked in self._unanswered if not asked.answer.done()]
        asked = next((each for each in self._unanswered if each.body == body), None)
        if asked is None:
            asked = _Asked(body)
            self._unanswered.append(asked)
            self.requests.put_nowait(asked)
        asked.clients += 1
        try:
            message, turn = await asyncio.shield(asked.answer)
            self._before = turn
            self._nameless |= {each for each in turn.token_ids if each >= self._named}
            return message, turn
        finally:
            asked.clients -= 1

    def close(self, error: HTTPException) -> None:
        """Refuse all requests."""
        for asked in self._unanswered:
            asked.refuse(error)


class Switchboard:
    """The server of a process of environments, with an address for each conversation; it starts
    with the first."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self._base, self._secret, self._numbers = "", secrets.token_bytes(32), count()
        self._open = ExitStack()
        self._serving: asyncio.Task[None] | None = None

    def connect(self, line: Line) -> str:
        """A `base_url` whose requests reach this line."""
        if self._serving is None:
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two a conversation, and more
            address = self._open.enter_context(loopback.listening(0))
            self._base = address.base
            server = loopback.server(make_app(self._find), ends_by_signal=False)
            self._serving = asyncio.create_task(server.serve(sockets=[address.socket]))
        line.key = self._key(str(next(self._numbers)))
        self.lines[line.key] = line
        return f"{self._base}/{line.key}/v1"

    def disconnect(self, line: Line) -> None:
        """Forget a line; its requests are refused from now on."""
        self.lines.pop(line.key, None)
        line.close(HTTPException(410, ENDED))

    def _find(self, key: str) -> Line | None:
        if key in self.lines:
            return self.lines[key]
        if hmac.compare_digest(key.encode(), self._key(key.partition("-")[0]).encode()):
            raise HTTPException(410, ENDED)
        return None

    def _key(self, number: str) -> str:
        """The key of a conversation; it is known for one when the conversation is forgotten."""
        return f"{number}-{hmac.new(self._secret, number.encode(), 'sha256').hexdigest()}"


class HarnessSession:
    """The harness of one conversation; see `session.Session`.

    Attributes:
        asked: messages of its last request.
        posted: the tokens of its last request, if that was a token request.
        tools: those of its last request.
        restarted: True if that request does not continue the conversation so far.
        ending: the limit that the conversation has reached, of which the harness was told.
    """

    def __init__(
        self,
        harness: Callable[..., Any],
        runner: Runner,
        switchboard: Switchboard,
        line: Line,
    ) -> None:
        self._harness, self._switchboard, self._line = harness, switchboard, line
        self._runner = runner.of_conversation()
        self._open: _Asked | None = None
        self._read: tuple[Body, Parsed, Completion] | None = None  # last request with an answer
        self._running: asyncio.Future[Any] | None = None
        self._withdrawn = 0  # requests in a row
        self._problem: Problem | None = None
        self.asked: list[wire.ChatMessage] = []
        self.posted: list[int] = []
        self.tools: list[Tool] = []
        self.restarted = False
        self.ending: Ending | None = None

    def withdraws(self) -> bool:
        """True if the harness gave up the request that the model answered, which is dropped."""
        assert self._open is not None
        if not self._open.withdrawn:
            return False
        self._open.answer.cancel()
        self._withdrawn += 1
        return True

    @property
    def opened(self) -> list[Message]:
        """The chat of its last request, without images; that of tokens is one message. Empty for
        the problem's own, if the conversation begins with it."""
        if self.posted:
            text = str(self._line.encoder.tokenizer.decode(self.posted))
            return [Message(role="user", content=text)]
        asked = [message.shown() for message in self.asked]
        return unlike(asked, None if self.restarted else self._problem)

    async def start(
        self, problem: Problem, seed: int, config: Config | None = None
    ) -> list[Message]:
        """Start the harness, and wait for its first request.

        Raises:
            EnvironmentFailed: it raised an exception, or returned without a request.
        """
        self._problem = problem
        run = (await self._runner.run(self._harness)).run
        base_url = self._switchboard.connect(self._line)
        self._running = asyncio.ensure_future(self._runner.run(run, problem, base_url))
        return await self.again()

    async def again(self) -> list[Message]:
        """Wait for another first request."""
        return (await self.next()).messages

    async def step(self, message: Parsed, turn: Completion) -> Reply:
        """Answer the harness, and wait for its next request or its reward; see `next`."""
        assert self._open is not None
        if not self._open.answer.done():
            self._open.answer.set_result((message, turn))
        self._read, self._withdrawn = (self._open.body, message, turn), 0
        self.ending = "max_tokens" if turn.finish_reason == "length" else None
        return await self.next()

    async def refuse(self, ending: Ending, reason: str) -> Reply | None:
        """Tell the harness of a limit that its request exceeds, and wait for its next request,
        which may be shorter, or its reward."""
        assert self._open is not None
        self.ending = ending
        full = ending == "context_full"
        self._open.refuse(ContextExceeded(reason) if full else HTTPException(410, reason))
        return await self.next()

    async def next(self) -> Reply:
        """Wait for the harness's next request, or its reward: what follows the last answer that it
        read.

        Raises:
            EnvironmentFailed: it raised an exception without being told of a limit, or returned
                neither a number nor None, or without having read an answer; or it gives up all
                requests.
        """
        if self._withdrawn > MAX_WITHDRAWN:
            raise EnvironmentFailed(
                f"the harness gave up {MAX_WITHDRAWN} requests before they were answered; raise "
                f"the time limit of its client"
            )
        try:
            body = await self._next()
        except EnvironmentFailed:
            if self.ending is None:
                raise
            return Reply(done=True)  # it could not go on
        if body is None:
            return Reply([], self._reward(), done=True)
        self.ending = None
        if isinstance(body, wire.TokenRequest):
            self.asked, self.tools, self.posted = [], [], body.token_ids
        else:
            self.asked, self.tools, self.posted = body.messages, body.described, []
        put = None if self._read is None else self._put(*self._read)
        self.restarted = put is None and self._read is not None
        return Reply(put or [])

    def _reward(self) -> float | None:
        assert self._running is not None
        value = self._running.result()
        if self._read is None and self.ending is None:
            raise EnvironmentFailed("run returned without a request that the model answered")
        reward = functions.number(value, bools=True)
        if value is not None and reward is None:
            raise EnvironmentFailed(f"run returned {value!r:.80}, not a finite number or None")
        return reward

    def _put(self, before: Body, message: Parsed, turn: Completion) -> list[Message] | None:
        """What the last request put in behind the answer to the one before it; None if it does not
        continue that."""
        if self.posted:
            tokens = [*turn.prompt_ids, *turn.token_ids]
            count = len(tokens)
            if self.posted[:count] != tokens:
                return None
            text = str(self._line.encoder.tokenizer.decode(self.posted[count:]))
            return [Message(role="user", content=text)]
        if isinstance(before, wire.TokenRequest):
            return None
        count, said = len(before.messages), self.asked[len(before.messages) :]
        continues = (
            self.asked[:count] == before.messages
            and self.tools == before.described
            and said
            and _repeats(said[0], wire.readable(message, self._line.encoder.tags))
        )
        if not continues:
            return None
        return wire.answers(said[0], said[1:])

    async def _next(self) -> Body | None:
        """The harness's next request that is not given up; None if it has returned."""
        assert self._running is not None
        while True:
            waiting = asyncio.ensure_future(self._line.requests.get())
            try:
                coming = {waiting, self._running, self._line.fault}
                await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
                if self._line.fault.done():
                    self._line.fault.result()
                if not waiting.done():
                    self._running.result()  # raises what it raised
                    return None
                self._open = waiting.result()
            finally:
                waiting.cancel()
            if not self._open.withdrawn:
                return self._open.body
            self._open.answer.cancel()

    async def final_reward(self) -> float | None:
        """None: a conversation that ends before its harness returns has no reward."""
        return None

    async def close(self) -> None:
        """End the conversation: requests of the harness are refused from now on."""
        self._switchboard.disconnect(self._line)
        if self._running is not None:
            self._running.cancel()
        self._runner.end()


def _repeats(said: wire.ChatMessage, message: Parsed) -> bool:
    """True if a message in a chat is the one that was answered."""
    calls = [(call.function.name, call.function.arguments) for call in said.tool_calls or ()]
    return (
        said.role == "assistant"
        and said.content.strip() == message.content.strip()
        and calls == [(call.name, call.arguments) for call in message.calls]
    )
