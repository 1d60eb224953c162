"""Sampling masks: what top-p and top-k allowed where a token was drawn is what the trainer's
log-probs are over, so that truncated sampling is exact and not merely close."""

import math
from array import array
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from tests.generator.slot_models import finish, make_model, make_requests, make_tokenizer
from tests.trainer.tabular import completion, descent, every_group, trainer
from tramontane.batches import TrainSequence
from tramontane.config import Config, GeneratorConfig, TrainerConfig
from tramontane.controller.snapshot import FrozenGroup, Snapshot
from tramontane.errors import InputError
from tramontane.generator import Generator
from tramontane.run.checkpoint import PipelineCheckpoint, read_pipeline, write_pipeline
from tramontane.tokens import INSERTED, AllowedTokens, floats, ints
from tramontane.trainer.allowed import allowed_of
from tramontane.trainer.trainer import Trainer
from tramontane.types import Completion, Group, Problem, Request, SamplingParams

# Which of three actions the sampler allows after each action, and, last, first of all: a sampler
# that draws them in these proportions.
ALLOWED = [[1, 2], [0, 1, 2], [2], [0, 1]]
PROPORTIONS = [[1, 1], [2, 1, 1], [1], [3, 1]]
REWARDS = torch.tensor([[0.2, 1.0, 0.0], [0.9, 0.1, 0.5], [0.3, 0.3, 0.7]], dtype=torch.float64)


def sequences_of_two(with_sets):
    """All sequences (a, b) that the sampler can draw, each with its probability as a count."""
    found = []
    for (a, p), (b, q) in (
        (first, second)
        for first in zip(ALLOWED[3], PROPORTIONS[3], strict=True)
        for second in zip(ALLOWED[first[0]], PROPORTIONS[first[0]], strict=True)
    ):
        rest = sum(PROPORTIONS[a])
        sets = AllowedTokens(ints([2, len(ALLOWED[a]) % 3]), ints(ALLOWED[3]))
        if len(ALLOWED[a]) < 3:  # a set of all is recorded as 0
            sets.ids.extend(ALLOWED[a])
        sequence = TrainSequence(
            prompt_ids=array("i", [3]),
            token_ids=array("i", [a, b]),
            logprobs=array("d", [math.log(p / 4), math.log(q / rest)]),
            versions=array("i", [0, 0]),
            reward=float(REWARDS[a, b]),
            allowed=sets if with_sets else None,
        )
        found.append((p * q * 4 // rest, sequence))
    return found


def value(table):
    """The expected reward of a policy restricted to the allowed actions."""
    total = torch.zeros((), dtype=torch.float64)
    for a, b in product(range(3), repeat=2):
        if a in ALLOWED[3] and b in ALLOWED[a]:
            first = table[3, ALLOWED[3]].log_softmax(0)[ALLOWED[3].index(a)]
            second = table[a, ALLOWED[a]].log_softmax(0)[ALLOWED[a].index(b)]
            total = total + (first + second).exp() * REWARDS[a, b]
    return total


def ascent(table, with_sets):
    """The trainer's step on every group of two, for an objective without clipping that weighs whole
    completions: the exact expectation under the sampler."""
    outcomes = sequences_of_two(with_sets)
    groups = [
        [replace(outcomes[outcome][1]) for outcome in group]
        for group in every_group([count for count, _ in outcomes], 2)
    ]
    options = {"advantage_normalization": "none", "loss_normalization": "sequence"}
    t = trainer(table, {"name": "magistral", "magistral": options | {"kl_coef": 0.0}})
    return descent(t, groups), t.metrics


@pytest.mark.parametrize("seed", range(3))
def test_the_step_is_the_gradient_of_the_restricted_policy(seed):
    """On policy, over all that the sampler can draw, each token's score is that of the policy over
    the allowed tokens: the step is (1 − 1/G) ∇J of that policy, over the T tokens."""
    random = torch.Generator().manual_seed(seed)
    table = torch.full((4, 3), -3.0, dtype=torch.float64)
    for state, (allowed, shares) in enumerate(zip(ALLOWED, PROPORTIONS, strict=True)):
        table[state, allowed] = torch.tensor(shares, dtype=torch.float64).log()
        if len(allowed) < 3:  # what is excluded has a logit too
            (others,) = [list({0, 1, 2} - set(allowed))]
            table[state, others] = torch.randn(len(others), dtype=torch.float64, generator=random)
    leaf = table.clone().requires_grad_()
    (expected,) = torch.autograd.grad(value(leaf) / 2 / 2, leaf)
    found, metrics = ascent(table, with_sets=True)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    assert metrics["mismatch_age_0_max"] < 1e-12
    assert metrics["effective_sample_size"] == pytest.approx(1)
    plain, metrics = ascent(table, with_sets=False)  # the whole distribution: another gradient
    assert (plain - expected).abs().max() > 1e-3
    assert metrics["mismatch_age_0_max"] > 0.1


def test_off_policy_the_weighted_step_is_exact():
    """π other than the sampler: E[π_S/μ_S (R − R̄)] over everything it draws has the gradient of π
    over the allowed tokens."""
    table = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    first = [(p, s) for p, s in zip(PROPORTIONS[3], ALLOWED[3], strict=True)]
    groups = []
    for group in every_group([p for p, _ in first], 2):
        groups.append(
            [
                replace(
                    completion(table, [first[i][1]], float(i)),
                    logprobs=array("d", [math.log(first[i][0] / 4)]),
                    allowed=AllowedTokens(ints([2]), ints(ALLOWED[3])),
                )
                for i in group
            ]
        )
    options = {"rho": 1e9, "advantage_normalization": "none", "loss_normalization": "sequence"}
    found = descent(trainer(table, {"name": "aipo", "aipo": options}), groups)
    leaf = table.clone().requires_grad_()
    (expected,) = torch.autograd.grad(leaf[3, ALLOWED[3]].softmax(0)[1] / 2, leaf)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


SAMPLING = {"temperature": 0.8, "top_p": 0.9, "top_k": 12, "record_allowed": True}


def generator(**options):
    config = GeneratorConfig(dtype="float32", **options)
    return Generator(make_model(), make_tokenizer(), config, 6, 120)


def trainer_of_the_generator():
    model = make_model()
    model.set_attn_implementation("packed")
    return Trainer(model, TrainerConfig(microbatch_tokens=256, dtype="float32"), 4)


def truncated(count, each, **sizes):
    requests = make_requests(count, each, seed=3, **sizes)
    return [
        replace(r, sampling=SamplingParams(r.sampling.max_tokens, **SAMPLING)) for r in requests
    ]


@pytest.mark.parametrize("scale", ["fused", "plain"])
def test_generator_and_trainer_agree_on_truncated_samples(scale, monkeypatch):
    g = generator()
    g.submit(truncated(3, 4, lengths=(2, 30), tokens=(5, 40)))
    sequences = [TrainSequence.of(c) for _, c in sorted(finish(g).items())]
    t = trainer_of_the_generator()
    if scale == "plain":
        monkeypatch.setattr(t, "_head_scale", None)
    for s, found in zip(sequences, t.logprobs(sequences, 0.8), strict=True):
        np.testing.assert_allclose(found, s.logprobs, atol=1e-4)
        assert len(s.allowed) == len(s.token_ids)
        assert 1 <= min(s.allowed.counts) <= max(s.allowed.counts) <= 12
        for place, token in enumerate(s.token_ids):
            assert token in s.allowed[place : place + 1].ids
    plain = [replace(s, allowed=None) for s in sequences]
    gaps = [np.abs(np.array(f) - s.logprobs).max() for s, f in zip(plain, t.logprobs(plain, 0.8))]  # noqa: B905
    assert max(gaps) > 0.1


def test_rows_that_do_not_record_share_steps_with_those_that_do():
    g = generator()
    requests = truncated(4, 2, lengths=(2, 30), tokens=(5, 40))
    for r in requests[::2]:
        r.sampling = replace(r.sampling, top_k=0, record_allowed=False)
    g.submit(requests)
    for (group, index), c in finish(g).items():
        assert (c.allowed is None) == (requests[2 * group + index] in requests[::2])


def test_inserted_tokens_and_continued_requests_keep_their_places():
    g = generator()
    requests = truncated(2, 2, lengths=(2, 30), tokens=(8, 12))
    g.submit(requests)
    done = finish(g)
    again = []
    for r in requests:
        c = done[r.group, r.index]
        more = replace(r.sampling, max_tokens=len(c.token_ids) + 40)
        put = c.token_ids + ints([7, 8, 9]), c.logprobs + floats([0.0] * 3)
        versions = c.versions + ints([INSERTED] * 3)
        again.append(
            replace(
                r, token_ids=put[0], logprobs=put[1], versions=versions, allowed=c.allowed,
                sampling=more,
            )
        )  # fmt: skip
    known = {(r.group, r.index): r.copy() for r in again}
    g.submit(again)
    for _ in range(2):  # what a controller knows of a lost worker's requests
        progress = g.poll([])
        for key, new in progress.grown.places():
            known[key].grow(progress.grown, new)
    pending = g.pending()
    assert len(pending) > 1
    for r in pending:
        own = known[r.group, r.index]
        assert (own.token_ids, own.allowed) == (r.token_ids, r.allowed)
    g.cancel_all()
    other = generator()
    other.submit([known[r.group, r.index].copy() for r in pending])
    t = trainer_of_the_generator()
    for c in finish(other).values():
        first = len(done[c.group, c.index].token_ids)
        assert c.allowed.counts[first : first + 3].tolist() == [0, 0, 0]
        (found,) = t.logprobs([TrainSequence.of(c)], 0.8)
        drawn = np.asarray(c.versions) >= 0
        np.testing.assert_allclose(np.array(found)[drawn], np.array(c.logprobs)[drawn], atol=1e-4)


def test_tokens_that_this_run_did_not_draw_have_no_set():
    """A given answer replaces sampled tokens, and their sets with them."""
    allowed = AllowedTokens(ints([2, 0, 1]), ints([4, 5, 6]))
    s = TrainSequence(*(ints([1]), ints([4, 9, 6]), floats([0.0] * 3)), versions=ints([0, 0, -1]))
    s.allowed = allowed
    assert allowed_of([s]).tolist() == [[4, 5, *[-1] * 6], [-1] * 8, [-1] * 8]
    assert allowed_of([replace(s, allowed=None)]) is None


def test_checkpoints_carry_the_sets(tmp_path):
    sets = AllowedTokens(ints([2, 0, 1]), ints([4, 5, 6]))
    tokens = ints([4, 9, 6]), floats([-0.5, 0, 0]), ints([0, INSERTED, 1])
    sampling = SamplingParams(9, **SAMPLING)
    request = Request(0, 1, [3], 5, sampling, *tokens, allowed=sets)
    group = Group(0, Problem("p", "math", "?"), [], [], requests=[request])
    bare = Completion(0, 0, [3], *tokens, "stop")
    group.completions = [replace(bare, allowed=AllowedTokens()), replace(bare, index=2)]
    snapshot = Snapshot(0, 1, {}, {}, [FrozenGroup(group)], [])
    write_pipeline(tmp_path, PipelineCheckpoint(snapshot, 1.0))
    (frozen,) = read_pipeline(tmp_path).snapshot.groups
    (again,), completions = frozen.thaw().requests, frozen.thaw().completions
    assert (again.allowed, again.sampling) == (sets, sampling)
    assert [c.allowed for c in completions] == [AllowedTokens(), None]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"generator": {"top_p": 0.9, "kind": "vllm"}}, "(?s)generator.top_p.*not recorded"),
        ({"generator": {"top_k": 1025}}, "1024"),
        (
            {"generator": {"top_k": 20}, "trainer": {"objective": "distill"},
             "teacher": {"model": "tiny"}, "pipeline": {"diversity": "none"}},
            "(?s)generator.top_k.*teacher's over all",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_exact_is_refused(keys, message):
    with pytest.raises((InputError, ValueError), match=message):
        Config.model_validate({"data": {"train": "playground:math"}} | keys)


def test_a_top_p_alone_is_bounded():
    assert GeneratorConfig(top_p=0.9).sampling["top_k"] == 1024
    assert GeneratorConfig().sampling["record_allowed"] is False
