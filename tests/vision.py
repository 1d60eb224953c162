"""Tiny wrappers of vision towers, with random weights and their own processors."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    Gemma3Config,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaConfig,
    LlavaProcessor,
    Mistral3Config,
    PixtralImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
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
    "qwen3_vl": "<|image_pad|>",
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
    "idefics3": _TILES,
    "smolvlm": _TILES,
    "gemma3": ["<image_soft_token>", "<end_of_image>"],
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
}
WRITTEN = {kind: "<|vision_start|><|image_pad|><|vision_end|>" for kind in PLACES if "qwen" in kind}
GEMMA = {
    "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
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
        **({"extra_special_tokens": GEMMA} if kind == "gemma3" else {}),
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
    if kind == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        gemma = {"sliding_window": 3, "query_pre_attn_scalar": 8, "layer_types": kinds}
        return Gemma3Config(
            text_config={"model_type": "gemma3_text", **TEXT, **gemma},
            vision_config={"model_type": "siglip_vision_model", **VISION},
            image_token_index=token,
            mm_tokens_per_image=4,
        )
    if "qwen" in kind:
        return qwen_config(kind, token)
    made = {"idefics3": Idefics3Config, "smolvlm": SmolVLMConfig}[kind]
    return made(
        vision_config={"model_type": f"{kind}_vision", **VISION},
        text_config={"model_type": "llama", **TEXT},
        image_token_id=token,
        scale_factor=2,
    )


def qwen_config(kind: str, token: int) -> Any:
    """Of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, whose towers' settings have other names."""
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
    vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    return Qwen3VLConfig(text_config=text, vision_config=vision, **ids)


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
    if kind == "smolvlm" or "qwen" in kind:
        # As published: these classes of transformers need torchvision, for videos.
        names = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
        if kind == "smolvlm":
            SmolVLMImageProcessorPil(**TILE_SIZES).save_pretrained(folder)
        else:
            Qwen2VLImageProcessorPil(
                size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56}, patch_size=7, merge_size=2
            ).save_pretrained(folder)
        given = {"processor_class": f"{names.get(kind, 'SmolVLM')}Processor", "image_seq_len": 4}
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
    with torch.no_grad():  # so that tokens and images matter
        for parameter in model.parameters():
            parameter.normal_(std=0.3) if parameter.dim() > 1 else parameter.add_(0.0)
    model.save_pretrained(folder)
    write_processor(kind, tokenizer, folder)
    return model


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """Noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise)


def png(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def uri(image: Image.Image | None = None, **sizes: int) -> str:
    content = png(image or picture(**sizes))
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
