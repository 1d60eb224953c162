"""JEPO by exact enumeration, through the trainer's step."""

import math
from array import array
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.tabular import completion, descent, every_group, logits, trainer
from tramontane.config import parse_settings
from tramontane.config.config import Config
from tramontane.config.objectives import JEPOOptions
from tramontane.errors import InputError
from tramontane.tokens import ELSEWHERE
from tramontane.trainer.objectives import Sequences, jepo

# Thoughts are token 0 or 1, the given answer is token 2, and token 3 stands for any other answer.
NEVER = -1e3
EXACT = {"advantage_normalization": "none", "advantage_clip": None, "supervised_coef": 1.0}


def table(thoughts, answers):
    """The policy that thinks c with these probabilities, and then answers a* with `answers[c]`."""
    rows = torch.full((5, 4), NEVER, dtype=torch.float64)
    for c, p in enumerate(answers):
        rows[c, 2:] = logits([p, 1 - p])
    rows[2:4] = 0
    rows[4, :2] = logits(thoughts)
    return rows


def sequence(policy, thought, **fields):
    """A sampled thought with the given answer."""
    found = completion(policy, [thought, 2], target=1, **fields)
    found.logprobs[1], found.versions[1] = 0.0, ELSEWHERE
    return found


def step(counts, answers, n, **options):
    """Descent of the table, over all groups of n thoughts of the policy, drawn ∝ counts."""
    policy = table([c / sum(counts) for c in counts], answers)
    groups = [[sequence(policy, c) for c in group] for group in every_group(counts, n)]
    t = trainer(policy, {"name": "jepo", "jepo": EXACT | options})
    return descent(t, groups)


ANSWERS = (0.1, 0.9)  # π(a*|c); P(c = 1) = .2


@pytest.mark.parametrize("baseline", ["leave_one_out", "none"])
@pytest.mark.parametrize(("bound", "expected"), [("one_sample", 0.351556), ("n_sample", 0.449634)])
def test_the_papers_bounds_with_two_samples(bound, expected, baseline):
    got = step((4, 1), ANSWERS, 2, bound=bound, baseline=baseline)[4, :2]
    assert got.tolist() == pytest.approx([-expected, expected], abs=1e-6)


def test_without_a_baseline_one_sample_is_enough():
    got = step((4, 1), ANSWERS, 1, bound="one_sample", baseline="none")[4, :2]
    assert got.tolist() == pytest.approx([-0.351556, 0.351556], abs=1e-6)


def test_many_thoughts_have_the_gradient_of_the_marginal_likelihood():
    """log π(a*|x), the bound's limit. One group has the thoughts in their proportions."""
    policy = table((0.8, 0.2), ANSWERS)
    group = [sequence(policy, int(i % 5 == 0)) for i in range(500)]
    t = trainer(policy, {"name": "jepo", "jepo": EXACT | {"bound": "n_sample"}})
    got = descent(t, [group])[4, :2]
    assert got.tolist() == pytest.approx([-0.492308, 0.492308], abs=2e-3)


def test_the_mean_of_the_thoughts_gradients_is_a_share_of_their_sum():
    whole = step((4, 1), ANSWERS, 2, supervised_coef=0.0)
    mean = step((4, 1), ANSWERS, 2, supervised_coef=0.0, first_sum="mean")
    torch.testing.assert_close(mean, whole / 2)


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=2, max_size=2),
    st.lists(st.floats(0.02, 0.98), min_size=2, max_size=2),
    st.integers(1, 3),
    st.floats(0, 2),
)
def test_the_gradient_is_that_of_the_n_sample_bound(counts, answers, n, coefficient):
    """The gradients by thoughts and by answer; the one-sample bound is n = 1."""
    policy = table([c / sum(counts) for c in counts], answers).requires_grad_()
    logprobs = policy.log_softmax(-1)
    fixed = logprobs.detach()

    def bound(of_thoughts, of_answers):
        total = 0.0
        for group in product(range(2), repeat=n):
            p = torch.stack([of_thoughts[4, c] for c in group]).sum().exp()
            found = torch.stack([of_answers[c, 2] for c in group])
            total = total + p * (found.logsumexp(0) - math.log(n))
        return total

    objective = bound(logprobs, fixed) + coefficient * bound(fixed, logprobs)
    (expected,) = torch.autograd.grad(objective, policy)
    options = {"baseline": "none"} if n == 1 else {}
    got = step(counts, answers, n, supervised_coef=coefficient, **options)
    torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-7)


def sequences(targets, logprobs, rewards=None, groups=None, scored=None):
    n = len(targets)
    return Sequences(
        rewards=torch.tensor(rewards or [0.0] * n, dtype=torch.float64),
        groups=torch.tensor(groups or [0] * n),
        scored=torch.tensor(scored or [True] * n),
        lengths=torch.ones(n, dtype=torch.int64),
        answers=torch.full((n,), -1),
        targets=torch.tensor(targets),
        target_logprobs=torch.tensor(logprobs, dtype=torch.float64),
    )


def test_completions_without_the_marker_earn_the_format_reward_and_leave_the_bound():
    options = JEPOOptions(**EXACT, bound="one_sample")
    whole = jepo.advantages(sequences([3, 3], [-1.0, -4.0]), options)
    assert whole.tolist() == [[3, 1], [-3, 1]]
    masked = jepo.advantages(sequences([3, 0, 3], [-1.0, 0.0, -4.0]), options)
    # Format: −10 less its mean over three; the bound is that of the two others.
    third = 10 / 3
    assert masked[:, 0].tolist() == pytest.approx([3 + third, -20 / 3, -3 + third])
    assert masked[:, 1].tolist() == [1, 0, 1]


def test_the_n_sample_bound_of_three_answers():
    """A thought's advantage is log of the mean answer probability, less that of the two others."""
    probabilities = [0.5, 0.2, 0.1]
    options = JEPOOptions(**EXACT, bound="n_sample")
    logs = [math.log(p) for p in probabilities]
    found = jepo.advantages(sequences([2, 2, 2], logs), options)
    total = sum(probabilities)
    bounds = [math.log(total / 3) - math.log((total - p) / 2) for p in probabilities]
    assert found[:, 0].tolist() == pytest.approx([3 * bound for bound in bounds])
    assert found[:, 1].tolist() == pytest.approx([3 * p / total for p in probabilities])
    options = JEPOOptions(**EXACT, bound="n_sample", baseline="none", first_sum="mean")
    found = jepo.advantages(sequences([2, 2, 2], logs), options)
    assert found[:, 0].tolist() == pytest.approx([math.log(total / 3)] * 3)


def test_one_marker_in_a_group_makes_its_lack_a_fault():
    """No reward is learned from then, and an unscorable completion counts nowhere."""
    options = JEPOOptions(**EXACT, bound="one_sample")
    scored = [True, True, True, False]
    found = jepo.advantages(
        sequences([2, 0, 0, 0], [-1.0, 0, 0, 0], [1.0] * 4, None, scored), options
    )
    assert found[:, 0].tolist() == pytest.approx([20 / 3, -10 / 3, -10 / 3, 0])
    without = jepo.advantages(
        sequences([0, 0, 0], [0.0] * 3, [1.0, 0, 9.0], None, scored[1:]), options
    )
    assert without[:, 0].tolist() == [0.5, -0.5, 0]


@pytest.mark.parametrize("normalization", ["group", "minibatch"])
def test_deviations_are_of_a_group_or_of_the_minibatch(normalization):
    options = JEPOOptions(
        bound="one_sample", advantage_normalization=normalization, advantage_clip=None
    )
    logs, groups = [-1.0, -3.0, -1.0, -11.0], [0, 0, 1, 1]
    found = jepo.advantages(sequences([2] * 4, logs, None, groups), options)[:, 0]
    if normalization == "group":  # ±2 and ±10 have these deviations
        expected = [1.0, -1.0, 1.0, -1.0]
    else:
        expected = [a / math.sqrt((2**2 + 10**2) / 2) for a in (2, -2, 10, -10)]
    assert found.tolist() == pytest.approx(expected)


def test_a_deviation_is_about_the_mean():
    """With the bound itself as advantage, whose mean is not 0."""
    options = JEPOOptions(bound="one_sample", baseline="none", advantage_clip=None)
    found = jepo.advantages(sequences([2, 2], [-1.0, -3.0]), options)[:, 0]
    assert found.tolist() == pytest.approx([-1.0, -3.0])


def test_advantages_without_spread_teach_nothing_and_large_ones_are_cut():
    options = JEPOOptions(bound="one_sample", baseline="none", advantage_normalization="group")
    # Equal in the first group, alone in the second, and 1.4 deviations above the mean in the third.
    logs, groups = [-2.0, -2.0, -3.0, -1.0, -30.0, -30.0], [0, 0, 1, 2, 2, 2]
    found = jepo.advantages(sequences([2] * 6, logs, None, groups), options)[:, 0]
    assert found[:3].tolist() == [0, 0, 0]
    options = JEPOOptions(bound="one_sample")
    found = jepo.advantages(sequences([2] * 3, logs[3:]), options)[:, 0]
    assert found[0] == 1 and found[1] == found[2] > -1


def test_each_kind_of_advantage_has_its_own_deviation_and_is_clipped():
    options = JEPOOptions(bound="one_sample", supervised_coef=0.5)
    found = jepo.advantages(
        sequences(
            [2, 2, 2, 0, 0, 0],
            [-1.0, -1.0, -30.0, 0.0, 0.0, 0.0],
            [0.0] * 4 + [1.0, 0.0],
            [0, 0, 0, 0, 1, 1],
        ),
        options,
    )
    # L − v: 14.5, 14.5 and −29, of standard deviation 20.5. The format rewards 2.5 and −7.5 have
    # 4.33, and those of the solved group ½.
    deviation = math.sqrt((2 * 14.5**2 + 29**2) / 3)
    of_bound, of_form = 14.5 / deviation, 2.5 / math.sqrt((3 * 2.5**2 + 7.5**2) / 4)
    expected = [of_bound + of_form, of_bound + of_form, -1 + of_form, -1, 1, -1]
    assert found[:, 0].tolist() == pytest.approx(expected)
    assert found[:, 1].tolist() == [0.5, 0.5, 0.5, 0, 0, 0]


def test_a_lone_answer_has_no_baseline_and_teaches_the_thoughts_nothing():
    for bound in ("one_sample", "n_sample"):
        options = JEPOOptions(**EXACT, bound=bound)
        found = jepo.advantages(sequences([2, 2], [-1.0, -2.0], scored=[True, False]), options)
        assert found.tolist() == [[0, 1], [0, 0]]


def test_a_group_without_answers_is_learned_from_by_its_rewards():
    policy = table((0.5, 0.5), (0.3, 0.6))
    members = [completion(policy, [c, 3], float(c)) for c in range(2)]
    t = trainer(policy, {"name": "jepo", "jepo": EXACT})
    plain = trainer(policy, {"name": "aipo"})
    torch.testing.assert_close(descent(t, [members]), descent(plain, [members]))


def test_only_sampled_tokens_have_an_importance_weight():
    policy = table((0.5, 0.5), (0.3, 0.6))
    members = [sequence(policy, c) for c in range(2)]
    for member in members:
        member.logprobs = array("d", [member.logprobs[0] - math.log(2), -50.0])
    t = trainer(policy, {"name": "jepo", "jepo": EXACT})
    got = descent(t, [members])
    exact = step((1, 1), (0.3, 0.6), 2)  # only to compare the answers' rows in sign
    assert t.metrics["ratio"] == pytest.approx(2)  # of the sampled token alone
    assert t.metrics["given_tokens"] == 0.5
    expected = (math.log(0.3) + math.log(0.6)) / 4
    assert t.metrics["answer_logprob"] == pytest.approx(2 * expected)
    assert torch.sign(got[:2, 2:]).equal(torch.sign(exact[:2, 2:]))


def test_the_diversity_filter_must_be_off():
    raw = {"trainer": {"objective": {"name": "jepo"}}}
    message = "diversity 'rewards' drops groups that objective 'jepo' learns from"
    with pytest.raises(InputError, match=message):
        parse_settings(Config, raw, [], "run.yaml")
    raw["pipeline"] = {"diversity": "none"}
    parse_settings(Config, raw, [], "run.yaml")
    raw["trainer"]["objective"]["jepo"] = {"target_text": "answer"}
    with pytest.raises(InputError, match="jepo.target_text: .* must contain {answer}"):
        parse_settings(Config, raw, [], "run.yaml")
