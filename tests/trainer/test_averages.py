import torch

from tramontane.trainer.averages import Averages


def pair(value, weight):
    return torch.tensor(value), torch.tensor(weight)


def test_means_are_sums_over_weights_of_all_that_was_added():
    averages = Averages()
    averages.add({"loss": pair(3.0, 2.0), "ratio": pair(1.0, 4.0)})
    averages.add({"loss": pair(5.0, 2.0), "ratio": pair(0.0, 1.0)})
    assert averages.result() == {"loss": 2.0, "ratio": 0.2}


def test_a_name_of_weight_zero_is_left_out_with_its_maximum():
    averages = Averages()
    averages.add({"old": pair(0.0, 0.0), "new": pair(0.0, 1.0)})
    averages.maximum("old", torch.tensor(7.0))
    averages.maximum("new", torch.tensor(-3.0))
    averages.maximum("new", torch.tensor(-5.0))
    assert averages.result() == {"new": 0.0, "new_max": -3.0}


def test_small_values_are_summed_in_float64():
    averages = Averages()
    averages.add({"x": pair(1e8, 1.0)})
    for _ in range(10):
        averages.add({"x": pair(1.0, 0.0)})
    assert averages.result() == {"x": 1e8 + 10}
