import math

import pytest
import torch

from tests.trainer.rollouts import batch, trainer
from tramontane.config.objectives import SFTOptions
from tramontane.trainer.objectives import Tokens, sft


def test_loss_is_the_weighted_negative_log_likelihood_and_accuracy_counts_first_choices():
    logprobs = torch.tensor([0.5, 0.25]).log().requires_grad_()
    ones = torch.ones(2)
    tokens = Tokens(
        logprobs=logprobs,
        behavior=torch.zeros(2),
        advantages=ones,
        weights=torch.tensor([0.5, 0.25]),
        sequence=torch.zeros(2, dtype=torch.int64),
        rewards=ones,
        entropy=ones,
        top1=torch.tensor([1.0, 0.0]),
    )
    loss, metrics = sft.loss(tokens, SFTOptions())
    assert loss.item() == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(4))
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [-0.5, -0.25]
    assert [float(x) for x in metrics["accuracy"]] == [1.0, 2.0]


def test_the_trainer_finds_the_first_choices():
    t = trainer(objective={"name": "sft"})
    b = batch()
    choices = []
    for s in b.sequences:
        logits = t.model(torch.tensor([[*s.prompt_ids, *s.token_ids]])).logits[0]
        predicted = logits[len(s.prompt_ids) - 1 : -1].argmax(-1)
        choices += (predicted == torch.tensor(s.token_ids)).tolist()
    metrics = t.step(b)
    assert metrics["accuracy"] == pytest.approx(sum(choices) / len(choices))
