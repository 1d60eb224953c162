"""Tiny random models of every architecture, by the names that configs give their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE,
)

VOCAB, EOS, PAD = 2048, 1, 0  # of the tokenizer `tiny`
_HIDDEN, _INNER, _LAYERS, _HEADS, _EXPERTS = 64, 96, 4, 4, 4

# Values, and the names that configs give them; a config takes those that it knows.
_NAMES = (
    (VOCAB, "vocab_size vocab_size_per_layer_input"),
    (_HIDDEN, "hidden_size d_model n_embd embedding_size word_embed_proj_dim"),
    (
        _INNER,
        "intermediate_size intermediate_size_mlp ffn_dim n_inner ffn_hidden_size block_ff_dim dff "
        "decoder_ffn_dim encoder_ffn_dim",
    ),
    (
        _LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers",
    ),
    (
        _HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads "
        "encoder_attention_heads linear_num_value_heads",
    ),
    (2, "num_key_value_heads linear_num_key_heads index_n_heads mamba_expand"),
    (16, "head_dim global_head_dim v_head_dim kv_lora_rank linear_key_head_dim index_head_dim"),
    (16, "linear_value_head_dim mamba_d_head mamba_head_dim mamba_chunk_size"),
    (512, "max_position_embeddings n_positions max_seq_len n_ctx"),
    (_EXPERTS, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_top_k moe_topk moe_k top_k_experts"),
    (1, "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts"),
    (1, "n_group topk_group first_k_dense_replace num_dense_layers moe_layer_start_index"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
    (32, "moe_shared_expert_intermediate_size q_lora_rank"),
    (8, "sliding_window qk_rope_head_dim qk_nope_head_dim hidden_size_per_layer_input"),
    (8, "mamba_d_state state_size ssm_state_size mamba_n_heads mamba_num_heads"),
    (1, "mamba_n_groups n_groups"),
    (128, "mamba_d_ssm"),
    (3, "conv_L_cache"),
    (6, "index_topk"),
)
SIZES = {name: value for value, names in _NAMES for name in names.split()}
SIZES |= {"bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": PAD}
SWITCHES = {"is_decoder": True}
TOWER = {
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 48, "num_hidden_layers": 1, "depth": 1,
    "num_attention_heads": 2, "num_heads": 2, "head_dim": 16, "image_size": 32, "patch_size": 8,
    "out_hidden_size": _HIDDEN, "projection_dim": 32, "vision_output_dim": 32,
    "projector_input_dim": 32, "projector_output_dim": 32, "encoder_layers": 1,
    "encoder_attention_heads": 2, "d_model": 32, "encoder_ffn_dim": 48, "output_dim": _HIDDEN,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
_MOST = 12_000_000  # parameters
_TEXT_PARTS = {"text_config", "thinker_config", "decoder_config", "global_config"}

# What the names above do not settle.
_LATENT = {"head_dim": None, "num_key_value_heads": 4}
_MROPE = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3],
        "partial_rotary_factor": 1.0,
    }
}  # fmt: skip
_DELTA = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
_SLIDING = ["sliding_attention", "full_attention"] * 2
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "num_hidden_layers": 10, "num_kv_shared_layers": 5, "altup_num_inputs": 2, "laurel_rank": 8,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
        "activation_sparsity_pattern": [0.0] * 10,
    },
    "glm4_moe_lite": _LATENT,
    "glm4v_text": _MROPE,
    "glm4v_moe_text": _MROPE,
    "glm_moe_dsa": _LATENT,
    "gptj": {"rotary_dim": 8},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": _LATENT | {"linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "llama4_text": {"attention_chunk_size": 16, "floor_scale": 12},
    "longcat_flash": _LATENT | {"zero_expert_num": 2, "expert_ffn_hidden_size": 32},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "minicpm3": _LATENT,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "mistral4_text": _LATENT,
    "modernbert-decoder": {"local_attention": 8},
    "mistral4": _LATENT,
    "mistral_large4_text": _LATENT,
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "zaya": {"num_experts_per_tok": 1},
    "xlm": {"emb_dim": _HIDDEN},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "mamba"], "num_hidden_layers": None,
        "n_groups": 2,
    },
    "olmo_hybrid": _DELTA,
    "qwen2_vl_text": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "qwen2_5_omni_text": _MROPE,
    "qwen3_vl_text": _MROPE,
    "qwen3_vl_moe_text": _MROPE,
    "qwen3_omni_moe_text": _MROPE,
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 4, "hc_lowrank": 16,
    },
    "youtu": _LATENT,
}  # fmt: skip


def tiny_config(kind: str, changed: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """A small config of an architecture, wrappers of several models included."""
    config = CONFIG_MAPPING[kind]
    keys = _sizes(config(), SIZES, SPECIAL.get(kind, {}) | dict(changed or {}))
    given = {part: keys[part] for part in _TEXT_PARTS & {*keys}}
    for part, base in _parts(config(**given)).items():
        if part in _TEXT_PARTS:
            own = SPECIAL.get(base.model_type, {})
            keys[part] = {"model_type": base.model_type} | _sizes(base, SIZES, own)
        else:
            keys[part] = {"model_type": base.model_type} | _sizes(base, TOWER, {})
    return config(**keys)


def _parts(base: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    found = {part: getattr(base, part, None) for part in type(base).sub_configs}
    return {part: own for part, own in found.items() if isinstance(own, PreTrainedConfig)}


def _sizes(
    base: PreTrainedConfig, sizes: dict[str, Any], changed: dict[str, Any]
) -> dict[str, Any]:
    """Those of the sizes that a config knows by their own names, with what is changed; None: its
    default."""
    known = {*base.to_dict(), *getattr(type(base), "__dataclass_fields__", ())}
    keys = {name: value for name, value in (sizes | SWITCHES).items() if name in known}
    return {name: value for name, value in (keys | changed).items() if value is not None}


def tiny_model(kind: str, changed: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """A float32 model in evaluation mode, whose weights are drawn so wide that errors show."""
    config = tiny_config(kind, changed)
    auto: Any = AutoModelForCausalLM
    if kind in IMAGE:  # these may be in both
        auto = AutoModelForImageTextToText
    elif type(config) not in CAUSAL:
        auto = AutoModelForMultimodalLM
    with torch.device("meta"):
        count = auto.from_config(config).num_parameters()
    if count > _MOST:
        raise ValueError(f"{count:,} parameters, since its config has sizes by other names")
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    _widen(model)
    return model


@torch.no_grad()
def _widen(model: PreTrainedModel) -> None:
    numbers = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if p.dim() > 1 and "A_log" not in name:
            wide = 0.5 if "embed" in name else 1.2 * p.shape[-1] ** -0.5
            p.copy_(torch.randn(p.shape, generator=numbers) * wide)
        elif p.is_floating_point() and not any(x in name for x in ("A_log", "dt_", "decay")):
            p.add_(torch.randn(p.shape, generator=numbers) * 0.2)
    head = model.get_output_embeddings()
    if head is None:
        return
    ids = torch.randint(5, VOCAB, (1, 30), generator=numbers)
    for _ in range(3):  # logits of a trained model's spread
        spread = float(model(input_ids=ids, use_cache=False).logits.std())
        head.weight.mul_(min(max(1.5 / spread, 0.1), 10.0) if spread > 0 else 1.0)
