"""Turns a problem's statement into the prompt tokens that the model continues.

The system prompt paraphrases Magistral's (arXiv 2506.10910, section 2.2.4).
"""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tramontane.errors import InputError
from tramontane.types import Problem

SYSTEM_PROMPT = """\
Before you answer, think the task through as an inner monologue between <think> and </think>. \
Think as casually and for as long as you want: try things out, doubt, check, start again, until \
you are confident. After </think>, write a short summary that stands on its own: the steps that \
matter, then the final answer. Put the answer to a mathematical task in \\boxed{}, and a program \
in one fenced code block that names its language. Use Markdown and LaTeX. Write both the thoughts \
and the summary in the language of the task.

Task:
"""


def system_text(system_prompt: str | None) -> str | None:
    """The system prompt's text: `magistral` names the text above, other values are the text."""
    return SYSTEM_PROMPT if system_prompt == "magistral" else system_prompt


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, problem: str, system_prompt: str | None = None
) -> str:
    """The text before a completion, by the tokenizer's chat template.

    A base model without a template reads the system text (by default the package's, since nothing
    else describes the format), the problem, and a line break. If the template has no system role,
    the system text precedes the problem.
    """
    system = system_text(system_prompt)
    if tokenizer.chat_template is None:
        return f"{system or SYSTEM_PROMPT}{problem}\n\n"
    user = {"role": "user", "content": problem}
    if system is None:
        return _render(tokenizer, [user])
    try:
        return _render(tokenizer, [{"role": "system", "content": system}, user])
    except TemplateError:  # the template has no such role
        return _render(tokenizer, [{"role": "user", "content": f"{system}{problem}"}])


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, problem: str, system_prompt: str | None = None
) -> list[int]:
    """Token ids of `render_prompt`; the template writes the special tokens itself."""
    text = render_prompt(tokenizer, problem, system_prompt)
    return tokenizer(text, add_special_tokens=tokenizer.chat_template is None)["input_ids"]


def check_prompt_length(
    tokenizer: PreTrainedTokenizerBase,
    problems: Iterable[Problem],
    *,
    system_prompt: str | None,
    limit: int | None,
    context: int | None,
    max_tokens: int,
) -> int:
    """Check that all prompts fit; returns the longest in tokens, 0 without problems.

    Args:
        tokenizer: the model's tokenizer.
        problems: all problems that may be asked.
        system_prompt: as in `render_prompt`.
        limit: maximum tokens of a prompt; None: only the context limits it.
        context: the model's positions (`models.loading.context_length`), which hold prompt and
            completion; None: unknown, so no bound.
        max_tokens: maximum tokens of a completion.

    Raises:
        InputError: a prompt does not fit; the message names the longest one's problem.
    """
    # A list, not a dict by id: problems of different sources may share an id.
    lengths = [(len(encode_prompt(tokenizer, p.problem, system_prompt)), p.id) for p in problems]
    if not lengths:
        return 0
    tokens, longest = max(lengths)
    if context is not None and tokens + max_tokens > context:
        count = sum(n + max_tokens > context for n, _ in lengths)
        raise InputError(
            f"problem {longest!r}: its prompt has {tokens} tokens, which with completions of "
            f"{max_tokens} makes {tokens + max_tokens}, but the model's context holds {context} "
            f"({count} of {len(lengths)} problems are too long): remove them, allow fewer tokens "
            f"a completion, or take a model with more context"
        )
    if limit is not None and tokens > limit:
        count = sum(n > limit for n, _ in lengths)
        raise InputError(
            f"problem {longest!r}: its prompt has {tokens} tokens, but data.max_prompt_tokens "
            f"allows {limit} ({count} of {len(lengths)} problems are too long): raise it, or "
            f"remove them"
        )
    return tokens


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text
