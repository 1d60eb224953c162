import pytest

from tramontane.data.playground import problems
from tramontane.data.prompts import (
    SYSTEM_PROMPT,
    check_prompt_length,
    encode_prompt,
    render_prompt,
    system_text,
)
from tramontane.data.tokenizer import TINY_SYSTEM_PROMPT, train_tokenizer
from tramontane.errors import InputError
from tramontane.types import Problem

STATEMENTS = [p.problem for p in problems("train", 0, count=300)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(STATEMENTS, 700)


def with_template(tokenizer, template):
    copy = train_tokenizer(STATEMENTS[:50], 600)
    copy.chat_template = template
    return copy


# The small tokenizer


@pytest.mark.parametrize(
    "text",
    ["12 + 305 = 317", "Сколько 你好 ça", "\t\x00 \r\n\n tabs", "🦆 ½ ﷽", "<think>a</think>"],
)
def test_any_text_survives(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_digits_and_thinking_tags_are_single_visible_tokens(tokenizer):
    assert tokenizer.tokenize("<think>1234</think>") == ["<think>", *"1234", "</think>"]
    assert not set(tokenizer.tokenize("<think></think>")) & set(tokenizer.all_special_tokens)
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.eos_token_id is not None


def test_the_small_template(tokenizer):
    def head(system):
        return f"<s><|system|>{system}<|user|>1 + 1?<|assistant|>"

    assert render_prompt(tokenizer, "1 + 1?") == head(TINY_SYSTEM_PROMPT)
    assert render_prompt(tokenizer, "1 + 1?", "Be brief.") == head("Be brief.")
    assert render_prompt(tokenizer, "1 + 1?", "magistral") == head(SYSTEM_PROMPT)


def test_the_small_template_ends_answers_with_eos(tokenizer):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text.endswith("<|user|>a<|assistant|>b</s>")


# Prompts


def test_magistral_names_the_system_prompt():
    assert system_text("magistral") == SYSTEM_PROMPT
    assert system_text("Be brief.") == "Be brief."
    assert system_text(None) is None
    assert "</think>" in SYSTEM_PROMPT
    assert "\\boxed{}" in SYSTEM_PROMPT


def test_special_tokens_are_encoded_once(tokenizer):
    ids = encode_prompt(tokenizer, "1 + 1?")
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == render_prompt(tokenizer, "1 + 1?")


def test_a_base_model_without_a_template_reads_the_system_text(tokenizer):
    base = with_template(tokenizer, None)
    assert render_prompt(base, "1 + 1?") == SYSTEM_PROMPT + "1 + 1?\n\n"
    assert render_prompt(base, "1 + 1?", "Sum: ") == "Sum: 1 + 1?\n\n"


def test_a_template_without_a_system_role_gets_it_before_the_problem(tokenizer):
    refuses = with_template(
        tokenizer,
        "{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}",
    )
    assert render_prompt(refuses, "1 + 1?", "magistral") == f"[user]{SYSTEM_PROMPT}1 + 1?"
    assert render_prompt(refuses, "1 + 1?") == "[user]1 + 1?"


# Lengths


def check(tokenizer, asked, limit=None, context=None, max_tokens=10):
    return check_prompt_length(
        tokenizer, asked, system_prompt=None, limit=limit, context=context, max_tokens=max_tokens
    )


def test_prompt_lengths(tokenizer):
    short, long = (Problem(f"sum-{n}", "math", "1 + " * n + "1?", "0") for n in (2, 90))
    tokens = len(encode_prompt(tokenizer, long.problem))
    assert check(tokenizer, []) == 0
    assert check(tokenizer, [short, long]) == tokens
    assert check(tokenizer, [short, long], limit=tokens, context=tokens + 10) == tokens
    with pytest.raises(
        InputError,
        match=rf"'sum-90': its prompt has {tokens} tokens.* makes {tokens + 10}, but the model's "
        rf"context holds {tokens + 9} \(1 of 2 ",
    ):
        check(tokenizer, [short, long], context=tokens + 9)
    with pytest.raises(
        InputError, match=rf"'sum-90': .* {tokens} tokens, but data\.max_prompt_tokens"
    ):
        check(tokenizer, [short, long], limit=tokens - 1)


def test_every_prompt_is_measured_when_ids_repeat(tokenizer):
    long, short = (Problem("same", "math", "1 + " * n + "1?", "0") for n in (90, 2))
    tokens = len(encode_prompt(tokenizer, long.problem))
    assert check(tokenizer, [long, short]) == tokens
    with pytest.raises(InputError, match=r"'same': .*\(1 of 2 .*fewer tokens a completion, or"):
        check(tokenizer, [long, short], context=tokens)
