"""A small model and made-up completions, for tests in this folder and the processes they start."""

import random
from array import array

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tramontane.batches import BatchSettings, TrainBatch, TrainSequence
from tramontane.config import ObjectiveConfig, TrainerConfig
from tramontane.trainer.teacher import Teacher
from tramontane.trainer.trainer import Trainer

torch.set_num_threads(1)

SUMS = "tests.trainer.more_objectives.sums"
VOCAB = 61
TEMPERATURE = 0.8


def model(tied=True, seed=0, layers=2):
    """A few layers, with grouped keys; weights drawn wide, so that distributions are far from
    uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        pad_token_id=0,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="packed")


def trainer(tied=True, updates=10, objective=None, layers=2, **config):
    settings = {"learning_rate": 1e-3, "microbatch_tokens": 64} | config
    objective = ObjectiveConfig.model_validate(objective or {})
    return Trainer(
        model(tied, layers=layers), TrainerConfig(objective=objective, **settings), updates
    )


def completion(rng, prompt=None, length=None, version=0, reward=0.0):
    length = length or rng.randint(1, 30)
    return TrainSequence(
        prompt_ids=array("i", prompt or [rng.randrange(VOCAB) for _ in range(5)]),
        token_ids=array("i", [rng.randrange(VOCAB) for _ in range(length)]),
        logprobs=array("f", [rng.uniform(-5, -3) for _ in range(length)]),
        versions=array("i", [version] * length),
        reward=reward,
    )


def taught(batch, top_k=None, seed=0):
    """The same batch, scored by a teacher of another seed."""
    teacher = Teacher(model(seed=seed + 1), budget=64, top_k=top_k, vocabulary=VOCAB)
    scores = teacher.score(batch.sequences, batch.settings.temperature)
    for sequence, found in zip(batch.sequences, scores, strict=True):
        sequence.teacher = found
    return batch


def group(rng, size=4, version=0, rewards=None):
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 8))]
    rewards = rewards or [rng.choice([0.0, 0.1, 1.0]) for _ in range(size)]
    return [completion(rng, prompt, version=version, reward=reward) for reward in rewards]


def train_batch(version, groups, n_minibatch=None):
    return TrainBatch(
        version,
        groups,
        BatchSettings(
            stage="",
            temperature=TEMPERATURE,
            l_max=32,
            n_minibatch=n_minibatch or sum(map(len, groups)),
        ),
    )


def batch(version=0, groups=4, size=4, seed=0, n_minibatch=None):
    rng = random.Random((seed << 16) + version)
    return train_batch(version, [group(rng, size, version) for _ in range(groups)], n_minibatch)


def with_own_logprobs(trainer, batch):
    """The same batch, as if the trainer's present weights had generated it."""
    logprobs = trainer.logprobs(batch.sequences, TEMPERATURE)
    for sequence, values in zip(batch.sequences, logprobs, strict=True):
        sequence.logprobs = array("f", values)
    return batch


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
