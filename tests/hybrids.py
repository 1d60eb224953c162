"""Tiny random models whose layers carry state, with wide weights, so that a wrong state shows."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 97
EOS = 2
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
DELTA = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
# Sequences are padded to whole chunks, of 256 tokens by default.
CHUNK = {"chunk_size": 32, "mamba_chunk_size": 32}
ALIKE = {"num_hidden_layers": 2}  # where all layers are of one kind
MAMBA2 = {
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, **CHUNK,
}  # fmt: skip
FAMILIES = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "qwen3_next": DELTA | EXPERTS,
    "olmo_hybrid": DELTA,
    "lfm2": {"conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], **EXPERTS},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        **CHUNK,
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 16,
        **MAMBA2,
        **EXPERTS,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "head_dim": 8, **MAMBA2, **ALIKE},
    "bamba": {"attn_layer_indices": [1], **MAMBA2},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        **EXPERTS,
    },
    "mamba": {"state_size": 8, **ALIKE},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, **CHUNK, **ALIKE},
    "falcon_mamba": {"state_size": 8, **ALIKE},
}


def make_hybrid(family: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model in evaluation mode, with transformers' own eager attention."""
    keys = set(AutoConfig.for_model(family).to_dict()) | {"layers_block_type"}
    sizes = COMMON | {k: v for k, v in FAMILIES[family].items() if k in keys}
    if "layers_block_type" in sizes:
        del sizes["num_hidden_layers"]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **sizes), dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and not any(part in name for part in ("A_log", "dt_")):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.9 * p.shape[-1] ** -0.5)
            elif p.dim() == 1 and "A_log" not in name and "dt_" not in name:
                p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    return model.eval()
