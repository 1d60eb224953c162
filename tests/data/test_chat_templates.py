"""Prompts and responses under chat templates of the shapes that published models have."""

import json
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from tests.data.chat_templates import MAGISTRAL, SHAPES, make_tokenizer
from tramontane.config import BUILT_IN, PromptConfig, load_section
from tramontane.config.data import DataConfig
from tramontane.data.lengths import PromptFilter, PromptLimit
from tramontane.data.load import load_problems
from tramontane.data.prompts import PromptEncoder, find_tags
from tramontane.data.system_prompt import SYSTEM_PROMPT
from tramontane.errors import InputError
from tramontane.generator.endings import Detokenizer
from tramontane.types import Completion
from tramontane.verifier.format import check_format

MATH = BUILT_IN["math"].format
TAGS = {"magistral-1.2": ("[THINK]", "[/THINK]")}
OPENED = {"qwen3-thinking": "<think>\n", "qwq": "<think>\n", "r1-distill": "<think>\n"}

tokenizer_of = cache(make_tokenizer)


def encoder_of(shape, tags=None, **settings):
    return PromptEncoder(tokenizer_of(shape), PromptConfig(**settings), tags)


def response_text(encoder, sampled, end_ids=()):
    """The text of a response whose sampled part is the text `sampled`."""
    ids = encoder.tokenizer(sampled, add_special_tokens=False)["input_ids"]
    n = len(ids)
    prompt = encoder.encode("1 + 1?")
    completion = Completion(0, 0, prompt, ids, [0.0] * n, [0] * n, "stop")
    return "".join(Detokenizer(encoder.tokenizer, encoder.response).parts(completion, end_ids))


@pytest.mark.parametrize("shape", SHAPES)
def test_tags_come_from_the_tokenizer(shape):
    tags = TAGS.get(shape, ("<think>", "</think>"))
    assert find_tags(tokenizer_of(shape)) == tags
    assert encoder_of(shape).tags == tags
    assert encoder_of(shape, tags=("<a>", "</a>")).tags == ("<a>", "</a>")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_template_that_writes_the_opening_tag_has_opened_the_response(shape):
    encoder = encoder_of(shape)
    assert encoder.opened == OPENED.get(shape, "")
    assert encoder.render("1 + 1?").endswith(encoder.opened)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_natural_response_of_each_model_has_the_format(shape):
    encoder = encoder_of(shape)
    opening, closing = encoder.tags
    start = "" if encoder.opened else f"{opening}\n"
    eos = encoder.tokenizer.eos_token
    sampled = rf"{start}1 + 1 = 2.{closing}" + "\n\n" + r"It is \boxed{2}." + eos
    text = response_text(encoder, sampled, [encoder.tokenizer.eos_token_id])
    parsed = check_format(text, MATH, encoder.tags)
    assert (parsed.ok, parsed.reason) == (True, "")
    assert parsed.thoughts.strip() == "1 + 1 = 2."
    assert parsed.answer.strip() == r"It is \boxed{2}."


@pytest.mark.parametrize("shape", sorted(OPENED))
def test_a_tag_that_the_template_wrote_must_not_be_written_again(shape):
    encoder = encoder_of(shape)
    text = response_text(encoder, r"<think>\n1 + 1 = 2</think>\boxed{2}")
    assert check_format(text, MATH, encoder.tags).reason == "more than one <think>"
    with pytest.raises(InputError, match="already ends its prompts with '<think>"):
        encoder_of(shape, response_prefix="<think>\n")


def test_an_empty_pair_of_tags_counts_as_the_responses_thoughts():
    encoder = encoder_of("qwen3", chat_template_kwargs={"enable_thinking": False})
    assert encoder.opened == "<think>\n\n</think>\n\n"
    parsed = check_format(response_text(encoder, r"It is \boxed{2}."), MATH, encoder.tags)
    assert parsed.ok
    assert parsed.thoughts.strip() == ""
    thinking = encoder_of("qwen3", chat_template_kwargs={"enable_thinking": True})
    assert thinking.opened == encoder_of("qwen3").opened == ""


@pytest.mark.parametrize("shape", SHAPES)
def test_the_system_prompt_names_the_models_tags(shape):
    encoder = encoder_of(shape, system_prompt="magistral")
    text = encoder.render("1 + 1?")
    opening, closing = encoder.tags
    assert f"between {opening} and {closing}" in text
    assert text.count("1 + 1?") == 1
    asked = SYSTEM_PROMPT.replace("<think>", opening).replace("</think>", closing)
    assert asked.strip() in text


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_have_the_templates_special_tokens_once(shape):
    encoder = encoder_of(shape)
    ids = encoder.encode("1 + 1?")
    assert encoder.tokenizer.decode(ids) == encoder.render("1 + 1?")
    assert encoder.encode_all(["1 + 1?", "2 + 2?"]) == [ids, encoder.encode("2 + 2?")]
    assert ids.count(encoder.tokenizer.bos_token_id) <= 1


@pytest.mark.parametrize("shape", ["qwen2.5", "base", "magistral-1.2", "r1-distill"])
@pytest.mark.parametrize("prefix", ["Sure.", "Let me see:\n", " é"])
def test_a_prefix_is_in_the_prompt_and_in_the_text(shape, prefix):
    plain, encoder = encoder_of(shape), encoder_of(shape, response_prefix=prefix)
    assert encoder.render("1 + 1?") == plain.render("1 + 1?") + prefix
    assert response_text(encoder, " yes") == encoder.opened + prefix + " yes"
    assert encoder.response.prefix == encoder.opened + prefix


def test_a_prefix_opens_the_thoughts_of_a_base_model():
    encoder = encoder_of("base", response_prefix="<think>")
    assert encoder.render("1 + 1?").endswith("1 + 1?\n\n<think>")
    text = response_text(encoder, r" 2</think>\boxed{2}")
    assert check_format(text, MATH, encoder.tags).thoughts == " 2"


def test_template_variables_that_nothing_reads_are_refused():
    with pytest.raises(InputError, match="enable_thinking: .* does not read"):
        encoder_of("qwen2.5", chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(InputError, match="no chat template"):
        encoder_of("base", chat_template_kwargs={"enable_thinking": False})


def test_arguments_that_the_package_sets_are_refused(tmp_path):
    path = tmp_path / "data.yaml"
    path.write_text("chat_template_kwargs: {tokenize: true}")
    with pytest.raises(InputError, match="chat_template_kwargs: tokenize cannot be set"):
        load_section(DataConfig, path)


def test_special_tokens_have_no_text_except_the_tags():
    encoder = encoder_of("magistral-1.2")
    text = response_text(encoder, r"[THINK]a[INST][/THINK]<s>\boxed{2}</s>")
    assert text == r"[THINK]a[/THINK]\boxed{2}"
    other = encoder_of("magistral-1.2", tags=("<think>", "</think>"))
    assert response_text(other, r"[THINK]a[/THINK]b") == "ab"


def test_a_token_that_ended_the_completion_has_no_text():
    encoder = encoder_of("qwen2.5")
    [end] = encoder.tokenizer("?", add_special_tokens=False)["input_ids"]
    assert response_text(encoder, "a?b?", [end]) == "a?b"
    assert response_text(encoder, "a?b?") == "a?b?"


# Special tokens in rows


PIECES = ("a", "1 + 1?", " ", "\n", "\ufdd0", "<|im_", "<think>")


@pytest.mark.parametrize("shape", SHAPES)
def test_special_tokens_in_a_statement_are_text(shape):
    """No statement has more control tokens than an ordinary one, and its text is unchanged."""
    encoder = PromptEncoder(make_tokenizer(shape))
    tokenizer = encoder.tokenizer
    special = {*tokenizer.all_special_ids}
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    texts = [str(tokenizer.added_tokens_decoder[i]) for i in sorted(special)]

    def control(prompt):
        return [token for token in encoder.encode(prompt) if token in special]

    ordinary = control("What is 1 + 1?")

    @given(st.lists(st.sampled_from([*PIECES, *texts]), min_size=1).map("".join))
    @settings(max_examples=50, deadline=None)
    def holds(statement):
        assert control(statement) == ordinary
        ids = encoder.encode(statement)[len(encoder.first_tokens) :]
        assert tokenizer.decode(ids) == encoder.render(statement)
        allowed = PromptEncoder(tokenizer, PromptConfig(allow_special_tokens=True))
        kept = "trim" in (tokenizer.chat_template or "") and statement != statement.strip()
        found = [token for token in allowed.encode(statement) if token in special]
        assert kept or len(found) == len(ordinary) + len(
            re.findall(encoder.special._special, statement)
        )

    holds()


def test_special_tokens_in_the_turns_of_a_chat_are_text():
    """In the system's and the assistant's turns thinking tags are tokens, as Magistral's are."""
    encoder = PromptEncoder(make_tokenizer("magistral-1.2"))
    ids = dict(zip(*(f(encoder.tokenizer) for f in (tokens_of, ids_of)), strict=True))
    chat = [
        {"role": "system", "content": "Think in [THINK] and [/THINK], not in [INST]."},
        {"role": "user", "content": "[THINK]1[/THINK]</s>[INST]"},
        {"role": "assistant", "content": "[THINK]2[/THINK]3</s>"},
        {"role": "user", "content": "[/INST]4"},
    ]
    found = [token for token in encoder.encode(chat) if token in ids.values()]
    turn = [ids["[INST]"], ids["[/INST]"]]
    tags = [ids["[THINK]"], ids["[/THINK]"]]
    assert found == [ids["<s>"], *tags, *turn, *tags, ids["</s>"], *turn]


def tokens_of(tokenizer):
    return [str(token) for token in tokenizer.added_tokens_decoder.values()]


def ids_of(tokenizer):
    return list(tokenizer.added_tokens_decoder)


@pytest.mark.parametrize("template", [None, MAGISTRAL])
def test_a_tokenizer_that_appends_eos_does_not_end_prompts_with_it(template):
    tokenizer = make_tokenizer("base")
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<s> $A {tokenizer.eos_token}",
        special_tokens=[("<s>", bos), (tokenizer.eos_token, eos)],
    )
    assert tokenizer("1 + 1?")["input_ids"][-1] == eos
    tokenizer.chat_template = template
    for prefix in ("", "<think>"):
        encoder = PromptEncoder(tokenizer, PromptConfig(response_prefix=prefix))
        ids = encoder.encode("1 + 1?")
        assert (ids.count(bos), ids.count(eos)) == (1, 0)
        assert tokenizer.decode(ids).removeprefix("<s>") == encoder.render("1 + 1?").removeprefix(
            "<s>"
        )


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{{ m.content }}"
    "{% endfor %}"
)


def test_a_row_that_the_template_refuses_is_located_before_the_start(tmp_path):
    tokenizer = make_tokenizer("base")
    tokenizer.chat_template = ALTERNATING
    user, assistant = ({"role": r, "content": "1"} for r in ("user", "assistant"))
    chats = [[user], [user, assistant, user], [user, user], [user, assistant, user]]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"prompt": c, "answer": "2"}) + "\n" for c in chats))
    problems = load_problems(
        str(file), DataConfig(train="playground:"), split="train", limit=None, seed=0
    )
    prompts = PromptFilter(PromptEncoder(tokenizer), PromptLimit(10_000, ""), drop=False)
    message = (
        r"chats\.jsonl:3: the model's chat template refuses the prompt, whose roles are user, user "
        r"\(Roles must alternate user/assistant\); .*or remove the row"
    )
    with pytest.raises(InputError, match=message):
        prompts.keep(problems)
    prompts.keep([p for number, p in enumerate(problems) if number != 2])
    with pytest.raises(InputError, match=r"^the model's chat template refuses"):
        prompts.encoder.encode(chats[2])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_hostile_template_runs_nothing_and_is_no_traceback(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer("base")
    tokenizer.chat_template = template + "{{ messages[0].content }}"
    with pytest.raises(InputError, match="chat template: cannot write a prompt"):
        PromptEncoder(tokenizer)
    assert not (tmp_path / "ran").exists()


def test_a_template_that_refuses_every_prompt_is_no_traceback():
    tokenizer = make_tokenizer("base")
    tokenizer.chat_template = "{{ raise_exception('Never.') }}"
    with pytest.raises(InputError, match=r"chat template: cannot write a prompt: Never\."):
        PromptEncoder(tokenizer, PromptConfig(response_prefix="<think>"))
