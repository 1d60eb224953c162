"""What a model's chat template does with conversations, found by trying it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from tramontane.data.prompts import PromptEncoder
from tramontane.environments.calls import Parsed
from tramontane.environments.chat import Chat
from tramontane.environments.mistral import MistralChat, files_of, load_mistral
from tramontane.environments.mistral_family import MistralFamily
from tramontane.environments.template_checks import ASKED, MORE, TOOL, Cell, Family
from tramontane.errors import InputError
from tramontane.types import Message, ToolCall

# Variables of published templates that decide whether thoughts of earlier turns stay.
THOUGHT_KEYS = (
    "preserve_thinking", "clear_thinking", "truncate_history_thinking", "keep_past_thinking",
    "preserve_thoughts", "drop_thinking",
)  # fmt: skip
_CALL = ToolCall("add", {"a": 1, "b": 2}, "3")
_ANSWER: Message = {"role": "tool", "content": "3"}
_Turn: TypeAlias = tuple[Parsed, list[Message]]  # of the model, and what answers it
_New: TypeAlias = Callable[[], Any]  # makes a `Chat` or `MistralChat`


class Trait(NamedTuple):
    """One line of the report; `optional` is what a run can do without, at a cost."""

    name: str
    state: Literal["ok", "missing", "optional"]
    found: str
    remedy: str = ""


def examine(model: str) -> list[Trait]:
    """Try the chat template of a model (a checkpoint folder or Hugging Face name): which
    conversations it appends to, and what a run would do with the others.

    Raises:
        InputError: no such model, or its template cannot write a prompt.
    """
    from tramontane.models.loading import load_tokenizer

    encoder = PromptEncoder(load_tokenizer(model))
    return examined(encoder) + (by_mistral(encoder) if files_of(encoder) else [])


def examined(encoder: PromptEncoder) -> list[Trait]:
    """`examine` with the encoder of a model."""
    family = Family(encoder)
    form, template = family.form, family.form.template
    tools = "by the template" if encoder.reads_tools else "in the system prompt"
    answers = "messages of the role tool" if form.tool_role else "messages of the user"
    keys = [key for key in THOUGHT_KEYS if re.search(rf"\b{key}\b", template)]
    return [
        Trait("chat template", "ok", f"{len(template):,} characters" if template else "none"),
        Trait("form of calls", "ok", family.parser.form),
        Trait("tools are described", "ok", tools),
        Trait("tools answer in", "ok", answers),
        *(_trait(column, cell) for column, cell in family.row().items()),
        *_followed(lambda: Chat(form, [TOOL]), encoder, keys),
    ]


def _trait(column: str, cell: Cell) -> Trait:
    found = str(cell).removeprefix(f"{cell.state}; ")
    if cell.state == "wrong":
        return Trait(column, "missing", found, _OTHER_FORM)
    if cell.state == "refused":
        return Trait(column, "optional", found, _OTHER_TEMPLATE)
    return Trait(column, "ok", found)


def by_mistral(encoder: PromptEncoder) -> list[Trait]:
    """`examined` with the tokens of mistral-common (`conversation.tokens: mistral`)."""
    try:
        mistral = load_mistral(encoder)
    except InputError as error:
        return [Trait("by mistral-common", "optional", str(error))]
    row = MistralFamily(mistral, encoder).row()
    traits = [_trait(column, cell) for column, cell in row.items() if column != "SFT text"]
    traits += _followed(lambda: MistralChat(mistral, encoder, [TOOL]), encoder)
    return [trait._replace(name=f"{trait.name}, by mistral-common") for trait in traits]


_OTHER_TEMPLATE = "give another template (data.chat_template)"
_OTHER_FORM = f"{_OTHER_TEMPLATE}, or the form of the model's calls (conversation.calls)"


def _followed(new_chat: _New, encoder: PromptEncoder, keys: Sequence[str] = ()) -> list[Trait]:
    """What becomes of turns with thoughts; `keys` of the template keep them."""

    def thought(content: str, calls: list[ToolCall]) -> Parsed:
        return Parsed(f"{encoder.tags.around('Add.')}{content}", "Add.", content, calls)

    called: _Turn = (thought("", [_CALL]), [_ANSWER])
    tried: dict[str, tuple[_Turn, ...]] = {
        "call with thoughts, answered": (called,),
        "thoughts, then a message": ((thought("3", []), MORE),),
        "both, then a message": (called, (Parsed("3", "", "3", []), MORE)),
    }
    remedy = (
        "a run begins a new sequence there, with the rewritten conversation as its prompt; with "
        "conversation.history: keep, it appends anyway"
    )
    if keys:
        remedy += f"; or set {', '.join(keys)} in data.chat_template_kwargs"
    traits = []
    for name, turns in tried.items():
        following = _follow(new_chat, encoder, *turns)
        if isinstance(following, InputError):
            traits.append(Trait(name, "missing", str(following), _OTHER_TEMPLATE))
        elif following.rewritten:
            traits.append(Trait(name, "optional", "rewritten", remedy))
        else:
            traits.append(Trait(name, "ok", "appended"))
    return traits


def _follow(new_chat: _New, encoder: PromptEncoder, *turns: _Turn) -> Any:
    """What follows the last of some turns, or the `InputError` that refuses them."""
    chat = new_chat()
    try:
        chat.start(ASKED)
        for message, new in turns:
            following = chat.follow(message, new)
        chat.tokens(following, encoder.tokenizer.eos_token_id)
    except InputError as error:
        return error
    return following
