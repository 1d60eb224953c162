"""Tiny wrappers of vision towers, with random weights and their own processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    Gemma3Config,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Gemma4Config,
    Gemma4ImageProcessorPil,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaProcessor,
    Mistral3Config,
    PixtralImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
    SmolVLMImageProcessorPil,
)

TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 320, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 7,
}  # fmt: skip
TOKENS = ("<s>", "</s>", "<pad>")
# What a template writes for an image, and the tokens at whose places features are.
PLACES = {
    "mistral3": "[IMG]", "llava": "<image>", "idefics3": "<image>", "smolvlm": "<image>",
    "gemma3": "<start_of_image>", "qwen2_vl": "<|image_pad|>", "qwen2_5_vl": "<|image_pad|>",
    "qwen3_vl": "<|image_pad|>", "qwen3_vl_moe": "<|image_pad|>", "qwen3_5": "<|image_pad|>",
    "qwen3_5_moe": "<|image_pad|>", "gemma4": "<|image|>", "llava_next": "<image>",
}  # fmt: skip
TOKEN = {**PLACES, "gemma3": "<image_soft_token>"}
_TILES = [
    "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
]  # fmt: skip
_QWEN = ["<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
OTHERS = {
    "mistral3": ["[IMG_BREAK]", "[IMG_END]"],
    "llava": [],
    "llava_next": [],
    "idefics3": _TILES,
    "smolvlm": _TILES,
    "gemma3": ["<image_soft_token>", "<end_of_image>"],
    "gemma4": ["<|image>", "<image|>", "<|audio|>", "<|video|>"],
    **{kind: _QWEN for kind in PLACES if "qwen" in kind},
}
WRITTEN = {kind: "<|vision_start|><|image_pad|><|vision_end|>" for kind in PLACES if "qwen" in kind}
# What tokenizers name.
NAMED = {
    "gemma3": {
        "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    "gemma4": {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
}  # fmt: skip
TEMPLATE = (
    "{{{{ bos_token }}}}{{% for m in messages %}}{{{{ m.role + ':' }}}}"
    "{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{{% for p in m.content %}}"
    "{{% if p.type == 'image' %}}{{{{ '{place}' }}}}{{% else %}}{{{{ p.text }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}{{{{ '\n' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ 'assistant:' }}}}{{% endif %}}"
)


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Bytes, and the family's special tokens."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [*TOKENS, PLACES[kind], *OTHERS[kind]]
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=special[3:],
        chat_template=TEMPLATE.format(place=WRITTEN.get(kind, PLACES[kind])),
        **({"extra_special_tokens": NAMED[kind]} if kind in NAMED else {}),
    )


def config_of(kind: str, token: int) -> Any:
    if kind == "mistral3":
        return Mistral3Config(
            text_config={"model_type": "mistral", **TEXT},
            vision_config={"model_type": "pixtral", "head_dim": 8, **VISION, "image_size": 56},
            image_token_index=token,
            spatial_merge_size=2,
            vision_feature_layer=-1,
        )
    if kind == "llava":
        vision = {"model_type": "clip_vision_model", "projection_dim": 16, **VISION}
        text = {"model_type": "llama", **TEXT}
        return LlavaConfig(vision_config=vision, text_config=text, image_token_index=token)
    if kind == "llava_next":
        vision = {"model_type": "clip_vision_model", "projection_dim": 16, **VISION}
        text = {"model_type": "mistral", **TEXT}
        return LlavaNextConfig(
            vision_config=vision, text_config=text, image_token_index=token,
            image_grid_pinpoints=PINPOINTS,
        )  # fmt: skip
    if kind == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        gemma = {"sliding_window": 3, "query_pre_attn_scalar": 8, "layer_types": kinds}
        return Gemma3Config(
            text_config={"model_type": "gemma3_text", **TEXT, **gemma},
            vision_config={"model_type": "siglip_vision_model", **VISION},
            image_token_index=token,
            mm_tokens_per_image=4,
        )
    if kind == "gemma4":
        return gemma4_config(token)
    if "qwen" in kind:
        return qwen_config(kind, token)
    made = {"idefics3": Idefics3Config, "smolvlm": SmolVLMConfig}[kind]
    return made(
        vision_config={"model_type": f"{kind}_vision", **VISION},
        text_config={"model_type": "llama", **TEXT},
        image_token_id=token,
        scale_factor=2,
    )


def gemma4_config(token: int) -> Any:
    """With layers that share keys and values, embeddings for each layer, and ears."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    text = {
        **TEXT, "num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 8,
        "global_head_dim": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320, "use_bidirectional_attention": "vision",
    }  # fmt: skip
    vision = {
        **VISION, "num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2,
        "position_embedding_size": 64,
    }  # fmt: skip
    audio = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "subsampling_conv_channels": [8, 4], "output_proj_dims": 16,
    }  # fmt: skip
    return Gemma4Config(
        text_config={"model_type": "gemma4_text", **text},
        vision_config={"model_type": "gemma4_vision", **vision},
        audio_config={"model_type": "gemma4_audio", **audio},
        image_token_id=token, audio_token_id=token + 3, video_token_id=token + 4,
    )  # fmt: skip


def qwen_config(kind: str, token: int) -> Any:
    """The config of Qwen2-VL or a successor, whose settings have other names."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {**TEXT, "rope_parameters": rope, "tie_word_embeddings": False}
    sizes = {"patch_size": 7, "num_heads": 2, "depth": 3, "spatial_merge_size": 2}
    ids = {"image_token_id": token, "vision_start_token_id": token + 1}
    ids |= {"vision_end_token_id": token + 2, "video_token_id": token + 3}
    if kind == "qwen2_vl":
        vision = {**sizes, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
        return Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
    vision = {**sizes, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 28, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    vision |= {"num_position_embeddings": 16}
    if "moe" in kind:
        text |= {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        }  # fmt: skip
    if "qwen3_5" in kind:
        text |= {
            "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        }  # fmt: skip
        text["rope_parameters"] = rope | {"partial_rotary_factor": 1.0}
        made: Any = Qwen3_5MoeConfig if "moe" in kind else Qwen3_5Config
        return made(text_config=text, vision_config=vision, **ids)
    vision |= {"deepstack_visual_indexes": [0, 1]}
    made = Qwen3VLMoeConfig if "moe" in kind else Qwen3VLConfig
    return made(text_config=text, vision_config=vision, **ids)


PINPOINTS = [[28, 56], [56, 28], [56, 56]]
TILE_SIZES: Any = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}


def write_processor(kind: str, tokenizer: Any, folder: Path) -> None:
    if kind == "mistral3":
        # As published: transformers' class for it cannot be imported without torchvision.
        PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size=7).save_pretrained(folder)
        given = {"processor_class": "PixtralProcessor", "patch_size": 7, "spatial_merge_size": 2}
        given |= {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]"}
        text = json.dumps(given | {"image_end_token": "[IMG_END]"})
        (folder / "processor_config.json").write_text(text)
        tokenizer.save_pretrained(folder)
        return
    if kind in ("smolvlm", "gemma4") or "qwen" in kind:
        # As published: these classes of transformers need torchvision, for videos.
        names = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}
        names |= {"smolvlm": "SmolVLM", "gemma4": "Gemma4"}
        if kind == "gemma4":
            Gemma4ImageProcessorPil(
                patch_size=7, pooling_kernel_size=2, max_soft_tokens=70
            ).save_pretrained(folder)
        elif kind == "smolvlm":
            SmolVLMImageProcessorPil(**TILE_SIZES).save_pretrained(folder)
        else:
            Qwen2VLImageProcessorPil(
                size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56}, patch_size=7, merge_size=2
            ).save_pretrained(folder)
        given = {"processor_class": f"{names.get(kind, 'Qwen3VL')}Processor", "image_seq_len": 4}
        (folder / "processor_config.json").write_text(json.dumps(given))
        tokenizer.save_pretrained(folder)
        return
    made: Any
    if kind == "llava":
        pixels = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28)
        made = LlavaProcessor(
            pixels, tokenizer, patch_size=7, vision_feature_select_strategy="default",
            num_additional_image_tokens=1, chat_template=tokenizer.chat_template,
        )  # fmt: skip
    elif kind == "llava_next":
        pixels = LlavaNextImageProcessorPil(
            size={"shortest_edge": 28}, crop_size=28, image_grid_pinpoints=PINPOINTS
        )
        made = LlavaNextProcessor(
            pixels, tokenizer, patch_size=7, vision_feature_select_strategy="default",
            num_additional_image_tokens=1, chat_template=tokenizer.chat_template,
        )  # fmt: skip
    elif kind == "gemma3":
        square = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
        template = tokenizer.chat_template
        made = Gemma3Processor(square, tokenizer, image_seq_length=4, chat_template=template)
    else:
        tiles = Idefics3ImageProcessorPil(**TILE_SIZES)
        template = tokenizer.chat_template
        made = Idefics3Processor(tiles, tokenizer, image_seq_len=4, chat_template=template)
    made.save_pretrained(folder)


def write_wrapper(folder: Path, kind: str = "mistral3", seed: int = 0) -> Any:
    """Write a wrapper with random weights and its processor; returns the model."""
    tokenizer = tokenizer_of(kind)
    torch.manual_seed(seed)
    token = tokenizer.convert_tokens_to_ids(TOKEN[kind])
    model = AutoModelForImageTextToText.from_config(config_of(kind, token)).eval()
    # Recurrences grow with weights: at 0.3, float32 is 5e-5 nats from float64 in the whole model.
    std = 0.2 if "qwen3_5" in kind else 0.3
    with torch.no_grad():  # so that tokens and images matter
        for parameter in model.parameters():
            parameter.normal_(std=std) if parameter.dim() > 1 else parameter.add_(0.0)
    model.save_pretrained(folder)
    write_processor(kind, tokenizer, folder)
    return model
