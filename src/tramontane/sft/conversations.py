"""Recorded conversations as examples, with the tokens that training makes of conversations.

A conversation is one sequence whose inserted tokens, e.g. a tool's answers, are not learned from.
Where the chat template rewrites earlier turns, another sequence begins, as with
`conversation.history: fork`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tramontane.data.prompts import PromptEncoder, Tool
from tramontane.environments.calls import Parser
from tramontane.environments.chat import Chat, ChatFormat, Chatted
from tramontane.errors import InputError

ROLES = ("system", "user", "assistant", "tool")


class Example(NamedTuple):
    """Token ids of a prompt and of its response, EOS included; `inserted` has the spans of the
    response that the model did not write."""

    prompt: list[int]
    response: list[int]
    inserted: tuple[range, ...] = ()


class Conversation(NamedTuple):
    """A chat that ends with the model's message, and descriptions of the tools in it."""

    messages: list[Chatted]
    tools: list[Tool]

    @classmethod
    def of(cls, messages: Any, tools: Any, where: str) -> Conversation:
        """The content of a row's fields; `tools` may be JSON, and a message's thoughts may be in
        its `reasoning_content`.

        Raises:
            InputError: the chat has no reply of the model, or two replies in a row.
        """
        if isinstance(tools, str):
            tools = json.loads(tools)
        roles = [m.get("role") if isinstance(m, dict) else None for m in messages]
        if "assistant" not in roles[1:] or not {*roles} <= {*ROLES}:
            raise InputError(
                f"{where}: field 'messages' must be a chat with roles {', '.join(ROLES)} and a "
                f"message of the assistant after others (it has {roles})"
            )
        last = len(roles) - roles[::-1].index("assistant")
        if any(pair == ("assistant", "assistant") for pair in pairwise(roles)):
            raise InputError(f"{where}: two messages of the assistant in a row; join them")
        return cls([dict(m) for m in messages[:last]], list(tools or ()))


class ConversationEncoder:
    """Makes examples from conversations.

    Args:
        encoder: makes the model's prompts.
        rest: the part of a message's text that follows its prompt, by (location, text).
    """

    def __init__(self, encoder: PromptEncoder, rest: Callable[[str, str], str]) -> None:
        self._encoder, self._rest = encoder, rest
        self._form = ChatFormat(encoder)
        self._parser = Parser(encoder.tokenizer, "auto", encoder.tags)

    def examples(self, conversation: Conversation, where: str) -> Iterator[Example]:
        """The sequences of a conversation, usually one.

        Raises:
            InputError: the template refuses the messages, or cannot write a call.
        """
        messages, tools = conversation
        tokenizer, chat = self._encoder.tokenizer, Chat(self._form, tools)
        ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        before = ends[0]
        prompt = chat.start([_plain(message) for message in messages[:before]])
        response, inserted = list[int](), list[range]()
        for place, following in zip(ends, [*ends[1:], None], strict=True):
            rest = self._rest(where, self._text(messages, place, tools, where))
            ids = tokenizer(rest, add_special_tokens=False)["input_ids"]
            response += [*ids, tokenizer.eos_token_id]
            if following is None:
                break
            message = self._parser.parse(chat.prefix + rest, tools, chat.prefix)
            answers = [_plain(answer) for answer in messages[place + 1 : following]]
            behind = chat.follow(message, answers)
            if behind.rewritten:
                yield Example(prompt, response, tuple(inserted))
                prompt, response, inserted = behind.whole(), [], []
            else:
                put = chat.tokens(behind, response[-1])
                inserted.append(range(len(response), len(response) + len(put)))
                response += put
        yield Example(prompt, response, tuple(inserted))

    def _text(
        self, messages: Sequence[Chatted], place: int, tools: Sequence[Tool], where: str
    ) -> str:
        """A message as the model writes it, its calls included."""
        message = _plain(messages[place])
        text: str = message["content"]
        if thoughts := messages[place].get("reasoning_content"):
            text = f"{self._encoder.tags.around(thoughts)}{text}"
        calls = [_function(call) for call in messages[place].get("tool_calls") or ()]
        if not calls:
            return text
        message |= {
            "content": text,
            "tool_calls": [{"type": "function", "function": call} for call in calls],
        }
        if self._form.reads_calls:
            chat: Any = [*messages[:place], message]
            start = self._encoder.render(chat[:-1], where, tools)
            written = self._encoder.render(chat, where, tools)
            if written.startswith(start):
                text = written[len(start) :]
                places = [place for end in self._form.ends if (place := text.find(end)) >= 0]
                text = text[: min(places, default=None)]
        elif self._parser.form == "hermes":
            text += "".join(f"\n<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
        names = [call.name for call in self._parser.parse(text, tools or [{}]).calls]
        if names != [call["name"] for call in calls]:
            raise InputError(
                f"{where}: its call of {calls[0]['name']} cannot be written as the model does; put "
                f"it into the message's content"
            )
        return text


def _plain(message: Mapping[str, Any]) -> Chatted:
    return {"role": message["role"], "content": message.get("content") or ""}


def _function(call: Mapping[str, Any]) -> dict[str, Any]:
    """Name and arguments of a call, which may be JSON, as in OpenAI's API."""
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {"name": function["name"], "arguments": arguments}
