"""An endpoint: a model that external harnesses talk to over HTTP.

`/v1/chat/completions` and `/v1/models` are OpenAI's, `/inference/v1/generate` is vLLM's, token ids
in and out. Every path begins with the key, `/KEY/v1/…`; a client that sends it as its API key may
omit it there. Prompts are written and answers read as in training (`chat`, `calls`), and each
answer has its tokens, their log-probs and versions, so a trainer need not tokenize anything again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from secrets import compare_digest
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from tramontane import loopback
from tramontane.config import Config
from tramontane.data.prompts import PromptEncoder
from tramontane.environments import wire
from tramontane.environments.answers import ChatAnswer, Choice, shown_tokens, token_answer
from tramontane.environments.calls import Parsed, Parser
from tramontane.environments.chat import Chat
from tramontane.environments.chat_format import ChatFormat
from tramontane.environments.mistral import MistralChat, load_mistral
from tramontane.errors import InputError
from tramontane.loopback import Address
from tramontane.models.images import Limits, checked
from tramontane.tokens import SampledTokens
from tramontane.types import Completion, SamplingParams

logger = logging.getLogger(__name__)

Choices = AsyncGenerator[list[Choice], None]  # so far, whenever there are new tokens
CONTEXT_CODE = "context_length_exceeded"  # OpenAI's, for a chat that is too long


class ContextExceeded(HTTPException):
    """A request with more tokens than the context has room for."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


class Endpoint(ABC):
    """Answers the requests of one address; its routes are those of `make_app`. A model that is
    served (`ModelEndpoint`) and a conversation with a harness (`harness.Line`) are endpoints."""

    encoder: PromptEncoder

    @property
    @abstractmethod
    def model(self) -> dict[str, Any]:
        """The only model, in `/v1/models`."""

    def models(self) -> dict[str, Any]:
        """`/v1/models`."""
        return {"object": "list", "data": [{"object": "model", "created": 0, **self.model}]}

    async def chat(self, body: wire.ChatRequest) -> Response:
        """`/v1/chat/completions`."""
        answer, choices = await self.sampled(body)
        if body.stream:
            return StreamingResponse(answer.stream(choices), media_type="text/event-stream")
        return JSONResponse(answer.whole(await _last(choices)))

    async def generate(self, body: wire.TokenRequest) -> Response:
        """`/inference/v1/generate`."""
        return JSONResponse(token_answer(body, await _last(await self.continued(body))))

    @abstractmethod
    async def sampled(self, body: wire.ChatRequest) -> tuple[ChatAnswer, Choices]:
        """What is sampled after a chat, and how it is written."""

    @abstractmethod
    async def continued(self, body: wire.TokenRequest) -> Choices:
        """What is sampled after tokens."""

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Refuse image tokens, whose images a request of tokens cannot have."""
        if self._image_token in token_ids:
            raise HTTPException(400, "token_ids hold image tokens: send images in a chat")

    @cached_property
    def _image_token(self) -> int | None:
        """The token at whose places features of images are; None for a model of text alone."""
        images = self.encoder.images
        try:
            return images.token_id if images else None
        except InputError:  # it has no tower, or one that is not supported
            return None

    @abstractmethod
    def failed(self, error: Exception) -> None:
        """An exception of this package, which failed one request alone."""


@dataclass
class ModelEndpoint(Endpoint):
    """Answers the requests to a model that is served.

    Args:
        name: in `/v1/models`.
        config: of its prompts and calls.
        encoder: makes its prompts.
        defaults: for what a request omits.
        sample: the method of `controller.sampling.Sampler`.
        max_len: longest prompt plus completion, in tokens.
        vocab: number of tokens of the model.
        log: called with the traceback of a failed request.
    """

    name: str
    config: Config
    encoder: PromptEncoder
    defaults: SamplingParams
    sample: Callable[
        [list[int], int, int, SamplingParams, Sequence[str]],
        AsyncGenerator[Sequence[Completion], None],
    ]
    max_len: int
    vocab: int
    log: Callable[[str], None] = logger.error

    def __post_init__(self) -> None:
        encoder, talk = self.encoder, self.config.conversation
        self._format = ChatFormat(encoder)
        self._parser = Parser(encoder.tokenizer, talk.calls_form, encoder.tags)
        self._mistral = load_mistral(encoder) if talk.tokens == "mistral" else None
        # Prompts are written outside the event loop, in one thread: tokenizers are not reentrant.
        self._writer = ThreadPoolExecutor(1, "prompts")
        self._stops = [stop for stop in self.config.generator.stop if isinstance(stop, str)]

    @property
    def model(self) -> dict[str, Any]:
        return {"id": self.name, "owned_by": "tramontane", "max_model_len": self.max_len}

    def failed(self, error: Exception) -> None:
        trace = "".join(traceback.format_exception(error))
        self.log(f"a request to the endpoint failed: {trace}")

    async def sampled(self, body: wire.ChatRequest) -> tuple[ChatAnswer, Choices]:
        self._check_model(body.model)
        loop = asyncio.get_running_loop()
        prompt, prefix, images = await loop.run_in_executor(self._writer, self._write, body)
        tags, stops = self.encoder.tags, [*self._stops, *body.stop]
        read = partial(self._read, prompt=prompt, prefix=prefix, body=body)
        held = max(len(text) for text in (*tags, *stops, *self._parser.headers)) - 1
        parses_parts = self._parser.form != "template"
        show = partial(shown_tokens, self.encoder.tokenizer)
        answer = ChatAnswer(body, prompt, read, show, tags, held if parses_parts else None)
        return answer, self._sample(body, prompt, images)

    async def continued(self, body: wire.TokenRequest) -> Choices:
        if body.model is not None:
            self._check_model(body.model)
        self.check_token_ids(body.token_ids)
        return self._sample(body.sampling_params, body.token_ids)

    def _check_model(self, name: str) -> None:
        if name != self.name:
            raise HTTPException(404, f"no model {name!r}; this endpoint has {self.name!r}")

    def _write(self, body: wire.ChatRequest) -> tuple[list[int], str, list[str]]:
        """The prompt's tokens, the start of the answer that they already hold, and the images.

        Each message of the model is appended as in a conversation of a run, so that calls and the
        answers of tools are written in the form that the template takes.
        """
        self._check_images(body.images)
        chat = self._new_chat(body)
        return wire.write(chat, body.messages), chat.prefix, chat.images

    def _check_images(self, images: Sequence[str]) -> None:
        config = self.config
        images_of = self.encoder.images
        takes = {
            "generator.kind": config.generator.kind != "vllm"
            or bool(images_of and images_of.family.plain),
            "placement.kind": config.placement.kind != "ray",
        }
        key = next((key for key, taken in takes.items() if not taken), None)
        if images and key:
            raise HTTPException(400, f"this endpoint takes no images, because of its {key}")
        check_images(images, config.data.images.limits)

    def _new_chat(self, body: wire.ChatRequest) -> Any:
        if body.reasoning_effort not in (None, *self._format.levels):
            known = ", ".join(self._format.levels) or "none"
            raise HTTPException(400, f"reasoning_effort: the model's levels are {known}")
        form = self._format.at(body.reasoning_effort)
        if self._mistral is not None:
            return MistralChat(self._mistral, form.encoder, body.described)
        self._parser.check(body.described)
        return Chat(form, body.described)

    def _read(
        self, tokens: SampledTokens, *, prompt: list[int], prefix: str, body: wire.ChatRequest
    ) -> Parsed:
        """Thoughts, content and calls of an answer; a call that does not parse stays in the
        content."""
        text = prefix + self._format.text_of(tokens.token_ids, prompt)
        ends = [p for stop in (*self._stops, *body.stop) if (p := text.find(stop)) >= 0]
        text = text[: min(ends, default=None)]
        message, tags = self._parser.parse(text, body.described, prefix), self.encoder.tags
        return wire.readable(message, tags)

    def _sample(
        self, body: wire.SamplingRequest, prompt: list[int], images: Sequence[str] = ()
    ) -> Choices:
        """Yield the choices so far whenever there are new tokens, until all have ended."""
        room = self.max_len - len(prompt)
        asked = body.max_tokens or max(1, min(self.defaults.max_tokens, room))
        if room < asked:
            raise ContextExceeded(
                f"{wire.CONTEXT} {self.max_len} tokens, and a prompt of {len(prompt)} with "
                f"max_tokens {asked} exceeds it; shorten either"
            )
        if not all(0 <= token < self.vocab for token in prompt):
            raise HTTPException(400, f"tokens outside the model's vocabulary of {self.vocab:,}")
        seed = random.getrandbits(31) if body.seed is None else body.seed
        sampling = body.params(asked, self.defaults)
        return self._choices(body, self.sample(prompt, body.n, seed, sampling, images))

    async def _choices(
        self, body: wire.SamplingRequest, reports: AsyncGenerator[Sequence[Completion], None]
    ) -> Choices:
        choices = [Choice() for _ in range(body.n)]
        async with aclosing(reports):
            async for report in reports:
                for choice, sampled in zip(choices, report, strict=True):
                    if choice.reason is None:
                        self._note(choice, sampled, body)
                yield choices
                if all(choice.reason is not None for choice in choices):
                    return

    def _note(self, choice: Choice, sampled: Completion, body: wire.SamplingRequest) -> None:
        """Take a choice's new tokens, up to the first that completes a stop."""
        ids, reason = sampled.token_ids, sampled.finish_reason
        # A token has at least one byte; a few more, since the first may hold part of a character.
        tail = max((len(stop.encode()) for stop in body.stop), default=0) + 4
        decode = self.encoder.tokenizer.decode
        count = len(ids)
        for end in range(choice.searched + 1, count + 1):
            last = str(decode(ids[max(0, end - tail) : end].tolist())) if body.stop else ""
            if ids[end - 1] in body.stop_token_ids or any(stop in last for stop in body.stop):
                count, reason = end, "stop"
                break
        choice.searched, choice.reason, choice.tokens = count, reason, sampled.copy(count)


def check_images(images: Sequence[str], limits: Limits) -> None:
    """Decode the images of a chat.

    Raises:
        InputError: one that `models.images.decode` refuses.
    """
    for image in images:
        checked(image, limits, "messages: an image")


async def _last(choices: Choices) -> list[Choice]:
    """The finished choices."""
    async with aclosing(choices):
        return [report async for report in choices][-1]


async def _unless_gone(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """An answer, which is cancelled once its client has disconnected."""
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(request.receive())  # the next message after the body
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise HTTPException(499, "the client closed the connection")
        return answering.result()
    finally:
        leaving.cancel()
        answering.cancel()


class _FailingAlone:
    """An application whose exceptions go to the endpoint that was asked: each fails its request."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            if "serving" not in scope:
                raise
            scope["serving"].failed(error)


def make_app(find: Callable[[str], Endpoint | None]) -> _FailingAlone:
    """The application that serves endpoints; `find` returns the endpoint of a key, or None. All of
    it is asynchronous: a function that is not has a thread, which would keep the process."""
    app = FastAPI(openapi_url=None)  # nor pages of it

    async def found(request: Request) -> Endpoint:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if (endpoint := find(request.path_params.get("key", bearer))) is None:
            raise HTTPException(401, "the address lacks the key: http://HOST:PORT/KEY/v1")
        request.scope["serving"] = endpoint
        return endpoint

    Chosen = Depends(found)
    api = APIRouter()

    @api.get("/v1/models")
    async def models(endpoint: Endpoint = Chosen) -> dict[str, Any]:
        return endpoint.models()

    @api.get("/v1/models/{name:path}")
    async def model(name: str, endpoint: Endpoint = Chosen) -> dict[str, Any]:
        for each in endpoint.models()["data"]:
            if each["id"] == name:
                return each
        raise HTTPException(404, f"no model {name!r}")

    @api.post("/v1/chat/completions")
    async def chat(
        request: Request, body: wire.ChatRequest, endpoint: Endpoint = Chosen
    ) -> Response:
        return await _unless_gone(request, endpoint.chat(body))

    @api.post("/inference/v1/generate")
    async def generate(
        request: Request, body: wire.TokenRequest, endpoint: Endpoint = Chosen
    ) -> Response:
        return await _unless_gone(request, endpoint.generate(body))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _error(400, "; ".join(_line(fault) for fault in error.errors()))

    @app.exception_handler(RecursionError)
    async def deep(_: Request, error: RecursionError) -> Response:
        return _error(400, "the body is nested too deeply")

    @app.exception_handler(InputError)  # of a chat template
    async def refused(_: Request, error: InputError) -> Response:
        return _error(400, str(error))

    @app.exception_handler(AnyHTTPException)
    async def failed(_: Request, error: AnyHTTPException) -> Response:
        code = CONTEXT_CODE if isinstance(error, ContextExceeded) else error.status_code
        return _error(error.status_code, str(error.detail), code)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return _error(500, f"the server failed, not the request: {type(error).__name__}")

    app.include_router(api)
    app.include_router(api, prefix="/{key}")
    return _FailingAlone(app)


def key_is(key: str, endpoint: Endpoint) -> Callable[[str], Endpoint | None]:
    """A function that returns the endpoint for this key alone."""
    return lambda given: endpoint if compare_digest(given.encode(), key.encode()) else None


@asynccontextmanager
async def answering(
    endpoint: ModelEndpoint, address: Address, *, ends_by_signal: bool
) -> AsyncIterator[asyncio.Task[None]]:
    """Context manager: serve an endpoint in this event loop; gives the task that serves it."""
    app = make_app(key_is(address.key, endpoint))
    server = loopback.server(app, ends_by_signal=ends_by_signal)
    serving = asyncio.create_task(server.serve(sockets=[address.socket]), name="endpoint")
    try:
        yield serving
    finally:
        server.should_exit = True
        await serving


def _line(fault: Any) -> str:
    place = ".".join(str(part) for part in fault["loc"] if part != "body")
    message = fault["msg"]
    if fault["type"] == "json_invalid":
        message += f": {fault['ctx']['error']}"
    return f"{place}: {message}" if place else message


def _error(status: int, message: str, code: str | int | None = None) -> Response:
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code or status}
    return JSONResponse({"error": error}, status)
