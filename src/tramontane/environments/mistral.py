"""Conversations in Mistral's own tokens, with `mistral-common` (an extra; Python ≥ 3.11).

Mistral's models are trained on the tokens that its library makes of messages; Jinja templates only
come close. The library encodes messages one by one, so what follows a turn is the encoding of the
new messages, token for token, and nothing in a text can become a control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tramontane.data.prompts import PromptEncoder, Tool
from tramontane.environments.calls import Message as Parsed
from tramontane.environments.chat import Chatted, call_id, ids_of
from tramontane.errors import InputError, install

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


def load_mistral(encoder: PromptEncoder) -> MistralTokenizer:
    """Mistral's tokenizer of a model.

    Raises:
        InputError: the library or the file is missing; its tokens are not those of the model's
            tokenizer; or there is a `response_prefix` or a `chat_template`, which it cannot write.
    """
    key = "conversation.tokens: mistral"
    config, tokenizer = encoder.config, encoder.tokenizer
    if config.response_prefix or config.chat_template:
        raise InputError(f"{key}: data.response_prefix and data.chat_template need `template`")
    try:
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
    mistral = MistralTokenizer.from_file(str(found[0]))
    own = mistral.instruct_tokenizer.tokenizer
    ids = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    same = own.encode(_PROBE, bos=False, eos=False) == ids and own.eos_id == tokenizer.eos_token_id
    if not same:
        raise InputError(f"{key}: {found[0].name} has different tokens than tokenizer.json")
    return mistral


class MistralChat:
    """One conversation as Mistral's tokenizer writes it; see `chat.Chat`.

    Args:
        mistral: the model's tokenizer.
        encoder: for the system prompt and the thinking tags.
        tools: descriptions of the tools that the model may call.
    """

    prefix = ""
    calls_form = "mistral"

    def __init__(
        self, mistral: MistralTokenizer, encoder: PromptEncoder, tools: Sequence[Tool] = ()
    ) -> None:
        self._mistral, self._encoder = mistral, encoder
        self._tools = [plain_tool(tool) for tool in tools]
        self._messages: list[Chatted] = []
        self._ids: list[int] = []
        self._turns = 0
        self.thinks = getattr(mistral.instruct_tokenizer, "BEGIN_THINK", None) is not None
        # Before v7, a message has a text or calls.
        self.takes_both = hasattr(mistral.instruct_tokenizer, "BEGIN_TOOL_CONTENT")
        self._effort = encoder.config.chat_template_kwargs.get("reasoning_effort")

    def copy(self) -> MistralChat:
        """A copy that this chat's further messages do not change."""
        copied = copy(self)
        copied._messages = [*self._messages]
        return copied

    def start(self, messages: Sequence[Chatted]) -> list[int]:
        """The tokens of the prompt of the first turn.

        Raises:
            InputError: Mistral's validator refuses the messages.
        """
        given = list(messages)
        own = given.pop(0)["content"] if given[0]["role"] == "system" else None
        if (system := self._encoder.system(own)) is not None:
            given.insert(0, {"role": "system", "content": system})
        self._messages = [{**m, "content": self._chunks(m)} for m in given]
        try:
            self._ids = self._encode()
        except InputError:  # some versions take no thoughts in a system message
            if self._messages == given:
                raise
            self._messages = [dict(m) for m in given]
            self._ids = self._encode()
        return self._ids

    def follow(self, message: Parsed, new: Sequence[Chatted]) -> MistralFollowing:
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
        chunks = self._chunks({"role": "assistant", "content": said})
        own: Chatted = {"role": "assistant", "content": chunks}
        ids = ids_of(message.calls, self._turns)
        if message.calls:
            own["tool_calls"] = [
                {
                    "id": ids[number],
                    "function": {
                        # As the library's validator takes it; a name that no tool has is answered.
                        "name": re.sub("[^a-zA-Z0-9_-]", "_", call.name)[:64] or "invalid",
                        "arguments": json.dumps(call.arguments, ensure_ascii=False),
                    },
                }
                for number, call in enumerate(message.calls)
            ]
        self._messages.append(own)
        for number, given in enumerate(new):
            if given["role"] == "tool":
                call = ids[number] if number < len(ids) else call_id(self._turns, number)
                given = {**given, "tool_call_id": call}
            self._messages.append(dict(given))
            put += self._encode_one(given)
        self._turns += 1
        self._ids = whole = self._encode()
        rewritten = dropped or whole[: len(before)] != before or whole[-len(put) :] != put
        return MistralFollowing(put, rewritten, lambda: whole)

    def parts(
        self, message: Parsed, new: Sequence[Chatted]
    ) -> Iterator[tuple[Parsed, Sequence[Chatted]]]:
        """A message of the model and what answers it."""
        yield message, new

    def tokens(self, following: MistralFollowing, last: int) -> list[int]:
        """The tokens that follow a message of the model, whose last token is `last`."""
        eos = self._mistral.instruct_tokenizer.tokenizer.eos_id
        return following.put if last == eos else [eos, *following.put]

    def _encode(self) -> list[int]:
        from mistral_common.exceptions import MistralCommonException
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        given: Chatted = {"messages": self._messages, "tools": self._tools or None}
        if self._effort is not None:
            given["reasoning_effort"] = self._effort
        try:
            request: Any = ChatCompletionRequest.model_validate(given)
            return list(self._mistral.encode_chat_completion(request).tokens)
        except (MistralCommonException, ValueError) as error:
            raise InputError(f"mistral-common refuses the conversation: {error}") from None

    def _encode_one(self, message: Chatted) -> list[int]:
        from mistral_common.protocol.instruct.messages import ToolMessage, UserMessage

        instruct: Any = self._mistral.instruct_tokenizer
        if message["role"] == "tool":
            answer = ToolMessage(content=message["content"], tool_call_id=message["tool_call_id"])
            return list(instruct.encode_tool_message(answer, False)[0])
        asked = UserMessage(content=message["content"])
        encoded = instruct.encode_user_message(asked, None, is_last=True, is_first=False)
        return list(encoded[0])

    def _chunks(self, message: Chatted) -> Any:
        """The content of a message, with thoughts in chunks of their own; the user's is a text."""
        text, (opening, closing) = message["content"], self._encoder.tags
        may_think = self.thinks and message["role"] in ("system", "assistant")
        if not may_think or opening not in text:
            return text
        parts = re.split(
            f"{re.escape(opening)}(.*?)(?:{re.escape(closing)}|\\Z)", text, flags=re.DOTALL
        )
        kinds = ("text", "text"), ("thinking", "thinking")
        return [
            {"type": kinds[n % 2][0], kinds[n % 2][1]: part} for n, part in enumerate(parts) if part
        ]


def plain_tool(tool: Tool) -> dict[str, Any]:
    """A description without keys that the library does not know, e.g. the type of the result."""
    function = tool["function"]
    known = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    return {"type": "function", "function": known}
