"""Recorded conversations as examples, with the tokens that training makes of conversations.

A conversation is one sequence whose inserted tokens, e.g. a tool's answers, are not learned from.
Where the chat template rewrites earlier turns, another sequence begins, as with
`conversation.history: fork`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple, cast

from tramontane.data.prompts import GENERATED, PromptEncoder, Tool
from tramontane.data.special_tokens import Marks
from tramontane.environments.chat_format import ChatFormat
from tramontane.environments.forms import kept_id, written
from tramontane.environments.learned import call_id, shared
from tramontane.errors import InputError
from tramontane.journals import unique_keys
from tramontane.types import PLACE

THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # a message's key for its thoughts
_UNASKED: dict[str, Any] = {"id": call_id(0, 0), "function": {"name": "environment"}}
ROLES = ("system", "user", "assistant", "tool")


class Example(NamedTuple):
    """Token ids of a prompt and of its response, EOS included; `inserted` has the spans of the
    response that the model did not write."""

    prompt: list[int]
    response: list[int]
    inserted: tuple[range, ...] = ()
    images: tuple[str, ...] = ()  # of the prompt, as data URIs
    put_images: tuple[str, ...] = ()  # of the inserted tokens

    def put(self, ids: Sequence[int], images: Sequence[str] = ()) -> Example:
        """It with tokens appended that the model did not write, and their images."""
        span = range(len(self.response), len(self.response) + len(ids))
        response, inserted = [*self.response, *ids], (*self.inserted, span)
        put = *self.put_images, *images
        return self._replace(response=response, inserted=inserted, put_images=put)


class Conversation(NamedTuple):
    """A chat that ends with the model's message, and descriptions of the tools in it. Of the first
    `given` messages, those of the model are not learned either. A message may have `images`, each
    at a `PLACE` of its content."""

    messages: list[dict[str, Any]]
    tools: list[Tool]
    given: int = 0

    @classmethod
    def of(cls, messages: Any, tools: Any, where: str, given: int = 0) -> Conversation:
        """The content of a row's fields; `tools` may be JSON, and a message's thoughts may be in
        its `reasoning_content`.

        Raises:
            InputError: the chat has no reply of the model, or two replies in a row; or the tools
                are not JSON.
        """
        if isinstance(tools, str):
            try:
                tools = json.loads(tools, object_pairs_hook=unique_keys) if tools.strip() else []
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: the tools are text, but not JSON ({error})") from None
        roles = [m.get("role") if isinstance(m, dict) else None for m in messages]
        if "assistant" not in roles[max(given, 1) :] or not {*roles} <= {*ROLES}:
            fields = "fields with prompt and response" if given else "field 'messages'"
            raise InputError(
                f"{where}: {fields} must be a chat with roles {', '.join(ROLES)} and a "
                f"message of the assistant after others (it has {roles})"
            )
        last = len(roles) - roles[::-1].index("assistant")
        if any(pair == ("assistant", "assistant") for pair in pairwise(roles)):
            raise InputError(f"{where}: two messages of the assistant in a row; join them")
        return cls([dict(m) for m in messages[:last]], list(tools or ()), given)


class ConversationEncoder:
    """Makes examples from conversations, whose tokens are those of the chat template.

    Args:
        encoder: makes the model's prompts.
        rest: the part of a message's text that follows its prompt, by (location, text); for models
            without a chat template.
    """

    def __init__(self, encoder: PromptEncoder, rest: Callable[[str, str], str]) -> None:
        self._encoder, self._rest = encoder, rest
        self._form, self._marking = ChatFormat(encoder), encoder.marking()
        # Calls as text, as `TOOLS_PROMPT` asks for them, or as the template shows.
        form = self._form.calls_form
        self._by_text = form == "lfm" or (
            form == "hermes" and (not encoder.reads_tools or "<tool_call>" in self._form.template)
        )

    def examples(self, conversation: Conversation, where: str) -> Iterator[Example]:
        """The sequences of a conversation, usually one.

        Raises:
            InputError: the template refuses the messages, or does not write a part of one.
        """
        messages, tools, given = conversation
        marks, chat = Marks("\ufdd0"), list[dict[str, Any]]()
        text, example, seen = "", Example([], []), 0
        images = [image for message in messages for image in message.get("images", ())]
        for message, is_learned in self._turns(messages, given, marks):
            if not is_learned:
                chat += message
                continue
            start, rest = self._written(chat, message[0], tools, where)
            before, seen = seen, sum(str(m.get("content")).count(PLACE) for m in chat)
            chat += message
            if example.prompt and start.startswith(text):
                new = tuple(images[before:seen])
                example = example.put(self._encoded(start[len(text) :], new, marks, where), new)
            else:
                if example.prompt:
                    yield example
                shown = tuple(images[:seen])
                ids = self._encoded(start, shown, marks, where)
                example = Example([*self._encoder.first_tokens, *ids], [], images=shown)
            for written_text, learned in rest:
                ids = self._encoder.tokenizer(written_text, add_special_tokens=False)["input_ids"]
                size = len(example.response)
                example.response.extend(ids)
                if not learned:
                    span = range(size, size + len(ids))
                    example = example._replace(inserted=(*example.inserted, span))
            text = start + "".join(part for part, _ in rest)
        yield example

    def _encoded(self, text: str, images: Sequence[str], marks: Marks, where: str) -> list[int]:
        """Tokens of a rendered text with marks, and with images at the places of the template."""
        if images:
            text = self._encoder.illustrated(text, images, where)
        return self._encoder.special.encode(text, marks)

    def _turns(
        self, messages: Sequence[dict[str, Any]], given: int, marks: Marks
    ) -> Iterator[tuple[list[Any], bool]]:
        """The messages as the template takes them: one of the model, or those between two; with
        whether they are learned, as the model's are after the first `given` of all."""
        calls: list[dict[str, Any]] = []
        numbered = groupby(enumerate(messages), lambda pair: pair[1]["role"] == "assistant")
        for said, pairs in numbered:
            places, group = zip(*pairs, strict=True)
            if said:
                made = self._made(group[0])
                calls = made.get("tool_calls", [])
                yield [made], places[0] >= given
                continue
            put, names = list[Any](), iter(calls)
            for message in group:
                own = _plain(message)
                texts = own["content"].split(PLACE)
                marked = (self._encoder.special.mark(text, own["role"], marks) for text in texts)
                own["content"] = PLACE.join(marked)
                if own["role"] == "tool":
                    call = next(names, _UNASKED)
                    own |= {"name": call["function"]["name"], "tool_call_id": call["id"]}
                put.append(own)
            yield self._form.as_taken(put), False

    def _made(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message of the model with its thoughts and calls where the template reads them."""
        made: Any = _plain(message)
        tags = self._encoder.tags
        calls = [function_of(call) for call in message.get("tool_calls") or ()]
        thoughts = next((message[key] for key in THOUGHTS if message.get(key)), None)
        if calls and self._form.writes_calls(made["content"]):
            given = [(call["name"], call["arguments"]) for call in calls]
            made = self._form.calling(made["content"], given, _ids_of(message))
        elif calls and self._by_text:
            text = written(self._form.calls_form, calls)
            made["content"] = "\n".join(filter(None, [made["content"], text]))
        elif calls:
            made["unwritten"] = f"call of {calls[0]['name']}"
        if thoughts and self._form.reads_thoughts:
            made["reasoning_content"] = thoughts
        elif thoughts and self._form.drops_thoughts:
            made["unwritten"] = "thoughts"
        elif thoughts:
            made["content"] = f"{tags.around(thoughts)}{made['content']}"
        return made

    def _written(
        self, chat: list[dict[str, Any]], message: dict[str, Any], tools: Sequence[Tool], where: str
    ) -> tuple[str, list[tuple[str, bool]]]:
        """The text before a message of the model, and the parts of the message, to the token that
        ends it, each with whether it is learned."""
        encoder, given = self._encoder, cast(Any, [*chat, message])
        if self._marking:
            start, parts = self._marked(self._marking, given, tools, where)
        elif not self._form.template:
            start = encoder.render(given[:-1], where, tools)
            text = self._rest(where, message["content"]) + encoder.tokenizer.eos_token
            parts = [(text, True)]
        else:
            self._form.check_ends()
            start = encoder.render(given[:-1], where, tools)
            whole = encoder.complete(given, where, tools)
            place = shared(start, whole)
            place = min(encoder.special.boundary(text, place) for text in (start, whole))
            if place < len(start) - len(encoder.opened_in(start)):
                raise InputError(
                    f"{where}: the chat template writes a prompt differently once a message "
                    f"follows; give another template (data.chat_template)"
                )
            called = "tool_calls" in message
            start, parts = whole[:place], [(self._form.closed(whole[place:], called=called), True)]
        text = "".join(part for part, _ in parts)
        if encoder.never_closes(start, text):
            raise InputError(
                f"{where}: the chat template writes a message into thoughts that it never closes, "
                f"or opens twice; give another template (data.chat_template)"
            )
        self._check(message, encoder.begun_in(start) + text, where)
        return start, parts

    @staticmethod
    def _marked(
        marking: PromptEncoder, given: Any, tools: Sequence[Tool], where: str
    ) -> tuple[str, list[tuple[str, bool]]]:
        """`_written` where the template marks what the model generates: this is what is learned."""
        before = marking.complete(given[:-1], where, tools).count(GENERATED)
        pieces = marking.complete(given, where, tools).split(GENERATED)
        if len(pieces) < before + 3:
            raise InputError(f"{where}: the chat template marks no part of a message as generated")
        own = pieces[before + 1 : -1]
        parts = [(text, number % 2 == 0) for number, text in enumerate(own) if text]
        return "".join(pieces[: before + 1]), parts

    def _check(self, message: dict[str, Any], text: str, where: str) -> None:
        """Refuse a message that the template writes only in part."""
        parts = {
            "content": message["content"] or "",
            "thoughts": message.get("reasoning_content") or "",
        }
        left = [part for part, wanted in parts.items() if not _holds(text, wanted)]
        beside = text.replace((message["content"] or "").strip(), "", 1)
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        lost = (name for name in dict.fromkeys(names) if beside.count(name) < names.count(name))
        left += [f"call of {name}" for name in lost]
        if part := message.get("unwritten"):
            left.append(part)
        if left:
            raise InputError(
                f"{where}: the chat template does not write a message's {' and '.join(left)}; "
                f"give another template (data.chat_template), or put it into the content as the "
                f"model writes it"
            )


def _ids_of(message: Mapping[str, Any]) -> list[str]:
    """The ids of a row's calls, where they have a model's form."""
    calls = enumerate(message["tool_calls"])
    return [kept_id(call.get("id")) or call_id(0, number) for number, call in calls]


def _holds(text: str, wanted: str) -> bool:
    return "".join(wanted.split()) in "".join(text.split())


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": message["role"], "content": message.get("content") or ""}


def function_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Name and arguments of a call, which may be JSON, as in OpenAI's API."""
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {"name": function["name"], "arguments": arguments}
