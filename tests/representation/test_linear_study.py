"""The arm of byol-linear, and the keys and measures of its study."""

import json
from pathlib import Path

import pytest

from tramontane.errors import InputError
from tramontane.representation.linear_study import LinearSettings, run_arm
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
