"""A tiny checkpoint of Magistral Small's shape: `mistral3`, which wraps a language model and a
vision tower, with random weights and a `tekken.json` of Mistral's format."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForImageTextToText, Mistral3Config

from tramontane.data.system_prompt import SYSTEM_PROMPT

CONTROL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]",
)  # fmt: skip
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = 400  # of the vocabulary, the 256 bytes included
VOCABULARY = WORDS + len(CONTROL)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
    "{% elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
TEXT = {
    "model_type": "mistral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 11,
}  # fmt: skip
VISION = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 16, "image_size": 28, "patch_size": 14,
}  # fmt: skip


def write_tekken(folder: Path, version: str = "v13") -> None:
    """Write a `tekken.json` whose words come from the paper's system prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([SYSTEM_PROMPT], trainer)
    learned = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merged = [_bytes_of(text) for text, _ in learned if len(text) > 1]
    tokens = [*(bytes([value]) for value in range(256)), *merged]
    content = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) + len(CONTROL),
            "default_num_special_tokens": len(CONTROL),
            "version": version,
        },
        "vocab": [
            {
                "rank": rank,
                "token_bytes": base64.b64encode(token).decode(),
                "token_str": token.decode(errors="replace"),
            }
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(CONTROL)
        ],
    }
    (folder / "tekken.json").write_text(json.dumps(content), encoding="utf-8")


def _bytes_of(text: str) -> bytes:
    """The bytes of a token as byte-level BPE spells it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in plain]
    spelled = {chr(value): value for value in plain}
    spelled |= {chr(256 + place): value for place, value in enumerate(others)}
    return bytes(spelled[char] for char in text)


def write_magistral(folder: Path) -> Path:
    """Write the checkpoint as Mistral publishes it; returns its folder."""
    torch.manual_seed(0)
    config = Mistral3Config(
        text_config=TEXT,
        vision_config=VISION,
        image_token_index=CONTROL.index("[IMG]"),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    # The same weights in Mistral's own layout, beside those of transformers.
    (folder / "consolidated.safetensors").write_bytes(b"unread")
    (folder / "params.json").write_text("{}", encoding="utf-8")
    write_tekken(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder
