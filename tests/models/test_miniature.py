"""A small model of a family gets the verdict that the whole model would get."""

from functools import partial

import pytest
import torch
from transformers import AutoConfig

import tramontane
from tests import hybrids
from tests.generator.test_attention_kinds import KINDS, SIZES
from tests.models.test_families import LLAMA4, MOE, SLIDING, saved
from tests.runs import small_config
from tramontane.config.sft import SFTConfig
from tramontane.errors import InputError
from tramontane.models.loading import load_tokenizer
from tramontane.models.miniature import miniature
from tramontane.models.weight_files import SINGLE
from tramontane.run.fine_tuning import dry_run

# As published, but for the number of layers.
LARGE = {
    "hidden_size": 512,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "vocab_size": 151_936,
    "eos_token_id": 151_645,
    "pad_token_id": 151_643,
}


def config_of(kind, **keys):
    return AutoConfig.for_model(kind, **LARGE | keys)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("qwen3_moe", MOE | {"num_experts": 128, "num_experts_per_tok": 8}),
        ("gemma3_text", {"sliding_window": 512}),
        ("nemotron", {}),
        ("llama4_text", LLAMA4 | {"no_rope_layers": None, "attention_chunk_size": 8192}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_it_is_small_and_has_a_layer_of_each_kind(kind, keys):
    config = config_of(kind, **keys)
    before = config.to_dict()
    small = miniature(config)
    assert config.to_dict() == before
    assert sum(p.numel() for p in small.parameters()) < 5e6
    kinds = set(getattr(config, "layer_types", None) or [])
    assert set(getattr(small.config, "layer_types", None) or []) == kinds
    assert small.config._attn_implementation == "packed"


@pytest.mark.parametrize("kind", KINDS)
def test_families_with_other_attention_pass(kind):
    config_class, extra = KINDS[kind]
    miniature(config_class(**SIZES | extra))


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "falcon_h1", "jamba", "mamba2"])
def test_families_with_state_pass(family):
    miniature(hybrids.make_hybrid(family).config)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("bloom", {"n_head": 8}),
        ("doge", {}),
        ("mpt", {"n_heads": 8}),
        ("qwen2_moe", MOE | SLIDING | {"num_hidden_layers": 2}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_families_that_leak_are_refused(kind, keys):
    with pytest.raises(InputError, match="choose another model|Choose another model"):
        miniature(config_of(kind, **keys))


def test_compressed_keys_are_refused_in_words():
    """They stand beside those of the tokens (DeepSeek V4)."""
    with pytest.raises(InputError, match="attends to other keys than those of its tokens"):
        miniature(AutoConfig.for_model("deepseek_v4"))


def test_a_dry_run_refuses_what_training_refuses(tmp_path):
    tokenizer = load_tokenizer("tiny")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    path = saved(tmp_path / "model", "bloom", n_head=4, **sizes)
    tokenizer.save_pretrained(path)
    state = torch.random.get_rng_state()
    with pytest.raises(InputError, match=r"BloomForCausalLM .*computes attention itself"):
        tramontane.dry_run(small_config(tmp_path / "run", model=path))
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("worker", ["trainer", "teacher", "fine-tuning"])
def test_a_dry_run_asks_for_weights(tmp_path, worker):
    tokenizer = load_tokenizer("tiny")
    path = saved(tmp_path / "model", "llama", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(path)
    (tmp_path / "model" / SINGLE).rename(tmp_path / "model" / "consolidated.safetensors")
    keys = {"model": path}
    if worker == "teacher":
        objective = {
            "trainer": {"objective": {"name": "distill"}},
            "pipeline": {"diversity": "none"},
        }
        keys = objective | {"teacher": {"model": path}}
    ask = partial(tramontane.dry_run, small_config(tmp_path / "run", **keys))
    if worker == "fine-tuning":
        ask = partial(dry_run, SFTConfig(model=path, output=str(tmp_path / "tuned")))
    with pytest.raises(InputError, match=r"no weights .*consolidated"):
        ask()


@pytest.mark.parametrize(
    "kind",
    ["jamba", "bamba", "nemotron_h", "zamba2", "granitemoehybrid", "mamba2", "bailing_hybrid"],
)
def test_published_widths_make_no_large_model(kind):
    """Their layers' widths follow from that of the residual stream and from numbers of heads; a
    model of them took up to two minutes."""
    assert sum(p.numel() for p in miniature(AutoConfig.for_model(kind)).parameters()) < 5e7


@pytest.mark.parametrize("by", ["--model-shape", "plan"])
def test_a_config_without_weights_is_examined(tmp_path, by):
    config_of("bloom", n_head=4, max_position_embeddings=8192).save_pretrained(tmp_path)
    shape = str(tmp_path / "config.json")
    if by == "plan":
        settings = {"model": shape, "gpus": 2, "n_batch": 64, "engine": "slots"}
        with pytest.raises(InputError, match="computes attention itself"):
            tramontane.plan(settings)
        return
    with pytest.raises(InputError, match="computes attention itself"):
        tramontane.dry_run("configs/quickstart.yaml", model_shape=shape)


def test_a_config_that_transformers_cannot_build_is_refused_in_words(tmp_path):
    config_of("hunyuan_v1_dense", head_dim=None).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"code of hunyuan_v1_dense fails .*config\.json"):
        tramontane.dry_run(
            "configs/quickstart.yaml", model_shape=str(tmp_path / "config.json"), gpu="h100"
        )


def test_a_dry_run_takes_chunked_attention(tmp_path):
    tokenizer = load_tokenizer("tiny")
    keys = LLAMA4 | {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    path = saved(tmp_path / "model", "llama4_text", **keys)
    tokenizer.save_pretrained(path)
    tramontane.dry_run(small_config(tmp_path / "run", model=path))
