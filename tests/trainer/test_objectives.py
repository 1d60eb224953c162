"""A file adds an objective: the examples are in `more_objectives/` and in the docs."""

import re

import pytest
import torch

from tests.paths import ROOT
from tests.trainer.rollouts import TEMPERATURE, batch, trainer, with_own_logprobs
from tramontane.config import ObjectiveConfig
from tramontane.errors import InputError
from tramontane.trainer import objectives
from tramontane.trainer.objectives import Tokens, load_objective

DOCS = ROOT / "docs" / "objectives.md"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder whose files are objectives."""
    monkeypatch.setattr(objectives, "__path__", [*objectives.__path__, str(tmp_path)])
    return tmp_path


@pytest.mark.parametrize(
    ("cap", "gradient"), [(1e9, [0.21, -0.14, -0.07]), (2.0, [0.06, -0.04, -0.02])]
)
def test_the_example_in_the_docs_is_aipo(folder, cap, gradient):
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    (folder / "aipo.py").write_text(code)
    config = ObjectiveConfig(name="aipo", importance_cap=cap)
    policy, behavior = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.2, 0.7])
    logits = policy.log().requires_grad_()
    # Every outcome, weighted by μ: the exact expectation.
    tokens = Tokens(
        logprobs=torch.log_softmax(logits, 0),
        behavior=behavior.log(),
        advantages=torch.tensor([1.0, 0.0, 0.0]),
        weights=behavior,
        sequence=torch.arange(3),
        rewards=torch.tensor([1.0, 0.0, 0.0]),
        entropy=torch.zeros(3),
    )
    loss, _ = load_objective(config).loss(tokens, config)
    (got,) = torch.autograd.grad(-loss, logits)
    assert got.tolist() == pytest.approx(gradient, abs=1e-6)
    assert trainer(objective={"name": "aipo"}).step(batch())["grad_norm"] > 0


def test_advantages_may_depend_on_summed_log_probs():
    t = trainer(objective={"name": "sums"}, learning_rate=1e-2)
    b = with_own_logprobs(t, batch())
    reference = [sum(s.logprobs) for s in b.sequences]
    t.step(b)
    now = [sum(logprobs) for logprobs in t.logprobs(b.sequences, TEMPERATURE)]
    squares, expected = [], []
    for g in range(4):
        members = range(4 * g, 4 * g + 4)
        rewards = [s.reward for s in b.groups[g]]
        values = [r - 0.1 * (now[i] - reference[i]) for r, i in zip(rewards, members, strict=True)]
        for value, i in zip(values, members, strict=True):
            length = len(b.sequences[i].token_ids)
            squares += [(value - sum(values) / 4) ** 2] * length
            expected += [now[i]] * length
    metrics = t.step(b)
    assert metrics["advantage_squared"] == pytest.approx(sum(squares) / len(squares), rel=1e-3)
    assert metrics["sequence_logprob"] == pytest.approx(sum(expected) / len(expected), rel=1e-4)


def test_a_need_that_nobody_provides_is_an_error(folder):
    code = "def needs(config):\n    return {'values', 'entropy', config.advantage_normalization}\n"
    (folder / "valued.py").write_text(code)
    provided = ", ".join(sorted(objectives.PROVIDED))
    message = f"^objective 'valued' needs group, values, but the trainer provides only {provided}$"
    with pytest.raises(InputError, match=message):
        load_objective(ObjectiveConfig(name="valued", advantage_normalization="group"))


def test_an_unknown_objective_is_an_error_that_lists_those_there_are(folder):
    (folder / "another.py").write_text("")
    with pytest.raises(
        InputError, match=r"^trainer\.objective\.name: no objective 'magistrale'"
    ) as e:
        load_objective(ObjectiveConfig(name="magistrale"))
    names = str(e.value).partition("; there are: ")[2].split(", ")
    assert names == sorted(names)
    assert {"another", "magistral", "sft"} <= set(names)
