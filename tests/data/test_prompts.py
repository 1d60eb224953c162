import pickle
import subprocess
import sys
import time

import pytest

from tramontane.config import Config, DataConfig, PromptConfig, parse
from tramontane.data.lengths import PromptLimit, measure_prompts
from tramontane.data.playground import problems
from tramontane.data.prompts import PromptEncoder
from tramontane.data.special_tokens import Marks
from tramontane.data.system_prompt import SYSTEM_PROMPT, system_text
from tramontane.data.tokenizer import TINY_SYSTEM_PROMPT, train_tokenizer
from tramontane.errors import InputError
from tramontane.evaluation.checkpoint import encoder_of
from tramontane.types import Problem, ThinkingTags

STATEMENTS = [p.problem for p in problems("train", 0, count=300)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(STATEMENTS, 700)


def with_template(tokenizer, template):
    copy = train_tokenizer(STATEMENTS[:50], 600)
    copy.chat_template = template
    return copy


def render(tokenizer, problem, system_prompt=None):
    return PromptEncoder(tokenizer, PromptConfig(system_prompt=system_prompt)).render(problem)


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

    assert render(tokenizer, "1 + 1?") == head(TINY_SYSTEM_PROMPT)
    assert render(tokenizer, "1 + 1?", "Be brief.") == head("Be brief.")
    assert render(tokenizer, "1 + 1?", "magistral") == head(SYSTEM_PROMPT)


def test_the_small_template_ends_answers_with_eos(tokenizer):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text.endswith("<|user|>a<|assistant|>b</s>")


# Prompts


def test_magistral_names_the_system_prompt():
    assert system_text("magistral") == SYSTEM_PROMPT
    assert system_text("Be brief.") == "Be brief."
    assert system_text(None) is None
    tagged = system_text("magistral", ThinkingTags("[THINK]", "[/THINK]"))
    assert "between [THINK] and [/THINK]" in tagged
    assert "think>" not in tagged
    assert system_text("a <think>", ThinkingTags("[THINK]", "[/THINK]")) == "a <think>"
    assert "</think>" in SYSTEM_PROMPT
    assert "\\boxed{}" in SYSTEM_PROMPT


def test_a_process_that_gets_an_encoder_imports_no_torch_and_nothing_of_its_own(tmp_path):
    """Processes of environments get one, and took two seconds more each; the imports for it are
    made by the process that forks them."""
    (tmp_path / "encoder").write_bytes(pickle.dumps(encoder_of(Config(model="tiny"))))
    code = (
        "import pickle, sys, tramontane.environments.process\n"
        "tramontane.environments.process.warm_up()\n"
        "warm = set(sys.modules)\n"
        "encoder = pickle.load(open('encoder', 'rb'))\n"
        "more = sum(name.startswith('transformers') for name in set(sys.modules) - warm)\n"
        "print(len(encoder.encode('1 + 1')) > 5, 'torch' in sys.modules, more)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.split() == ["True", "False", "0"]


def test_special_tokens_are_encoded_once(tokenizer):
    ids = PromptEncoder(tokenizer).encode("1 + 1?")
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == render(tokenizer, "1 + 1?")


def test_a_text_full_of_special_tokens_takes_linear_time(tokenizer):
    special, marks = PromptEncoder(tokenizer).special, Marks("\ufdd0")
    marked = special.mark(tokenizer.bos_token * 20_000, "tool", marks)
    started = time.process_time()
    ids = special.encode(marked, marks)
    assert time.process_time() - started < 10  # quadratic: minutes
    assert tokenizer.bos_token_id not in ids
    assert tokenizer.decode(ids) == tokenizer.bos_token * 20_000


def test_a_base_model_without_a_template_reads_the_system_text(tokenizer):
    base = with_template(tokenizer, None)
    assert render(base, "1 + 1?") == SYSTEM_PROMPT + "1 + 1?\n\n"
    assert render(base, "1 + 1?", "Sum: ") == "Sum: 1 + 1?\n\n"


def test_a_template_without_a_system_role_gets_it_before_the_problem(tokenizer):
    refuses = with_template(
        tokenizer,
        "{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}",
    )
    assert render(refuses, "1 + 1?", "magistral") == f"[user]{SYSTEM_PROMPT}1 + 1?"
    assert render(refuses, "1 + 1?") == "[user]1 + 1?"


# Chats


def test_a_chat_is_rendered_as_the_template_renders_it(tokenizer):
    chat = [
        {"role": "user", "content": "Pick a number."},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "Double it."},
    ]
    turns = "<|user|>Pick a number.<|assistant|>7</s><|user|>Double it.<|assistant|>"
    assert render(tokenizer, chat, "Be brief.") == f"<s><|system|>Be brief.{turns}"
    own = [{"role": "system", "content": "Think."}, *chat]
    assert render(tokenizer, own, "Be brief.") == f"<s><|system|>Think.{turns}"
    assert render(tokenizer, chat[-1:]) == render(tokenizer, "Double it.")


def test_a_chat_for_models_without_system_role_or_template(tokenizer):
    chat = [{"role": "system", "content": "Think. "}, {"role": "user", "content": "1 + 1?"}]
    strict = with_template(
        tokenizer,
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}",
    )
    assert render(strict, chat) == "user: Think. 1 + 1?\n"
    assert render(with_template(tokenizer, None), chat) == "Think. 1 + 1?\n\n"


def test_the_bound_on_a_chats_tokens_holds(tokenizer):
    turns = [{"role": role, "content": "1 + 1?"} for role in ("user", "assistant")] * 20
    chat = Problem("c", "math", "1 + 1?", "2", messages=[*turns, turns[0]])
    encoder = PromptEncoder(tokenizer)
    tokens = len(encoder.encode(chat.prompt))
    limit = PromptLimit(tokens - 1, "so")
    assert measure_prompts(encoder, [chat], limit).overlong == {0: tokens}


# Texts of the user's


def load(**keys):
    return parse(DataConfig, {"train": "playground:"} | keys, "run.yaml")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}\n{{ m.content }", r"data\.chat_template: line 2: "),
        ("{{ raise_exception('no') }}{{ messages }}", r"data\.chat_template: cannot write .*: no"),
        ("{{ prompt }} hello", r"data\.chat_template: its prompts lack the problem"),
    ],
)
def test_a_template_that_does_not_work_is_refused(tokenizer, template, message):
    with pytest.raises(InputError, match=message):
        PromptEncoder(with_template(tokenizer, None), PromptConfig(chat_template=template))


def test_texts_that_are_no_texts_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("no braces")
    (tmp_path / "latin.jinja").write_bytes(b"{{ \xe9 }}")
    for keys, message in [
        ({"chat_template": "chat.jinja"}, r"chat_template: chat\.jinja: no such file"),
        ({"chat_template": str(tmp_path / "notes.txt")}, "not a Jinja template"),
        ({"chat_template": str(tmp_path / "latin.jinja")}, "not a template in UTF-8"),
        (
            {"system_prompt": "prompts/system.txt"},
            "system_prompt: prompts/system.txt: no such file",
        ),
        ({"system_prompt": "magistrl"}, "'magistrl' looks like a misspelling: .* 'magistral'"),
        ({"system_prompt": "Magistral"}, "did you mean 'magistral'"),
        ({"system_prompt": "mistral"}, "did you mean 'magistral'"),
    ]:
        with pytest.raises(InputError, match=message):
            load(**keys)


def test_a_system_prompt_is_a_text_or_the_file_of_one(tmp_path):
    (tmp_path / "system.txt").write_text("Think.\nThen answer.")
    found = load(system_prompt=str(tmp_path / "system.txt")).system_prompt
    assert found == "Think.\nThen answer."
    for text in ("Be brief.", "/no_think", "Think", "Écris en français.", "用中文思考", found):
        assert load(system_prompt=text).system_prompt == text
