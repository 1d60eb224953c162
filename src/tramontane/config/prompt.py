"""Settings of the text around each problem, shared by every command that prompts a model."""

from __future__ import annotations

import os
import re
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from tramontane.config.section import Section, key_error, nearest


def _distinct(pair: tuple[str, str]) -> tuple[str, str]:
    opening, closing = pair
    if opening in closing or closing in opening:
        raise ValueError(f"{opening!r} and {closing!r}: neither tag may contain the other")
    return pair


_Tag = Annotated[str, Field(min_length=1, pattern=r"^\S(.*\S)?$")]
TagPair = Annotated[tuple[_Tag, _Tag], AfterValidator(_distinct)]

# Arguments of `apply_chat_template` that are set by the package.
_RESERVED = ("tokenize", "add_generation_prompt", "continue_final_message")


def _text_of(value: str, what: str) -> str:
    # `Path` raises errors for texts that are too long, or name an unknown user; `os.path` does not.
    path = Path(os.path.expanduser(value)) if "\n" not in value else None
    if path is None or not os.path.isfile(path):
        return value
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{value}: not {what} in UTF-8 ({error})") from None


def _system_text(value: str | None) -> str | None:
    if value is None or value == "magistral":
        return value
    text = _text_of(value, "a text")
    if text is value and not re.search(r"\s", value):
        if re.search(r"\.(txt|md|jinja2?|j2)$|^(\.\.?|~)/|^/.+/", value):
            raise ValueError(f"{value}: no such file, and too short for a text; check the path")
        if nearest(value.lower(), ["magistral"]):
            raise ValueError(f"{value!r} looks like a misspelling: did you mean 'magistral'?")
    return text


def _template_text(value: str | None) -> str | None:
    text = value and _text_of(value, "a template")
    if text and "{" not in text:
        fault = "no such file" if text is value else "not a Jinja template (nothing in braces)"
        raise ValueError(f"{value}: {fault}; give the file of a chat template, e.g. chat.jinja")
    return text


def _free(kwargs: dict[str, Any]) -> dict[str, Any]:
    if taken := [name for name in _RESERVED if name in kwargs]:
        raise ValueError(f"{', '.join(taken)} cannot be set; remove it")
    return kwargs


TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_free)]


class PromptConfig(Section):
    """Text around each problem: system prompt, chat template, start of the response."""

    system_prompt: Annotated[str | None, AfterValidator(_system_text)] = None
    """System prompt: `magistral` (the paper's instruction, in our wording), a text, or a text file.
    null: the default of the model's chat template."""
    chat_template: Annotated[str | None, AfterValidator(_template_text)] = None
    """Jinja chat template that replaces the tokenizer's: a file, or the template itself. It is
    stored in the run's config and checkpoints. null: the tokenizer's."""
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    """Variables of the chat template, e.g. `{enable_thinking: false}` for Qwen3. A variable that
    the template does not read is refused."""
    date: datetime | None = None
    """Time that the chat template reads (`strftime_now`: Llama 3, Granite and SmolLM3 write the
    date), e.g. `2026-01-31`. null: the time at which the command begins; a run records it, so that
    its conversations, its evaluations and a resumed run have the same prompts."""
    response_prefix: str = ""
    """Start of every response, e.g. `<think>`. It is appended to the prompt: graded as part of the
    response, but never trained on. Not needed if the chat template writes the opening thinking
    tag."""

    allow_special_tokens: bool = False
    """Treat special tokens in the text of rows (`<|im_end|>`) as control tokens, like those of the
    chat template. false: they are plain text, which cannot end or begin a turn."""


class EffortConfig(Section):
    """A level of effort: how it is asked for, and the lengths that it allows. A null key keeps the
    run's value."""

    phrase: str = ""
    """Text before the system prompt, also before a problem's own, e.g. `Effort: low.`"""
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    """Variables of the chat template at this level, added to `data.chat_template_kwargs`, e.g.
    `{enable_thinking: false}` or `{reasoning_effort: low}`."""
    share: float = Field(1.0, gt=0)
    """Share of the training groups, relative to those of the other levels."""
    l_max: int | None = Field(None, ge=2)
    """Replaces `pipeline.l_max`, which it may not exceed."""
    l_cache: int | None = Field(None, ge=0)
    """Replaces `pipeline.l_cache`: the tokens below `l_max` over which the length penalty grows.
    Completions of up to l_max − l_cache tokens, the level's budget, have none."""
    length: float | None = Field(None, ge=0)
    """Replaces `verifier.reward.length`, the maximum penalty for length."""

    @model_validator(mode="after")
    def _asks(self) -> EffortConfig:
        if not (self.phrase or self.chat_template_kwargs):
            raise key_error(
                "the model cannot tell this level from others: give a phrase, or variables of the "
                "chat template (chat_template_kwargs)",
                "phrase",
            )
        return self
