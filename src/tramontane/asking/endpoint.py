"""A model behind an OpenAI-compatible HTTP server (`POST …/chat/completions`).

A temporary failure (429, 5xx, no connection, a stall, an invalid response) is retried after a
pause. A permanent failure is recorded for its prompt, and the other prompts continue. Only an
endpoint that cannot answer any prompt (a wrong address or key) ends the command, which resumes once
this is fixed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx

from tramontane.asking import Answer, Collector, Prompt, answer_seed, in_paper_tags
from tramontane.config.asking import EndpointModel, ModelConfig
from tramontane.data.system_prompt import system_text
from tramontane.errors import InputError
from tramontane.journals import Journal
from tramontane.models.images import named_uri
from tramontane.types import PAPER_TAGS, ThinkingTags

MAX_BACKOFF_S = 60.0
MAX_RETRY_AFTER_S = 600.0  # maximum pause at a server's request
MAX_BYTES = 2**24  # maximum size of a response
TEMPORARY = frozenset({408, 409, 425, 429})  # in addition to 5xx
FATAL = frozenset({401, 402, 404, 405})  # a wrong key, no credit, a wrong address
# Errors from reading a response of a different form.
_MALFORMED = ValueError, RecursionError, LookupError, TypeError, OverflowError, AttributeError


class Failed(Exception):
    """A temporary failure of a request; the server asked for a pause of `pause` seconds."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class Refused(Exception):
    """A permanent failure of a request: the same body will fail again."""


class EndpointClient:
    """A model that is asked over HTTP, one request per answer.

    Args:
        config: its `endpoint` is set.
        sending: called before each request, retries included; if it raises InputError, no more
            requests are sent.

    Raises:
        InputError: the variable for the key is not set.
    """

    def __init__(self, config: ModelConfig, sending: Callable[[], None] = lambda: None) -> None:
        assert config.endpoint is not None
        self.config, self.endpoint, self._sending = config, config.endpoint, sending
        self.tags = ThinkingTags.of(config.thinking_tags)
        url = self.endpoint.url.rstrip("/")
        self.url = url if url.endswith("/chat/completions") else f"{url}/chat/completions"
        headers = {"Content-Type": "application/json"} | authorization(self.endpoint)
        self._key = headers.get("Authorization", "").partition(" ")[2]
        concurrency = self.endpoint.concurrency
        # `_request` limits the time of a request as a whole.
        limits = httpx.Limits(max_connections=concurrency)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None)
        self._slots = asyncio.Semaphore(concurrency)
        self._not_before = 0.0  # monotonic time before which nothing is sent, by Retry-After
        self._fatal: InputError | None = None  # the server cannot answer any prompt

    def answers(
        self, prompts: Sequence[Prompt], n: int, record: Path
    ) -> Iterator[tuple[int, list[Answer]]]:
        """See `Model`. Failures are not recorded, so another call requests them again."""
        collector = Collector(n)
        missing = {(i, j): prompt for i, prompt in enumerate(prompts) for j in range(n)}
        with Journal(record) as journal:
            for i, j, text, tokens in journal:
                del missing[i, j]
                yield from collector.add(i, j, Answer(text, tokens))
            asked = {self.ask(prompt, j): (i, j) for (i, j), prompt in missing.items()}
            try:
                for future in as_completed(asked):  # `timeout_s` and `retries` bound this wait
                    (i, j), answer = asked[future], future.result()
                    if not answer.fault:
                        journal.add((i, j, answer.text, answer.tokens))
                    yield from collector.add(i, j, answer)
            finally:
                for future in asked:
                    future.cancel()

    def ask(self, prompt: Prompt, index: int = 0) -> Future[Answer]:
        """Request one answer; the future holds it, or its fault after all retries.

        `endpoint.timeout_s` and `retries` bound its wait. If the server cannot answer any prompt,
        the future raises InputError, and nothing is sent from then on.

        Args:
            prompt: the prompt.
            index: number of the answer among those to this prompt; changes its seed.

        Raises:
            InputError: the server could not answer any prompt before.
        """
        if self._fatal:
            raise self._fatal
        return asyncio.run_coroutine_threadsafe(self._ask(prompt, index), _loop(os.getpid()))

    async def _ask(self, prompt: Prompt, index: int) -> Answer:
        async with self._slots:
            body = self._body(prompt, index)
            reason = ""
            for attempt in range(self.endpoint.retries + 1):
                await asyncio.sleep(self._not_before - time.monotonic())
                if self._fatal:
                    raise self._fatal
                try:
                    return await self._request(body)
                except Refused as error:
                    return Answer("", 0, str(error))
                except InputError as error:
                    self._fatal = error
                    raise
                except Failed as error:
                    reason = self._without_key(str(error))
                    self._not_before = max(self._not_before, time.monotonic() + error.pause)
                    # Jitter, so that requests that failed together are not retried together.
                    pause = self.endpoint.backoff_s * 2**attempt * random.uniform(0.5, 1)
                    if attempt < self.endpoint.retries:
                        await asyncio.sleep(min(pause, MAX_BACKOFF_S))
            return Answer("", 0, f"{reason} (tried {self.endpoint.retries + 1} times)")

    def _body(self, prompt: Prompt, index: int) -> bytes:
        config = self.config
        system = system_text(config.system_prompt, self.tags)
        messages = [{"role": "system", "content": system}] if system else []
        content: Any = prompt.text
        if prompt.images:
            shown = [{"url": named_uri(image)} for image in prompt.images]
            content = [{"type": "image_url", "image_url": url} for url in shown]
            content.append({"type": "text", "text": prompt.text})
        body: dict[str, Any] = {
            "model": self.endpoint.model,
            "messages": [*messages, {"role": "user", "content": content}],
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            # Some servers accept at most 31 bits.
            "seed": answer_seed(config.seed, prompt.key, index) % 2**31,
            # vLLM and SGLang read it; other servers may reject unknown keys.
            "chat_template_kwargs": config.chat_template_kwargs or None,
            **self.endpoint.extra,
        }
        return json.dumps({k: v for k, v in body.items() if v is not None}).encode()

    async def _request(self, body: bytes) -> Answer:
        seconds = self.endpoint.timeout_s
        self._sending()
        try:
            response, content = await asyncio.wait_for(self._post(body), seconds)
        except asyncio.TimeoutError:
            raise Failed(f"no answer within {seconds:g} s") from None
        except httpx.RequestError as error:
            raise Failed(f"{type(error).__name__}: {error}"[:200]) from None
        if not response.is_success:
            raise self._status_error(response, content)
        answer = read_answer(content)
        return answer._replace(text=in_paper_tags(answer.text, self.tags))

    async def _post(self, body: bytes) -> tuple[httpx.Response, bytes]:
        content = bytearray()
        async with self._client.stream("POST", self.url, content=body) as response:
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > MAX_BYTES:
                    raise Failed(f"more than {MAX_BYTES:,} bytes")
        return response, bytes(content)

    def _status_error(self, response: httpx.Response, content: bytes) -> Exception:
        """The exception for a status; an InputError is a permanent failure of every request."""
        code = response.status_code
        detail = content[:500].decode(errors="replace").strip() or response.reason_phrase
        message = self._without_key(f"HTTP {code}: {detail}")[:300]
        if code in FATAL:
            return InputError(
                f"endpoint {self.url}: {message}; correct it, and start the same command again"
            )
        if code in TEMPORARY or code >= 500:
            return Failed(message, _retry_after(response.headers.get("Retry-After")))
        return Refused(message)

    def _without_key(self, text: str) -> str:
        """A server's message without the key, which some servers repeat."""
        return text.replace(self._key, "[key]") if self._key else text


@lru_cache(maxsize=1)
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of this process's requests. Its thread is a daemon, so that an interrupted
    command does not wait for pending requests; a forked process has a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="endpoint", daemon=True).start()
    return loop


def authorization(endpoint: EndpointModel) -> dict[str, str]:
    """The header with the key from the environment; empty if `key_variable` is null.

    Raises:
        InputError: the variable is not set.
    """
    if endpoint.key_variable is None:
        return {}
    key = os.environ.get(endpoint.key_variable, "").strip()
    if not key:
        raise InputError(
            f"endpoint {endpoint.url}: its key belongs in the environment variable "
            f"{endpoint.key_variable}, which is not set"
        )
    return {"Authorization": f"Bearer {key}"}


def read_answer(content: bytes) -> Answer:
    """A server's response as one text; thoughts in separate fields are put between the tags.

    Raises:
        Failed: the response is not a chat completion.
    """
    try:
        response = json.loads(content)
        choice = response["choices"][0]
        message, cut = choice["message"], choice.get("finish_reason") == "length"
        thoughts, text = _parts(message["content"])
        thoughts = message.get("reasoning_content") or message.get("reasoning") or thoughts
        tokens = int((response.get("usage") or {}).get("completion_tokens") or 0)
        if not isinstance(thoughts, str) or not isinstance(text, str):
            raise TypeError("neither text nor parts of text")
        if message["content"] is None and not thoughts:
            raise TypeError("no content")
    except _MALFORMED as error:
        cause = f"{type(error).__name__}: {error}"[:100]
        raise Failed(f"not a chat completion ({cause}): {content[:100]!r}") from None
    # JSON can hold half a surrogate pair, which cannot be encoded.
    whole = PAPER_TAGS.around(thoughts) + text if thoughts else text
    return Answer(whole.encode(errors="replace").decode(), tokens, cut=cut)


def _parts(content: Any) -> tuple[str, str]:
    """(thoughts, text) of a message's content, which some servers send as a list of parts."""
    if not isinstance(content, list):
        return "", content or ""
    thoughts = [_text(part["thinking"]) for part in content if part["type"] == "thinking"]
    return "".join(thoughts), _text([part for part in content if part["type"] == "text"])


def _text(parts: Any) -> str:
    return parts if isinstance(parts, str) else "".join(part["text"] for part in parts)


def _retry_after(value: str | None) -> float:
    """Seconds of a Retry-After header, which holds seconds or a date; 0 without the header."""
    if value is None:
        return 0.0
    if re.fullmatch(r"\d+(\.\d+)?", value.strip()):
        seconds = float(value)
    else:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)
