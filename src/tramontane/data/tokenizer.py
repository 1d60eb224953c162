"""Trains the small byte-level BPE tokenizer of the tiny base, which can encode any text."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>")
THINK = ("<think>", "</think>")

# Each digit is a token, so that a model sees the columns of a sum. A word includes its leading
# space, and the token before a number includes the space between (" + " is one token, not two).
PIECES = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+(?: (?=\p{N}))?|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?|\s*[\r\n]|\s+"
)

TINY_SYSTEM_PROMPT = (
    "Think in the language of the task between <think> and </think>, then answer in \\boxed{}."
)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] != 'system' %}{{ '<|system|>' + DEFAULT + '<|user|>' }}"
    "{% else %}{{ '<|system|>' }}{% endif %}"
    "{% for m in messages %}{% if not loop.first %}"
    "{{ '<|' + ('user' if m['role'] == 'tool' else m['role']) + '|>' }}{% endif %}"
    "{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer trained on `texts`; the thinking tags are single, visible tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(THINK),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = list(texts)
    # Every prompt contains the system text, so it is added once per text.
    tokenizer.train_from_iterator(texts + [TINY_SYSTEM_PROMPT] * len(texts), trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in THINK])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=list(SPECIAL[2:]),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE.replace("DEFAULT", repr(TINY_SYSTEM_PROMPT))
    return fast
