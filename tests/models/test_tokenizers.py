"""Tokenizers that are only a `tekken.json`, and templates that only a processor has."""

import json
import logging

import pytest

from tests.magistral import CONTROL, TEMPLATE, VOCABULARY, write_tekken
from tramontane.config import PromptConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.models import tokenizers
from tramontane.models.loading import load_tokenizer
from tramontane.models.tokenizers import save_tokenizer

TEXT = "Hello, 12 think é🙂\n"


@pytest.fixture
def folder(tmp_path):
    """A checkpoint's folder without weights, with a tekken.json."""
    config = {"model_type": "mistral", "vocab_size": VOCABULARY}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tekken(tmp_path)
    return tmp_path


def test_a_tekken_file_is_a_tokenizer(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode())  # words are merged
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 11)
    encoder = PromptEncoder(tokenizer, PromptConfig())
    assert encoder.tags == ("[THINK]", "[/THINK]")
    names = [tokenizer.convert_ids_to_tokens(i) for i in encoder.encode("Hi [INST] there")]
    assert [n for n in names if n in CONTROL] == ["<s>", "[INST]", "[/INST]"]  # the template's own


def test_tokens_are_those_of_mistrals_library(folder):
    library = pytest.importorskip("mistral_common", reason="mistral-common is not installed")
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    assert library
    own = MistralTokenizer.from_file(str(folder / "tekken.json")).instruct_tokenizer.tokenizer
    assert load_tokenizer(str(folder))(TEXT)["input_ids"] == own.encode(TEXT, bos=True, eos=False)


def test_a_base_model_gets_bos_and_one_word_about_the_template(folder, caplog, monkeypatch):
    monkeypatch.setattr(
        "transformers.integrations.mistral.tokenizer.is_mistral_common_available", lambda: False
    )
    tokenizers._warn_no_template.cache_clear()
    with caplog.at_level(logging.WARNING, "tramontane"):
        encoder = PromptEncoder(load_tokenizer(str(folder)), PromptConfig())
        load_tokenizer(str(folder))
    assert encoder.first_tokens == [1]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "tekken.json has no chat template" in warnings[0]


def test_a_saved_tokenizer_keeps_the_tekken_file(folder, tmp_path_factory):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    out = tmp_path_factory.mktemp("saved")
    first = load_tokenizer(str(folder))
    save_tokenizer(first, out)
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert (out / "tekken.json").read_bytes() == (folder / "tekken.json").read_bytes()
    again = load_tokenizer(str(out))
    assert again(TEXT)["input_ids"] == first(TEXT)["input_ids"]
    assert again.chat_template == TEMPLATE


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"config": {"pattern": "("}, "vocab": [], "special_tokens": []}']
)
def test_a_damaged_tekken_file_is_named(folder, content):
    (folder / "tekken.json").write_text(content)
    with pytest.raises(InputError, match="tekken.json: damaged"):
        load_tokenizer(str(folder))


def test_a_template_that_only_the_processor_has(folder):
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    first = load_tokenizer(str(folder))
    assert first.chat_template == TEMPLATE
    first.chat_template = None
    first.save_pretrained(folder)  # a tokenizer.json, without a template
    assert load_tokenizer(str(folder)).chat_template == TEMPLATE
    (folder / "chat_template.json").write_text("[]")
    with pytest.raises(InputError, match="chat_template.json: damaged, not a chat template"):
        load_tokenizer(str(folder))
