"""The endpoint's requests and answers, in the form of OpenAI's chat completions and vLLM's token
route.

A key that would change the answer and is not supported is refused, never ignored. Null is "not
given" for every key, and so are an empty value and false for an unknown one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from tramontane.data.images import PART_TYPES, own_image
from tramontane.data.prompts import Tool
from tramontane.data.values import cleaned
from tramontane.environments.arguments import fault_of
from tramontane.environments.calls import Parsed
from tramontane.environments.forms import kept_id, written
from tramontane.tokens import SampledTokens
from tramontane.types import PLACE, Message, SamplingParams, ThinkingTags, ToolCall

MAX_N = 128  # completions of one request
# The beginning of OpenAI's message about a chat that is too long, which clients look for.
CONTEXT = "This model's maximum context length is"
Ignored = Annotated[Any, Field(exclude=True)]  # it changes nothing in the answer


class Part(BaseModel):
    """A part of a body: a key that is null is one that is not given."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {key: value for key, value in body.items() if value is not None}


class Body(Part):
    """A whole body: unknown keys are refused unless they are empty or false, and texts are made
    encodable in UTF-8."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _neutral(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return cleaned(
            {key: v for key, v in body.items() if key in cls.model_fields or not _neutral(v)}
        )


def _neutral(value: Any) -> bool:
    """True if an unknown key with this value asks for nothing."""
    return value is False or (isinstance(value, (dict, list, str)) and not value)


class Function(Part):
    """The function of a call, with its arguments as JSON."""

    name: str
    arguments: dict[str, Any] = {}

    @field_validator("arguments", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return cleaned(json.loads(value)) if value.strip() else {}


class Call(Part):
    """A call in a message of the assistant."""

    id: str = ""
    function: Function


class ChatMessage(Part):
    """A message of a chat. Keys with other uses, such as `refusal`, are accepted and not read."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    reasoning_content: str = ""
    reasoning: str = ""  # the same, in clients that follow vLLM's newer name
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    images: list[str] = []  # of the content's parts, as data URIs, each at a `PLACE`

    @model_validator(mode="before")
    @classmethod
    def _parts(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        parts, images = body.get("content", ""), list[str]()
        if not isinstance(parts, list):
            content = parts.replace(PLACE, "\ufffd") if isinstance(parts, str) else parts
        else:
            content = "".join(_part_text(part, images) for part in parts)
        return {**body, "content": content, "images": images}

    def plain(self) -> Message:
        """The message as a `Chat` takes it."""
        role = "system" if self.role == "developer" else self.role
        plain = Message(role=role, content=self.content)
        return {**plain, "images": self.images} if self.images else plain

    def shown(self) -> Message:
        """The message with its calls in the content, for whoever grades the chat."""
        return {**self.plain(), "content": self.parsed().text}

    def parsed(self, form: str = "hermes") -> Parsed:
        """A message of the assistant as it was read when the model wrote it; `form`: of calls that
        are part of its text."""
        calls = [
            ToolCall(c.function.name, c.function.arguments, "", id=kept_id(c.id))
            for c in self.tool_calls or ()
        ]
        thoughts = self.reasoning_content or self.reasoning
        made = [{"name": call.name, "arguments": call.arguments} for call in calls]
        text = "\n".join(filter(None, (self.content, written(form, made) if made else "")))
        return Parsed(text, thoughts, self.content, calls)


def _part_text(part: Any, images: list[str]) -> str:
    """The text of a content part, `PLACE` for an image, which is appended to `images`."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in PART_TYPES:
        found, options = own_image(part, 0, "content"), part.get("image_url")
        detail = part.get("detail") or (options.get("detail") if isinstance(options, dict) else "")
        if not isinstance(found, str) or found[:5].lower() != "data:":
            raise ValueError(
                "nothing is fetched, and no file is read: give an image as a data URI "
                "(data:image/png;base64,…)"
            )
        if detail not in (None, "", "auto", "high"):
            raise ValueError(f"detail {detail!r} is not supported: images are read in full")
        images.append(found)
        return PLACE
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        raise ValueError("only texts and images are read: give parts {type: text, text: …}")
    return str(part["text"]).replace(PLACE, "\ufffd")


class SamplingRequest(Body):
    """The parameters of both routes. The server's values replace omitted ones. A `Literal` is the
    value that changes nothing."""

    n: int = Field(1, ge=1, le=MAX_N)
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: list[Annotated[str, Field(min_length=1)]] = []
    stop_token_ids: list[int] = []
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    repetition_penalty: Literal[1] | None = None
    min_p: Literal[0] | None = None
    min_tokens: Literal[0] | None = None
    best_of: Literal[1] | None = None
    length_penalty: Literal[1] | None = None
    use_beam_search: Literal[False] | None = None
    ignore_eos: Literal[False] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    detokenize: Literal[True] | None = None
    output_kind: Ignored = None
    cache_salt: Ignored = None
    priority: Ignored = None
    skip_special_tokens: Ignored = None
    spaces_between_special_tokens: Ignored = None

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) and value else value or []

    def params(self, max_tokens: int, defaults: SamplingParams) -> SamplingParams:
        """Sampling parameters, with the server's `defaults` for those that are not given."""
        return SamplingParams(
            max_tokens,
            defaults.temperature if self.temperature is None else self.temperature,
            self.top_p or defaults.top_p,
            defaults.top_k if self.top_k is None else max(0, self.top_k),
        )


class StreamOptions(Part):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: Ignored = None


class ChatRequest(SamplingRequest):
    """The body of `/v1/chat/completions`."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    reasoning_effort: str | None = None  # a level of `data.effort`; a harness's is its problem's
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = False
    top_logprobs: Literal[0] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    return_token_ids: Ignored = None
    parallel_tool_calls: Literal[True] | None = None
    echo: Literal[False] | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    include_reasoning: Literal[True] | None = None
    separate_reasoning: Literal[True] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    metadata: Ignored = None
    mm_payload: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    request_id: Ignored = None
    safety_identifier: Ignored = None
    session_id: Ignored = None
    stream_interval: Ignored = None
    stream_reasoning: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None
    user: Ignored = None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        roles = [message.role for message in self.messages]
        if roles[0] in ("assistant", "tool") or roles[-1] == "assistant":
            raise ValueError(
                "messages: a chat begins with the system's or the user's message, and ends with "
                "the user's or a tool's"
            )
        if any(pair == ("assistant", "assistant") for pair in pairwise(roles)):
            raise ValueError("messages: two of the assistant in a row")
        if any(each.images for each in self.messages if each.role == "assistant"):
            raise ValueError("messages: an image in a message of the assistant")
        for tool in self.tools or ():
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError("tools: each is {type: function, function: {name, parameters}}")
            parameters = function.get("parameters") or {}
            fault = fault_of(parameters) if isinstance(parameters, dict) else "not an object"
            if fault:
                raise ValueError(f"tools: the parameters of {function['name'][:80]!r}: {fault}")
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        return self

    @property
    def images(self) -> list[str]:
        """The images of all messages, in order, as data URIs."""
        return [image for message in self.messages for image in message.images]

    @property
    def described(self) -> list[Tool]:
        """The tools that the prompt describes."""
        return [] if self.tool_choice == "none" else list(self.tools or ())


class TokenSampling(SamplingRequest):
    """`sampling_params` of the token route; log-probs are those of the sampled tokens alone."""

    logprobs: Literal[0, 1] | None = None
    routed_experts_prompt_start: Ignored = None  # of renderers


class TokenRequest(Body):
    """The body of `/inference/v1/generate`."""

    token_ids: list[int] = Field(min_length=1)
    sampling_params: TokenSampling = Field(default_factory=TokenSampling)
    model: str | None = None
    request_id: str | None = None
    stream: Literal[False] | None = None
    output_mode: Literal["tokens"] | None = None
    return_token_ids: Ignored = None
    cache_salt: Ignored = None
    priority: Ignored = None


def readable(message: Parsed, tags: ThinkingTags) -> Parsed:
    """A message of the model as clients receive it.

    Only the first thoughts are set apart, and a call that does not parse stays in the content, as
    the model wrote it; one that is read does not. Reading the beginning of a message thus gives the
    beginning of what reading all of it gives.
    """
    thoughts, content, calls = message.thoughts, message.content, message.calls
    if tags.opening in message.text or tags.closing in message.text:
        thoughts, content = _first_thoughts(message.text, tags)
    read = [call for call in calls if call.name]
    if read:
        broken = (call.text.strip() for call in calls)  # of one that is read, nothing
        content = "\n".join(filter(None, (message.content.strip(), *broken)))
    elif calls and not thoughts:
        content = message.text
    return message._replace(thoughts=thoughts, content=content.strip(), calls=read)


def _first_thoughts(text: str, tags: ThinkingTags) -> tuple[str, str]:
    """(first thoughts, the rest) of a text with tags; no thoughts if the first closes them."""
    before, _, rest = text.partition(tags.opening)
    if tags.closing in before:
        return "", text
    thoughts, _, answer = rest.partition(tags.closing)
    return thoughts, before + answer


def write(chat: Any, messages: Sequence[ChatMessage]) -> list[int]:
    """The tokens of a whole chat.

    Args:
        chat: a new `Chat` or `MistralChat`.
        messages: begin with the user's or the system's, and do not end with the assistant's.
    """
    places = [i for i, message in enumerate(messages) if message.role == "assistant"]
    first, *ends = [*places, len(messages)]
    prompt: list[int] = chat.start([message.plain() for message in messages[:first]])
    following = None
    for place, end in zip(places, ends, strict=True):
        put = answers(messages[place], messages[place + 1 : end])
        for message, new in chat.parts(messages[place].parsed(chat.calls_form), put):
            following = chat.follow(message, new)
    return following.whole() if following else prompt


def answers(said: ChatMessage, new: Sequence[ChatMessage]) -> list[Message]:
    """The messages after one of the assistant's, those of tools in the order of its calls."""
    order = {call.id: number for number, call in enumerate(said.tool_calls or ())}
    ordered = sorted(new, key=lambda message: order.get(message.tool_call_id or "", len(order)))
    return [message.plain() for message in ordered]


def logprobs(
    tokens: SampledTokens, shown: Sequence[tuple[str, list[int] | None]]
) -> dict[str, Any]:
    """Log-probs of sampled tokens in OpenAI's form, with a text and bytes for each token."""
    return {
        "content": [
            {
                "token": text,
                "bytes": encoded,
                "logprob": logprob,
                "top_logprobs": [],
            }
            for (text, encoded), logprob in zip(shown, tokens.logprobs, strict=True)
        ]
    }


def truth(tokens: SampledTokens) -> dict[str, Any]:
    """What a trainer needs from a choice: token ids, their log-probs, and the versions of the
    weights that sampled them."""
    return {
        "token_ids": tokens.token_ids.tolist(),
        "token_logprobs": tokens.logprobs.tolist(),
        "versions": tokens.versions.tolist(),
    }
