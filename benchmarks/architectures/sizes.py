"""Tiny random models of every architecture, by the names that configs give their sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save_file
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
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers layers",
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
    (32, "moe_shared_expert_intermediate_size shared_experts_intermediate_size q_lora_rank"),
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
    "deepstack_visual_indexes": [0], "hidden_dim": 32, "num_layers": 1, "dim_head": 16,
    "encoder_hidden_size": 32, "mlp_dim": 48, "decoder_dim": 32, "attention_heads": 2, "layers": 1,
    "ffn_dim": 48, "num_query_tokens": 4, "patch_embed_hidden_size": 32,
    "text_hidden_size": _HIDDEN, "adapter_out_dim": _HIDDEN, "num_local_experts": 2,
    "base_channels": 32, "codebook_size": 64, "num_embeddings": 64, "num_filters": 4,
    "num_timestamp_prediction_layers": 1,
}  # fmt: skip
_MOST = 20_000_000  # parameters
_TEXT_PARTS = {"text_config", "thinker_config", "decoder_config", "global_config"}

# What the names above do not settle.
_LATENT = {"head_dim": None, "num_key_value_heads": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
_MROPE = {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}}
_MUSE = {"out_hidden_size": 128, "projector_hidden_size": 32}
_DRAFTS = {
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_hidden_layers": 4,
    "num_kv_shared_layers": 4,
}  # fmt: skip
_SPARSE = ["dense", "sparse", "sparse", "sparse"]
_DELTA = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
_SLIDING = ["sliding_attention", "full_attention"] * 2
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 64, "patcher_config": {"vocab_size": VOCAB},
        "encoder_config": {
            "vocab_size": VOCAB, "hidden_size": _HIDDEN, "hidden_size_global": _HIDDEN,
        },
        "decoder_config": {"hidden_size_global": _HIDDEN},
    },
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": _SLIDING, "rope_parameters": dict.fromkeys(_SLIDING, _ROPE),
    },
    "cosmos3_edge_text": _MROPE,
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"hidden_size": _HIDDEN, "ffn_hidden_size": _INNER},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": _SPARSE, "num_key_value_heads": 4},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "dots3_note_text": {
        "num_key_value_heads": 4, "mlp_layer_types": _SPARSE, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32, "swa_kv_lora_rank": 16,
        "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 16,
    },
    "dots3_note_audio_encoder": {
        "adapter_input_size": 32, "adapter_out_dim": _HIDDEN, "downsample_hidden_size": 16,
        "conv_output_size": 256,
    },
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"], "adapter_in_dim": 32},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": _HIDDEN, "intermediate_size": _HIDDEN // 4}},
    "gemma4_assistant": {"text_config": _DRAFTS | {"model_type": "gemma4_text"}},
    "gemma4_unified_assistant": {"text_config": _DRAFTS | {"model_type": "gemma4_unified_text"}},
    "gemma3n_text": {
        "num_hidden_layers": 10, "num_kv_shared_layers": 5, "altup_num_inputs": 2, "laurel_rank": 8,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
        "activation_sparsity_pattern": [0.0] * 10,
    },
    "glm4_moe_lite": _LATENT,
    "glm5_next_text": _LATENT | {
        "head_dim": 0, "qk_rope_head_dim": 0, "index_kpool": 2, "linear_head_dim": 16,
        "linear_num_heads": 4, "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "mlp_layer_types": _SPARSE, "indexer_types": ["full"] * 4,
    },
    "glm_ocr_text": _MROPE,
    "glm4v_text": _MROPE,
    "glm4v_moe_text": _MROPE,
    "glm_moe_dsa": _LATENT,
    "gptj": {"rotary_dim": 8},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]], "vision_config": {"hidden_size": 64},
        "downsample_rate": "1/2",
    },
    "hunyuan_vl_text": {"rope_parameters": _ROPE | {"mrope_section": [2, 2, 2, 2]}},
    "kosmos_2_text_model": {"embed_dim": _HIDDEN},
    "kosmos_2_5_text_model": {"embed_dim": _HIDDEN},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0]}},
    "muse_glimmer": _MUSE,
    "muse_spark": _MUSE,
    "muse_spark_audio": {
        "num_hidden_layers": 4, "hidden_sizes": [8] * 4, "out_hidden_size": _HIDDEN,
    },
    "nemotron3_diarization": {"head_config": {"audio_hidden_size": 32}},
    "nemotron_h_omni": {"projector_hidden_size": 32, "vision_hidden_size": 32},
    "paddleocr_vl_text": _MROPE,
    "qwen2_5_omni": {"enable_audio_output": False},
    "qwen3_omni_moe": {"enable_audio_output": False},
    "radio": {"video_temporal_patch_size": 2},
    "unlimited_ocr_text": {"mlp_layer_types": _SPARSE, "num_key_value_heads": 4},
    "reformer": {"axial_pos_embds_dim": [16, 48]},
    "roc_bert": {"shape_vocab_size": 64, "pronunciation_vocab_size": 64},
    "xmod": {"languages": ["en"], "default_language": "en"},
    "hy_v4_vl_text": _LATENT | {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}},
    "inkling2_loop_text": {"loop_layer_index_start": 1, "loop_layer_index_end": 3},
    "sarvam_mla": _LATENT,
    "wavtokenizer_encoder": {"codebook_dim": 32},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": _LATENT | {"linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "llama4_text": {"attention_chunk_size": 16, "floor_scale": 12},
    "longcat_flash": _LATENT | {
        "head_dim": 8, "zero_expert_num": 2, "expert_ffn_hidden_size": 32,
    },
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
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 32], "mlp_layer_types": _SPARSE,
        "rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]},
    },
    "florence_vision": {
        "embed_dim": [16] * 4, "depths": [1] * 4, "num_heads": [2] * 4, "num_groups": [2] * 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
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
    own = SPECIAL.get(kind, {}) | dict(changed or {})
    parts = {part: own[part] for part in {*config.sub_configs} & {*own}}
    base = config(**{part: keys for part, keys in parts.items() if "model_type" in keys})
    return config(**_small(base, own, SIZES))


def _small(base: PreTrainedConfig, own: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Small values for the keys of a config, and of the configs within it."""
    keys = _sizes(base, sizes, own)
    for part in type(base).sub_configs:
        inner = getattr(base, part, None)
        if isinstance(inner, PreTrainedConfig):
            text = sizes is SIZES and part in _TEXT_PARTS
            special = SPECIAL.get(inner.model_type, {}) | (own.get(part) or {})
            small = _small(inner, special, SIZES if text else TOWER)
            keys[part] = {"model_type": inner.model_type} | small
    return keys


def _sizes(
    base: PreTrainedConfig, sizes: dict[str, Any], changed: dict[str, Any]
) -> dict[str, Any]:
    """Those of the sizes that a config knows by their own names, with what is changed; None: its
    default."""
    known = {*base.to_dict(), *getattr(type(base), "__dataclass_fields__", ())}
    if sizes is TOWER:  # some have a number for each stage
        known -= {name for name, v in base.to_dict().items() if isinstance(v, list | tuple)}
    keys = {name: value for name, value in (sizes | SWITCHES).items() if name in known}
    return {name: value for name, value in (keys | changed).items() if value is not None}


def tiny_model(kind: str, changed: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """A float32 model in evaluation mode, whose weights are drawn so wide that errors show. The
    text half alone, where a tower needs a package that is not installed."""
    config = tiny_config(kind, changed)
    auto: Any = AutoModelForCausalLM
    if kind in IMAGE:  # these may be in both
        auto = AutoModelForImageTextToText
    elif type(config) not in CAUSAL:
        auto = AutoModelForMultimodalLM
    try:
        with torch.device("meta"):
            count = auto.from_config(config).num_parameters()
    except ImportError:
        auto, config = AutoModelForCausalLM, config.get_text_config()
        count = 0
    if count > _MOST:
        raise ValueError(f"{count:,} parameters, since its config has sizes by other names")
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    _widen(model)
    return model


def save(model: PreTrainedModel, kind: str, changed: Mapping[str, Any] | None, path: str) -> None:
    """Save a `tiny_model`; a text half alone as transformers would save its wrapper."""
    if isinstance(model.config, CONFIG_MAPPING[kind]):
        model.save_pretrained(path)
        return
    tiny_config(kind, changed).save_pretrained(path)
    weights = {
        re.sub(r"^model\.", "model.language_model.", name): tensor.clone()
        for name, tensor in model.state_dict().items()
    }
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, f"{path}/model.safetensors", {"format": "pt"})


@torch.no_grad()
def _widen(model: PreTrainedModel) -> None:
    numbers = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if p.dim() > 1 and "A_log" not in name:
            wide = 0.5 if "embed" in name else 1.2 * p.shape[-1] ** -0.5
            p.copy_(torch.randn(p.shape, generator=numbers) * wide)
        elif p.is_floating_point() and not any(x in name for x in ("A_log", "dt_", "decay")):
            p.add_(torch.randn(p.shape, generator=numbers) * 0.2)
    speaking = of_text(model)
    if speaking is None:
        return
    head: Any = speaking.get_output_embeddings()
    ids = torch.randint(5, VOCAB, (1, 30), generator=numbers)
    for _ in range(3):  # logits of a trained model's spread
        spread = float(speaking(input_ids=ids, use_cache=False).logits.std())
        head.weight.mul_(min(max(1.5 / spread, 0.1), 10.0) if spread > 0 else 1.0)


def of_text(model: PreTrainedModel) -> PreTrainedModel | None:
    """What of a model runs on text alone: the whole, or the language model in it; None if nothing
    does."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return next((p for p in parts if p.get_output_embeddings() is not None and _runs(p)), None)


def _runs(part: PreTrainedModel) -> bool:
    try:
        found = part(input_ids=torch.full((1, 3), VOCAB - 1), use_cache=False)
    except Exception:  # it wants an image, sound or another model's states as well
        return False
    return isinstance(getattr(found, "logits", None), torch.Tensor)
