"""The study `oversight`: an arm's figures, and the model that its runs share."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tramontane import InputError
from tramontane.studies.study import load_study
from tramontane_oversight.studies import arm
from tramontane_oversight.studies.arm import TAUGHT, run_arm, taught_model

STUDY = load_study("oversight")


def keys_of(arm: str, **changes: Any) -> dict[str, Any]:
    return {**STUDY.base, **STUDY.arms[arm], **changes}


SIMULATED = {
    "judge": {"simulated": {"accuracy": 1.0}},
    "agent": {"simulated": {"accuracy": 0.84, "persuasiveness": {"right": 0.9, "wrong": 0.6}}},
}


@pytest.mark.parametrize("arm", STUDY.arms)
def test_every_arm_returns_the_measures_of_the_study(arm: str, tmp_path: Path) -> None:
    folder = tmp_path / arm / "seed_0"
    found = run_arm(keys_of(arm, questions=40, **SIMULATED), 0, folder)
    assert set(STUDY.measures) == set(found)
    assert 0 <= found["accuracy"] <= 1
    assert math.isnan(found["win_rate"]) == arm.startswith("direct")
    assert math.isnan(found["own_accuracy"]) == (not arm.startswith("open"))
    assert run_arm(keys_of(arm, questions=40, **SIMULATED), 0, folder) == pytest.approx(
        found, nan_ok=True
    )


@pytest.mark.parametrize(
    "change",
    [
        {"lessons": 9},
        {"drills": 9},
        {"drill_steps": 9},
        {"lesson_steps": 9},
        {"wording": "default"},
        {"extractive": {"languages": ["de"]}},
    ],
)
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("begun", [("drilled",), ("model",), ("drilled", "model")])
def test_a_model_of_other_lessons_is_refused(
    change: dict[str, Any], recorded: bool, begun: tuple[str, ...], tmp_path: Path
) -> None:
    keys = keys_of("debate", lessons=5, drills=5, drill_steps=3, lesson_steps=3)
    for name in begun:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    if recorded:
        made = {name: keys[name] for name in TAUGHT}
        (tmp_path / "model.json").write_text(json.dumps(made))
        if len(begun) == 2:
            assert taught_model(tmp_path, keys) == tmp_path / "model"
    with pytest.raises(InputError, match="a model with different lessons"):
        taught_model(tmp_path, {**keys, **change})


@pytest.mark.slow
def test_the_runs_of_a_study_share_a_model_that_the_first_one_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(arm.SFT, "batch_tokens", 1024)
    keys = keys_of(
        "debate", questions=2, rounds=1, lessons=20, drills=20, drill_steps=2, lesson_steps=2
    )
    found = run_arm(keys, 0, tmp_path / "debate/seed_0")
    assert 0 <= found["accuracy"] <= 1
    weights = tmp_path / "model/model.safetensors"
    before = weights.stat().st_mtime_ns
    assert taught_model(tmp_path, keys) == tmp_path / "model"
    assert weights.stat().st_mtime_ns == before
