"""How a chat template writes conversations, found by trying it: what it takes, where it puts
thoughts, calls and answers, and how it ends turns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

from tramontane.data.prompts import PromptEncoder
from tramontane.environments.calls import shown_by
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
from tramontane.types import PLACE, Message

# Tokens that end a turn besides the tokenizer's EOS.
_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<turn|>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>",
    "<|END_OF_TURN_TOKEN|>",
)  # fmt: skip


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
        """True if the content has no place for thoughts, for a template without a key for them: it
        cuts them out (DeepSeek-R1), writes messages in channels, or the content behind calls (Gemma
        4)."""
        thought, said = "zq2qz", "zq3qz"
        content = self.encoder.tags.around(thought) + said
        text = self._tried([ASKED, {"role": "assistant", "content": content}])
        cut = self.calls_form == "harmony" or (said in text and thought not in text)
        if self._taken_calls:
            call = self._taken_calls.message(content, [(NAME, {"x": ARGUMENT})], [call_id(0, 0)])
            text = self._tried([ASKED, call])
            cut = cut or text.rfind(thought) > text.rfind(ARGUMENT) >= 0
        return cut

    def _tried(self, chat: list[Message]) -> str:
        """A chat as the template writes it; empty if it refuses it."""
        try:
            return self.encoder.complete(chat)
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
        own = self._next_turn(told[shared(said, told) :])
        return own or str(self.encoder.tokenizer.eos_token)

    @cached_property
    def _call_tails(self) -> tuple[str, str]:
        """Text after the arguments of a call: where it is the last, and up to a tool's answer."""
        assert self._taken_calls is not None
        said, answer = self._tried(self._taken_calls.probe(1)), "zq9qz"
        told = self._told(answer).rpartition(answer)[0]
        return said.rpartition(ARGUMENT)[2], told.rpartition(ARGUMENT)[2]

    def _told(self, answer: str) -> str:
        """A chat with a tool's answer to a call as the template writes it; empty if it refuses
        it."""
        chat = (self._taken_calls or Calls(False, "")).probe(1)
        last = Message(role="tool", content=answer, name=NAME, tool_call_id=call_id(0, 0))
        return self._tried([*chat, last])

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
        answer = "zq9qz"
        return bool(self.template) and answer in self._told(answer)

    @cached_property
    def tool_images(self) -> bool:
        """True if the template writes images in messages of tools."""
        return self.encoder.image_token in self._told(f"{PLACE}?")

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
