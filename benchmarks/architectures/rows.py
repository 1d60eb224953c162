"""The rows of the table: architectures that people use, in the order of the page, with their
variants, and then every other one that transformers has."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as MULTIMODAL,
)

from tramontane.models.wrapped import PARTS


class Row(NamedTuple):
    """An architecture or a variant of one."""

    kind: str  # `model_type` of its config
    known: str = ""  # checkpoints that people know it by
    variant: str = ""
    changed: Mapping[str, Any] | None = None  # keys of the config that make the variant

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.variant}" if self.variant else self.kind

    @property
    def wrapped(self) -> bool:
        """True for a model that wraps a text half."""
        return wraps(self.kind)


_SLIDING = ["sliding_attention", "full_attention"] * 2
_LONG = {"long_factor": [4.0] * 8, "short_factor": [1.0] * 8}

USED = [
    Row("mistral", "Mistral 7B; Mistral Small 3, Magistral Small 1.0 and 1.1 as text"),
    Row("mistral", "Mistral 7B v0.1", "all layers without window", {"sliding_window": None}),
    Row("mistral3", "Mistral Small 3.1 and 3.2, Magistral Small 1.2, Devstral Small 2"),
    Row("ministral", "Ministral 8B 2410"),
    Row("ministral3", "Ministral 3"),
    Row("mistral4", "Mistral Small 4 as text"),
    Row("mistral3", "Mistral Small 4", "experts", {"text_config": {"model_type": "mistral4"}}),
    Row("mistral_large4", "Mistral Large 4"),
    Row("mixtral", "Mixtral 8x7B, 8x22B"),
    Row("voxtral", "Voxtral"),
    Row("llama", "Llama 2 to 3.3, SmolLM2, DeepSeek-R1-Distill-Llama, `tiny`"),
    Row("llama", "Llama 3.2 1B and 3B", "tied head", {"tie_word_embeddings": True}),
    Row(
        "llama",
        "Llama 3.1",
        "Llama 3 positions",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    Row("llama4", "Llama 4 Scout, Maverick"),
    Row("qwen2", "Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen"),
    Row(
        "qwen2",
        "Qwen2.5 beyond 32k",
        "YaRN",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    Row("qwen2_moe", "Qwen1.5-MoE, Qwen2-57B-A14B"),
    Row(
        "qwen2_moe",
        "",
        "sliding windows",
        {"use_sliding_window": True, "layer_types": _SLIDING},
    ),
    Row("qwen2_vl", "Qwen2-VL"),
    Row("qwen2_5_vl", "Qwen2.5-VL"),
    Row("qwen3", "Qwen3 0.6B to 32B"),
    Row("qwen3", "", "sliding windows", {"use_sliding_window": True, "layer_types": _SLIDING}),
    Row("qwen3_moe", "Qwen3-30B-A3B, 235B-A22B"),
    Row("qwen3_moe", "", "dense first layer", {"mlp_only_layers": [0]}),
    Row("qwen3_next", "Qwen3-Next"),
    Row("qwen3_vl", "Qwen3-VL"),
    Row("qwen3_vl_moe", "Qwen3-VL-30B-A3B"),
    Row("qwen3_5_text", "Qwen3.5, Qwen3.6 as text"),
    Row("qwen3_5", "Qwen3.5, Qwen3.6"),
    Row("qwen3_5_moe", "Qwen3.5-35B-A3B"),
    Row("gemma", "Gemma 1"),
    Row("gemma2", "Gemma 2"),
    Row("gemma3_text", "Gemma 3 270M and 1B"),
    Row("gemma3", "Gemma 3 4B to 27B"),
    Row("gemma3_text", "", "soft-capped logits", {"final_logit_softcapping": 3.0}),
    Row("gemma3n_text", "Gemma 3n as text"),
    Row("gemma4_text", "Gemma 4 as text", "", {"layer_types": _SLIDING}),
    Row(
        "gemma4_text",
        "Gemma 4 E2B, E4B",
        "shared keys and values",
        {"num_kv_shared_layers": 2, "layer_types": _SLIDING},
    ),
    Row(
        "gemma4_text",
        "",
        "keys equal values",
        {
            "attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 32,
            "layer_types": _SLIDING,
        },
    ),
    Row("gemma4", "Gemma 4"),
    Row("deepseek_v2", "DeepSeek-V2, V2-Lite"),
    Row("deepseek_v3", "DeepSeek-V3, R1, Kimi K2"),
    Row("deepseek_v3", "", "without dense layers", {"first_k_dense_replace": 0}),
    Row("deepseek_v32", "DeepSeek-V3.2"),
    Row("deepseek_v4", "DeepSeek-V4"),
    Row("kimi_k25", "Kimi K2.5"),
    Row("kimi_linear", "Kimi Linear"),
    Row("glm4", "GLM-4 0414, GLM-Z1"),
    Row("glm4_moe", "GLM-4.5, 4.6, 4.7"),
    Row("glm4_moe_lite", "GLM-4.7-Flash"),
    Row("glm_moe_dsa", "GLM-5"),
    Row("glm4v", "GLM-4.1V"),
    Row("glm4v_moe", "GLM-4.5V"),
    Row("gpt_oss", "gpt-oss 20B, 120B"),
    Row("phi3", "Phi-3, Phi-4, Phi-4-mini"),
    Row(
        "phi3",
        "Phi-3 128k, Phi-4-mini",
        "LongRoPE beyond the original context",
        {
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **_LONG},
            "original_max_position_embeddings": 2,
        },
    ),
    Row("phimoe", "Phi-3.5-MoE"),
    Row("granite", "Granite 3"),
    Row("granitemoehybrid", "Granite 4", "", {"layer_types": ["mamba", "attention"] * 2}),
    Row("falcon_h1", "Falcon-H1"),
    Row("nemotron_h", "Nemotron-H, Nemotron 3 Nano"),
    Row("bamba", "Bamba"),
    Row("jamba", "Jamba"),
    Row("lfm2", "LFM2"),
    Row("lfm2_moe", "LFM2-8B-A1B"),
    Row("olmo2", "OLMo 2"),
    Row("olmo3", "Olmo 3"),
    Row("olmoe", "OLMoE"),
    Row("olmo_hybrid", "Olmo Hybrid"),
    Row("smollm3", "SmolLM3"),
    Row("cohere2", "Command A, Command R7B"),
    Row("ernie4_5", "ERNIE 4.5 0.3B"),
    Row("ernie4_5_moe", "ERNIE 4.5 21B-A3B"),
    Row("hunyuan_v1_dense", "Hunyuan 0.5B to 7B"),
    Row("hunyuan_v1_moe", "Hunyuan-A13B"),
    Row("minimax_m2", "MiniMax-M2"),
    Row("minicpm3", "MiniCPM3"),
    Row("seed_oss", "Seed-OSS"),
    Row("exaone4", "EXAONE 4"),
    Row("apertus", "Apertus"),
    Row("gpt2", "GPT-2"),
    Row("gpt_neox", "Pythia, GPT-NeoX"),
    Row("llava", "LLaVA 1.5"),
    Row("llava_onevision", "LLaVA-OneVision"),
    Row("internvl", "InternVL3"),
    Row("idefics3", "Idefics3"),
    Row("smolvlm", "SmolVLM"),
    Row("paligemma", "PaliGemma"),
]  # fmt: skip


def wraps(kind: str) -> bool:
    """True if the config of an architecture has a part that is a language model's."""
    return bool(PARTS & {*CONFIG_MAPPING[kind].sub_configs})


@cache
def every_row() -> list[Row]:
    """The rows that people use, and one for each other causal LM, and each other wrapper of one, of
    the installed transformers."""
    used = {row.kind for row in USED}
    wrappers = {kind for kind in MULTIMODAL if wraps(kind)}
    return USED + [
        Row(kind, _example(kind)) for kind in sorted({*CAUSAL} | wrappers) if kind not in used
    ]


def named(name: str) -> Row:
    """The row of a name."""
    [row] = [row for row in every_row() if row.name == name]
    return row


def _example(kind: str) -> str:
    """The checkpoint that transformers' own documentation of the config names."""
    source = inspect.getsource(inspect.getmodule(CONFIG_MAPPING[kind]))  # type: ignore[arg-type]
    found = re.search(r'checkpoint="([^"]+)"', source)
    return found[1] if found else ""
