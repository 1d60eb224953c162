"""The tokens of a conversation: what was sampled stays, and only what is new is rendered.

The chat template is applied to the whole conversation, with a sign in place of each message of the
model. The text behind the last sign is the end of the model's turn, the new messages and the start
of the next turn; its tokens are appended to those so far, without the end of the turn if the model
has sampled one. So the tokens of a turn extend those before, to the token, whatever the model wrote
and however it would be rendered.

A template may rewrite what it wrote earlier: drop the thoughts of earlier turns, or number the
turns. This is seen by comparing its text before the last sign with that of the turn before. The
conversation then continues as a new sequence (`history: fork`), or as if the template had only
appended (`keep`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from tramontane.data.prompts import Marks, PromptEncoder, Tool
from tramontane.environments.calls import Message as Parsed
from tramontane.errors import InputError

Chatted = dict[str, Any]  # a message: role, content, and what tools need

# Signs in place of what the model wrote; digits and letters, so that no template changes them.
_SIGN = "zq{kind}{number}x7f3a9cqz"
# Tokens that end a turn besides the tokenizer's EOS.
_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<turn|>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>",
    "<|END_OF_TURN_TOKEN|>",
)  # fmt: skip
_MARK = "\ufdd0"  # no character; see `Marks`


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
            if token.special or number == tokenizer.eos_token_id
        }
        self.ends = {tokenizer.eos_token, *_ENDS}
        self.template = str(tokenizer.chat_template or "")

    @cached_property
    def reads_calls(self) -> bool:
        """True if the template writes `tool_calls`; otherwise calls are part of the content."""
        return "tool_calls" in self.template

    @cached_property
    def tool_role(self) -> bool:
        """True if the template takes messages of tools; otherwise they are the user's, between
        `<tool_response>` tags."""
        answer = _SIGN.format(kind="p", number=0)
        call = {"name": "probe", "arguments": {}}
        calls = [{"id": call_id(0, 0), "type": "function", "function": call}]
        chat: list[Chatted] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": answer, "name": "probe", "tool_call_id": call_id(0, 0)},
        ]
        try:
            return answer in self.encoder.render(chat)  # type: ignore[arg-type]
        except InputError:
            return False

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


def call_id(turn: int, number: int) -> str:
    """The id of a call: nine letters and digits, as Mistral's templates demand."""
    return f"call{turn % 1000:03d}{number % 100:02d}"


@dataclass
class Following:
    """What follows a message of the model.

    Args:
        end: the token, as text, by which the template ends the model's turn; may be empty.
        text: text behind it: the new messages, and the start of the next turn.
        rewritten: True if the template writes the conversation before it otherwise than so far.
        whole: makes the tokens of the whole conversation, as the template writes it.
    """

    end: str
    text: str
    rewritten: bool
    whole: Callable[[], list[int]]


class Chat:
    """One conversation as its chat template writes it.

    Args:
        form: the model's.
        tools: descriptions of the tools that the model may call.

    Attributes:
        prefix: the start of the model's next message that the prompt already holds.
    """

    def __init__(self, form: ChatFormat, tools: Sequence[Tool] = ()) -> None:
        self._form, self._tools = form, list(tools)
        self._marks = Marks(_MARK)
        self._chat: list[Chatted] = []  # as it is
        self._signs: list[Chatted] = []  # with a sign for each message of the model
        self._text = ""  # of `_signs`
        self._turns = 0
        self.prefix = ""

    def start(self, messages: Sequence[Chatted]) -> list[int]:
        """The tokens of the prompt of the first turn.

        Raises:
            InputError: the template refuses the messages.
        """
        self._chat = [self._marked(message) for message in messages]
        self._signs = list(self._chat)
        self._render()
        return self._whole()

    def follow(self, message: Parsed, new: Sequence[Chatted]) -> Following:
        """Append a message of the model and the messages that answer it; those of the role `tool`
        answer its calls, in order.

        Raises:
            InputError: the template refuses them.
        """
        before, prefix = self._text.removesuffix(self.prefix), self.prefix
        put = self._put(new, message)
        head, kept_signs = len(self._chat), self._signs
        for whole in (False, True):  # some templates take one call a message, or none
            real, sign = self._model_message(message, whole)
            self._chat[head:] = [real, *put]
            self._signs = [*kept_signs, sign, *put]
            try:
                self._render()
                break
            except InputError:
                if whole or "tool_calls" not in real:
                    raise
        self._turns += 1
        end, text = self._split()
        told = self._text[len(before) :].lstrip()
        thoughts = _sign("t", self._turns)
        kept = thoughts in told if message.thoughts else told.startswith(prefix.strip())
        rewritten = not (self._text.startswith(before) and kept)
        return Following(end, text, rewritten, self._whole)

    def tokens(self, following: Following, last: int) -> list[int]:
        """The tokens that follow a message of the model.

        Args:
            following: what follows it.
            last: the message's last token.

        Raises:
            InputError: the tokenizer does not keep the end of a turn as a token.
        """
        encoder, sampled = self._form.encoder, self._form.special.get(last)
        if sampled is None:
            return encoder.encode_marked(following.end + following.text, self._marks)
        text = following.text
        if not following.end and text.lstrip().startswith(sampled):
            text = text.lstrip().removeprefix(sampled)  # the next turn begins with this end
        ids = encoder.encode_marked(sampled + text, self._marks)
        if ids[0] != last:
            raise InputError(f"the tokenizer does not keep {sampled!r} as a token of its own")
        return ids[1:]

    def _render(self) -> None:
        encoder = self._form.encoder
        self._text = encoder.render(self._signs, tools=self._tools)  # type: ignore[arg-type]
        response_prefix = encoder.config.response_prefix
        opened = encoder.opened_in(self._text.removesuffix(response_prefix))
        self.prefix = opened + response_prefix

    def _whole(self) -> list[int]:
        encoder = self._form.encoder
        text = encoder.render(self._chat, tools=self._tools)  # type: ignore[arg-type]
        return [*encoder.first_tokens, *encoder.encode_marked(text, self._marks)]

    def _split(self) -> tuple[str, str]:
        """(end of the turn, text behind it) of the last message of the model."""
        content, call = (_sign(kind, self._turns) for kind in ("a", "c"))
        last = max(content, call, key=self._text.rfind)
        _, found, behind = self._text.rpartition(last)
        if not found:
            raise InputError(
                "the chat template omits the model's last message, so nothing can follow it"
            )
        places = {end: behind.find(end) for end in self._form.ends if end in behind}
        end = min(places, key=places.__getitem__, default="")
        if last == call and not end:
            raise InputError("the chat template does not end a message with calls by a token")
        if end and (last == call or not behind[: places[end]].strip()):
            return end, behind[places[end] + len(end) :]
        return "", behind

    def _model_message(self, message: Parsed, whole: bool) -> tuple[Chatted, Chatted]:
        """A message of the model as it is, and with signs in place of its parts; `whole` leaves
        the calls in its text."""
        thoughts, content, call = (_sign(kind, self._turns + 1) for kind in "tac")
        tags = self._form.encoder.tags
        started = tags.around(f"\n{thoughts}\n") + "\n\n" if message.thoughts else self.prefix
        sign: Chatted = {"role": "assistant", "content": started + content}
        if whole or not message.calls or not self._form.reads_calls:
            return self._marked({"role": "assistant", "content": message.text}), sign
        thought = f"{tags.around(message.thoughts)}\n\n" if message.thoughts else ""
        real = self._marked({"role": "assistant", "content": thought + message.content})
        real["tool_calls"], sign["tool_calls"] = [], []
        for number, made in enumerate(message.calls):
            name, about = made.name or "invalid", {"id": call_id(self._turns, number)}
            for calls, arguments in (
                (real["tool_calls"], self._map(made.arguments)),
                (sign["tool_calls"], {"x": call}),
            ):
                function = {"name": name, "arguments": arguments}
                calls.append({**about, "type": "function", "function": function})
        return real, sign

    def _marked(self, message: Chatted) -> Chatted:
        return {**message, "content": self._mark(message["content"], message["role"])}

    def _mark(self, text: str, role: str) -> str:
        return self._form.encoder.mark(text.replace(_MARK, "\ufffd"), role, self._marks)

    def _map(self, value: Any) -> Any:
        """A call's arguments with their texts marked."""
        if isinstance(value, str):
            return self._mark(value, "assistant")
        if isinstance(value, dict):
            return {key: self._map(item) for key, item in value.items()}
        return [self._map(item) for item in value] if isinstance(value, list) else value

    def _put(self, messages: Sequence[Chatted], message: Parsed) -> list[Chatted]:
        """Messages that answer the model's, in the roles that the template takes."""
        put, answered = [], 0
        for given in map(self._marked, messages):
            if given["role"] == "tool":
                name = message.calls[answered].name or "invalid"
                given |= {"name": name, "tool_call_id": call_id(self._turns, answered)}
                answered += 1
            put.append(given)
        if not answered or self._form.tool_role:
            return put
        texts = [
            f"<tool_response>\n{m['content']}\n</tool_response>"
            if m["role"] == "tool"
            else m["content"]
            for m in put
        ]
        return [{"role": "user", "content": "\n".join(texts)}]


def _sign(kind: str, number: int) -> str:
    return _SIGN.format(kind=kind, number=number)
