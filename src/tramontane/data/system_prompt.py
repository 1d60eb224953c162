"""Texts of system prompts: Magistral's, and one that describes tools.

Magistral's is a paraphrase (arXiv 2506.10910, section 2.2.4).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tramontane.types import PAPER_TAGS, ThinkingTags

SYSTEM_PROMPT = """\
Before you answer, think the task through as an inner monologue between <think> and </think>. \
Think as casually and for as long as you want: try things out, doubt, check, start again, until \
you are confident. After </think>, write a short summary that stands on its own: the steps that \
matter, then the final answer. Put the answer to a mathematical task in \\boxed{}, and a program \
in one fenced code block that names its language. Use Markdown and LaTeX. Write both the thoughts \
and the summary in the language of the task.

Task:
"""

# For chat templates that do not describe tools; the form of calls is that of Hermes and Qwen.
TOOLS_PROMPT = """\
You may call these tools:
<tools>
{tools}
</tools>

To call one, write its name and arguments as JSON:
<tool_call>{{"name": NAME, "arguments": {{ARGUMENTS}}}}</tool_call>
"""


def system_text(system_prompt: str | None, tags: ThinkingTags = PAPER_TAGS) -> str | None:
    """The system prompt's text: `magistral` names the text above, with the model's thinking tags;
    other values are the text."""
    if system_prompt != "magistral":
        return system_prompt
    return SYSTEM_PROMPT.replace(PAPER_TAGS.opening, tags.opening).replace(
        PAPER_TAGS.closing, tags.closing
    )


def describe(tools: Sequence[Mapping[str, Any]], system: str) -> str:
    """A system prompt that describes tools, for a chat template that does not; unchanged if it
    names all of them."""
    if all(tool["function"]["name"] in system for tool in tools):
        return system
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"{TOOLS_PROMPT.format(tools=listed)}\n{system}"  # first, as `magistral` ends in "Task:"
