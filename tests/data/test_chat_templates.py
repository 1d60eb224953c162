"""Prompts and responses under chat templates of the shapes that published models have."""

from functools import cache

import pytest

from tests.data.chat_templates import SHAPES, make_tokenizer
from tramontane.config import BUILT_IN, PromptConfig, load_section
from tramontane.config.data import DataConfig
from tramontane.data.prompts import SYSTEM_PROMPT, PromptEncoder, find_tags
from tramontane.errors import InputError
from tramontane.generator.text import Detokenizer
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
