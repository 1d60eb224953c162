"""Arms of several steps, which may share some of them, at tiny sizes."""

from __future__ import annotations

import numpy as np
import pytest

from tramontane.run.folder import RunFolder
from tramontane.studies.distillations import at_levels, combined, restored, share
from tramontane.studies.plan import Plan
from tramontane.studies.procedures import started
from tramontane.studies.study import load_study

SIZES = {"n_async": 16, "n_batch": 8, "group_size": 4, "l_max": 64, "l_cache": 16}
SIZES["diversity"] = "none"  # an update of the first two groups
MEASURED = {"evaluation.samples": 2, "evaluation.before": False}
CONFIG = {f"pipeline.{key}": value for key, value in SIZES.items()} | MEASURED
SMALL = {
    "updates": 1,
    "levels": [1, 1],
    "maths": {"kinds": ["sums", "stories"], "levels": [1, 1]},  # which the tiny base can solve
    "config": CONFIG,
    "student": {"pipeline.n_minibatch": 4},
    "problems": 8,  # whose two answers each are decoded together
}


def arms(study, run, folder, some=(), **sizes):
    """The figures of each arm of a study of the catalog, or of some, at tiny sizes."""
    found = load_study(study)
    return {
        arm: run(found.base | SMALL | sizes | changes, 0, folder / arm / "seed_0")
        for arm, changes in found.arms.items()
        if arm in (some or found.arms)
    }


def run_of(folder):
    """Config and trained tokens of each update of a finished run."""
    run = RunFolder(folder / "run")
    tokens = [sum(row["staleness_histogram"].values()) for row in run.metrics()]
    return run.config(), np.cumsum(tokens)


def test_the_study_of_a_real_checkpoint_has_the_claims_of_the_catalog():
    real = load_study("restore_smollm2")
    found = load_study("restore")
    assert (real.claims, real.arms) == (found.claims, found.arms)
    assert real.base.keys() == found.base.keys()


def test_a_share_of_weights_that_solve_nothing_is_not_a_number():
    assert share(0.25, 0.5) == 0.5
    assert np.isnan(share(0.25, 0.0))


@pytest.mark.slow
def test_two_teachers_are_compared_with_mixed_training_of_as_many_tokens(tmp_path):
    found = arms("two_teachers", combined, tmp_path, teacher_updates=1, mixed_updates=3)
    student, spent = run_of(tmp_path / "student_0")
    assert student.teacher.model.startswith(f"{tmp_path}/maths_0/run/")
    assert student.teacher.domains["code"].startswith(f"{tmp_path}/code_0/run/")
    in_all = spent[-1]
    for name, kinds in {"maths": ("sums", "stories"), "code": ("programs",)}.items():
        config, tokens = run_of(tmp_path / f"{name}_0")
        assert config.data.playground.kinds == kinds and config.teacher is None
        in_all += tokens[-1]
    mixed, tokens = run_of(tmp_path / "mixed_0")
    assert mixed.data.playground == student.data.playground
    assert mixed.data.playground.kinds == ("sums", "stories", "programs")
    assert len(tokens) == 3
    assert found["two teachers"]["tokens"] == spent[-1] / 1e6
    assert found["two teachers"]["tokens_in_all"] == in_all / 1e6
    for arm, budget in {"mixed RL": spent[-1], "longer mixed RL": in_all}.items():
        assert found[arm]["tokens"] * 1e6 in tokens
        assert abs(found[arm]["tokens"] * 1e6 - budget) == abs(tokens - budget).min()
    shares = found["two teachers"]
    assert shares["of_teachers"] == pytest.approx((shares["of_maths"] + shares["of_code"]) / 2)


@pytest.mark.slow
def test_what_was_forgotten_is_distilled_from_the_weights_before(tmp_path):
    settings = {"batch_tokens": 512, "learning_rate": 3e-3, "warmup_steps": 1}
    sizes = {"start_updates": 1, "sft_steps": 6, "sft_settings": settings}
    found = arms("restore", restored, tmp_path, **sizes)
    assert found["start"]["of_start"] == found["SFT"]["of_sft"] == 1
    start, narrow = f"{tmp_path}/start_0/run/", f"{tmp_path}/sft_0/sft"
    for arm, domains in {"restored": {}, "restored on both": {"code": narrow}}.items():
        config, _ = run_of(tmp_path / arm / "seed_0")
        first = RunFolder(tmp_path / arm / "seed_0/run").metrics()[0]
        assert first["teacher_divergence"] > 0.01  # six large steps on programs alone
        assert config.model == narrow
        assert config.teacher.model.startswith(start) and config.teacher.domains == domains
        assert ("programs" in config.data.playground.kinds) == bool(domains)
    # Arms share what was measured; measured again, the same weights have the same figures.
    kept = [*(tmp_path / "start_0").rglob("pass_at_1_*.json")]
    for file in kept:
        file.unlink()
    again = arms("restore", restored, tmp_path, ("start",), **sizes)
    assert len(kept) == 2 and again["start"]["maths"] == found["start"]["maths"]


@pytest.mark.slow
def test_arms_of_one_level_begin_where_the_arm_of_both_does(tmp_path, one_layer):
    small = {"model": one_layer, "sft_steps": 1, "updates": 1, "problems": 8}
    keys = load_study("effort").base | small
    keys["config"] = CONFIG | {"pipeline.n_async": 32, "pipeline.n_batch": 32}
    keys["config"]["evaluation.samples"] = 4
    keys["effort"] = {
        name: level | {"l_max": 40, "l_cache": 2} for name, level in keys["effort"].items()
    }
    found = {}
    for arm, trained in (("both", None), ("low alone", ["low"])):
        folder = tmp_path / arm / "seed_0"
        found[arm] = at_levels(keys | {"train_effort": trained}, 0, folder)
        run = RunFolder(folder / "run")
        asked = {level for row in run.metrics() for level in row["effort_completion_tokens"]}
        assert asked == ({"low", "high"} if trained is None else {"low"})
        assert run.config().model == str(tmp_path / "sft_0" / "sft")
        assert found[arm]["effort_tokens"] == found[arm]["tokens_low"] / found[arm]["tokens_high"]
        assert 0 < found[arm]["effort_obeyed"] < 1


@pytest.mark.slow
def test_the_arms_of_a_checkpoint_begin_with_the_same_cold_start(tmp_path, one_layer):
    sizes = {
        "model": one_layer,
        "playground": {"levels": [1, 1], "languages": ["en"]},
        "cold_start": {"steps": 1, "batch_tokens": 2048},
    }
    trained = ("SFT + RL", "no language reward")
    study = load_study("smollm2")
    plan = Plan(study, tmp_path / "out", 1, share=0.01)  # which makes no update of none
    keys = {arm: plan.settings(arm, 0, plan.folder(arm, 0))["keys"] for arm in study.arms}
    assert [arm for arm in keys if not keys[arm]["rl"]] == ["SFT"]
    found = arms("smollm2", started, tmp_path, ("SFT", *trained), **sizes)
    assert np.isnan(found["SFT"]["late_entropy"]) and found["SFT + RL"]["late_entropy"] > 0
    configs = [run_of(tmp_path / arm / "seed_0")[0] for arm in trained]
    assert {config.model for config in configs} == {str(tmp_path / "start/sft")}
    assert [config.verifier.reward.language for config in configs] == [0.1, 0.0]
