"""A tabular policy as a causal LM in float64, and every completion it can write, so that a step of
the trainer takes the exact gradient of an expectation."""

from array import array
from itertools import product
from math import prod

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tramontane.batches import BatchSettings, TrainBatch, TrainSequence
from tramontane.config import ObjectiveConfig, TrainerConfig
from tramontane.trainer.trainer import Trainer


class Tabular(PreTrainedModel):
    """The logits of the next token are a row of a table, chosen by the token before.

    Tokens 0 to A − 1 are actions; token A is the prompt. So the table's last row is the policy of
    the first action.

    Args:
        table: [A + 1, A] float64.
    """

    config_class = PreTrainedConfig

    def __init__(self, table):
        super().__init__(PreTrainedConfig(hidden_size=len(table)))
        self.table = torch.nn.Parameter(table.double().clone())
        self.head = None

    def get_output_embeddings(self):
        return self.head

    def set_output_embeddings(self, head):
        """A value network's head: its weights are a table of values, [1, A + 1]."""
        self.head = head

    def forward(self, input_ids, logits_to_keep=slice(None), **_):
        states = input_ids[0, logits_to_keep]
        if self.head is not None:
            values = self.head.weight[0, states]
            return type("Output", (), {"logits": values[None, :, None]})
        rows = self.table[states]
        logits = torch.nn.functional.pad(rows, (0, 1), value=-1e9)
        return type("Output", (), {"logits": logits[None]})


def trainer(policy, objective, reference=None):
    """A trainer whose weights are the logits `policy`, whose reference model has the logits
    `reference`, and whose step adds the gradient's descent direction to them."""
    config = TrainerConfig(
        learning_rate=1.0,
        max_grad_norm=1e9,
        microbatch_tokens=512,
        objective=ObjectiveConfig.model_validate(objective),
    )
    t = Trainer(Tabular(policy if reference is None else reference), config, updates=1)
    if t._reference is not t.model:
        t._reference.double()
        t._reference.table.data.copy_(reference)
        t.model.table.data.copy_(policy)
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=1.0)
    if t._values:
        t._values.model.double()
        t._values._optimizer = torch.optim.SGD(t._values.model.parameters(), lr=1.0)
    return t


def values(t):
    """The value network's table, [A + 1]: of the prefix that ends with each token."""
    return t._values.model.head.weight.detach()[0]


def descent(t, groups):
    """The change of the logits in one step: −∂ loss/∂ table."""
    before = t.model.table.detach().clone()
    size = sum(map(len, groups))
    settings = BatchSettings(stage="", temperature=1.0, l_max=8, n_minibatch=size)
    t.metrics = t.step(TrainBatch(0, groups, settings))
    return t.model.table.detach() - before


def completion(table, actions, reward=0.0, **fields):
    """A completion as the policy with these logits samples it."""
    logprobs, state = [], table.shape[1]
    for action in actions:
        logprobs.append(float(table[state].log_softmax(-1)[action]))
        state = action
    return TrainSequence(
        prompt_ids=array("i", [table.shape[1]]),
        token_ids=array("i", actions),
        logprobs=array("d", logprobs),
        versions=array("i", [0] * len(actions)),
        reward=reward,
        **fields,
    )


def every_group(counts, size):
    """All groups of `size` outcomes, as often as `counts` says (a probability times its common
    denominator): an exact expectation as a mean over groups.

    Args:
        counts: how often each outcome occurs among Σ counts draws.
        size: outcomes in a group.
    """
    for group in product(range(len(counts)), repeat=size):
        for _ in range(prod(counts[outcome] for outcome in group)):
            yield group


def logits(probabilities):
    """The logits of one row of probabilities."""
    return torch.tensor(probabilities, dtype=torch.float64).log()


def bandit(probabilities):
    """The table of a policy that takes one action: its last row alone matters."""
    row = logits(probabilities)
    return torch.cat([torch.zeros(len(row), len(row), dtype=torch.float64), row[None]])
