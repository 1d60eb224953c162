"""Holds conversations in Mistral's own tokens (`mistral`) to what its library makes of the whole
request, as `families` holds chat templates to their rendering."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tramontane.data.prompts import PromptEncoder
from tramontane.environments import wire
from tramontane.environments.calls import Parsed, Parser
from tramontane.environments.chat_format import ChatFormat
from tramontane.environments.mistral import MistralChat, MistralExamples, load_mistral, plain_tool
from tramontane.environments.recorded import Conversation
from tramontane.environments.template_checks import (
    ASKED,
    COLUMNS,
    TOOL,
    Case,
    Cell,
    Note,
    cell_of,
    misread,
    plain,
    same,
)

if TYPE_CHECKING:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer


class MistralFamily:
    """One version of Mistral's tokenizers, tried.

    Args:
        mistral: the library's tokenizer.
        encoder: of the same tokens.
    """

    def __init__(self, mistral: MistralTokenizer, encoder: PromptEncoder) -> None:
        self.mistral, self.encoder = mistral, encoder
        self.instruct: Any = mistral.instruct_tokenizer
        self.form = ChatFormat(encoder)
        self.parser = Parser(encoder.tokenizer, "mistral", encoder.tags)

    def row(self) -> dict[str, Cell]:
        """The outcome of each of the `COLUMNS`."""
        tried: tuple[Callable[[Case], Note], ...] = (
            self.bridge, self.history, self.tuned, self.read_back, self.end
        )  # fmt: skip
        return {column: cell_of(try_one) for column, try_one in zip(COLUMNS, tried, strict=True)}

    def chat(self) -> MistralChat:
        return MistralChat(self.mistral, self.encoder, [TOOL])

    def whole(self, case: Case) -> list[int]:
        """The library's tokens of the request after the message's answers."""
        return self._library([self._said(case), *map(dict, case.answers())], self.mistral)

    def _library(self, said: list[dict[str, Any]], mistral: MistralTokenizer) -> list[int]:
        """The library's tokens of a chat that goes on with these messages."""
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        request = {"messages": [*ASKED, *said], "tools": [plain_tool(TOOL)]}
        made: Any = ChatCompletionRequest.model_validate(request)
        return list(mistral.encode_chat_completion(made).tokens)

    def _said(self, case: Case) -> dict[str, Any]:
        """The model's message as the library takes it."""
        said: dict[str, Any] = {**case.said()}
        thoughts = said.pop("reasoning_content", "")
        if thoughts and self.chat().thinks:
            text = {"type": "text", "text": case.content}
            said["content"] = [{"type": "thinking", "thinking": thoughts}, text]
        elif thoughts:
            said["content"] = self.encoder.tags.around(thoughts) + case.content
        if case.calls and not self.chat().takes_both:
            said["content"] = ""
        return said

    def sampled(self, case: Case) -> list[int]:
        """The tokens of the message."""
        from mistral_common.protocol.instruct.messages import AssistantMessage

        said = self._said(case)
        text = self.encoder.tags.around(case.thoughts) if case.thoughts else ""
        before = text + case.content if case.calls and not self.chat().takes_both else ""
        ids = self.encoder.tokenizer(before, add_special_tokens=False)["input_ids"]
        message = AssistantMessage.model_validate(said)
        return [*ids, *self.instruct.encode_assistant_message(message, False)]

    def read(self, ids: list[int]) -> Parsed:
        """The message in sampled tokens."""
        return self.parser.parse(self.form.text_of(ids), [TOOL])

    def bridge(self, case: Case) -> Note:
        """What was sampled and what is put in after it, against the whole request."""
        chat, ids, wanted = self.chat(), self.sampled(case), self.whole(case)
        prompt = chat.start(ASKED)
        following = chat.follow(self.read(ids), [plain(answer) for answer in case.answers()])
        if following.rewritten:
            state, said = same(following.whole(), wanted, self.encoder)
            return state, said or "a new sequence"
        return same([*prompt, *ids, *chat.tokens(following, ids[-1])], wanted, self.encoder)

    def history(self, case: Case) -> Note:
        """The endpoint's prompt for the whole chat."""
        messages = [
            wire.ChatMessage.model_validate(m) for m in (*ASKED, case.said(), *case.answers())
        ]
        return same(wire.write(self.chat(), messages), self.whole(case), self.encoder)

    def tuned(self, case: Case) -> Note:
        """The example of fine-tuning for the chat that ends with the message, against what the
        library writes for fine-tuning."""
        conversation = Conversation.of([*ASKED, case.said()], [TOOL], "the chat")
        (example,) = MistralExamples(self.encoder).examples(conversation, "the chat")
        wanted = self._library([self._said(case)], load_mistral(self.encoder, mode="finetuning"))
        return same([*example.prompt, *example.response], wanted, self.encoder)

    def read_back(self, case: Case) -> Note:
        """What is read in the message that the library writes."""
        ids = self.sampled(case)
        return misread(case, self.read(ids), self.form.text_of(ids))

    def end(self, case: Case) -> Note:
        """The token that ends the message."""
        return "ok", f"`{self.encoder.tokenizer.convert_ids_to_tokens(self.sampled(case)[-1])}`"
