"""What `tramontane doctor --chat` says of templates."""

import pytest

from tests.environments.templates import SHAPES, tokenizer_of
from tests.environments.test_chat import REWRITES
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.report import examined
from tramontane.environments.template_checks import COLUMNS


@pytest.mark.parametrize("shape", SHAPES)
def test_the_report_says_what_a_run_would_do(shape):
    traits = {trait.name: trait for trait in examined(PromptEncoder(tokenizer_of(shape)))}
    after_call, after_message = REWRITES.get(shape, (False, False))
    for name, rewritten in (
        ("call with thoughts, answered", after_call),
        ("thoughts, then a message", after_message),
        ("both, then a message", shape in ("qwen3", "gpt-oss", "numbered")),
    ):
        assert traits[name].found == ("rewritten" if rewritten else "appended")
        assert ("conversation.history" in traits[name].remedy) == rewritten
    missing = [trait for trait in traits.values() if trait.state == "missing"]
    assert not missing and {*COLUMNS} <= {*traits}
    own = shape in ("gemma-3", "base")
    assert ("of the user" in traits["tools answer in"].found) == own


def test_what_is_read_otherwise_than_it_is_written_is_missing():
    tokenizer = tokenizer_of.__wrapped__("qwen2.5")
    own = "{{ '<|im_start|>assistant\n' + m.content }}"
    thoughts = "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    tokenizer.chat_template = tokenizer.chat_template.replace(own, own + thoughts)
    traits = {trait.name: trait for trait in examined(PromptEncoder(tokenizer))}
    state, found, remedy = traits["calls read back"][1:]
    assert state == "missing" and found.startswith("its thoughts are not found (")
    assert "conversation.calls" in remedy and "data.chat_template" in remedy
    assert traits["history"].state == "optional" and "calls" not in traits["history"].remedy


def test_a_key_that_keeps_thoughts_is_named():
    tokenizer = tokenizer_of.__wrapped__("qwen3")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "loop.index0 > ns.last", "(preserve_thinking is defined or loop.index0 > ns.last)"
    )
    traits = {trait.name: trait for trait in examined(PromptEncoder(tokenizer))}
    assert "set preserve_thinking in" in traits["thoughts, then a message"].remedy
