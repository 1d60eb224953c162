import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.paths import ROOT
from tramontane.config import ObjectiveConfig, TrainerConfig, load_config
from tramontane.config.lora import LoraConfig
from tramontane.config.trainer import usual_rate
from tramontane.trainer.optimizer import build_optimizer, chosen_rate, lr_at


def test_warm_up_rises_to_the_peak_and_then_stays():
    rates = [lr_at(step, 100, 4, "constant", 1e-4) for step in range(8)]
    assert rates == pytest.approx([0.25e-4, 0.5e-4, 0.75e-4] + [1e-4] * 5)


@pytest.mark.parametrize(("schedule", "halfway"), [("linear", 0.5), ("cosine", 0.5)])
def test_schedules_fall_from_peak_to_zero(schedule, halfway):
    rates = [lr_at(step, 110, 10, schedule, 2.0) for step in (10, 60, 110)]
    assert rates == pytest.approx([2.0, 2.0 * halfway, 0.0], abs=1e-12)


def test_one_step_of_adamw_is_the_formula_and_decays_matrices_only():
    matrix = torch.nn.Parameter(torch.tensor([[1.0, -2.0]]))
    vector = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = build_optimizer([matrix, vector], 0.1, (0.9, 0.95), 0.5)
    matrix.grad, vector.grad = torch.tensor([[0.3, -0.7]]), torch.tensor([2.0])
    optimizer.step()
    # Bias-corrected, the first step is lr · sign(g); decay takes lr · 0.5 of a matrix's weight.
    assert matrix.tolist()[0] == pytest.approx([1 - 0.05 - 0.1, -2 + 0.1 + 0.1])
    assert vector.tolist() == pytest.approx([2.9])


# Parameters of the models that the configs are for: the tiny base, SmolLM2-135M, Qwen2.5-0.5B, and
# Mistral Small.
SHIPPED = {"quickstart": 1.6e6, "real": 134.5e6, "gsm8k": 494e6, "small": 23.6e9}


@pytest.mark.parametrize("name", SHIPPED)
def test_without_a_learning_rate_a_model_gets_that_of_the_shipped_config_of_its_size(name):
    given = ["model=any", "data.train=any.jsonl"]
    shipped = load_config(ROOT / f"configs/{name}.yaml", given)
    found = TrainerConfig().peak_rate(int(SHIPPED[name]))
    assert found == pytest.approx(shipped.trainer.learning_rate, rel=0.1)
    if start := shipped.cold_start:
        found = start.model_copy(update={"learning_rate": None}).trainer.peak_rate(134_500_000)
        assert found == pytest.approx(start.learning_rate, rel=0.1)


@pytest.mark.parametrize(("kind", "ends"), [("rl", (1e-6, 3e-4)), ("sft", (1e-5, 1e-3))])
@given(sizes=st.lists(st.integers(1, 10**12), min_size=2, max_size=2))
def test_a_larger_model_never_gets_a_higher_rate(kind, ends, sizes):
    small, large = sorted(sizes)
    assert ends[0] <= usual_rate(large, kind) <= usual_rate(small, kind) <= ends[1]


def test_the_rate_says_its_reason():
    assert chosen_rate(TrainerConfig(learning_rate=5e-6), "any") == (5e-6, "5e-06")
    rate, reason = chosen_rate(TrainerConfig(), "mistral-small-24b")
    assert (rate, reason) == (1e-6, "1e-06, as is usual for 23,572 million parameters")
    adapters = TrainerConfig(lora=LoraConfig())
    assert chosen_rate(adapters, "mistral-small-24b")[0] == pytest.approx(1e-5)
    fine_tuning = TrainerConfig(objective=ObjectiveConfig(name="sft"))
    assert chosen_rate(fine_tuning, "mistral-small-24b")[0] == pytest.approx(1e-5)
