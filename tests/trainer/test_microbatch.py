"""What a microbatch holds: the tokens that are trained on, and filler that changes nothing."""

import random
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.rollouts import batch, completion, equal, group, model, train_batch, trainer
from tramontane.tokens import INSERTED
from tramontane.trainer import rows
from tramontane.trainer.head import plain_predictions
from tramontane.trainer.microbatch import Microbatch, cut_batch
from tramontane.trainer.rows import Predictions, pack_row

CPU = torch.device("cpu")


def with_exclusions(amount=0.0):
    """Groups with an inserted token and an unscored completion, whose log-probs under the
    generator are `amount`."""
    b = batch(groups=2)
    inserted, unscored = b.sequences[1], b.sequences[6]
    inserted.versions[0], inserted.logprobs[0] = INSERTED, amount
    unscored.scored, unscored.logprobs = False, array("f", [amount] * len(unscored.logprobs))
    return b


@pytest.mark.parametrize(
    "objective",
    [
        {},
        {"magistral": {"kl_coef": 0.1, "entropy_coef": 0.1}},
        {"magistral": {"kl_coef": 0.1, "kl_as": "loss", "kl_level": "sequence"}},
        {"magistral": {"importance_correction": "clipped"}},
        {"name": "gspo"},
        {"name": "cispo"},
    ],
)
def test_an_excluded_token_whose_ratio_overflows_contributes_nothing(objective):
    found = []
    for amount in (0.0, -1e3, 1e3):  # e^1000 is inf
        t = trainer(objective=objective)
        metrics = t.step(with_exclusions(amount))
        kept = {n: x for n, x in metrics.items() if not n.startswith("mismatch")}
        found.append((kept, t.weights()))
    for metrics, weights in found[1:]:
        assert metrics == found[0][0]
        assert equal(weights, found[0][1])


def test_tokens_are_those_with_a_weight_in_the_order_of_their_sequences():
    (minibatch,) = cut_batch(with_exclusions(), trainer(microbatch_tokens=10_000).config)
    (micro,) = minibatch.microbatches
    sequences = [minibatch.completions[i] for i in micro.indices]
    used = [s.scored and v != INSERTED for s in sequences for v in s.versions]
    predicted = torch.arange(float(len(used)))
    tokens = minibatch.tokens(0, Predictions(predicted, predicted))
    mask = torch.tensor(used)
    assert torch.equal(tokens.logprobs, predicted[mask])
    numbers = torch.tensor([n for n, s in enumerate(sequences) for _ in s.versions])
    assert torch.equal(tokens.sequence, numbers[mask])
    behavior = torch.tensor([x for s in sequences for x in s.logprobs])
    assert torch.equal(tokens.behavior, behavior[mask])
    assert tokens.weights.all() and tokens.top1 is None


def test_an_idle_microbatch_has_no_tokens():
    (minibatch,) = cut_batch(batch(groups=1), trainer().config)
    minibatch.microbatches = [Microbatch([0], live=False)]
    predicted = torch.zeros(len(minibatch.completions[0].token_ids))
    assert len(minibatch.tokens(0, Predictions(predicted, predicted)).weights) == 0


@given(st.integers(0, 1000), st.integers(1, 64))
@settings(max_examples=8)
def test_filler_changes_no_prediction_and_no_gradient(seed, multiple):
    """On a GPU a row is rounded up to a multiple of 256 tokens, on a CPU to a recurring size."""
    sequences = [s for n in range(2) for s in group(random.Random(seed + n), size=3)]
    found = []
    for filled in (1, multiple):
        t = trainer(microbatch_tokens=10_000, max_grad_norm=1e9)
        t.optimizer = torch.optim.SGD(t.model.parameters())  # adds the gradient to the weights
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rows, "padded", lambda n, device, m=filled: -(-n // m) * m)
            row = pack_row(sequences, CPU)
            metrics = t.step(train_batch(0, [sequences]))
        assert (
            row.inputs["input_ids"].shape[1] % filled
            == len(row.inputs["logits_to_keep"]) % filled
            == 0
        )
        found.append((t.logprobs(sequences, 0.8), metrics, t.weights()))
    (plain, one, before), (padded, two, after) = found
    for a, b in zip(plain, padded, strict=True):
        assert b == pytest.approx(a, abs=1e-5)
    assert two == pytest.approx(one, rel=1e-4, abs=1e-6)
    for name, values in before.items():
        torch.testing.assert_close(after[name], values, rtol=1e-5, atol=1e-7)


@given(st.integers(1, 5000))
def test_rows_of_a_gpu_are_multiples_of_256_tokens(tokens):
    padded = rows.padded(tokens, torch.device("cuda"))
    assert tokens <= padded < tokens + rows.ROW_MULTIPLE
    assert padded % rows.ROW_MULTIPLE == 0


@pytest.mark.parametrize("shared", [False, True])
def test_an_empty_completion_changes_nothing_about_its_neighbors(shared):
    rng = random.Random(3)
    prompt = [5, 6, 7] if shared else None
    one, other = (completion(rng, prompt, length) for length in (4, 5))
    empty = completion(rng, prompt, 1)
    empty.token_ids, empty.logprobs, empty.versions = array("i"), array("f"), array("i")
    llama = model()
    rows = [[one, empty, other], [empty, one, other], [one, other, empty], [one, other]]
    found = []
    for sequences in rows:
        row = pack_row(sequences, CPU)
        assert row.lengths == [len(s.token_ids) for s in sequences]
        found.append(plain_predictions(llama, row, 1.0).logprobs)
        assert len(row.targets) == 9
    for logprobs in found:
        torch.testing.assert_close(logprobs, found[-1])
