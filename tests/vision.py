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
    Idefics3Config,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaConfig,
    LlavaProcessor,
    Mistral3Config,
    PixtralImageProcessorPil,
    PreTrainedTokenizerFast,
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
PLACES = {"mistral3": "[IMG]", "llava": "<image>", "idefics3": "<image>"}
OTHERS = {
    "mistral3": ["[IMG_BREAK]", "[IMG_END]"],
    "llava": [],
    "idefics3": [
        "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    ],
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
        chat_template=TEMPLATE.format(place=PLACES[kind]),
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
    return Idefics3Config(
        vision_config={"model_type": "idefics3_vision", **VISION},
        text_config={"model_type": "llama", **TEXT},
        image_token_id=token,
        scale_factor=2,
    )


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
    made: Any
    if kind == "llava":
        pixels = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28)
        made = LlavaProcessor(
            pixels, tokenizer, patch_size=7, vision_feature_select_strategy="default",
            num_additional_image_tokens=1, chat_template=tokenizer.chat_template,
        )  # fmt: skip
    else:
        sizes = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
        tiles = Idefics3ImageProcessorPil(**sizes)
        template = tokenizer.chat_template
        made = Idefics3Processor(tiles, tokenizer, image_seq_len=4, chat_template=template)
    made.save_pretrained(folder)


def write_wrapper(folder: Path, kind: str = "mistral3", seed: int = 0) -> Any:
    """Write a wrapper with random weights and its processor; returns the model."""
    tokenizer = tokenizer_of(kind)
    torch.manual_seed(seed)
    token = tokenizer.convert_tokens_to_ids(PLACES[kind])
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
