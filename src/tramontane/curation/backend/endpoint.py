"""An OpenAI-compatible server that answers over HTTP (`POST …/chat/completions`).

The standard library alone: one request an answer, a thread a request under way. Whatever may pass
(429, 5xx, no connection, a stall, rubbish) is tried again after a pause; whatever will not is said
of the prompt that it befell, and the others go on. Only an endpoint that cannot answer anybody (a
wrong address or key) ends the curation, to be continued once that is mended.
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
from collections.abc import Iterator, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from tramontane.curation.backend import Answer, Gathering, Prompt, answer_seed
from tramontane.curation.backend.journal import Journal
from tramontane.curation.config import EndpointModel, ModelConfig
from tramontane.data.prompts import system_text
from tramontane.errors import InputError
from tramontane.verifier.format import CLOSE, OPEN

LONGEST_PAUSE = 60.0  # seconds, by our own reckoning
LONGEST_ASKED_PAUSE = 600.0  # seconds, by the server's
MAX_BYTES = 2**24  # of a response
AGAIN = frozenset({408, 409, 425, 429})  # and 5xx
NOBODY = frozenset({401, 402, 404, 405})  # a wrong key, no credit, a wrong address
Place = tuple[int, int]


class Failed(Exception):
    """This request failed, but may not the next time; the server may have asked for a pause."""

    def __init__(self, why: str, pause: float = 0.0) -> None:
        super().__init__(why)
        self.pause = pause


class Refused(Exception):
    """This request will fail every time."""


class Endpoint:
    """A client.

    Args:
        config: with an `endpoint`.

    Raises:
        InputError: the variable for the key is not set.
    """

    def __init__(self, config: ModelConfig) -> None:
        assert config.endpoint is not None
        self.config, self.endpoint = config, config.endpoint
        url = self.endpoint.url.rstrip("/")
        self.url = url if url.endswith("/chat/completions") else f"{url}/chat/completions"
        self.headers = {"Content-Type": "application/json"} | authorization(self.endpoint)
        self._not_before = 0.0  # on the monotonic clock: what a server asks of one, all keep to

    def answers(
        self, prompts: Sequence[Prompt], n: int, record: Path
    ) -> Iterator[tuple[int, list[Answer]]]:
        """See `Backend`. What was not answered is not recorded: it is asked once more."""
        gathering = Gathering(n)
        left = {(i, j): prompt for i, prompt in enumerate(prompts) for j in range(n)}
        with Journal(record) as journal:
            for i, j, text, tokens in journal:
                del left[i, j]
                yield from gathering.add(i, j, Answer(text, tokens))
            for (i, j), answer in self._all(left):
                if not answer.fault:
                    journal.add((i, j, answer.text, answer.tokens))
                yield from gathering.add(i, j, answer)

    def _all(self, left: dict[Place, Prompt]) -> Iterator[tuple[Place, Answer]]:
        """Each answer as it comes, in any order."""
        tasks: queue.SimpleQueue[tuple[Place, Prompt]] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[Place, Answer | Exception]] = queue.SimpleQueue()
        stop = threading.Event()
        for task in left.items():
            tasks.put(task)

        def work() -> None:
            """Unblocked by the last task, and by `stop`."""
            while not stop.is_set():
                try:
                    place, prompt = tasks.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put((place, self._patiently(prompt, place[1], stop)))
                except Exception as error:  # raised where somebody waits for it
                    done.put((place, error))

        # Daemons: who stops the command need not wait for answers that are under way.
        for _ in range(min(self.endpoint.concurrency, len(left))):
            threading.Thread(target=work, name="endpoint", daemon=True).start()
        try:
            for _ in left:
                place, answer = done.get()  # which `timeout_s` and `retries` bound
                if isinstance(answer, Exception):
                    raise answer
                yield place, answer
        finally:
            stop.set()

    def _patiently(self, prompt: Prompt, index: int, stop: threading.Event) -> Answer:
        """One answer, or why there is none after all retries."""
        body = self._body(prompt, index)
        why = ""
        for attempt in range(self.endpoint.retries + 1):
            stop.wait(max(0.0, self._not_before - time.monotonic()))
            if stop.is_set():
                break
            try:
                return self._ask(body)
            except Refused as error:
                return Answer("", 0, str(error))
            except Failed as error:
                why = str(error)
                now = time.monotonic()
                self._not_before = max(self._not_before, now + error.pause)
                # Jitter, so that those that failed together do not come back together.
                pause = self.endpoint.backoff_s * 2**attempt * random.uniform(0.5, 1)
                if attempt < self.endpoint.retries:
                    stop.wait(min(pause, LONGEST_PAUSE))
        return Answer("", 0, f"{why} (tried {self.endpoint.retries + 1} times)")

    def _body(self, prompt: Prompt, index: int) -> bytes:
        config = self.config
        system = system_text(config.system_prompt)
        messages = [{"role": "system", "content": system}] if system else []
        body: dict[str, Any] = {
            "model": self.endpoint.model,
            "messages": [*messages, {"role": "user", "content": prompt.text}],
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            # Not every server takes more than 31 bits.
            "seed": answer_seed(config.seed, prompt.key, index) % 2**31,
            **self.endpoint.extra,
        }
        return json.dumps({k: v for k, v in body.items() if v is not None}).encode()

    def _ask(self, body: bytes) -> Answer:
        """One request.

        Raises:
            Failed: in a way that may pass.
            Refused: in a way that will not, for this body.
            InputError: in a way that will not, for any.
        """
        timeout = self.endpoint.timeout_s
        deadline = time.monotonic() + timeout
        request = urllib.request.Request(self.url, body, self.headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                content = _read(response, deadline)
        except urllib.error.HTTPError as error:
            with error:
                raise _complaint(error, self.url) from None
        except TimeoutError:
            raise Failed(f"no answer within {timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or error
            if isinstance(why, TimeoutError):
                raise Failed(f"no connection within {timeout:g} s") from None
            raise Failed(f"{type(why).__name__}: {why}"[:200]) from None
        return read_answer(content)


def authorization(endpoint: EndpointModel) -> dict[str, str]:
    """The header with the key, from the environment; empty where no key is wanted.

    Raises:
        InputError: the variable is not set.
    """
    if endpoint.key_variable is None:
        return {}
    key = os.environ.get(endpoint.key_variable, "").strip()
    if not key:
        raise InputError(
            f"endpoint {endpoint.url}: its key is to be in the environment variable "
            f"{endpoint.key_variable}, which is not set"
        )
    return {"Authorization": f"Bearer {key}"}


def read_answer(content: bytes) -> Answer:
    """What a server says, as one text: thoughts that came apart stand between the tags again.

    Raises:
        Failed: it is no chat completion.
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
        what = f"{type(error).__name__}: {error}"[:100]
        raise Failed(f"not a chat completion ({what}): {content[:100]!r}") from None
    # Half a surrogate pair, which JSON can hold, is in no text that can be written.
    whole = f"{OPEN}{thoughts}{CLOSE}{text}" if thoughts else text
    return Answer(whole.encode(errors="replace").decode(), tokens)


def _parts(content: Any) -> tuple[str, str]:
    """(thoughts, text) of a message's content, which some servers give in parts."""
    if not isinstance(content, list):
        return "", content or ""
    thoughts = [_text(part["thinking"]) for part in content if part["type"] == "thinking"]
    return "".join(thoughts), _text([part for part in content if part["type"] == "text"])


def _text(parts: Any) -> str:
    return parts if isinstance(parts, str) else "".join(part["text"] for part in parts)


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The body. Some servers send blanks while they think, so that no single wait is long."""
    content = bytearray()
    while chunk := response.read1(2**16):
        content += chunk
        if time.monotonic() > deadline:
            raise TimeoutError
        if len(content) > MAX_BYTES:
            raise Failed(f"more than {MAX_BYTES:,} bytes")
    return bytes(content)


def _complaint(error: urllib.error.HTTPError, url: str) -> Exception:
    """What a status means: come back later, never with this, or never at all."""
    try:
        detail = error.read(500).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException):
        detail = ""
    why = f"HTTP {error.code}: {detail or error.reason}"[:300]
    if error.code in NOBODY:
        return InputError(f"endpoint {url}: {why}; mend that, and start the same command again")
    if error.code in AGAIN or error.code >= 500:
        return Failed(why, _retry_after(error.headers.get("Retry-After")))
    return Refused(why)


def _retry_after(value: str | None) -> float:
    """Seconds of a Retry-After header, which holds seconds or a date; 0 without one."""
    if value is None:
        return 0.0
    if re.fullmatch(r"\d+(\.\d+)?", value.strip()):
        seconds = float(value)
    else:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), LONGEST_ASKED_PAUSE)
