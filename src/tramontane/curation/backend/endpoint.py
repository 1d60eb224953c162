"""A curation's model as an OpenAI-compatible HTTP server (`POST …/chat/completions`).

Uses the standard library only: one request per answer, and one thread per request under way. A
temporary failure (429, 5xx, no connection, a stall, an invalid response) is retried after a pause.
A permanent failure is recorded for its prompt, and the other prompts continue. Only an endpoint
that cannot answer any prompt (a wrong address or key) ends the curation, which the same command
resumes once this is fixed.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import random
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from tramontane.curation.backend import Answer, Collector, Prompt, answer_seed, in_paper_tags
from tramontane.curation.backend.journal import Journal
from tramontane.curation.config import EndpointModel, ModelConfig
from tramontane.data.prompts import system_text
from tramontane.errors import InputError
from tramontane.types import PAPER_TAGS, ThinkingTags

MAX_BACKOFF_S = 60.0
MAX_RETRY_AFTER_S = 600.0  # maximum pause at a server's request
MAX_BYTES = 2**24  # maximum size of a response
TEMPORARY = frozenset({408, 409, 425, 429})  # in addition to 5xx
FATAL = frozenset({401, 402, 404, 405})  # a wrong key, no credit, a wrong address
Place = tuple[int, int]  # index of the prompt, index of its answer


class Failed(Exception):
    """A temporary failure of a request; the server asked for a pause of `pause` seconds."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class Refused(Exception):
    """A permanent failure of a request: the same body will fail again."""


class Endpoint:
    """A backend that asks a server.

    Args:
        config: its `endpoint` is set.

    Raises:
        InputError: the variable for the key is not set.
    """

    def __init__(self, config: ModelConfig) -> None:
        assert config.endpoint is not None
        self.config, self.endpoint = config, config.endpoint
        self.tags = ThinkingTags.of(config.thinking_tags)
        url = self.endpoint.url.rstrip("/")
        self.url = url if url.endswith("/chat/completions") else f"{url}/chat/completions"
        self.headers = {"Content-Type": "application/json"} | authorization(self.endpoint)
        self._not_before = 0.0  # monotonic time before which no thread sends, by Retry-After

    def answers(
        self, prompts: Sequence[Prompt], n: int, record: Path
    ) -> Iterator[tuple[int, list[Answer]]]:
        """See `Backend`. Failures are not recorded, so another call requests them again."""
        collector = Collector(n)
        missing = {(i, j): prompt for i, prompt in enumerate(prompts) for j in range(n)}
        with Journal(record) as journal:
            for i, j, text, tokens in journal:
                del missing[i, j]
                yield from collector.add(i, j, Answer(text, tokens))
            for (i, j), answer in self._request_all(missing):
                if not answer.fault:
                    journal.add((i, j, answer.text, answer.tokens))
                yield from collector.add(i, j, answer)

    def _request_all(self, missing: dict[Place, Prompt]) -> Iterator[tuple[Place, Answer]]:
        """Yield each answer when it arrives, in any order."""
        tasks: queue.SimpleQueue[tuple[Place, Prompt]] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[Place, Answer | Exception]] = queue.SimpleQueue()
        stop = threading.Event()
        for task in missing.items():
            tasks.put(task)

        def work() -> None:
            """Ends after the last task, or when `stop` is set."""
            while not stop.is_set():
                try:
                    place, prompt = tasks.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put((place, self.ask(prompt, place[1], stop)))
                except Exception as error:  # raised again in the thread that reads `done`
                    done.put((place, error))
                    stop.set()  # here, before a worker sends another request

        # Daemons, so that an interrupted command does not wait for pending requests.
        for _ in range(min(self.endpoint.concurrency, len(missing))):
            threading.Thread(target=work, name="endpoint", daemon=True).start()
        try:
            for _ in missing:
                place, answer = done.get()  # `timeout_s` and `retries` bound this wait
                if isinstance(answer, Exception):
                    raise answer
                yield place, answer
        finally:
            stop.set()

    def ask(self, prompt: Prompt, index: int, stop: threading.Event) -> Answer:
        """One answer to a prompt, or its fault after all retries. Thread-safe.

        Args:
            prompt: the prompt.
            index: number of the answer among those to this prompt; changes its seed.
            stop: ends the retries once it is set.

        Raises:
            InputError: the server cannot answer any prompt.
        """
        body = self._body(prompt, index)
        reason = ""
        for attempt in range(self.endpoint.retries + 1):
            stop.wait(max(0.0, self._not_before - time.monotonic()))
            if stop.is_set():
                break
            try:
                return self._request(body)
            except Refused as error:
                return Answer("", 0, self._without_key(str(error)))
            except Failed as error:
                reason = self._without_key(str(error))
                now = time.monotonic()
                self._not_before = max(self._not_before, now + error.pause)
                # Jitter, so that requests that failed together are not retried together.
                pause = self.endpoint.backoff_s * 2**attempt * random.uniform(0.5, 1)
                if attempt < self.endpoint.retries:
                    stop.wait(min(pause, MAX_BACKOFF_S))
        return Answer("", 0, f"{reason} (tried {self.endpoint.retries + 1} times)")

    def _without_key(self, text: str) -> str:
        """A server's message without the key, which some repeat."""
        _, _, key = self.headers.get("Authorization", "").partition(" ")
        return text.replace(key, "[key]") if key else text

    def _body(self, prompt: Prompt, index: int) -> bytes:
        config = self.config
        system = system_text(config.system_prompt, self.tags)
        messages = [{"role": "system", "content": system}] if system else []
        body: dict[str, Any] = {
            "model": self.endpoint.model,
            "messages": [*messages, {"role": "user", "content": prompt.text}],
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

    def _request(self, body: bytes) -> Answer:
        """Send one request.

        Raises:
            Failed: a temporary failure.
            Refused: a permanent failure of this body.
            InputError: a permanent failure of every request.
        """
        timeout = self.endpoint.timeout_s
        deadline = time.monotonic() + timeout
        request = urllib.request.Request(self.url, body, self.headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                content = _read(response, deadline)
        except urllib.error.HTTPError as error:
            with error:
                raise _status_error(error, self.url, self._without_key) from None
        except TimeoutError:
            raise Failed(f"no answer within {timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", None) or error
            if isinstance(cause, TimeoutError):
                raise Failed(f"no connection within {timeout:g} s") from None
            raise Failed(f"{type(cause).__name__}: {cause}"[:200]) from None
        answer = read_answer(content)
        return answer._replace(text=in_paper_tags(answer.text, self.tags))


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
        message = response["choices"][0]["message"]
        thoughts, text = _parts(message["content"])
        thoughts = message.get("reasoning_content") or message.get("reasoning") or thoughts
        tokens = int((response.get("usage") or {}).get("completion_tokens") or 0)
        if not isinstance(thoughts, str) or not isinstance(text, str):
            raise TypeError("neither text nor parts of text")
        if message["content"] is None and not thoughts:
            raise TypeError("no content")
    except (
        ValueError,
        RecursionError,
        LookupError,
        TypeError,
        OverflowError,
        AttributeError,
    ) as error:
        cause = f"{type(error).__name__}: {error}"[:100]
        raise Failed(f"not a chat completion ({cause}): {content[:100]!r}") from None
    # JSON can hold half a surrogate pair, which cannot be encoded.
    whole = PAPER_TAGS.around(thoughts) + text if thoughts else text
    return Answer(whole.encode(errors="replace").decode(), tokens)


def _parts(content: Any) -> tuple[str, str]:
    """(thoughts, text) of a message's content, which some servers send as a list of parts."""
    if not isinstance(content, list):
        return "", content or ""
    thoughts = [_text(part["thinking"]) for part in content if part["type"] == "thinking"]
    return "".join(thoughts), _text([part for part in content if part["type"] == "text"])


def _text(parts: Any) -> str:
    return parts if isinstance(parts, str) else "".join(part["text"] for part in parts)


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The body, read until `deadline` (monotonic time).

    Some servers send blanks while they think, so a time limit per read is not enough.
    """
    content = bytearray()
    while chunk := response.read1(2**16):
        content += chunk
        if time.monotonic() > deadline:
            raise TimeoutError
        if len(content) > MAX_BYTES:
            raise Failed(f"more than {MAX_BYTES:,} bytes")
    return bytes(content)


def _status_error(
    error: urllib.error.HTTPError, url: str, without_key: Callable[[str], str]
) -> Exception:
    """The exception for a status: `Failed`, `Refused` or `InputError`."""
    try:
        detail = error.read(500).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException):
        detail = ""
    message = without_key(f"HTTP {error.code}: {detail or error.reason}")[:300]
    if error.code in FATAL:
        return InputError(
            f"endpoint {url}: {message}; correct it, and start the same command again"
        )
    if error.code in TEMPORARY or error.code >= 500:
        return Failed(message, _retry_after(error.headers.get("Retry-After")))
    return Refused(message)


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
