"""A small model and made-up completions, for tests in this folder and the processes they start."""

import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tramontane.config import ObjectiveConfig, PipelineConfig, TrainerConfig
from tramontane.trainer import objectives
from tramontane.trainer.trainer import Trainer
from tramontane.types import Batch, Completion, Group, Problem, Verdict

torch.set_num_threads(1)
objectives.__path__.append(str(Path(__file__).parent / "more_objectives"))

VOCAB = 61


def model(tied=True, seed=0):
    """Two layers, with grouped keys; weights drawn wide, so that distributions are far from
    uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        pad_token_id=0,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="packed")


def trainer(
    tied=True, n_batch=16, n_minibatch=None, group_size=4, updates=10, objective=None, **config
):
    settings = {"learning_rate": 1e-3, "microbatch_tokens": 64} | config
    return Trainer(
        model(tied),
        TrainerConfig(objective=ObjectiveConfig(**(objective or {})), **settings),
        PipelineConfig(
            n_batch=n_batch,
            n_minibatch=n_minibatch,
            group_size=group_size,
            n_async=n_batch,
            l_max=32,
            l_cache=4,
        ),
        temperature=0.8,
        updates=updates,
        seed=3,
    )


def completion(rng, group=0, index=0, prompt=None, length=None, version=0):
    length = length or rng.randint(1, 30)
    return Completion(
        group=group,
        index=index,
        prompt_ids=prompt or [rng.randrange(VOCAB) for _ in range(5)],
        token_ids=[rng.randrange(VOCAB) for _ in range(length)],
        logprobs=[rng.uniform(-5, -3) for _ in range(length)],
        versions=[version] * length,
        finish_reason="stop",
    )


def group(rng, number, size=4, version=0, rewards=None):
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 8))]
    rewards = rewards or [rng.choice([0.0, 0.1, 1.0]) for _ in range(size)]
    return Group(
        id=number,
        problem=Problem("p", "math", "?"),
        completions=[completion(rng, number, i, prompt, version=version) for i in range(size)],
        verdicts=[Verdict(r, {}, "right" if r else "malformed") for r in rewards],
    )


def batch(version=0, groups=4, size=4, seed=0):
    rng = random.Random((seed << 16) + version)
    return Batch(version, [group(rng, n, size, version) for n in range(groups)])


def with_own_logprobs(trainer, batch):
    """The same batch, as if the trainer's present weights had generated it."""
    own = trainer.logprobs(batch.completions)
    for c, logprobs in zip(batch.completions, own, strict=True):
        c.logprobs = logprobs
    return batch


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
