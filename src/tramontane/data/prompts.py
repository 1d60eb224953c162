"""From a Problem's text to the tokens that the model continues.

The system prompt says what Magistral's says (arXiv 2506.10910, section 2.2.4), in our own words.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

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
    """`magistral` names the text above; anything else is taken as it is."""
    return SYSTEM_PROMPT if system_prompt == "magistral" else system_prompt


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, problem: str, system_prompt: str | None = None
) -> str:
    """The text that a completion follows, by the tokenizer's chat template.

    A base model without a template reads the system text (by default the package's own, since
    nothing else would tell it the format), the problem, and a line break.
    """
    system = system_text(system_prompt)
    if tokenizer.chat_template is None:
        return f"{system or SYSTEM_PROMPT}{problem}\n\n"
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": problem})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, problem: str, system_prompt: str | None = None
) -> list[int]:
    """Token ids of `render_prompt`; the template writes the special tokens itself."""
    text = render_prompt(tokenizer, problem, system_prompt)
    return tokenizer(text, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
