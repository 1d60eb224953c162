"""Models that would compute something else for packed rows are refused when they are loaded."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tramontane.errors import InputError
from tramontane.models import attention
from tramontane.models.loading import load_model
from tramontane.models.packing import pack

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
}
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 64,
    "layer_types": ["full_attention", "sliding_attention"],
}
LLAMA4 = {
    "head_dim": 8,
    "attention_chunk_size": 64,
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "no_rope_layers": [1, 0],
}
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
INKLING = {
    "head_dim": 8,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}

SPARSE = {
    "head_dim": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
}


def saved(folder, kind, **keys):
    """A checkpoint with weights so wide that errors show."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | keys))
    for parameter in model.parameters():
        wide = 1.2 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
        parameter.data.add_(torch.randn_like(parameter), alpha=wide)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("llama", {}),
        ("qwen3", {"head_dim": 8} | SLIDING),
        ("gemma2", {"head_dim": 8, "sliding_window": 64}),
        ("mixtral", {"num_local_experts": 4}),
        ("nemotron", {}),  # its layers do not pass the packing on to attention
        ("stablelm", {}),
        ("llama4_text", LLAMA4),
        ("phimoe", {"num_local_experts": 4, "sliding_window": 128}),  # holds the whole context
    ],
    ids=str,
)
def test_a_model_that_keeps_sequences_apart_loads_as_it_was(tmp_path, kind, keys, dtype):
    model = load_model(saved(tmp_path, kind, **keys), dtype)
    assert model.config._attn_implementation == "packed"
    window = keys.get("sliding_window")
    assert getattr(model.config, "sliding_window", None) == window
    windows = {w for m in model.modules() if (w := getattr(m, "sliding_window", None))}
    assert windows <= {window}  # in the layers of those that keep it there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("bloom", {"n_head": 4}),  # its positions are places in the row
        ("xglm", {}),
        ("qwen2_moe", MOE | SLIDING),  # its window is only in the mask
        ("camembert", {"is_decoder": True}),
        ("mpt", {"n_heads": 4}),  # not through the attention interface
        ("falcon", {}),
    ],
    ids=str,
)
def test_a_model_that_would_leak_into_the_next_sequence_is_refused(tmp_path, kind, keys, dtype):
    with pytest.raises(InputError, match=r"packed in one row.*another model"):
        load_model(saved(tmp_path, kind, **keys), dtype)


@pytest.mark.parametrize(
    ("kind", "keys", "cause"),
    [
        ("mpt", {"n_heads": 4}, "computes attention itself"),
        ("codegen", {"n_head": 4, "rotary_dim": 8}, "computes attention itself"),
        ("recurrent_gemma", {"head_dim": 8, "lru_width": 32}, "computes attention itself"),
        ("deepseek_v32", SPARSE, "gives its attention indices, which"),
        ("inkling_text", INKLING, "gives its attention position_bias, which"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_refusal_names_its_cause_in_one_line(tmp_path, kind, keys, cause):
    with pytest.raises(InputError, match=cause) as refused:
        load_model(saved(tmp_path, kind, **keys))
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 350
    assert "another model" in message


def test_positions_count_from_the_start_of_a_sequence_beyond_the_check_s(tmp_path):
    """Llama 4 scales queries from position `floor_scale` on, which no short sequence reaches."""
    keys = LLAMA4 | {"floor_scale": 60, "attn_scale": 1.0}
    model = load_model(saved(tmp_path, "llama4_text", **keys))
    ids = torch.arange(3, 93).tolist()
    with torch.no_grad():
        packed = model(**pack([ids, ids[::-1], ids[:20]], continues=[None, None, 1])).logits[0]
        model.set_attn_implementation("eager")
        for part, whole in zip(
            packed.split([90, 90, 20]), (ids, ids[::-1], ids[::-1] + ids[:20]), strict=True
        ):
            alone = model(torch.tensor([whole]), use_cache=False).logits[0, -len(part) :]
            torch.testing.assert_close(part, alone, atol=1e-4, rtol=1e-4)


def test_a_mask_by_content_is_refused_whatever_its_weights(tmp_path):
    """Weights that are zero at first let all content through, until they are trained."""
    path = saved(tmp_path, "doge")
    model = AutoModelForCausalLM.from_pretrained(path)
    for layer in model.model.layers:
        layer.self_attn.A.data.zero_()
    model.save_pretrained(path)
    with pytest.raises(InputError, match="DogeAttention gives its attention attention_mask"):
        load_model(path)


def test_a_config_that_transformers_cannot_run_is_refused_in_words(tmp_path):
    path = saved(tmp_path, "mixtral", num_local_experts=4)
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text().replace('"num_experts_per_tok": 2', '"num_experts_per_tok": 9')
    )
    with pytest.raises(InputError, match=r"transformers' own forward of Mixtral.* its config.json"):
        load_model(path)


def test_a_fault_of_our_own_is_not_a_refusal(tmp_path, monkeypatch):
    path = saved(tmp_path, "llama")

    def broken(*args):
        raise TypeError("broken")

    monkeypatch.setattr(attention._ShortAttention, "forward", broken)
    with pytest.raises(TypeError, match="broken"):
        load_model(path)
