"""Small tokenizers with chat templates of the shapes that published models have.

Each template has its original's structure (roles, defaults, variables, the text that opens a
response) in a shorter form.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tramontane.data.playground import problems

CHATML_TURNS = (
    "{% for m in messages %}{% if not (loop.first and m.role == 'system') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
CHATML_SYSTEM = (
    "{% if messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
)
QWEN25 = (
    CHATML_SYSTEM + "{% else %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}" + CHATML_TURNS + "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = (
    CHATML_SYSTEM + "{% endif %}" + CHATML_TURNS + "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
QWEN3_THINKING = QWEN25.replace("assistant\n'", "assistant\n<think>\n'")
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% else %}{{ '<｜Assistant｜>' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
MAGISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}"
    "{% set system = 'First draft your thinking process. [THINK]Your thoughts.[/THINK]Your answer.'"
    " %}{% endif %}{{ '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}"
    "{% for m in turns %}{{ '[INST]' + m.content + '[/INST]' if m.role == 'user' else m.content "
    "+ eos_token }}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n"
    "<|eot_id|>' }}{% endif %}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' "
    "}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
SMOLLM2 = QWEN25.replace(
    "You are a helpful assistant.", "You are a helpful AI assistant named SmolLM"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "{{ '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>")
_STATEMENTS = [p.problem for p in problems("train", 0, count=100)]
# Name: (template, special tokens, other added tokens, EOS).
_SHAPES = {
    "qwen2.5": (QWEN25, _CHATML, (), "<|im_end|>"),
    "qwen3": (QWEN3, _CHATML, _THINK, "<|im_end|>"),
    "qwen3-thinking": (QWEN3_THINKING, _CHATML, _THINK, "<|im_end|>"),
    "qwq": (QWEN3_THINKING, _CHATML, _THINK, "<|im_end|>"),
    "r1-distill": (R1, ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"), _THINK, None),
    "magistral-1.2": (MAGISTRAL, ("[THINK]", "[/THINK]", "[INST]", "[/INST]"), (), "</s>"),
    "llama-3": (
        LLAMA3,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        (),
        "<|eot_id|>",
    ),
    "smollm2": (SMOLLM2, _CHATML, (), "<|im_end|>"),
    "gemma": (GEMMA, ("<start_of_turn>", "<end_of_turn>"), (), "</s>"),
    "base": (None, ("<|endoftext|>",), (), "<|endoftext|>"),
}
SHAPES = tuple(_SHAPES)


def make_tokenizer(shape: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one of the `SHAPES`."""
    return build_tokenizer(*_SHAPES[shape])


def build_tokenizer(template, special, added=(), eos=None) -> PreTrainedTokenizerFast:
    """A tokenizer with a template, special and other added tokens, and its EOS."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator(_STATEMENTS, trainer)
    core.add_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token=eos or special[-1]
    )
    tokenizer.chat_template = template
    return tokenizer


def make_checkpoint(folder: Path, shape: str, context: int = 1024) -> str:
    """Write a small random model with a tokenizer of one of the `SHAPES`; returns its folder."""
    tokenizer = make_tokenizer(shape)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=context,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
