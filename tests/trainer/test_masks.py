"""Masks of tokens and completions: the step's gradient is that of the tokens that stay, divided by
their number."""

import math
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.trainer.tabular import bandit, completion, descent, trainer
from tramontane.batches import Batch, BatchSettings
from tramontane.config import ObjectiveConfig
from tramontane.tokens import INSERTED
from tramontane.trainer.ratios import effective_sample_size
from tramontane.types import Completion, Group, Problem, Verdict

MASKS = {
    "token_ratio": [0.7, 1.3],
    "sequence_ratio": [0.6, 1.6],
    "geometric_ratio": [0.8, 1.2],
    "off_policy": 0.05,
    "token_tv": 0.05,
    "token_kl": 0.01,
    "truncated": True,
}


def stays(key, pi, mu, advantage, truncated):
    """Whether each token of a completion stays under a mask, as its paper writes."""
    ratios = [p / m for p, m in zip(pi, mu, strict=True)]
    whole, limit = math.prod(ratios), MASKS[key]
    if key == "truncated":
        return [not truncated] * len(pi)
    if key == "token_ratio":
        return [limit[0] <= r <= limit[1] for r in ratios]
    if key == "sequence_ratio":
        return [limit[0] <= whole <= limit[1]] * len(pi)
    if key == "geometric_ratio":
        return [limit[0] <= whole ** (1 / len(pi)) <= limit[1]] * len(pi)
    if key == "off_policy":
        drift = sum(math.log(m / p) for p, m in zip(pi, mu, strict=True)) / len(pi)
        return [advantage >= 0 or drift <= limit] * len(pi)

    def far(p, m):
        if key == "token_tv":
            return abs(p - m) > limit
        return m * math.log(m / p) + (1 - m) * math.log((1 - m) / (1 - p)) > limit

    return [
        not (far(p, m) and ((advantage > 0 and p > m) or (advantage < 0 and p < m)))
        for p, m in zip(pi, mu, strict=True)
    ]


@pytest.mark.parametrize(
    "keys", [*((key,) for key in MASKS), ("off_policy", "token_ratio", "token_tv"), tuple(MASKS)]
)
@pytest.mark.parametrize("normalization", ["group_tokens", "minibatch_tokens", "sequence"])
@settings(max_examples=4)
@given(seed=st.integers(0, 2**31))
def test_the_gradient_is_that_of_the_tokens_that_stay(keys, normalization, seed):
    random = torch.Generator().manual_seed(seed)
    policy, noise = torch.randn(2, 4, 3, dtype=torch.float64, generator=random)
    behavior = policy + 0.3 * noise
    groups = []
    for _ in range(2):
        lengths = torch.randint(1, 5, (4,), generator=random).tolist()
        group = []
        for n, length in enumerate(lengths):
            actions = torch.randint(0, 3, (length,), generator=random).tolist()
            found = completion(behavior, actions, float(n % 2), truncated=n == 3)
            group.append(found)
        groups.append(group)
    mask = {key: MASKS[key] for key in keys}
    options = {"rho": 1e9, "advantage_normalization": "none", "loss_normalization": normalization}
    t = trainer(policy, {"name": "aipo", "aipo": options, "mask": mask})
    got = descent(t, groups)

    table = policy.clone().requires_grad_()
    kept = []  # for each group, of each completion: surrogate of tokens that stay
    for group in groups:
        kept.append([])
        for s in group:
            states = [3, *s.token_ids[:-1]]
            logprobs = table.log_softmax(-1)[states, list(s.token_ids)]
            mu = torch.tensor(s.logprobs, dtype=torch.float64)
            advantage = s.reward - 0.5
            policies = logprobs.detach().exp().tolist(), mu.exp().tolist()
            which = [stays(key, *policies, advantage, s.truncated) for key in keys]
            terms = (logprobs - mu).exp() * advantage
            kept[-1].append(terms[torch.tensor(which).all(0)])
    flat = [terms for group in kept for terms in group if len(terms)]
    if normalization == "sequence":
        value = sum(terms.mean() for terms in flat) / max(len(flat), 1)
    elif normalization == "minibatch_tokens":
        value = sum(x.sum() for x in flat) / max(sum(map(len, flat)), 1)
    else:
        alive = [torch.cat(group) for group in kept if sum(map(len, group))]
        value = sum(terms.mean() for terms in alive) / max(len(alive), 1)
    expected = torch.zeros_like(policy)
    if flat:
        (expected,) = torch.autograd.grad(value, table)
    torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)
    total = sum(len(s.token_ids) for group in groups for s in group)
    assert t.metrics["masked_tokens"] == pytest.approx(1 - sum(map(len, flat)) / total)


@pytest.mark.parametrize(
    ("reason", "ending", "cut"),
    [
        ("length", None, True),
        ("stop", None, False),
        ("length", "max_tokens", True),
        ("stop", "context_full", True),  # by the environment's answer
        ("stop", "completed", False),
    ],
)
def test_completions_are_cut_by_their_tokens_or_by_what_is_answered(reason, ending, cut):
    ended = Completion(0, 0, [1, 2], [3], [-1.0], [0], reason, ending=ending)
    group = Group(0, Problem("p", "math", "?", "42"), [ended], [Verdict(0.0, {}, "wrong")])
    made = Batch(0, [group], BatchSettings("", 1.0, 8, 1)).train_batch(str.strip)
    assert [s.truncated for s in made.sequences] == [cut]


def test_inserted_tokens_and_given_ones_are_neither_masked_nor_counted():
    """A mask is of sampled tokens: what a tool said is in no denominator, and a recorded response,
    whose μ is not known, stays."""
    policy, behavior = torch.randn(2, 4, 3, dtype=torch.float64)
    sampled = completion(behavior, [0, 1, 2], 1.0)
    sampled.versions = array("i", [0, INSERTED, 0])
    other = completion(behavior, [2, 2], 0.0)
    objective = {"name": "aipo", "mask": {"token_ratio": [0.999, 1.001]}}
    t = trainer(policy, objective)
    assert not descent(t, [[sampled, other]]).any()
    assert t.metrics["masked_tokens"] == 1


def test_equal_policies_lose_no_token():
    table = torch.randn(4, 3, dtype=torch.float64)
    group = [completion(table, a, float(sum(a))) for a in ([0, 1], [2], [1, 1, 2], [0])]
    plain = trainer(table, {"name": "magistral"})
    expected = descent(plain, [group])
    assert "masked_tokens" not in plain.metrics
    masks = {key: value for key, value in MASKS.items() if key != "truncated"}
    t = trainer(table, {"name": "magistral", "mask": masks})
    torch.testing.assert_close(descent(t, [group]), expected)
    assert t.metrics["masked_tokens"] == 0
    assert t.metrics["effective_sample_size"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("weights", "size"),
    [([1.0, 1.0, 1.0, 1.0], 1), ([1.0, 0.0, 0.0, 0.0], 1 / 4), ([3.0, 1.0], 16 / 20)],
)
def test_effective_sample_sizes(weights, size):
    logs = torch.tensor(weights, dtype=torch.float64).log()
    assert effective_sample_size(logs) == pytest.approx(size)
    assert effective_sample_size(logs + 5000) == pytest.approx(size)  # whatever their scale


def test_the_metric_is_of_whole_completions():
    policy, behavior = (0.7, 0.2, 0.1), (0.1, 0.2, 0.7)
    group = [completion(bandit(behavior), [a], float(a == 0)) for a in (0, 1, 2)]
    t = trainer(bandit(policy), {"name": "magistral"})
    descent(t, [group])
    weights = [p / m for p, m in zip(policy, behavior, strict=True)]
    expected = sum(weights) ** 2 / (3 * sum(w * w for w in weights))
    assert t.metrics["effective_sample_size"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("bounds", [[1.0, 2.0], [0.5, 0.9], [-0.1, 2.0], [2.0, 0.5]])
def test_bounds_that_leave_out_equal_policies_are_refused(bounds):
    with pytest.raises(ValidationError, match="ratio of equal policies"):
        ObjectiveConfig.model_validate({"mask": {"token_ratio": bounds}})
