"""Rotary frequencies that depend on a length: generator, trainer and plain forward agree at every
length that they take, in any company."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from tests.generator.slot_models import (
    EOS,
    VOCAB,
    chosen,
    finish,
    make_prompt,
    make_requests,
    reference_logprobs,
)
from tramontane.errors import InputError
from tramontane.generator.engine import SlotEngine
from tramontane.models.loading import context_length, load_config, load_model
from tramontane.models.packing import pack

ORIGINAL, CONTEXT = 24, 96
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "original_max_position_embeddings": ORIGINAL,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": EOS,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": ORIGINAL,
    },
}


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    Phi3ForCausalLM(Phi3Config(**CONFIG)).save_pretrained(tmp_path)
    return tmp_path


def logits(model, *rows):
    with torch.no_grad():
        return [model(torch.tensor([row])).logits[0] for row in rows]


def test_the_case_differs_in_transformers(checkpoint):
    """Without one set of factors, a short sequence depends on what is beside it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    short, long = (make_prompt(random.Random(0), n) for n in (12, 60))
    beside = torch.tensor([short + [0] * (60 - 12), long])
    with torch.no_grad():
        both = model(beside).logits[0, :12]
    assert (both - logits(model, short)[0]).abs().max() > 0.05


def test_all_lengths_agree_and_so_does_what_is_saved(checkpoint, tmp_path):
    model = load_model(str(checkpoint))
    model.save_pretrained(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    rows = [make_prompt(random.Random(n), n) for n in (12, 60, 20, ORIGINAL, ORIGINAL + 1)]
    with torch.no_grad():
        packed = model.eval()(**pack(rows)).logits[0].split([len(row) for row in rows])
    for part, alone in zip(packed, logits(plain, *rows), strict=True):
        torch.testing.assert_close(part, alone, atol=1e-4, rtol=0)
    # The first tokens of a long sequence are those of the short one.
    torch.testing.assert_close(*logits(plain, rows[1][:12]), logits(plain, rows[1])[0][:12])


def test_completions_that_cross_the_original_context(checkpoint, tmp_path):
    model = load_model(str(checkpoint)).requires_grad_(False).eval()
    model.save_pretrained(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    engine = SlotEngine(model, 6, CONTEXT, [EOS])
    engine.submit(make_requests(4, 3, seed=1, lengths=(4, 30), tokens=(5, 60)))
    crossed = 0
    for c in finish(engine).values():
        expected = chosen(reference_logprobs(plain, c.prompt_ids, c.token_ids), c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)
        crossed += len(c.prompt_ids) < ORIGINAL < len(c.prompt_ids) + len(c.token_ids)
    assert crossed > 2


def test_the_short_factors_limit_the_context(checkpoint):
    path = checkpoint / "config.json"
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_factors": "short"}))
    assert context_length(load_config(str(checkpoint))) == ORIGINAL
    row = make_prompt(random.Random(0), ORIGINAL)
    ours = logits(load_model(str(checkpoint)).eval(), row)
    torch.testing.assert_close(ours, logits(plain, row), atol=1e-4, rtol=0)


def test_an_unknown_choice_of_factors_is_refused(checkpoint):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_factors": "both"}))
    with pytest.raises(InputError, match=r"rope_factors .* choose long or short"):
        load_config(str(checkpoint))


@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_dynamic_frequencies_are_refused_beyond_the_context(tmp_path, kind):
    """There transformers makes them from the longest sequence of a forward."""
    torch.manual_seed(0)
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    sizes = CONFIG | {"max_position_embeddings": ORIGINAL, "rope_parameters": rope}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = load_model(str(tmp_path)).eval()
    short, within, rest = (make_prompt(random.Random(n), n) for n in (12, ORIGINAL, 1))
    with torch.no_grad():
        packed = model(**pack([short, within])).logits[0].split([12, ORIGINAL])
    torch.testing.assert_close([*packed], logits(plain, short, within), atol=1e-4, rtol=0)
    beyond = pack([short, within, rest], continues=[None, None, 1])
    if kind == "yarn":
        model(**beyond)
        return
    with pytest.raises(InputError, match=r"25 tokens exceeds .* context of 24.*rope_type dynamic"):
        model(**beyond)
