"""A conversation teaches the same whether it is one sequence or forked into several."""

import random
from array import array
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer import rollouts
from tramontane.batches import TeacherScores
from tramontane.config import BUILT_IN_OBJECTIVES
from tramontane.errors import InputError
from tramontane.tokens import INSERTED
from tramontane.trainer.collate import lay_out
from tramontane.trainer.microbatch import cut_batch


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
                target=sequence.target if end == len(versions) else 0,
                teacher=sequence.teacher and taught_part(sequence.teacher, own),
            )
        )
    return parts


def taught_part(scores, own):
    """A teacher's scores of a part of a sequence."""
    return TeacherScores(*(values[own] for values in vars(scores).values()))


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
MEASURED = {
    "loss",
    "entropy",
    "completion_tokens",
    "staleness_mean",
    "grad_norm",
    "clip_fraction_high",
}
KL = {"kl_coef": 0.1}
OBJECTIVES = [
    *(("magistral", {"loss_normalization": n, "entropy_coef": 0.01}) for n in NORMALIZATIONS),
    ("magistral", {"importance_correction": "truncated", **KL}),
    ("magistral", {**KL, "kl_as": "loss", "kl_level": "sequence", "kl_estimator": "k3"}),
    ("aipo", {**KL, "kl_as": "both", "kl_level": "sequence", "kl_estimator": "k2"}),
    ("cispo", {}),
    ("gspo", {"eps_low": 0.5, "eps_high": 20.0}),
    ("pass_at_k", {"k": 2}),
    ("majority", {"k": 2}),
    ("agro", {"form": "on_policy"}),
    ("spo", {"loss": "squared", "initial_value": "importance"}),
    ("spo", {}),
    ("jepo", {}),
    ("dro", {}),
    ("dro", {"values": "prompt"}),
    ("dro", {"form": "policy"}),
    ("sft", {}),
    ("distill", {"discount": 1}),
    ("distill", {"top_k": 5, "discount": 1}),
]


def test_every_objective_is_tried():
    assert {name for name, _ in OBJECTIVES} == set(BUILT_IN_OBJECTIVES)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_do_not_depend_on_forks(objective):
    assert forks_without_effect(*objective, seed=5) > 5


@pytest.mark.slow
@settings(max_examples=30)
@given(st.sampled_from(OBJECTIVES), st.integers(0, 10**6))
def test_gradients_do_not_depend_on_any_forks(objective, seed):
    forks_without_effect(*objective, seed)


def forks_without_effect(name, options, seed):
    """The number of forks of a batch of conversations."""
    rng = random.Random(seed)
    rewards = [1.0, 0.0, 0.0, 0.1]
    groups = []
    for _ in range(3):
        prompt = [rng.randrange(rollouts.VOCAB) for _ in range(4)]
        groups.append([conversation(rng, prompt, reward) for reward in rewards])
        for answer, s in enumerate(groups[-1]):
            s.answer, s.target = answer % 2, int(name == "jepo")
    whole = rollouts.train_batch(1, groups, n_minibatch=8)
    if name == "distill":
        rollouts.taught(whole, top_k=5)
    parts = [[part for s in group for part in forked(rng, s)] for group in groups]
    apart = replace(whole, groups=parts)
    first, advantages, metrics = step(whole, name=name, **{name: options})
    second, split_advantages, split_metrics = step(apart, name=name, **{name: options})
    assert len(first) == len(second) > 0 and any(g.abs().max() > 1e-6 for g in first)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)  # rotary angles are float32
    firsts = [i for i, s in enumerate(apart.sequences) if not s.continues]
    assert [split_advantages[i] for i in firsts] == pytest.approx([*advantages], rel=1e-5, abs=1e-6)
    assert split_metrics.keys() == metrics.keys()
    for measured in MEASURED & metrics.keys():
        # Log-probs are float32.
        assert split_metrics[measured] == pytest.approx(metrics[measured], rel=1e-5, abs=1e-7)
    return len(apart.sequences) - len(whole.sequences)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_conversation_is_laid_out_together_only_where_it_must(ranks):
    rng = random.Random(3)
    parts = [forked(rng, conversation(rng, [1, 2, 3], 0.0)) for _ in range(12)]
    sequences = [s for part in parts for s in part]
    owners = [owner for owner, part in enumerate(parts) for _ in part]
    together, used = lay_out(sequences, ranks, 20, together=True)
    laid_out = [m for rank in together for m in rank]
    assert sorted(i for m in laid_out for i in m) == list(range(len(sequences)))
    of_microbatch = [[owner for owner, _ in groupby(m, owners.__getitem__)] for m in laid_out]
    assert sorted(o for m in of_microbatch for o in m) == list(range(12))
    for m, tokens in zip(laid_out, used, strict=True):
        inputs = sum(len(sequences[i].prompt_ids + sequences[i].token_ids) for i in m)
        assert tokens <= inputs and (
            inputs <= 20 or tokens <= 20 or len({owners[i] for i in m}) == 1
        )
    apart, least = lay_out(sequences, ranks, 20, together=False)
    assert sum(least) <= sum(used) and max(least) < max(used)
    assert len([o for rank in apart for m in rank for o in {owners[i] for i in m}]) > 12


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
