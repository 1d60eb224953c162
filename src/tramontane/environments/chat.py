"""The tokens of a conversation: what was sampled stays, and only what is new is rendered.

The chat template is applied to the whole conversation, with a sign in place of each message of the
model. The text after the last sign is the end of the model's turn, the new messages and the start
of the next turn; its tokens are appended to those so far, without the end of the turn if the model
has sampled one. So the tokens of a turn extend the earlier ones exactly, whatever the model wrote
and however the template would render it.

A template may rewrite what it wrote earlier: drop the thoughts of earlier turns, or number the
turns. This is detected by comparing its text before the last sign with that of the previous turn.
The conversation then continues as a new sequence (`history: fork`), or as if the template had only
appended (`keep`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal
from uuid import uuid4

from tramontane.data.prompts import PLACE, PromptEncoder, Tool
from tramontane.data.special_tokens import Marks
from tramontane.environments.calls import Parsed, shown_by
from tramontane.environments.forms import DELIMITERS
from tramontane.environments.learned import (
    ARGUMENT,
    ASKED,
    NAME,
    Calls,
    call_id,
    shared,
    taken_by,
    without_end,
)
from tramontane.errors import InputError
from tramontane.models.names import end_tokens
from tramontane.types import Message, ThinkingTags, ToolCall

# Tokens that end a turn besides the tokenizer's EOS.
_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<turn|>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>",
    "<|END_OF_TURN_TOKEN|>",
)  # fmt: skip
_MARK = "\ufdd0"  # a noncharacter, like the next; see `Marks`
_NEW = "\ufdd1"  # at the start of the first new message


class ChatFormat:
    """How one model's chat template writes conversations.

    Args:
        encoder: makes the model's prompts.
        history: `conversation.history`.
    """

    def __init__(self, encoder: PromptEncoder, history: Literal["fork", "keep"] = "fork") -> None:
        self.encoder, self.history = encoder, history
        tokenizer = encoder.tokenizer
        self.special = {
            number: str(token)
            for number, token in tokenizer.added_tokens_decoder.items()
            if (token.special or number == tokenizer.eos_token_id)
            and str(token) not in encoder.tags
        }
        ends = tokenizer.convert_ids_to_tokens(end_tokens(str(tokenizer.name_or_path)))
        self.stops = {str(tokenizer.eos_token), *map(str, ends)}
        self.ends = {*self.stops, *_ENDS}
        self.template = str(tokenizer.chat_template or "")
        self.levels = {name: ChatFormat(each, history) for name, each in encoder.levels.items()}

    def at(self, effort: str | None) -> ChatFormat:
        """The format at a level of effort."""
        return self if effort is None else self.levels[effort]

    @cached_property
    def _taken_calls(self) -> Calls | None:
        """How the template takes `tool_calls`; None if it writes none."""
        return taken_by(self._tried, self.special.values())

    @property
    def reads_calls(self) -> bool:
        """True if the template writes `tool_calls`; otherwise calls are part of the content."""
        return self._taken_calls is not None

    @cached_property
    def _calls_beside_text(self) -> bool:
        if self._taken_calls is None:
            return False
        said = self._taken_calls.message("zq9qz", [(NAME, {"x": ARGUMENT})], [call_id(0, 0)])
        text = self._tried([ASKED, said])
        return ARGUMENT in text or "zq9qz" not in text

    def writes_calls(self, content: str) -> bool:
        """True if the template writes `tool_calls` in a message with this content; otherwise calls
        are part of it."""
        return self._calls_beside_text if content else self.reads_calls

    @cached_property
    def one_call(self) -> bool:
        """True if the template writes one call a message."""
        taken = self._taken_calls
        return taken is not None and self._tried(taken.probe(2)).count(ARGUMENT) < 2

    @cached_property
    def calls_form(self) -> str:
        """The text form of calls, for a template that writes none: the form that its model was
        shown, or that of `TOOLS_PROMPT`."""
        return shown_by(self.encoder.tokenizer) if self.encoder.reads_tools else "hermes"

    @property
    def delimiters(self) -> tuple[str, ...]:
        """The tokens around calls that are written as text."""
        return DELIMITERS.get(self.calls_form, ())

    def calling(
        self, content: str, calls: Sequence[tuple[str, dict[str, Any]]], ids: Sequence[str]
    ) -> Message:
        """A message with calls, each a name and arguments, as the template takes them."""
        assert self._taken_calls is not None
        return self._taken_calls.message(content, calls, ids)

    @cached_property
    def reads_thoughts(self) -> bool:
        """True if the template writes the thoughts of a message (`reasoning_content`, which
        transformers also gives as `thinking`); otherwise they are part of the content."""
        thought = "zq2qz"
        said: Message = {"role": "assistant", "content": "!", "reasoning_content": thought}
        tried = [said]
        if self._taken_calls:
            _, call = self._taken_calls.probe(1)
            tried.append({**call, "reasoning_content": thought})
        return any(thought in self._tried([ASKED, message]) for message in tried)

    @cached_property
    def drops_thoughts(self) -> bool:
        """True if the template has no key for thoughts, and no place for them in the content: it
        cuts them out (DeepSeek-R1), or writes messages in channels."""
        content = self.encoder.tags.around("zq0qz") + "zq1qz"
        text = self._tried([ASKED, {"role": "assistant", "content": content}])
        cut = self.calls_form == "harmony" or ("zq1qz" in text and "zq0qz" not in text)
        return cut and not self.reads_thoughts

    def _tried(self, chat: list[Message]) -> str:
        """A chat as the template writes it; empty if it refuses it."""
        try:
            return self.encoder.complete(chat) if self.template else ""
        except InputError:
            return ""

    @cached_property
    def _tails(self) -> tuple[str, str]:
        """Text after a message of the model: where it is the last, and where the user answers."""
        said = "zq0qz"
        chat: list[Message] = [
            ASKED,
            {"role": "assistant", "content": said},
        ]
        answered = self._tried([*chat, ASKED])
        return self._tried(chat).rpartition(said)[2], answered.rpartition(said)[2]

    @cached_property
    def turn_end(self) -> str:
        """The tokens with which the template ends a message of the model; EOS if it writes none."""
        last, answered = self._tails
        common = last[: self.encoder.special.boundary(last, shared(last, answered))]
        written = self.ended(common) or self.ended(last)
        return written or self._next_turn(answered) or str(self.encoder.tokenizer.eos_token)

    def _next_turn(self, text: str) -> str:
        """The token that starts the next turn and ends the model's (GLM), by the generation
        config; empty if there is none."""
        return next((token for token in self.stops if text.lstrip().startswith(token)), "")

    @cached_property
    def call_end(self) -> str:
        """The token that ends a message with calls once they are answered, if the template
        writes none itself: of the generation config (GLM), else EOS."""
        said, told = self._call_tails
        common = said[: shared(said, told)]
        eos = str(self.encoder.tokenizer.eos_token)
        return self.ended(common) or self._next_turn(told[len(common) :]) or eos

    @cached_property
    def _call_tails(self) -> tuple[str, str]:
        """Text after the arguments of a call: where it is the last, and up to a tool's answer;
        empty if the template writes no calls."""
        if self._taken_calls is None:
            return "", ""
        chat, answer = self._taken_calls.probe(1), "zq9qz"
        told = self._tried([*chat, _answer(NAME, answer)]).rpartition(answer)[0]
        return self._tried(chat).rpartition(ARGUMENT)[2], told.rpartition(ARGUMENT)[2]

    @cached_property
    def ends_anew(self) -> bool:
        """True if the template ends a message differently once it is answered (gpt-oss)."""
        last, answered = self._tails
        common = last[: self.encoder.special.boundary(last, shared(last, answered))]
        return bool(self.ended(last)) and not self.ended(common)

    @cached_property
    def calls_anew(self) -> bool:
        """True if the template writes a call differently once it is answered (Apriel 1.5, which
        adds its id)."""
        said, told = self._call_tails
        return not told.startswith(without_end(said, self.special.values()).rstrip())

    def check_ends(self) -> None:
        """Raise an InputError if the template begins a response even where none is asked for, so
        that the end of a message cannot be told (Command R7B)."""
        asks = self.encoder.render([ASKED]).removesuffix(self.encoder.config.response_prefix)
        last, answered = self._tails
        if asks == self._tried([ASKED]) and last[shared(last, answered) :].strip():
            raise InputError(
                "the chat template begins a response behind every chat, also without "
                "add_generation_prompt; give another template (data.chat_template)"
            )

    def closed(self, text: str, *, called: bool = False) -> str:
        """A message that ends a chat, as rendered, up to the tokens that end it; `called`: it ends
        with calls."""
        last, _ = self._tails
        if last.strip() and text.endswith(last):
            return text.removesuffix(last) + self.turn_end
        return self.ended(text) or text.rstrip() + (self.call_end if called else self.turn_end)

    def ended(self, text: str) -> str:
        """A message's text as rendered, without white space after the token that ends it; empty
        if no token does."""
        bare = text.rstrip()
        return bare if any(bare.endswith(token) for token in self.special.values()) else ""

    @cached_property
    def tool_role(self) -> bool:
        """True if the template takes messages of tools; otherwise they are put into the user's,
        between `<tool_response>` tags."""
        answer = "zq0qz"
        taken = self._taken_calls or Calls(False, "")
        chat = [*taken.probe(1), _answer(NAME, answer)]
        try:
            return bool(self.template) and answer in self.encoder.render(chat)
        except InputError:
            return False

    @cached_property
    def tool_images(self) -> bool:
        """True if the template writes images in messages of tools."""
        taken = self._taken_calls or Calls(False, "")
        text = self._tried([*taken.probe(1), _answer(NAME, f"{PLACE}?")])
        return self.encoder.image_token in text

    def _shown_by_user(self, messages: list[Message]) -> list[Message]:
        """Messages with the images of tools in the user's message that follows, as for OpenAI's
        models, whose messages of tools are texts."""
        tools: list[Message] = [
            {**m, "content": m["content"].replace(PLACE, "")}
            for m in messages
            if m["role"] == "tool"
        ]
        shown = PLACE * sum(m["content"].count(PLACE) for m in messages if m["role"] == "tool")
        others = [m for m in messages if m["role"] != "tool"]
        if not others or others[0]["role"] != "user":
            others.insert(0, Message(role="user", content=""))
        others[0] = {**others[0], "content": shown + others[0]["content"]}
        return tools + others

    def as_taken(self, messages: list[Message]) -> list[Message]:
        """Messages that follow one of the model, in the roles that the template takes."""
        in_tools = any(m["role"] == "tool" and PLACE in m["content"] for m in messages)
        if in_tools and self.tool_role and not self.tool_images:
            messages = self._shown_by_user(messages)
        if self.tool_role or all(m["role"] != "tool" for m in messages):
            return messages
        texts = [
            f"<tool_response>\n{m['content']}\n</tool_response>"
            if m["role"] == "tool"
            else m["content"]
            for m in messages
        ]
        return [{"role": "user", "content": "\n".join(texts)}]

    def text_of(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text of a message of the model: all its tokens except one that ends it.

        Args:
            token_ids: the message's tokens.
            before: tokens before it; some tokenizers drop the space at the start of a text.
        """
        ids = list(token_ids)
        if ids and ids[-1] in self.special:
            ids.pop()
        last = list(before[-1:])
        decode = self.encoder.tokenizer.decode
        shown = str(decode([*last, *ids], clean_up_tokenization_spaces=False))
        return shown[len(str(decode(last, clean_up_tokenization_spaces=False))) :]


def _answer(name: str, content: str) -> Message:
    """A tool's answer to the first call of a chat."""
    return {"role": "tool", "content": content, "name": name, "tool_call_id": call_id(0, 0)}


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
        places = {end: place for end in ends if (place := self.text.find(end, 0, self.new)) >= 0}
        if not places:
            return "", self.text
        first = min(places, key=places.__getitem__)
        place = places[first] + len(first)
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
                if moved := self._nonce in text:
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
        text = text.replace(_NEW, "", 1)
        rewritten, images = moved or not appended, self.images[len(earlier) :]
        return Following(text, place, called, rewritten, self._whole, images)

    def _moved(self, text: str, message: Parsed, number: int) -> tuple[str, bool]:
        """(the text after a message whose content the template writes behind its calls, True if
        the model wrote it elsewhere)."""
        content = self._sign("a")
        behind = text.partition(content)[2]
        said = message.content.strip()
        before = message.text.rstrip().removesuffix(said) if said else ""
        wrote = before != message.text.rstrip() and message.calls[-1].name in before
        if wrote and content in text and _NEW in behind and self._nonce not in behind:
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
        response_prefix = encoder.config.response_prefix
        opened = encoder.opened_in(self._text.removesuffix(response_prefix))
        self.prefix = opened + response_prefix

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
