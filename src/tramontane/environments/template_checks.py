"""Holds a chat template to its own rendering: a run, the endpoint and fine-tuning on conversations
write what the template writes, token for token, or say why not.

The template is the measure. For each of a few conversations, it writes the prompt, the message that
a model would sample, and the whole chat with the next prompt; what this package makes of the same
conversation is compared with that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

from tramontane.data.prompts import PromptEncoder, Tool
from tramontane.environments import wire
from tramontane.environments.calls import Parsed, Parser
from tramontane.environments.chat import Chat
from tramontane.environments.chat_format import ChatFormat
from tramontane.environments.forms import written
from tramontane.environments.learned import call_id, shared, without_end
from tramontane.environments.recorded import Conversation, ConversationEncoder
from tramontane.errors import InputError
from tramontane.types import Message

COLUMNS = ("bridge", "history", "SFT text", "calls read back", "end of turn")
_TYPES: dict[str, Any] = {
    "a": {"type": "integer"},
    "b": {"type": "integer"},
    "half": {"type": "number"},
    "sure": {"type": "boolean"},
    "none": {"type": ["string", "null"]},
    "parts": {"type": "array", "items": {"type": ["integer", "string"]}},
    "more": {"type": "object"},
    "text": {"type": "string"},
}
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {key: {**kind, "description": key} for key, kind in _TYPES.items()},
            "required": ["a", "b"],
        },
    },
}
_SUM = {"a": 1, "b": 2}
_RICH = {
    **{"a": 7, "half": 0.5, "sure": True, "none": None},
    **{"parts": [1, "x"], "more": {"k": "v"}, "text": "12"},
}
ASKED: list[Message] = [{"role": "user", "content": "What is 1 + 2?"}]
MORE: list[Message] = [{"role": "user", "content": "And 3 + 4?"}]


class Case(NamedTuple):
    """A message of the model, whose answers follow from it: those of tools, or the user's."""

    name: str
    content: str = ""
    thoughts: str = ""
    calls: tuple[dict[str, Any], ...] = ()

    def said(self) -> Message:
        """The message in OpenAI's form, with arguments as objects."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call_id(0, number),
                    "type": "function",
                    "function": {"name": "add", "arguments": arguments},
                }
                for number, arguments in enumerate(self.calls)
            ]
        return message

    def answers(self) -> list[Message]:
        """What follows the message."""
        return [
            {"role": "tool", "name": "add", "content": str(3 + n), "tool_call_id": call_id(0, n)}
            for n in range(len(self.calls))
        ] or list(MORE)


CASES = (
    Case("an answer", "It is 3."),
    Case("thoughts and an answer", "It is 3.", "I add."),
    Case("a call", calls=(_SUM,)),
    Case("a text and a call", "Let me add.", calls=(_SUM,)),
    Case("thoughts and a call", thoughts="I add.", calls=(_SUM,)),
    Case("two calls", calls=(_SUM, {"a": 3, "b": 4})),
    Case("a call with all types", calls=(_RICH,)),
)


class Cell(NamedTuple):
    """One column's outcome; `notes` are (what, the cases' names).

    `ok` also where a new sequence begins, as with `conversation.history: fork`; `refused`: some
    cases are, in words; `wrong`: something else is written or read than the template writes.
    """

    state: Literal["ok", "refused", "wrong"]
    notes: Mapping[str, list[str]]

    def __str__(self) -> str:
        notes = [f"{what}{_which(names)}" for what, names in self.notes.items()]
        return "; ".join([self.state, *notes])


Note = tuple[Literal["ok", "refused", "wrong"], str]  # of one case; an empty text says nothing


def cell_of(try_one: Callable[[Case], Note]) -> Cell:
    """One column's outcome over all cases; an `InputError` is a refusal."""
    notes: dict[Note, list[str]] = {}
    for case in CASES:
        try:
            note = try_one(case)
        except InputError as error:
            note = ("refused", _reason(error))
        notes.setdefault(note, []).append(case.name)
    states = [state for state, _ in notes]
    state = next((s for s in ("wrong", "refused") if s in states), "ok")
    named = {what: names for (_, what), names in notes.items() if what}
    return Cell(cast(Any, state), named)


class Family:
    """One chat template with its tokenizer, tried.

    Args:
        encoder: makes the model's prompts.
        form: `conversation.calls`.
    """

    def __init__(self, encoder: PromptEncoder, form: str = "auto") -> None:
        self.encoder, self.form = encoder, ChatFormat(encoder)
        self.parser = Parser(encoder.tokenizer, form, encoder.tags)
        self.tokenizer = tokenizer = encoder.tokenizer
        self._special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
        self._special |= {str(tokenizer.eos_token)}

    def row(self) -> dict[str, Cell]:
        """The outcome of each of the `COLUMNS`."""
        tried = (self.bridge, self.history, self.tuned, self.read_back, self.end)
        return {column: self._cell(try_one) for column, try_one in zip(COLUMNS, tried, strict=True)}

    def _cell(self, try_one: Callable[[Case], Note]) -> Cell:
        def tried(case: Case) -> Note:
            try:
                self.whole(case)
            except InputError as error:  # the template refuses the conversation
                return "refused", f"the template: {_reason(error)}"
            return try_one(case)

        return cell_of(tried)

    # What the template writes.

    def taken(self, case: Case, *, tuned: bool = False) -> list[Message]:
        """The model's message and its answers as the template takes them. A template that does not
        write thoughts drops them from a history; what is fine-tuned on has them in its content."""
        form, said, answers = self.form, case.said(), case.answers()
        calls = [call["function"] for call in said.pop("tool_calls", ())]
        thoughts = said.pop("reasoning_content", "")
        reads_calls = form.writes_calls(case.content)
        if calls and not reads_calls:
            text = written(form.calls_form, calls)
            said["content"] = "\n".join(filter(None, [case.content, text]))
        if thoughts and not (form.reads_thoughts or form.drops_thoughts) and tuned:
            said["content"] = self.encoder.tags.around(thoughts) + said["content"]
        if calls and reads_calls:
            made = [(call["name"], call["arguments"]) for call in calls]
            if form.one_call and len(made) > 1:  # one after another, each with its answer
                pairs = zip(made, answers, strict=True)
                each = [
                    (form.calling("", [call], [answer["tool_call_id"]]), answer)
                    for call, answer in pairs
                ]
                return [message for pair in each for message in pair]
            said = form.calling(said["content"], made, [call_id(0, n) for n in range(len(made))])
        if thoughts and form.reads_thoughts:
            said["reasoning_content"] = thoughts
        return [said, *form.as_taken(answers)]

    @cached_property
    def prompt(self) -> str:
        """The prompt of the message."""
        return self.encoder.render(ASKED, tools=[TOOL])

    def ended(self, case: Case) -> str:
        """The chat that ends with the model's message, with its thoughts."""
        self.form.check_ends()
        chat = [*ASKED, self.taken(case, tuned=True)[0]]
        return self.encoder.complete(chat, tools=[TOOL])

    def whole(self, case: Case) -> str:
        """The chat with the message's answers and the start of the next one."""
        chat = [*ASKED, *self.taken(case)]
        return self.encoder.render(chat, tools=[TOOL])

    def ids(self, text: str) -> list[int]:
        """Tokens of a rendered text."""
        encoder = self.encoder
        tokens = encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*encoder.first_tokens, *tokens]

    def sampled(self, case: Case) -> str | None:
        """The message that a model would sample after the prompt, to the token that ends it; None
        if there is none: thoughts after an empty pair of tags, two calls for a template that writes
        one a message."""
        if len(case.calls) > 1 and self.form.one_call:
            return None
        prompt, said, tags = self.prompt, self.ended(case), self.encoder.tags
        place, opened = self.encoder.special.boundary(said, shared(prompt, said)), ""
        if place < len(prompt):  # the message begins otherwise than the prompt ends
            opened = self.encoder.opened_in(prompt)
            if place < len(prompt) - len(opened):
                raise InputError("the template writes a prompt differently once a message follows")
            place = len(prompt) - len(opened)
        end = self.end_of(case)
        body = self._body(said[place:], end)
        first, _, behind = body.partition(end) if end else (body, "", "")
        if behind and len(self.parser.parse(first, [TOOL]).calls) == len(case.calls) > 0:
            if any(part and part in behind for part in (case.content, case.thoughts)):
                raise InputError("the template writes the text beside calls as another message")
            body = first  # an empty message is written behind one with calls (DeepSeek-R1)
        if opened:
            if case.thoughts and tags.closing in opened:
                return None
            if body.lstrip().startswith(tags.opening):  # with other white space
                body = body.lstrip().removeprefix(tags.opening)
            if tags.closing in opened:
                body = body.rpartition(tags.closing)[2]
            elif tags.closing not in body:
                body = f"{case.thoughts}\n{tags.closing}\n\n{body.lstrip()}"
        if case.thoughts not in body:
            body = self._around_thoughts() + body
        if self.encoder.never_closes(prompt, body):
            raise InputError("the template writes the message into thoughts that it never closes")
        return body + end

    def _body(self, text: str, end: str) -> str:
        """A message without what ends it: the last token of the chat, and `end`."""
        body = without_end(text, self._special)
        bare = body.rstrip()
        return bare.removesuffix(end) if bare.endswith(end) else body

    def _around_thoughts(self) -> str:
        """Thoughts as the template writes them before a call, where it drops those of answers."""
        case = next(c for c in CASES if c.thoughts and c.calls)
        text, bare = (self.ended(c) for c in (case, case._replace(thoughts="")))
        place = self.encoder.special.boundary(text, shared(text, bare))
        return text[place : place + len(text) - len(bare)]

    def end_of(self, case: Case) -> str:
        """The token that ends the model's message; empty if the template writes none."""
        # Thoughts may be dropped later, and a text beside calls be written after their answers.
        case = case._replace(thoughts="", content="" if case.calls else case.content)
        said, whole = self.ended(case).rstrip(), self.whole(case)
        common = said[: self.encoder.special.boundary(said, shared(said, whole))].rstrip()
        if not (case.calls and self.form.reads_calls):
            ended = common.endswith((*self._special,)) and case.content in common
            said = common if ended else said
        body = self._body(said, "\0")
        ends = self._special if body != said else self._special & self.form.stops
        if case.calls and not whole.startswith(said):
            tail = body[-16:]  # once it is answered, it begins or ends differently
            behind = whole[whole.rfind(tail) + len(tail) :] if tail in whole else ""
            return _first(behind, ends)
        return said[len(body) :] or _first(whole[len(said) :], ends)

    # What this package writes.

    def bridge(self, case: Case) -> Note:
        """What was sampled and what is put in after it, against the whole chat."""
        self._check_calls(case)
        text = self.sampled(case)
        if text is None:
            return "ok", "one call a message" if len(case.calls) > 1 else ""
        if not self.end_of(case):
            return self.end(case)
        chat = Chat(self.form, [TOOL])
        prompt = chat.start(ASKED)
        ids = self.encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
        message = self._read(chat.prefix, ids, prompt)
        whole = self.ids(self._bridged(case, text, [call.id for call in message.calls]))
        following = chat.follow(message, [plain(answer) for answer in case.answers()])
        put = chat.tokens(following, ids[-1])
        told = following.whole()
        if not following.rewritten:
            return same([*prompt, *ids, *put], whole, self.encoder)
        if told != whole:
            return same(told, whole, self.encoder)
        if [*prompt, *ids] == whole[: len(prompt) + len(ids)]:
            return "ok", "a new sequence, though the template appends"
        return "ok", "a new sequence"

    def _bridged(self, case: Case, sampled: str, ids: Sequence[str]) -> str:
        """The whole chat, with the sampled text as content where thoughts are part of it, and with
        the ids that the calls were sampled with."""
        form, opened = self.form, self.encoder.opened_in(self.prompt)
        separate = form.reads_thoughts or form.drops_thoughts or (case.calls and form.reads_calls)
        if separate or not opened:
            chat = [*ASKED, *self.taken(case, tuned=True)]
            said, tag = chat[len(ASKED)], self.encoder.tags.opening
            if opened and str(said["content"]).startswith(tag):  # with the prompt's white space
                said["content"] = opened + said["content"].removeprefix(tag)
            calls = said.get("tool_calls", ())
            for own, call, answer in zip(ids, calls, chat[len(ASKED) + 1 :], strict=False):
                if own:
                    call["id"] = answer["tool_call_id"] = own
            return self.encoder.render(chat, tools=[TOOL])
        said, *answers = self.taken(case)
        said["content"] = opened + sampled.removesuffix(self.end_of(case))
        return self.encoder.render([*ASKED, said, *answers], tools=[TOOL])

    def _check_calls(self, case: Case) -> None:
        if case.calls:
            self.parser.check([TOOL])

    def _read(self, prefix: str, ids: Sequence[int], before: Sequence[int]) -> Parsed:
        text = prefix + self.form.text_of(ids, before)
        return self.parser.parse(text, [TOOL], prefix)

    def history(self, case: Case) -> Note:
        """The endpoint's prompt for the whole chat."""
        chat = [*ASKED, case.said(), *case.answers()]
        messages = [wire.ChatMessage.model_validate(message) for message in chat]
        prompt = wire.write(Chat(self.form, [TOOL]), messages)
        return same(prompt, self.ids(self.whole(case)), self.encoder)

    def tuned(self, case: Case) -> Note:
        """The example of fine-tuning for the chat that ends with the message."""
        tools = [TOOL] if self.encoder.reads_tools else []
        conversation = Conversation.of([*ASKED, case.said()], tools, "the chat")
        made = ConversationEncoder(self.encoder, lambda _, text: text)
        (example,) = made.examples(conversation, "the chat")
        own = [*example.prompt, *example.response]
        chat = [*ASKED, self.taken(case, tuned=True)[0]]
        if "endgeneration" not in self.form.template:
            said = self.encoder.complete(chat, tools=tools)
            end = self.end_of(case) or str(self.tokenizer.eos_token)
            text = self._body(said, end) + end
            return same(own, self.ids(text), self.encoder)
        found: Any = self.tokenizer.apply_chat_template(
            self.encoder.as_read(chat),
            tools=cast(Any, tools or None),
            return_assistant_tokens_mask=True,
        )
        learned = [0] * len(example.prompt) + [1] * len(example.response)
        for span in example.inserted:
            for place in span:
                learned[len(example.prompt) + place] = 0
        marks = list(found["assistant_masks"])
        size = max((place + 1 for place, mark in enumerate(marks) if mark), default=0)
        if learned != marks[:size]:
            return "wrong", "learns other tokens than the template marks"
        return same(own, list(found["input_ids"])[:size], self.encoder)

    def read_back(self, case: Case) -> Note:
        """What is read in the message that the template writes."""
        self._check_calls(case)
        text = self.sampled(case)
        if text is None:
            return "ok", "one call a message" if len(case.calls) > 1 else ""
        chat = Chat(self.form, [TOOL])
        prompt = chat.start(ASKED)
        ids = self.encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
        return misread(case, self._read(chat.prefix, ids, prompt), text)

    def end(self, case: Case) -> Note:
        """The token that ends the message."""
        end = self.end_of(case)
        if not end:
            return "refused", "no token ends it: neither the template's nor the generation config's"
        return "ok", f"`{end}`"


def misread(case: Case, message: Parsed, text: str) -> Note:
    """What is wrong with a message that was read in the text of a case."""
    found = [(call.name, call.arguments) for call in message.calls]
    wanted = [
        ("add", {k: v for k, v in each.items() if v is not None or k in text})  # or it is omitted
        for each in case.calls
    ]
    if found != wanted:
        return "wrong", f"reads {[call.answer or call.arguments for call in message.calls]}"
    if case.content and case.content in message.thoughts:
        return "ok", "its text is written as thoughts"
    if message.thoughts.strip() != case.thoughts and case.thoughts in text:
        return "wrong", "its thoughts are not found"
    if message.content.strip() != case.content and case.content in text:
        return "wrong", "its content has more or less than its text"
    return "ok", ""


def _which(names: list[str]) -> str:
    """The cases of a note in words; nothing for all."""
    calls = [case.name for case in CASES if case.calls]
    answers = [case.name for case in CASES if not case.calls]
    if len(names) == len(CASES):
        return ""
    said = {tuple(calls): "calls", tuple(answers): "answers"}.get(tuple(names))
    return f" ({said or ', '.join(names)})"


def _first(text: str, tokens: set[str]) -> str:
    """The token at the start of a text, after white space."""
    bare = text.lstrip()
    return max((token for token in tokens if bare.startswith(token)), key=len, default="")


def plain(message: Message) -> Message:
    return {"role": message["role"], "content": message["content"]}


def _reason(error: InputError) -> str:
    """What an error says of a template, without the remedy."""
    text = re.sub(r"^the chat: ", "", str(error))
    inner = re.search(r"\((.+)\)", text)
    return (inner[1] if "refuses the prompt" in text and inner else text.partition(";")[0])[:120]


def same(own: list[int], wanted: list[int], encoder: PromptEncoder) -> Note:
    if own == wanted:
        return "ok", ""
    ours, theirs = encoder.decode(own), encoder.decode(wanted)
    place = max(0, shared(ours, theirs) - 8)
    shown = [repr(text[place:][:48]) for text in (ours, theirs)]
    return "wrong", f"{shown[0]} for {shown[1]}"
