"""The task of `vs_trl.py`, the same for both sides: a checkpoint and its prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import VOCAB, make_llama
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tramontane.config.device import number_type
from tramontane.data.prompts import PromptEncoder
from tramontane.models import loading
from tramontane.models.fetch import cache_dir, fetch

GROUP, MAX_TOKENS = 16, 128
TAUGHT = {"1.8M": 100, "25M": 40}  # initial steps of supervised training; smollm2: none
SEED = 0


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 83 tokens: padding, EOS, unknown, the tags of an answer, and characters."""
    tags = ["<think>", "</think>", "\\boxed{"]
    letters = [chr(ord("a") + i) for i in range(26)]
    characters = [*letters, *map(str.upper, letters), *"0123456789", *" \n+-*/=.,:;?}", "'", '"']
    tokens = ["<pad>", "<eos>", "<unk>", *tags, *characters][:VOCAB]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in tags])
    assert tokenizer.get_vocab_size() == VOCAB
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '\n' }}"
    return fast


def problems(count: int) -> list[dict[str, str]]:
    rng = random.Random(SEED)
    pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(count)]
    return [{"problem": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]


def traces(tokenizer: PreTrainedTokenizerFast, count: int) -> list[list[int]]:
    """Token ids of prompts with the answers that the model is taught, cut at MAX_TOKENS. The
    lengths of the thoughts are exponential, with a mean of 100 characters."""
    rng, encoder = random.Random(SEED + 1), PromptEncoder(tokenizer)
    words = ("take", "the", "tens", "and", "then", "ones", "so", "that", "sum", "more", "or", "it")
    found = []
    for problem in problems(count):
        length = min(MAX_TOKENS, 1 + int(rng.expovariate(1 / 100)))
        thoughts = " ".join(rng.choices(words, k=MAX_TOKENS))[:length]
        text = f"<think>{thoughts}</think>\\boxed{{{problem['answer']}}}<eos>"
        prompt = tokenizer.encode(encoder.render(problem["problem"]))
        found.append(prompt + tokenizer.encode(text)[:MAX_TOKENS])
    return found


def teach(model: Any, rows: list[list[int]]) -> None:
    """Train on `rows` (token ids) with the ordinary next-token loss."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    fast = number_type("cpu").dtype == "bfloat16"
    for start in range(0, len(rows), GROUP):
        chosen = rows[start : start + GROUP]
        ids = torch.zeros(len(chosen), max(map(len, chosen)), dtype=torch.long)
        for row, tokens in zip(ids, chosen, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            logits = model(ids).logits
        F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), ignore_index=0
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def prepare(size: str, folder: Path) -> None:
    """Write the checkpoint, and the prompts in each side's format."""
    if size in TAUGHT:
        tokenizer = make_tokenizer()
        model = make_llama(size, context=256, seed=SEED)
        teach(model, traces(tokenizer, TAUGHT[size] * GROUP))
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    else:
        (folder / "model").symlink_to(fetch(size, cache_dir() / size).folder)
        tokenizer = loading.load_tokenizer(str(folder / "model"))
    rows = problems(4096)
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = PromptEncoder(tokenizer)
    prompts = [encoder.render(row["problem"]) for row in rows]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
