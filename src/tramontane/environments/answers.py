"""The endpoint's answers: those of the token route, and chat completions, whole or streamed.

Thoughts are streamed as they are sampled. So is the content if the request has no tools; with
tools, only the end shows whether a text that begins like a call is one. A stream adds up to the
whole answer.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from tramontane.environments import wire
from tramontane.environments.calls import Parsed
from tramontane.environments.learned import call_id
from tramontane.tokens import SampledTokens
from tramontane.types import FinishReason, ThinkingTags

EMIT_SHARE = 1 / 32  # growth after which a stream decodes again, so that its work stays linear
PARTIAL = "\N{REPLACEMENT CHARACTER}"  # a token with part of a character decodes to this
TEXTS = ("reasoning_content", "content")


@dataclass
class Choice:
    """One completion of a request, up to the token that ends it."""

    tokens: SampledTokens | None = None  # so far; None before the first
    reason: FinishReason | None = None  # why it ended; None while it is sampled
    searched: int = 0  # number of tokens searched for stops


@dataclass
class _Sent:
    """How much of a choice was streamed."""

    tokens: int = 0
    texts: dict[str, str] = field(default_factory=lambda: dict.fromkeys(TEXTS, ""))
    ended: bool = False


def shown_tokens(tokenizer: Any, tokens: SampledTokens) -> list[tuple[str, list[int] | None]]:
    """A text for each token, and its bytes; None where they are unknown."""
    shown = []
    for token in tokens.token_ids:
        text = str(tokenizer.decode([token]))
        part = PARTIAL in text
        shown.append((text, _bytes_of(tokenizer, token) if part else list(text.encode())))
    return shown


def _bytes_of(tokenizer: Any, token: int) -> list[int] | None:
    """The bytes of a token with part of a character, by its name in the vocabulary: `<0xE2>`, or
    GPT-2's letter for each byte."""
    name = str(tokenizer.convert_ids_to_tokens(token))
    if found := re.fullmatch("<0x([0-9A-F]{2})>", name):
        return [int(found[1], 16)]
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # not before it is needed

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return [letters[char] for char in name] if set(name) <= letters.keys() else None


def token_answer(body: wire.TokenRequest, choices: Sequence[Choice]) -> dict[str, Any]:
    """The answer of the token route. Its log-probs name tokens by their ids: `token_id` as vLLM
    does since 0.33, and `token` as it did before."""
    answered: list[dict[str, Any]] = []
    for choice in choices:
        assert choice.tokens is not None
        ids = choice.tokens.token_ids
        names = [(name, [*name.encode()]) for name in map("token_id:{}".format, ids)]
        found: dict[str, Any] = {"index": len(answered), "finish_reason": choice.reason}
        found["logprobs"] = wire.logprobs(choice.tokens, names)
        for shown, token in zip(found["logprobs"]["content"], ids, strict=True):
            shown["token_id"] = token
        answered.append({**found, **wire.truth(choice.tokens)})
    request_id = body.request_id or uuid4().hex
    return {"request_id": request_id, "choices": answered, "prompt_token_ids": body.token_ids}


class ChatAnswer:
    """The answer to one request.

    Args:
        body: the request.
        prompt_ids: its prompt.
        read: finds thoughts, content and calls in a choice's tokens.
        show: returns a text for each token, and its bytes.
        tags: thinking tags.
        held: characters to hold back at the end of a partial text, since they may begin a tag or a
            stop; None: hold back everything until the end.
    """

    def __init__(
        self,
        body: wire.ChatRequest,
        prompt_ids: list[int],
        read: Callable[[SampledTokens], Parsed],
        show: Callable[[SampledTokens], list[tuple[str, list[int] | None]]],
        tags: ThinkingTags,
        held: int | None,
    ) -> None:
        self._body, self._prompt_ids, self._read, self._show = body, prompt_ids, read, show
        self._tags, self._held = tags, held
        self._turns = sum(message.role == "assistant" for message in body.messages)
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time())}
        self._head["model"] = body.model

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer as one object."""
        answered = []
        for index, choice in enumerate(choices):
            message, end = self._message(choice)
            shown = {"role": "assistant", **message}
            if "tool_calls" in message:
                shown["content"] = message["content"] or None
            answered.append({"index": index, "message": shown, **end})
        return {
            **self._head,
            "object": "chat.completion",
            "choices": answered,
            "usage": self._usage(choices),
            "prompt_token_ids": self._prompt_ids,
        }

    async def stream(self, reports: AsyncGenerator[list[Choice], None]) -> AsyncIterator[str]:
        """The answer as server-sent events; tokens and calls come with the end of each choice."""
        sent = [_Sent() for _ in range(self._body.n)]
        choices: list[Choice] = []
        for index in range(self._body.n):
            yield self._event(index, {"role": "assistant", "content": ""})
        async with aclosing(reports):
            async for choices in reports:
                for index, (choice, known) in enumerate(zip(choices, sent, strict=True)):
                    for event in self._news(index, choice, known):
                        yield event
        options = self._body.stream_options
        if options is not None and options.include_usage:
            usage = {"choices": [], "usage": self._usage(choices)}
            yield _data({**self._head, "object": "chat.completion.chunk", **usage})
        yield "data: [DONE]\n\n"

    def _news(self, index: int, choice: Choice, sent: _Sent) -> list[str]:
        if sent.ended or choice.tokens is None:
            return []
        count = len(choice.tokens.token_ids)
        if choice.reason is None and count < sent.tokens + max(1, count * EMIT_SHARE):
            return []
        sent.tokens = count
        events = []
        message = self._partial(choice) if choice.reason is None else None
        if message is None:
            sent.ended = True
            message, end = self._message(choice)
        for key in TEXTS:
            text = message[key] or ""
            if new := text[len(sent.texts[key]) :] if text.startswith(sent.texts[key]) else "":
                events.append(self._event(index, {key: new}))
                sent.texts[key] = text
        if sent.ended:
            calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls", ()))]
            delta = {"tool_calls": calls} if calls else {}
            events.append(self._event(index, delta, {**end, "prompt_token_ids": self._prompt_ids}))
        return events

    def _partial(self, choice: Choice) -> dict[str, Any]:
        """What is certain of an unfinished choice."""
        assert choice.tokens is not None
        if self._held is None:
            return dict.fromkeys(TEXTS, "")
        parsed = self._read(choice.tokens)
        thoughts, content = parsed.thoughts, parsed.content
        opened = self._tags.opening in parsed.text and self._tags.closing not in parsed.text
        thinks = opened or not content
        certain = (thoughts if thinks else content).rstrip(PARTIAL)[: -self._held or None].rstrip()
        texts = (certain, content) if thinks else (thoughts, certain)
        return dict(zip(TEXTS, texts if not self._body.described else (texts[0], ""), strict=True))

    def _message(self, choice: Choice) -> tuple[dict[str, Any], dict[str, Any]]:
        assert choice.tokens is not None
        parsed = self._read(choice.tokens)
        message: dict[str, Any] = {TEXTS[0]: parsed.thoughts or None, "content": parsed.content}
        if parsed.calls:
            message["tool_calls"] = [
                {
                    "id": call.id or call_id(self._turns, number),
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(call.arguments, ensure_ascii=False),
                    },
                }
                for number, call in enumerate(parsed.calls)
            ]
        called = parsed.calls and choice.reason != "length"  # a cut answer may lack calls
        end: dict[str, Any] = {
            "finish_reason": "tool_calls" if called else choice.reason,
            "logprobs": None,
            **wire.truth(choice.tokens),
        }
        if self._body.logprobs:
            end["logprobs"] = wire.logprobs(choice.tokens, self._show(choice.tokens))
        return message, end

    def _usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        sampled = sum(len(choice.tokens.token_ids) for choice in choices if choice.tokens)
        prompt = len(self._prompt_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

    def _event(self, index: int, delta: dict[str, Any], end: dict[str, Any] | None = None) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": None, **(end or {})}
        return _data({**self._head, "object": "chat.completion.chunk", "choices": [choice]})


def _data(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
