"""The arm of byol-linear, and the keys and measures of its study."""

import json
from pathlib import Path

import numpy as np
import pytest

from tramontane.errors import InputError
from tramontane.representation.dynamics import draw_dynamics
from tramontane.representation.linear import trace_objective
from tramontane.representation.linear_study import LinearSettings, limits, run_arm
from tramontane.representation.views import FUNCTIONS
from tramontane.studies.study import load_study

SMALL = {"draws": 12, "starts": 2, "shared_starts": 2, "time": 40}


def test_an_arm_returns_every_measure_of_the_study(tmp_path: Path) -> None:
    study = load_study("byol-linear")
    errors = {}
    for arm, keys in study.arms.items():
        LinearSettings(**study.base, **keys)
        folder = tmp_path / arm
        folder.mkdir()
        found = run_arm({**SMALL, **keys}, 0, folder)
        assert found.keys() == study.measures.keys()
        assert found["q"] == pytest.approx(found["value"] + found["advantage"])
        assert found["gram_drift"] < 1e-3
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        assert {study.over, *study.plots} <= lines[0].keys()
        own = [line[f"objective_{arm}"] for line in lines]
        assert own == sorted(own)
        errors[arm] = found
    assert min(errors, key=lambda arm: errors[arm]["value"]) == "pi"
    assert min(errors, key=lambda arm: errors[arm]["advantage"]) == "var"
    again = run_arm({**SMALL, "method": "var"}, 0, tmp_path)
    assert again == errors["var"]


def arm(folder: Path, **keys: object) -> tuple[dict[str, float], dict[str, float]]:
    """The measures, and the last line of the path."""
    found = run_arm({**SMALL, "method": "pi", **keys}, 0, folder)
    return found, json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def test_a_discount_changes_the_functions_and_not_the_representation(tmp_path: Path) -> None:
    (one_step, last), (discounted, last_discounted) = (arm(tmp_path, discount=g) for g in (0, 0.9))
    for function in FUNCTIONS:
        assert discounted[function] > 1.01 * one_step[function]
        assert last_discounted[function] > 1.01 * last[function]
    same = ("objective_pi", "fit_pi", "wins", "shared_bound")
    assert [discounted[name] for name in same] == [one_step[name] for name in same]


def test_the_best_of_all_starts_counts(tmp_path: Path) -> None:
    few, _ = arm(tmp_path, starts=1, shared_starts=1)
    many, _ = arm(tmp_path, starts=8, shared_starts=8)
    dynamics = draw_dynamics("sinkhorn", SMALL["draws"], seed=0)
    ends = limits("pi", dynamics, starts=8, time=SMALL["time"], width=4, seed=0)
    values = np.array([trace_objective("pi", dynamics, ends[:, start]) for start in range(8)])
    assert many["objective_pi"] == pytest.approx(values.max(0).mean())
    assert many["shared_bound"] > few["shared_bound"]
    assert few["wins_one_start"] == few["wins"]
    assert few["shared_named_one_start"] == few["shared_named"]


@pytest.mark.parametrize("discount", [0.0, 0.9])
def test_the_path_of_a_flow_that_converges_ends_at_the_measures(
    discount: float, tmp_path: Path
) -> None:
    """With one start; the path has the time of the dynamics, and the measures a scaled one."""
    keys = {"states": 4, "width": 2, "draws": 4, "starts": 1, "time": 1000, "discount": discount}
    measures, last = arm(tmp_path, **keys)
    assert last["time"] == pytest.approx(1000)
    for name in (*FUNCTIONS, "objective_pi", "objective_ac", "objective_var"):
        assert last[name] == pytest.approx(measures[name], abs=1e-4), name


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"methd": "pi"}, "methd: .*did you mean 'method'"),
        ({"method": "pi", "width": 12}, "width: .*10 at most"),
        ({"method": "pi", "actions": 1}, "actions: "),
    ],
)
def test_keys_that_do_not_fit_are_refused(
    keys: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"study byol-linear: {said}"):
        run_arm(keys, 0, tmp_path)
