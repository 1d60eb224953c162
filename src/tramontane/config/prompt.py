"""Settings of the text around each problem, shared by every command that asks a model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator

from tramontane.config.section import Section


def _distinct(pair: tuple[str, str]) -> tuple[str, str]:
    opening, closing = pair
    if opening in closing or closing in opening:
        raise ValueError(f"{opening!r} and {closing!r}: neither tag may contain the other")
    return pair


_Tag = Annotated[str, Field(min_length=1, pattern=r"^\S(.*\S)?$")]
TagPair = Annotated[tuple[_Tag, _Tag], AfterValidator(_distinct)]

# Arguments of `apply_chat_template` that the package sets.
_RESERVED = ("tokenize", "add_generation_prompt", "continue_final_message")


class PromptConfig(Section):
    """Text around each problem: system prompt, chat template, beginning of the response."""

    system_prompt: str | None = None
    """System prompt: `magistral` (the paper's instruction, in our wording) or any other text. null:
    the default of the model's chat template."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, e.g. `{enable_thinking: false}` for Qwen3. A variable that
    the template does not read is refused."""
    response_prefix: str = ""
    """Text that begins every response, e.g. `<think>`. The prompt ends with it, so it is graded as
    part of the response, and never trained on. Not needed if the chat template writes the opening
    thinking tag itself."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _free(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        if taken := [name for name in _RESERVED if name in kwargs]:
            raise ValueError(f"{', '.join(taken)} cannot be set; remove it")
        return kwargs
