"""On-policy distillation by exact enumeration, through the trainer's step."""

from array import array
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.allocations import measured
from tests.trainer import rollouts
from tests.trainer.tabular import completion, descent, every_group, logits, trainer
from tramontane.batches import TeacherScores
from tramontane.config import ObjectiveConfig, TrainerConfig
from tramontane.config.objectives import DistillOptions
from tramontane.tokens import ELSEWHERE, INSERTED
from tramontane.trainer.objectives.distill import divergence
from tramontane.trainer.teacher import Teacher
from tramontane.trainer.trainer import Trainer

# Two actions each time; all probabilities of pairs are multiples of 1/20.
POLICY = torch.stack([logits([0.5, 0.5]), logits([0.2, 0.8]), logits([0.5, 0.5])])
STALE = torch.stack([logits([0.2, 0.8]), logits([0.5, 0.5]), logits([0.5, 0.5])])
TEACHER = torch.tensor([[0.3, -0.4], [1.5, -0.5], [0.9, 0.2]], dtype=torch.float64)
PAIRS = [*product(range(2), repeat=2)]
WHOLE = [{"top_k": 0, "divergence": d} for d in ("reverse", "forward", "js")]
WHOLE += [{"top_k": 0, "divergence": "js", "js_beta": 0.3}, {"top_k": 1}]  # of two: 1 and the rest
SAMPLED = [{"baseline": False}, {"baseline": True}]


def scored(table, actions, teacher=TEACHER, top_k=None, **fields):
    """A completion of the policy `table` with the teacher's scores."""
    found = completion(table, actions, **fields)
    rows = F.pad(teacher, (0, 1), value=-1e9).log_softmax(-1)[[len(teacher) - 1, *actions[:-1]]]
    values, ids = rows.topk(top_k) if top_k else (rows, None)
    ids = ids if top_k else torch.zeros(len(actions), 0)
    chosen = rows[range(len(actions)), list(actions)]
    found.teacher = TeacherScores(chosen.numpy(), ids.int().numpy(), values.numpy())
    return found


def distilled(policy, groups, **options):
    """The gradient of the loss with respect to the logits."""
    options = {"loss_normalization": "sequence_sum", "rho": 1e9} | options
    return -descent(trainer(policy, {"name": "distill", "distill": options}), groups)


def draws(behavior, baseline=False, top_k=None, **_):
    """Groups in all combinations, as often as `behavior` draws them: of two completions where one
    is the other's baseline."""
    top_k = top_k or None
    first, second = behavior[2].softmax(0), behavior[:2].softmax(1)
    counts = [round(20 * float(first[a] * second[a, b])) for a, b in PAIRS]
    groups = every_group(counts, 1 + baseline)
    return [[scored(behavior, PAIRS[i], top_k=top_k) for i in group] for group in groups]


def local(table, divergence="reverse", js_beta=0.5, **_):
    """The divergence from the teacher at each state: [3]."""
    q, p = table.log_softmax(-1), TEACHER.log_softmax(-1)

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)

    mixture = (js_beta * p.exp() + (1 - js_beta) * q.exp()).log()
    js = js_beta * kl(p, mixture) + (1 - js_beta) * kl(q, mixture)
    return {"reverse": kl(q, p), "forward": kl(p, q), "js": js}[divergence]


def expected(policy, visits, **options):
    """The gradient of Σ visits · d; `visits` is how often each state is visited, a function of the
    table."""
    table = policy.clone().requires_grad_()
    return torch.autograd.grad((visits(table) * local(table, **options)).sum(), table)[0]


def visits(table):
    """The probabilities that the policy visits the states after 0, after 1, and of the prompt."""
    return torch.cat([table[2].softmax(0), torch.ones(1, dtype=torch.float64)])


@pytest.mark.parametrize("options", [*SAMPLED, *WHOLE])
def test_with_what_follows_it_is_the_gradient_of_the_divergence_of_whole_completions(options):
    got = distilled(POLICY, draws(POLICY, **options), discount=1, **options)
    torch.testing.assert_close(got, expected(POLICY, visits, **options))


@pytest.mark.parametrize("options", [*SAMPLED, *WHOLE])
def test_without_it_is_the_part_in_which_prefixes_are_given(options):
    got = distilled(POLICY, draws(POLICY, **options), **options)
    part = expected(POLICY, lambda t: visits(t).detach(), **options)
    torch.testing.assert_close(got, part)
    whole = expected(POLICY, visits, **options)
    assert (part - whole).abs().max() > 0.01


@pytest.mark.parametrize("discount", [0, 1])
@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("options", [*SAMPLED, *WHOLE])
def test_samples_of_an_older_policy_give_the_divergence_of_the_policy_that_is_trained(
    options, staleness, discount
):
    """After the prefixes that the older policy wrote, some steps of the trainer before.

    With discount 1, a token is charged for what follows it as often as the policy that is trained
    takes it, since its weight π_θ/μ is not truncated here. What follows is the divergence after
    that token, exactly; of sampled tokens, the log-ratio of those that the older policy drew.
    """
    options = options | {"discount": discount}
    table, groups, given = POLICY, draws(POLICY, **options), visits(POLICY)
    for _ in range(staleness):
        table = table - distilled(table, groups, **options)
    follows = local(table, **options)[:2]
    if "top_k" not in options:
        ratios = table.log_softmax(-1) - TEACHER.log_softmax(-1)
        follows = (POLICY.softmax(-1) * ratios).sum(-1)[:2]
    policy = table.clone().requires_grad_()
    taken = policy[2].softmax(0)
    (charged,) = torch.autograd.grad(discount * (taken * follows).sum(), policy)
    got = distilled(table, groups, **options)
    torch.testing.assert_close(got, expected(table, lambda _: given, **options) + charged)
    counted = visits if discount else lambda _: given
    before, after = ((counted(t) * local(t, **options)).sum() for t in (POLICY, table))
    assert after < before or not staleness


def test_without_importance_weights_older_samples_give_another_gradient():
    right, wrong = (distilled(POLICY, draws(STALE), baseline=False, rho=rho) for rho in (1e9, None))
    assert (right - wrong).abs().max() > 0.01


@pytest.mark.parametrize("rho", [1e9, 1.2, 0.5])
def test_what_follows_a_stale_token_counts_by_its_truncated_weight(rho):
    """The divergence at a prefix has no weight: it does not depend on the token drawn there."""
    policy, drawn = POLICY.clone().requires_grad_(), STALE[2].softmax(0)
    weighted = drawn * (POLICY[2].softmax(0) / drawn).clamp(max=rho)
    follows = (weighted * local(POLICY)[:2] * policy[2].log_softmax(0)).sum()
    part = (visits(STALE) * local(policy)).sum()
    (gradient,) = torch.autograd.grad(part + follows, policy)
    got = distilled(POLICY, draws(STALE), top_k=0, discount=1, rho=rho)
    torch.testing.assert_close(got, gradient)


def test_truncated_weights_bound_the_gradient():
    a, b = (distilled(POLICY, draws(STALE), baseline=False, rho=rho) for rho in (1e9, 0.5))
    assert b.abs().max() < a.abs().max()


def test_a_generalized_js_by_hand():
    """0.3 KL(teacher ‖ m) + 0.7 KL(policy ‖ m) of (½, ½) and (0.2, 0.8), m = (0.29, 0.71); with 0.3
    and 0.7 swapped it would be 0.0415."""
    policy, teacher = (torch.stack([logits(p)] * 3) for p in ([0.2, 0.8], [0.5, 0.5]))
    options = {"top_k": 0, "divergence": "js", "js_beta": 0.3}
    t = trainer(policy, {"name": "distill", "distill": options})
    step = descent(t, [[scored(policy, [0], teacher)]])
    assert t.metrics["teacher_divergence"] == pytest.approx(0.043925, abs=1e-6)
    # The policy times 0.7 ln(policy / m), less its mean.
    assert step[2].tolist() == pytest.approx([0.054982, -0.054982], abs=1e-6)


@pytest.mark.parametrize("name", ["reverse", "forward", "js"])
def test_all_other_tokens_count_as_one(name):
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log()
    p = torch.tensor([[0.4, 0.4, 0.1, 0.1]], dtype=torch.float64).log()
    top = DistillOptions(top_k=2, divergence=name, js_beta=0.3)
    whole = DistillOptions(top_k=0, divergence=name, js_beta=0.3)
    merged = [torch.cat([x[:, :2], x[:, 2:].logsumexp(1, keepdim=True)], 1) for x in (q, p)]
    assert divergence(q[:, :2], p[:, :2], top) == pytest.approx(divergence(*merged, whole).item())
    # Merging tokens never raises a divergence; a rest of a single token loses nothing.
    assert divergence(*merged, whole) < divergence(q, p, whole)
    three = top.model_copy(update={"top_k": 3})
    torch.testing.assert_close(divergence(q[:, :3], p[:, :3], three), divergence(q, p, whole))
    assert divergence(p, p, whole) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("discount", [0, 1])
def test_a_step_compares_the_teachers_likeliest_tokens_of_each_place(discount):
    torch.manual_seed(0)
    policy, teacher = torch.randn(2, 4, 3, dtype=torch.float64)
    groups = [[scored(policy, a, teacher, top_k=1)] for a in ([0, 2], [1, 0], [2, 2])]
    options = {"top_k": 1, "discount": discount, "loss_normalization": "minibatch_tokens"}
    got = distilled(policy, groups, **options)
    table = policy.clone().requires_grad_()
    states = [3, 0, 3, 1, 3, 2]
    q, p = table.softmax(-1)[states], teacher.softmax(-1)[states]
    best = p.argmax(-1, keepdim=True)
    q, p = (torch.cat([x.gather(1, best), 1 - x.gather(1, best)], 1) for x in (q, p))
    found = (q * (q / p).log()).sum(1)
    follows = found[1::2].detach() * table[3].log_softmax(0)  # after the tokens 0, 1 and 2
    (gradient,) = torch.autograd.grad((found.sum() + discount * follows.sum()) / 6, table)
    torch.testing.assert_close(got, gradient)


@pytest.mark.parametrize("options", [{"discount": 1}, {"top_k": 0, "discount": 1}, {"top_k": 1}])
def test_inserted_tokens_carry_nothing(options):
    found = []
    for nonsense in (0.0, -50.0):
        group = [scored(POLICY, a, top_k=options.get("top_k")) for a in ([0, 1, 0], [1, 0, 1])]
        for member in group:
            member.versions[1] = INSERTED
            member.teacher.logprobs[1] += nonsense
            member.teacher.top_logprobs[1] += nonsense
        found.append(distilled(POLICY, [group], **options))
    assert torch.equal(*found) and found[0].abs().max() > 0


@pytest.mark.parametrize("top_k", [0, 2, None])
def test_added_terms_have_their_own_weights_and_denominators(top_k):
    """Magistral's own gradient, that of the distance on sampled tokens, and the mean negative
    log-likelihood of recorded ones, which no teacher has scored."""
    sampled = [scored(POLICY, a, top_k=top_k, reward=a[0]) for a in ([0, 1], [1, 1])]
    recorded = [completion(POLICY, [1, 0, 0])]
    recorded[0].versions[:] = array("i", [ELSEWHERE] * 3)
    batch = [sampled, recorded]
    add = {"distill": 0.5, "sft": 2.0}
    distill = {"top_k": top_k, "baseline": False}
    t = trainer(POLICY, {"add": add, "distill": distill})
    got = -descent(t, batch)
    alone = -descent(trainer(POLICY, {}), batch)
    table = POLICY.clone().requires_grad_()
    logprobs, places = table.log_softmax(-1), ([2, 0, 2, 1], [0, 1, 1, 1])
    distance = local(table)[places[0]].mean()
    if top_k is None:
        ratio = (logprobs - TEACHER.log_softmax(-1))[places].detach()
        distance = (ratio * logprobs[places]).mean()
    likelihood = logprobs[[2, 1, 0], [1, 0, 0]].mean()
    (more,) = torch.autograd.grad(0.5 * distance - 2.0 * likelihood, table)
    torch.testing.assert_close(got, alone + more)
    found = (ratio + (-ratio).expm1()).mean() if top_k is None else distance
    assert t.metrics["teacher_divergence"] == pytest.approx(found.item())
    assert 0 <= t.metrics["accuracy"] <= 1


def test_the_charges_of_a_reference_and_of_a_teacher_add_up():
    """Each has its own baseline."""
    group = [scored(POLICY, actions, reward=actions[0]) for actions in ([0, 1], [1, 1], [0, 0])]

    def got(*terms):
        reference = STALE if KL in terms else None
        objective = {key: value for term in terms for key, value in term.items()}
        return descent(trainer(POLICY, objective, reference), [group])

    kl, distilled = got(KL) - got(), got(TERM) - got()
    torch.testing.assert_close(got(KL, TERM) - got(), kl + distilled)
    assert min(kl.abs().max(), distilled.abs().max()) > 0.01


KL, TERM = {"magistral": {"kl_coef": 0.5}}, {"add": {"distill": 2.0}}
OPTIONS = [{}, {"discount": 1}, {"top_k": 0}, {"top_k": 5, "divergence": "js", "discount": 1}]


@pytest.mark.parametrize("options", OPTIONS)
def test_microbatches_and_packing_change_nothing(options):
    found = []
    for budget in (10_000, 40):
        objective = {"name": "distill", "distill": options}
        t = rollouts.trainer(objective=objective, microbatch_tokens=budget, max_grad_norm=1e9)
        t.optimizer = torch.optim.SGD(t.model.parameters())
        taught = rollouts.taught(rollouts.batch(groups=2), options.get("top_k"))
        metrics = t.step(taught)
        found.append((metrics["teacher_divergence"], t.weights()))
    (one, whole), (two, cut) = found
    assert one == pytest.approx(two, rel=1e-4) and one > 0
    for name, values in whole.items():
        torch.testing.assert_close(cut[name], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top_k", [None, 4, 0])
def test_a_teacher_scores_tokens_as_a_trainer_does(top_k):
    sequences = rollouts.batch(groups=2).sequences
    want = rollouts.trainer().logprobs(sequences, 0.8)
    teacher = Teacher(rollouts.model(), 48, top_k, rollouts.VOCAB)
    for sequence, found, logprobs in zip(
        sequences, teacher.score(sequences, 0.8), want, strict=True
    ):
        n = len(sequence.token_ids)
        assert [*found.logprobs] == pytest.approx(logprobs, abs=1e-5)
        top = torch.from_numpy(found.top_logprobs)
        if top_k == 0:
            torch.testing.assert_close(top.exp().sum(1), torch.ones(n))
            assert top[range(n), list(sequence.token_ids)].tolist() == [*found.logprobs]
        else:
            assert found.top_ids.shape == top.shape == (n, top_k or 0)
            assert (top.diff(dim=1) <= 0).all()


def test_the_sampled_token_alone_has_no_forward_divergence():
    with pytest.raises(ValueError, match="top_k is null"):
        ObjectiveConfig.model_validate({"distill": {"divergence": "forward"}})


def test_the_whole_vocabulary_takes_no_more_memory_than_a_few_times_its_scores():
    """A step holds the scores put together, the logits, their log-probs, and two gradients."""
    vocab, tokens = 8_192, 400
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="packed")
    options = {"name": "distill", "distill": {"top_k": 0}}
    settings = {"device": "cpu", "dtype": "float32", "microbatch_tokens": 1024}
    distilling = Trainer(model, TrainerConfig(objective=options, **settings), 10)
    batch = rollouts.batch(groups=1, size=1)
    (sequence,) = batch.sequences
    sequence.token_ids = array("i", range(1, tokens + 1))
    sequence.logprobs, sequence.versions = array("f", [-9] * tokens), array("i", [0] * tokens)
    scores = np.full((tokens, vocab), -9.7, np.float32)
    none = np.zeros((tokens, 0), np.int32)
    sequence.teacher = TeacherScores(scores[:, 0].copy(), none, scores)
    distilling.step(batch)
    with measured() as step:
        distilling.step(batch)
    assert step.highest < 5.5 * scores.nbytes
