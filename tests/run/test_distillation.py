"""Whole runs that are distilled from a teacher, and refusals before any work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.controller.test_pipeline import check_ledger
from tests.runs import small_config
from tramontane.errors import InputError
from tramontane.models.names import resolve
from tramontane.run.changes import open_run
from tramontane.run.folder import RunFolder
from tramontane.run.prepare import prepare
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train

DISTILL = {
    "trainer": {"learning_rate": 1e-3, "objective": {"name": "distill", "distill": {"top_k": 4}}},
    "pipeline": {"diversity": "none", "max_staleness": 2},
    "teacher": {"model": "tiny"},
}


@pytest.mark.slow
def test_a_run_and_its_continuation_learn_from_a_teacher(tmp_path: Path, one_layer: str) -> None:
    """Its own base: the distance is that of the updates on noise, which the teacher undoes."""
    first, second = tmp_path / "first", tmp_path / "second"
    noise = {"learning_rate": 3e-3}
    train(small_config(first, model=one_layer, trainer=noise), QuietScreen())
    keys = DISTILL | {"teacher": {"model": one_layer}, "checkpoint": {"every": 2}}
    config = small_config(second, model=str(first), **keys)
    train(config, QuietScreen())
    folder, config = open_run(second, ["pipeline.updates=6"])
    assert train(config, QuietScreen(), folder).finished
    check_ledger(second, config)
    distances = [row["teacher_divergence"] for row in RunFolder(second).metrics()]
    assert len(distances) == 6
    assert 0 < distances[-1] < 0.7 * distances[0]


@pytest.mark.slow
def test_a_stage_of_a_run_learns_from_its_own_teacher(tmp_path: Path, one_layer: str) -> None:
    """First from the weights that it begins with, at a distance of 0, then from its base."""
    first, second = tmp_path / "first", tmp_path / "second"
    train(small_config(first, model=one_layer, trainer={"learning_rate": 3e-3}), QuietScreen())
    stages = [{"name": "own", "until": {"updates": 1}, "teacher": str(first)}, {"name": "base"}]
    changes = DISTILL | {"pipeline": DISTILL["pipeline"] | {"updates": 2}}
    changes |= {"teacher": {"model": one_layer}}
    train(small_config(second, model=str(first), stages=stages, **changes), QuietScreen())
    own, base = (row["teacher_divergence"] for row in RunFolder(second).metrics())
    assert own < 1e-4 < 0.02 < base


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": None}, "null, but the objective distills"),
        ({"pipeline": {}}, "drops groups that objective 'distill' learns from"),
        ({"trainer": {}}, "'magistral' has no use for a teacher"),
        (
            {"teacher": {"model": "tiny", "domains": {"x": "tiny"}}},
            "no such domain; choose from math",
        ),
        (
            {"trainer": {"objective": {"name": "jepo", "add": {"distill": 1.0}}}},
            "replaces sampled answers",
        ),
        ({"trainer": {"objective": {"name": "sft", "add": {"sft": 1.0}}}}, "the objective itself"),
        ({"trainer": {"objective": {"add": {"distill": 0.0}}}}, "greater than 0"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(changes, message, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=message):
        small_config(tmp_path, **DISTILL | changes)


def test_sequences_keep_to_the_contexts_of_teachers(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(resolve("tiny"), teacher)
    own = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(own | {"max_position_embeddings": 60}))
    config = small_config(tmp_path / "run", **DISTILL | {"teacher": {"model": str(teacher)}})
    with pytest.raises(InputError, match=r"context of teacher '\S+' of 60"):
        prepare(config)
