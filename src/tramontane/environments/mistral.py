"""Conversations in Mistral's own tokens, with `mistral-common` (an extra; Python ≥ 3.11).

Mistral's models are trained on the tokens that its library makes of messages; Jinja templates only
come close. The library encodes messages one by one, so what follows a turn is the encoding of the
new messages, token for token, and nothing in a text can become a control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tramontane.data.prompts import PromptEncoder, Tool
from tramontane.environments.calls import Parsed
from tramontane.environments.chat import ids_of
from tramontane.environments.forms import kept_id
from tramontane.environments.learned import call_id
from tramontane.environments.recorded import THOUGHTS, Conversation, Example, function_of
from tramontane.errors import InputError, install
from tramontane.types import PLACE

if TYPE_CHECKING:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

FILES = ("tekken.json", "tokenizer.model.v*")  # of a checkpoint
_PROBE = "Hello, 123 é 🙂\n"


@dataclass
class MistralFollowing:
    """What follows a message of the model; see `chat.Following`."""

    put: list[int]  # tokens of the new messages
    # True if the earlier messages are now written differently, e.g. because v7 describes the tools
    # before the user's last message.
    rewritten: bool
    whole: Callable[[], list[int]]  # makes the tokens of the whole conversation


def files_of(encoder: PromptEncoder) -> list[Path]:
    """The files with Mistral's own tokens in a model's folder."""
    folder = Path(encoder.tokenizer.name_or_path)
    return [file for name in FILES for file in sorted(folder.glob(name))]


def load_mistral(
    encoder: PromptEncoder,
    key: str = "conversation.tokens: mistral",
    mode: Literal["test", "finetuning"] = "test",
) -> MistralTokenizer:
    """Mistral's tokenizer of a model.

    Args:
        encoder: of the model.
        key: what asks for it, for messages.
        mode: the library's rules for a chat: it ends with a message of the user or of tools, or in
            `finetuning` with one of the model.

    Raises:
        InputError: the library or the file is missing; its tokens are not those of the model's
            tokenizer; or there is a `response_prefix` or a `chat_template`, which it cannot write.
    """
    config, tokenizer = encoder.config, encoder.tokenizer
    if config.response_prefix or config.chat_template:
        raise InputError(f"{key}: data.response_prefix and data.chat_template need `template`")
    try:
        from mistral_common.protocol.instruct.validator import ValidationMode
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
    except ImportError:
        raise InputError(
            f"{key} needs a package that is not installed: {install('mistral')}"
        ) from None
    if not (found := files_of(encoder)):
        raise InputError(
            f"{key}: {tokenizer.name_or_path} has no file {' or '.join(FILES)}; give the model as "
            f"a folder with one"
        )
    mistral = MistralTokenizer.from_file(str(found[0]), ValidationMode(mode))
    own = mistral.instruct_tokenizer.tokenizer
    ids = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    same = own.encode(_PROBE, bos=False, eos=False) == ids and own.eos_id == tokenizer.eos_token_id
    if not same:
        raise InputError(f"{key}: {found[0].name} has different tokens than tokenizer.json")
    instruct: Any = mistral.instruct_tokenizer
    if instruct.image_encoder is not None:
        instruct.image_encoder = partial(_encoded_image, encoder)
    return mistral


def _encoded_image(encoder: PromptEncoder, chunk: Any) -> Any:
    """The tokens of an image by the model's processor, in place of the library's own encoder."""
    from mistral_common.tokens.tokenizers.image import ImageEncoding

    text, tokenizer = encoder.expansion(chunk.get_url()), encoder.tokenizer
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ImageEncoding(tokens=ids, image=np.empty(0))  # pixels are made where they enter


class MistralChat:
    """One conversation as Mistral's tokenizer writes it; see `chat.Chat`.

    Args:
        mistral: the model's tokenizer.
        encoder: for the system prompt and the thinking tags.
        tools: descriptions of the tools that the model may call.

    Attributes:
        images: as a `Chat` has them.
    """

    prefix = ""
    calls_form = "mistral"

    def __init__(
        self, mistral: MistralTokenizer, encoder: PromptEncoder, tools: Sequence[Tool] = ()
    ) -> None:
        self._mistral, self._encoder = mistral, encoder
        self._tools = [plain_tool(tool) for tool in tools]
        self._messages: list[dict[str, Any]] = []
        self._ids: list[int] = []
        self._turns = 0
        self.images: list[str] = []
        # Of the newest recorded calls: their ids by those in the record, and in order.
        self._asked: tuple[dict[Any, str], list[str]] = {}, []
        self.thinks = getattr(mistral.instruct_tokenizer, "BEGIN_THINK", None) is not None
        own: Any = mistral.instruct_tokenizer.tokenizer
        self._tools_show = int(own.version.value[1:]) >= 15  # before, a tool's answer is a text
        # Before v7, a message has a text or calls.
        self.takes_both = hasattr(mistral.instruct_tokenizer, "BEGIN_TOOL_CONTENT")
        self._effort = encoder.config.chat_template_kwargs.get("reasoning_effort")

    def copy(self) -> MistralChat:
        """A copy that this chat's further messages do not change."""
        copied = copy(self)
        copied._messages = [*self._messages]
        return copied

    def start(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of the prompt of the first turn.

        Raises:
            InputError: Mistral's validator refuses the messages.
        """
        given = list(messages)
        if any(m.get("images") for m in given if m["role"] == "system"):
            raise InputError("Mistral's library takes no images in messages of the system")
        own = given.pop(0)["content"] if given[0]["role"] == "system" else None
        if (system := self._encoder.system(own)) is not None:
            given.insert(0, {"role": "system", "content": system})
        self._messages = [self._taken(m) for m in given]
        try:
            self._ids = self._encode()
        except InputError:  # some versions take no thoughts in a system message
            self._messages = [self._taken(m, thinks=False) for m in given]
            self._ids = self._encode()
        self.images = [image for m in given for image in m.get("images", ())]
        return self._ids

    def follow(self, message: Parsed, new: Sequence[Mapping[str, Any]]) -> MistralFollowing:
        """Append a message of the model and the messages that answer it; those of the role `tool`
        answer its calls, in order.

        Raises:
            InputError: Mistral's validator refuses them.
        """
        before, put = self._ids, list[int]()
        said = message.content if message.thoughts or message.calls else message.text or " "
        if message.thoughts:
            said = self._encoder.tags.around(message.thoughts) + said
        dropped = bool(said and message.calls) and not self.takes_both
        said = "" if dropped else said
        ids = ids_of(message.calls, self._turns)
        # As the library's validator takes names; a name that no tool has is answered.
        names = [re.sub("[^a-zA-Z0-9_-]", "_", c.name)[:64] or "invalid" for c in message.calls]
        arguments = [call.arguments for call in message.calls]
        self._say(said, zip(ids, names, arguments, strict=True))
        for number, given in enumerate(self._put(new)):
            if given["role"] == "tool":
                given["tool_call_id"] = self._id_at(ids, number)
            self._messages.append(given)
            put += self._encode_one(given)
        self._ids = whole = self._encode()
        rewritten = dropped or whole[: len(before)] != before or whole[-len(put) :] != put
        return MistralFollowing(put, rewritten, lambda: whole)

    def parts(
        self, message: Parsed, new: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[Parsed, Sequence[Mapping[str, Any]]]]:
        """A message of the model and what answers it."""
        yield message, new

    def tokens(self, following: MistralFollowing, last: int) -> list[int]:
        """The tokens that follow a message of the model, whose last token is `last`."""
        eos = self._mistral.instruct_tokenizer.tokenizer.eos_id
        return following.put if last == eos else [eos, *following.put]

    def learned(self, message: dict[str, Any], tuning: MistralTokenizer) -> list[int]:
        """Append a recorded message of the model as the library takes it; the tokens of the chat up
        to its end, as `tuning` writes it."""
        said = message.get("content") or ""  # a text, or the library's own chunks
        if thoughts := next((message[key] for key in THOUGHTS if message.get(key)), ""):
            if not isinstance(said, str):
                raise InputError("thoughts beside a content in chunks; put them into a chunk")
            said = self._encoder.tags.around(thoughts) + said
        given = message.get("tool_calls") or ()
        known = [call.get("id") for call in given]
        ids = [kept_id(each) or call_id(self._turns, n) for n, each in enumerate(known)]
        calls = [(function["name"], function["arguments"]) for function in map(function_of, given)]
        self._asked = {own: id_ for own, id_ in zip(known, ids, strict=True) if own}, ids
        self._say(said, [(id_, *call) for id_, call in zip(ids, calls, strict=True)])
        return self._encode(tuning)

    def _say(self, said: Any, calls: Iterable[tuple[str, str, dict[str, Any]]]) -> None:
        """Append a message of the model: a text or chunks, and calls as (id, name, arguments)."""
        content = self._chunks({"role": "assistant", "content": said})
        made = [
            {
                "id": id_,
                "function": {"name": name, "arguments": json.dumps(given)},
            }
            for id_, name, given in calls
        ]
        self._messages.append({"role": "assistant", "content": content, "tool_calls": made})
        self._turns += 1

    def answered(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Append recorded messages that answer the model's; the tokens of the prompt after them."""
        by_id, ids = self._asked
        for number, given in enumerate(self._put(messages)):
            if given["role"] == "tool":
                id_ = by_id.get(given.get("tool_call_id")) or self._id_at(ids, number)
                given = {"role": "tool", "content": given["content"], "tool_call_id": id_}
            self._messages.append(given)
        return self._encode()

    def _id_at(self, ids: Sequence[str], number: int) -> str:
        """The id for a tool's answer by its position; there may be more answers than calls."""
        return ids[number] if number < len(ids) else call_id(self._turns - 1, number)

    def _put(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages that answer the model's as the library takes them: before v15, with the images
        of tools in the user's message that follows."""
        given = [dict(message) for message in messages]
        tools = [m for m in given if m["role"] == "tool"]
        if not self._tools_show and any(m.get("images") for m in tools):
            shown = [image for m in tools for image in m.pop("images", ())]
            for each in tools:
                each["content"] = each["content"].replace(PLACE, "")
            others = [m for m in given if m["role"] != "tool"]
            others = others or [{"role": "user", "content": ""}]
            first = others[0]
            first["content"] = PLACE * len(shown) + first["content"]
            first["images"] = [*shown, *first.get("images", ())]
            given = [*tools, *others]
        self.images = [*self.images, *(image for m in given for image in m.get("images", ()))]
        return [self._taken(message, thinks=False) for message in given]

    def _encode(self, mistral: MistralTokenizer | None = None) -> list[int]:
        from mistral_common.exceptions import MistralCommonException
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        given = {
            "messages": self._messages,
            "tools": self._tools,
            "reasoning_effort": self._effort,
        }
        try:
            request: Any = ChatCompletionRequest.model_validate(given)
            return list((mistral or self._mistral).encode_chat_completion(request).tokens)
        except (MistralCommonException, ValueError, AssertionError) as error:
            raise InputError(f"mistral-common refuses it: {error}") from None

    def _encode_one(self, message: Mapping[str, Any]) -> list[int]:
        from mistral_common.protocol.instruct.messages import ToolMessage, UserMessage

        instruct: Any = self._mistral.instruct_tokenizer
        if message["role"] == "tool":
            answer = ToolMessage(content=message["content"], tool_call_id=message["tool_call_id"])
            return list(instruct.encode_tool_message(answer, False)[0])
        asked = UserMessage(content=message["content"])
        encoded = instruct.encode_user_message(
            asked, None, is_last=True, is_first=False, force_img_first=True
        )
        return list(encoded[0])

    def _taken(self, message: Mapping[str, Any], thinks: bool = True) -> dict[str, Any]:
        """A message of a chat as the library takes it: with images in chunks of their own, and
        thoughts unless it `thinks` not."""
        taken = dict(message)
        if images := taken.pop("images", ()):
            instruct: Any = self._mistral.instruct_tokenizer
            if instruct.image_encoder is None:
                raise InputError(
                    "conversation.tokens: mistral: the tokenizer's file (tekken.json) knows no "
                    "images; set template"
                )
            texts, chunks = taken["content"].split(PLACE), list[dict[str, Any]]()
            for text, image in zip_longest(texts, images):
                chunks += [{"type": "text", "text": text}] * bool(text)
                chunks += [{"type": "image_url", "image_url": image}] * bool(image)
            taken["content"] = chunks
        elif thinks:
            taken["content"] = self._chunks(message)
        return taken

    def _chunks(self, message: Mapping[str, Any]) -> Any:
        """The content of a message, with thoughts in chunks of their own; the user's is a text."""
        text, (opening, closing) = message["content"], self._encoder.tags
        may_think = self.thinks and message["role"] in ("system", "assistant")
        if not may_think or opening not in text:
            return text
        parts = re.split(
            f"{re.escape(opening)}(.*?)(?:{re.escape(closing)}|\\Z)", text, flags=re.DOTALL
        )
        kinds = ("text", "thinking")
        return [
            {"type": (kind := kinds[n % 2]), kind: part} for n, part in enumerate(parts) if part
        ]


class MistralExamples:
    """Makes examples from recorded conversations, whose tokens are those of Mistral's library: what
    it writes for fine-tuning, cut at its own prompt; see `recorded.ConversationEncoder`.

    Args:
        encoder: makes the model's prompts.

    Raises:
        InputError: see `load_mistral`.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder, key = encoder, "data.tokens: mistral"
        self._mistral = load_mistral(encoder, key)
        self._tuning = load_mistral(encoder, key, "finetuning")

    def examples(self, conversation: Conversation, where: str) -> Iterator[Example]:
        """The sequences of a conversation, usually one.

        Raises:
            InputError: the library refuses the messages, or writes a prompt differently once a
                message follows.
        """
        chat = MistralChat(self._mistral, self._encoder, conversation.tools)
        example, written, prompt, shown = Example([], []), list[int](), list[int](), 0
        numbered = enumerate(conversation.messages)
        by_model = groupby(numbered, lambda pair: pair[1]["role"] == "assistant")
        for said, group in by_model:
            places, messages = zip(*group, strict=True)
            try:
                if not said:
                    prompt = chat.answered(messages) if written else chat.start(messages)
                    continue
                whole = chat.learned(messages[0], self._tuning)
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
            if whole[: len(prompt)] != prompt:
                raise InputError(
                    f"{where}: mistral-common writes a prompt differently once a message follows; "
                    f"use data.tokens: template"
                )
            if places[0] < conversation.given:
                written = whole
                continue
            if example.prompt and prompt[: len(written)] == written:
                example = example.put(prompt[len(written) :], chat.images[shown:])
            else:
                if example.prompt:
                    yield example
                example = Example(prompt, [], images=tuple(chat.images))
            shown = len(chat.images)
            example.response.extend(whole[len(prompt) :])
            written = whole
        yield example


def plain_tool(tool: Tool) -> dict[str, Any]:
    """A description without keys that the library does not know, e.g. the type of the result."""
    function = tool["function"]
    known = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    return {"type": "function", "function": known}
