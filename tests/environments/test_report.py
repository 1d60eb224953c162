"""What `tramontane doctor --chat` says of templates."""

import sys

import pytest

from tests.environments.templates import _TOOLS, SHAPES, tokenizer_of
from tests.environments.test_chat import REWRITES
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.report import by_mistral, examined
from tramontane.environments.template_checks import COLUMNS


@pytest.mark.parametrize("shape", SHAPES)
def test_the_report_says_what_a_run_would_do(shape):
    encoder = PromptEncoder(tokenizer_of(shape))
    traits = {trait.name: trait for trait in examined(encoder)}
    after_call, after_message = REWRITES.get(shape, (False, False))
    for name, rewritten in (
        ("call with thoughts, answered", after_call),
        ("thoughts, then a message", after_message),
        ("both, then a message", shape in ("qwen3", "gpt-oss", "numbered")),
    ):
        told = ("optional", "rewritten") if rewritten else ("ok", "appended")
        assert (traits[name].state, traits[name].found) == told
        assert traits[name].remedy.startswith("a run begins a new sequence") == rewritten
        assert ("conversation.history" in traits[name].remedy) == rewritten
        assert "or set" not in traits[name].remedy  # the template has no such key
    missing = [trait for trait in traits.values() if trait.state == "missing"]
    assert not missing and {*COLUMNS} <= {*traits}
    own = shape in ("gemma-3", "base")
    assert ("of the user" in traits["tools answer in"].found) == own
    described = "by the template" if encoder.reads_tools else "in the system prompt"
    assert traits["tools are described"].found == described
    assert traits["chat template"].found.endswith("none" if shape == "base" else " characters")
    told = ("chat template", "form of calls", "tools are described", "tools answer in")
    assert all(traits[name].state == "ok" for name in told)


def test_what_is_read_otherwise_than_it_is_written_is_missing():
    tokenizer = tokenizer_of.__wrapped__("qwen2.5")
    own = "{{ '<|im_start|>assistant\n' + m.content }}"
    thoughts = "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    tokenizer.chat_template = tokenizer.chat_template.replace(own, own + thoughts)
    traits = {trait.name: trait for trait in examined(PromptEncoder(tokenizer))}
    state, found, remedy = traits["calls read back"][1:]
    assert state == "missing" and found.startswith("its thoughts are not found (")
    assert "conversation.calls" in remedy and "data.chat_template" in remedy
    refused = traits["history"]
    assert refused.state == "optional" and "in two places" in refused.found
    assert refused.remedy == "give another template (data.chat_template)"
    followed = traits["thoughts, then a message"]
    assert followed.state == "missing" and "in two places" in followed.found
    assert followed.remedy == refused.remedy
    assert traits["end of turn"][1:] == ("ok", "`<|im_end|>`", "")
    assert traits["form of calls"][1:] == ("ok", "hermes", "")


def test_calls_without_an_end_are_refused_and_tools_beside_the_last_question_written_anew():
    tokenizer = tokenizer_of.__wrapped__("qwen2.5")
    end, user = (
        "{{ '<|im_end|>\n' }}{% elif m.role == 'tool'",
        "{{ '<|im_start|>user\n' + m.content",
    )
    last = (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    )
    shown = "{% if tools and loop.index0 == ns.last %}{{ tools | tojson }}{% endif %}"
    tokenizer.chat_template = last + tokenizer.chat_template.removeprefix(_TOOLS).replace(
        end, "{% if not m.tool_calls %}" + end.replace("{% elif", "{% endif %}{% elif")
    ).replace(user, shown + user, 1)
    traits = {trait.name: trait for trait in examined(PromptEncoder(tokenizer))}
    refused, rewritten = (
        traits[name] for name in ("call with thoughts, answered", "thoughts, then a message")
    )
    assert refused.state == "missing"
    assert refused.found == "the chat template has no token that ends a message with calls"
    assert (rewritten.state, rewritten.found) == ("optional", "rewritten")


def test_mistrals_own_tokens_need_a_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "mistral_common.protocol.instruct.validator", None)
    (trait,) = by_mistral(PromptEncoder(tokenizer_of("qwen2.5")))
    assert (trait.name, trait.state) == ("by mistral-common", "optional")
    assert "not installed" in trait.found and "[mistral]" in trait.found


def test_a_key_that_keeps_thoughts_is_named():
    tokenizer = tokenizer_of.__wrapped__("qwen3")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "loop.index0 > ns.last", "(preserve_thinking is defined or loop.index0 > ns.last)"
    )
    tokenizer.chat_template += (
        "{# clear_thinking truncate_history_thinking keep_past_thinking preserve_thoughts "
        "drop_thinking preserve_thinking_of_others #}"
    )
    traits = {trait.name: trait for trait in examined(PromptEncoder(tokenizer))}
    remedy = traits["thoughts, then a message"].remedy
    assert remedy.startswith("a run begins a new sequence") and remedy.endswith(
        "or set preserve_thinking, clear_thinking, truncate_history_thinking, keep_past_thinking, "
        "preserve_thoughts, drop_thinking in data.chat_template_kwargs"
    )
