import pytest
import torch

from tramontane.trainer.optimizer import build_optimizer, lr_at


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
