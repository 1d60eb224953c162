"""The tokens of a conversation: what was sampled stays, and only what is new is rendered.

The chat template is applied to the whole conversation, with a placeholder for each message of the
model. The text after the last one is the end of the model's turn, the new messages and the start
of the next turn; its tokens are appended to those so far, without the end of the turn if the model
has sampled one. So the tokens of a turn extend the earlier ones exactly, whatever the model wrote
and however the template would render it.

A template may rewrite what it wrote earlier: drop the thoughts of earlier turns, or number the
turns. This is detected by comparing its text before the last placeholder with that of the previous
turn. The conversation then continues as a new sequence (`history: fork`), or as if the template had
only appended (`keep`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from tramontane.data.prompts import Tool
from tramontane.data.special_tokens import Marks
from tramontane.environments.calls import Parsed
from tramontane.environments.chat_format import ChatFormat
from tramontane.environments.learned import call_id
from tramontane.errors import InputError
from tramontane.types import PLACE, Message, ThinkingTags, ToolCall

_MARK = "\ufdd0"  # a noncharacter, like the next; see `Marks`
_NEW = "\ufdd1"  # at the start of the first new message


def ids_of(calls: Sequence[ToolCall], turn: int) -> list[str]:
    """The ids of the calls of a turn: those that the model wrote, else `call_id`."""
    return [call.id or call_id(turn, number) for number, call in enumerate(calls)]


@dataclass
class Following:
    """What follows a message of the model."""

    # Text after the message: the end of its turn, the new messages, the start of the next turn.
    text: str
    new: int  # place of the new messages' first text in it
    in_call: bool  # True if the message ended with calls, so that the text begins within one
    rewritten: bool  # True if the template now writes the conversation before it differently
    # Makes the tokens of the whole conversation, as the template writes it.
    whole: Callable[[], list[int]]
    images: Sequence[str] = ()  # of the new messages

    def behind(self, ends: Iterable[str]) -> tuple[str, str]:
        """(end of the model's turn, text after it); the end is the first of `ends` in the text."""
        before = self.text[: self.new]
        first = min((end for end in ends if end in before), key=before.index, default="")
        place = before.index(first) + len(first)
        return first if self.in_call else self.text[:place], self.text[place:]


class Chat:
    """One conversation as its chat template writes it.

    Args:
        form: the model's.
        tools: descriptions of the tools that the model may call.

    Attributes:
        prefix: the start of the model's next message that the prompt already holds.
        images: those of its messages so far, as data URIs. A message has its own as `images`, each
            at a `PLACE` of its content.
    """

    def __init__(self, form: ChatFormat, tools: Sequence[Tool] = ()) -> None:
        self._form, self._tools = form, list(tools)
        self._marks = Marks(_MARK)
        self._chat: list[Message] = []  # as it is
        self._signs: list[Message] = []  # with a sign for each message of the model
        self._text = ""  # of `_signs`
        self._turns = 0
        self._nonce = uuid4().hex[:12]
        self.prefix = ""
        self.images: list[str] = []

    def copy(self) -> Chat:
        """A copy that this chat's further messages do not change."""
        copied = copy(self)
        copied._chat = [*self._chat]
        return copied

    def start(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of the prompt of the first turn.

        Raises:
            InputError: the template refuses the messages.
        """
        self._chat = [self._marked(message) for message in messages]
        self._signs = list(self._chat)
        self._render()
        return self._whole()

    def follow(self, message: Parsed, new: Sequence[Message]) -> Following:
        """Append a message of the model and the messages that answer it; those of the role `tool`
        answer its calls, in order.

        Raises:
            InputError: the template refuses them.
        """
        first, *others = self.parts(message, new)
        # Several calls in the text of one message, which such a template would write anew.
        if not others or not self._form.ends_anew or self._form.history == "keep":
            return self._follow(message, new)
        self._follow(*first)
        following = [self._follow(*each) for each in others][-1]
        return replace(following, rewritten=True)

    def _follow(self, message: Parsed, new: Sequence[Message]) -> Following:
        if not message.thoughts.strip():  # an empty pair of tags
            message = message._replace(thoughts="")
        before, prefix = self._text.removesuffix(self.prefix), self.prefix
        signs, number, earlier = self._signs, len(self._chat), self.images
        put = self._put(new, message)
        first: Message = {**put[0], "content": _NEW + put[0]["content"]}
        self._turns += 1
        moved = False  # a part of the message is written after its last sign
        refused: InputError | None = None
        for apart in (True, False):
            real, sign, last = self._model_message(message, prefix, apart)
            self._chat[number:] = [real, *put]
            self._signs = [*signs, sign, first, *put[1:]]
            try:
                text = self._rendered_behind(last)
                if "tool_calls" in real and self._nonce in text:
                    text, moved = self._moved(text, message, number)
                break
            except InputError as error:  # some templates take one call a message, or none
                refused = refused or error
                if "tool_calls" not in real:
                    raise refused from None
        if self._nonce in text:
            raise InputError("the chat template writes a message of the model in two places")
        told = self._text[len(before) :].rpartition(last)[0]
        appended = self._text.startswith(before) and self._as_sampled(told, message, prefix)
        called = "tool_calls" in real
        if self._form.calls_anew if called else self._form.ends_anew:
            appended = False
        place = text.index(_NEW)
        text = text.replace(_NEW, "")
        rewritten, images = moved or not appended, self.images[len(earlier) :]
        return Following(text, place, called, rewritten, self._whole, images)

    def _moved(self, text: str, message: Parsed, number: int) -> tuple[str, bool]:
        """(the text after a message whose content the template writes behind its calls, True if
        the model wrote it elsewhere)."""
        content = self._sign("a")
        behind = text.partition(content)[2]
        said = message.text.rstrip()
        before = said.removesuffix(message.content.strip())
        wrote = before != said and message.calls[-1].name in before
        if wrote and _NEW in behind and self._nonce not in behind:
            return behind, False
        self._signs[number] = {**self._signs[number], "content": ""}
        self._render()
        return self._text.rpartition(self._sign(f"c{len(message.calls) - 1}"))[2], True

    def _as_sampled(self, told: str, message: Parsed, prefix: str) -> bool:
        """True if the template still writes the thoughts of a message, or an empty pair of tags,
        where and only where the model wrote them."""
        form, closing = self._form, self._form.encoder.tags.closing
        tagged = form.calls_form != "harmony" and (form.reads_thoughts or not message.thoughts)
        if tagged and (closing in message.text) != (closing in told):
            return False
        if message.thoughts:
            return self._sign("t") in told
        return told.startswith(prefix)

    def _rendered_behind(self, sign: str) -> str:
        """Render the conversation; returns its text after a sign."""
        self._render()
        _, found, text = self._text.rpartition(sign)
        if not found or _NEW not in text:
            raise InputError("the chat template omits a message of the conversation")
        return text

    def tokens(self, following: Following, last: int) -> list[int]:
        """The tokens that follow a message of the model.

        Args:
            following: what follows it.
            last: the message's last token.

        Raises:
            InputError: the tokenizer does not keep the end of a turn as a token.
        """
        encoder, sampled = self._form.encoder, self._form.special.get(last)
        end, text = following.behind([sampled] if sampled else ())
        if not end:  # the template ends turns differently
            end, text = following.behind(self._form.ends)
        if not end and following.in_call:
            raise InputError("the chat template has no token that ends a message with calls")
        if following.images:
            text = encoder.illustrated(text, following.images)
        if sampled is None:
            return encoder.special.encode(end + text, self._marks)
        ids = encoder.special.encode(sampled + text, self._marks)
        if ids[0] != last:
            raise InputError(f"the tokenizer does not keep {sampled!r} as a token of its own")
        return ids[1:]

    def _render(self) -> None:
        encoder = self._form.encoder
        self._text = encoder.render(self._signs, tools=self._tools)
        self.prefix = encoder.begun_in(self._text)

    def _whole(self) -> list[int]:
        encoder = self._form.encoder
        text = encoder.render(self._chat, tools=self._tools)
        if self.images:
            text = encoder.illustrated(text, self.images)
        return [*encoder.first_tokens, *encoder.special.encode(text, self._marks)]

    def _model_message(
        self, message: Parsed, prefix: str, apart: bool
    ) -> tuple[Message, Message, str]:
        """A message of the model as it is, the same with signs in place of its parts, and the last
        sign; calls that are not `apart` are left in its text."""
        form, thoughts, content = self._form, self._sign("t"), self._sign("a")
        tags, calls = form.encoder.tags, message.calls if apart and form.reads_calls else []
        said = message.content if calls else message.text
        if form.reads_thoughts or form.drops_thoughts:
            said = message.content if calls or not message.calls else _behind(message.text, tags)
            around, started = "", ""
        else:
            written = message.thoughts in message.text  # clients give them apart
            around = tags.around(message.thoughts) if message.thoughts and written else ""
            around += "\n\n" if around and message.content else ""
            started = tags.around(f"\n{thoughts}\n") + "\n\n" if around else prefix
            if not around and tags.closing in message.text:  # an empty pair
                started = f"{message.text.partition(tags.closing)[0]}{tags.closing}\n\n"
        said = self._mark(around + said if calls else said, "assistant")
        real: Message = {"role": "assistant", "content": said}
        sign: Message = {"role": "assistant", "content": started + content}
        if calls:
            ids = ids_of(calls, self._turns - 1)
            made = [(made.name or "invalid", self._map(made.arguments)) for made in calls]
            signs = [(name, {"x": self._sign(f"c{n}")}) for n, (name, _) in enumerate(made)]
            shown = started + content if message.content else started if around else ""
            real = form.calling(said, made, ids)
            sign = form.calling(shown, signs, ids)
            content = self._sign(f"c{len(calls) - 1}")
        if form.reads_thoughts and message.thoughts:
            real["reasoning_content"] = self._mark(message.thoughts, "assistant")
            sign["reasoning_content"] = thoughts
        return real, sign, content

    def parts(
        self, message: Parsed, new: Sequence[Message]
    ) -> Iterator[tuple[Parsed, Sequence[Message]]]:
        """A message of the model and what answers it; for templates that write one call a message,
        a message for each call, with its answer."""
        calls = message.calls
        answers = [each for each in new if each["role"] == "tool"]
        if not self._form.one_call or len(calls) < 2 or len(answers) != len(calls):
            yield message, new
            return
        for number, call in enumerate(calls):
            put = list(new[number:]) if call is calls[-1] else [answers[number]]
            yield message._replace(calls=[call]), put
            message = Parsed("", "", "", [])

    @property
    def calls_form(self) -> str:
        """The text form of calls; see `calls_form` of the template's form."""
        return self._form.calls_form

    def _marked(self, message: Message) -> Message:
        texts = [message["content"]]
        if own := message.get("images"):
            self.images = [*self.images, *own]
            texts = message["content"].split(PLACE)
        content = PLACE.join(self._mark(text, message["role"]) for text in texts)
        return {**message, "content": content}

    def _mark(self, text: str, role: str) -> str:
        for char in (_MARK, _NEW, PLACE):
            text = text.replace(char, "\ufffd")
        kept = () if role != "assistant" or self._form.reads_calls else self._form.delimiters
        return self._form.encoder.special.mark(text, role, self._marks, kept)

    def _map(self, value: Any) -> Any:
        """A call's arguments with their texts marked."""
        if isinstance(value, str):
            return self._mark(value, "assistant")
        if isinstance(value, dict):
            return {key: self._map(item) for key, item in value.items()}
        return [self._map(item) for item in value] if isinstance(value, list) else value

    def _put(self, messages: Sequence[Message], message: Parsed) -> list[Message]:
        """Messages that answer the model's, in the roles that the template takes."""
        put, names = [], [call.name or "invalid" for call in message.calls]
        ids = ids_of(message.calls, self._turns)
        for number, given in enumerate(map(self._marked, messages)):
            if given["role"] == "tool":
                name = names[number] if number < len(names) else "environment"
                own = ids[number] if number < len(ids) else call_id(self._turns, number)
                given |= {"name": name, "tool_call_id": own}
            put.append(given)
        return self._form.as_taken(put)

    def _sign(self, kind: str) -> str:
        """A text in place of what the model wrote in this turn: letters and digits, which no
        template changes, and which nobody can guess."""
        return f"zq{kind}t{self._turns}x{self._nonce}qz"


def _behind(text: str, tags: ThinkingTags) -> str:
    """A message's text after its thoughts."""
    return text.rpartition(tags.closing)[2].lstrip("\n")
