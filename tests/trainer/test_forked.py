"""A conversation teaches the same whether it is one sequence or forked into several."""

import random
from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer import rollouts
from tramontane.errors import InputError
from tramontane.trainer.microbatch import cut_batch
from tramontane.types import INSERTED


def conversation(rng, prompt, reward):
    """Turns of 1 to 5 tokens of two versions, with 1 to 4 inserted tokens between them."""
    sequence = rollouts.completion(rng, prompt, length=1, reward=reward)
    for version in range(rng.randint(0, 3)):
        for length, added in ((rng.randint(1, 4), INSERTED), (rng.randint(1, 5), version)):
            sequence.token_ids.extend(rng.randrange(rollouts.VOCAB) for _ in range(length))
            logprobs = [0.0 if added == INSERTED else rng.uniform(-5, -3) for _ in range(length)]
            sequence.logprobs.extend(logprobs)
            sequence.versions.extend([added] * length)
    return sequence


def forked(rng, sequence):
    """The same tokens with a new sequence at some turns, whose history is prompt."""
    versions, parts = sequence.versions, []
    starts = [
        i
        for i in range(1, len(versions))
        if versions[i - 1] == INSERTED != versions[i] and rng.random() < 0.6
    ]
    for start, end in zip([0, *starts], [*starts, len(versions)], strict=True):
        while end < len(versions) and versions[end - 1] == INSERTED:
            end -= 1  # what is inserted before a fork is part of the prompt
        own = slice(start, end)
        parts.append(
            replace(
                sequence,
                prompt_ids=sequence.prompt_ids + sequence.token_ids[:start],
                token_ids=sequence.token_ids[own],
                logprobs=sequence.logprobs[own],
                versions=sequence.versions[own],
                continues=bool(parts),
            )
        )
    return parts


def step(batch, **objective):
    """The gradients of one update in float64, its advantages, and its metrics."""
    trainer = rollouts.trainer(objective=objective, microbatch_tokens=48)
    trainer.model.double()
    gradients = []

    def take(*_):  # Adam's state is float32
        for parameter in trainer.model.parameters():
            gradients.append(parameter.grad)
            parameter.grad = None

    trainer.optimizer.register_step_pre_hook(take)
    metrics = trainer.step(batch)
    return gradients, trainer.learned().advantages, metrics


NORMALIZATIONS = ["group_tokens", "minibatch_tokens", "sequence", "constant"]


@settings(max_examples=6)
@given(st.integers(0, 10**6), st.sampled_from(NORMALIZATIONS))
def test_gradients_do_not_depend_on_forks(seed, normalization):
    rng = random.Random(seed)
    rewards = [1.0, 0.0, 0.0, 0.1]
    groups = []
    for _ in range(3):
        prompt = [rng.randrange(rollouts.VOCAB) for _ in range(4)]
        groups.append([conversation(rng, prompt, reward) for reward in rewards])
    whole = rollouts.train_batch(1, groups, n_minibatch=8)
    parts = [[part for s in group for part in forked(rng, s)] for group in groups]
    apart = replace(whole, groups=parts)
    options = {"magistral": {"loss_normalization": normalization, "entropy_coef": 0.01}}
    first, advantages, metrics = step(whole, name="magistral", **options)
    second, split_advantages, split_metrics = step(apart, name="magistral", **options)
    assert len(first) == len(second) > 0
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)  # rotary angles are float32
    firsts = [i for i, s in enumerate(apart.sequences) if not s.continues]
    assert [split_advantages[i] for i in firsts] == pytest.approx(list(advantages))
    for name in ("loss", "entropy", "completion_tokens", "staleness_mean", "grad_norm"):
        assert split_metrics[name] == pytest.approx(metrics[name], rel=1e-6)


def test_minibatches_count_conversations():
    rng = random.Random(0)
    long = [rollouts.completion(rng, [1, 2], 3) for _ in range(5)]
    for sequence in (long[1], long[2], long[4]):
        sequence.continues = True
    batch = rollouts.train_batch(0, [long, long, long], n_minibatch=4)
    config = rollouts.trainer().config
    assert [len(m.completions) for m in cut_batch(batch, config)] == [10, 5]
    with pytest.raises(InputError, match="minibatches of 1 completions"):
        cut_batch(rollouts.train_batch(0, [long], n_minibatch=1), config)


def test_inserted_tokens_count_in_no_sum_of_log_probs():
    """An objective that sums log-probs over a completion leaves them out."""
    rng = random.Random(1)
    plain = rollouts.group(rng, rewards=[1.0, 0.0])
    with_answer = [replace(s, token_ids=s.token_ids + array("i", [5, 6])) for s in plain]
    for sequence in with_answer:
        sequence.logprobs = sequence.logprobs + array("f", [0.0, 0.0])
        sequence.versions = sequence.versions + array("i", [INSERTED] * 2)
    agro = {"name": "agro", "agro": {"form": "off_policy"}}
    first, advantages, _ = step(rollouts.train_batch(0, [plain]), **agro)
    second, others, _ = step(rollouts.train_batch(0, [with_answer]), **agro)
    assert list(others) == pytest.approx(list(advantages))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)  # rotary angles are float32
