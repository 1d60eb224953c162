"""Studies: every shipped one is valid, a small one runs, and an interrupted one resumes."""

import importlib
import json
import math
import shutil
import sys

import pytest
import yaml

import tramontane
from tests.runs import SMALL
from tramontane.errors import InputError
from tramontane.studies.measures import MEASURES, FinishedRun
from tramontane.studies.plan import (
    LEAST_SHARE,
    Plan,
    finished_runs,
    minutes_of,
    share_of,
)
from tramontane.studies.plots import plot_curve
from tramontane.studies.procedures import collated, trained
from tramontane.studies.study import load_study, names
from tramontane.sweeps.settings import write_settings

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("share", [1.0, 0.1])
def test_every_arm_is_a_valid_config_that_differs(name, share, tmp_path):
    study = load_study(name)
    if study.runner is not None:
        plan = Plan(study, tmp_path, seeds=2, share=share)
        keys = [plan.settings(arm, seed, folder)["keys"] for arm, seed, folder in plan.runs()]
        assert len({str(sorted(k.items())) for k in keys}) == len(study.arms)
        return
    plan = Plan(study, tmp_path, seeds=2, share=share)
    configs = [plan.arm_config(arm, seed, folder) for arm, seed, folder in plan.runs()]
    assert len(configs) == 2 * len(study.arms)
    ignored = {"name", "run_dir"}
    assert len({c.model_dump_json(exclude=ignored) for c in configs}) == len(configs)
    # Arms that differ in nothing but their batches train on the same number of completions.
    trained = {completions(config) for config in configs}
    # A stage of large batches has at least one update, however small the budget.
    resized = any(stage.n_batch for config in configs for stage in config.stages)
    rounding = 2.0 if resized and share < 1 else 1.5
    assert max(trained) <= rounding * min(trained)


def completions(config):
    """Number of completions that a run trains on."""
    updates = [stage.until.updates for stage in config.stages if stage.until]
    updates.append(config.pipeline.updates - sum(updates))
    stages = config.by_stage()
    return sum(n * c.pipeline.n_batch for n, c in zip(updates, stages, strict=True))


@pytest.mark.parametrize(("name", "measured"), [("kv_cache", False), ("dro_single", True)])
def test_the_base_is_measured_where_a_figure_compares_to_it(name, measured, tmp_path):
    plan = Plan(load_study(name), tmp_path, seeds=1)
    for arm, seed, folder in plan.runs():
        assert plan.arm_config(arm, seed, folder).evaluation.before is measured


def test_a_budget_makes_fewer_updates(tmp_path):
    study = load_study("kv_cache")
    plan = Plan(study, tmp_path, 3, share_of([study], 6.0, 3))
    config = plan.arm_config("keep", 0, tmp_path / "x")
    # One minute a run, half of which is its start and evaluations: 18 · 0.5 / (1.4 − 0.5).
    assert config.pipeline.updates == 10
    assert minutes_of(study, 3, plan.share) == pytest.approx(6.0)
    # Six runs of half a minute, and a hundredth of 0.9 minutes each.
    for minutes in (3.0, 0.0, -1.0):
        with pytest.raises(InputError, match=r"^budget of .* the runs take 3\.1 at least"):
            share_of([study], minutes, 3)
    assert share_of([study], 3.054, 3) == pytest.approx(LEAST_SHARE)


STUDY = {
    "title": "Two learning rates",
    "question": "Which is better?",
    "paper": "Nothing.",
    "arms": {"slow": {"trainer.learning_rate": 1e-6}, "fast": {}},
    "claims": [
        {"text": "Fast learns more.", "arm": "fast", "against": "slow", "expect": "higher"},
        {
            "text": "Gradients are alike.",
            "measure": "grad_norm",
            "arm": "fast",
            "against": "slow",
            "expect": "equal",
            "margin": 100,
        },
    ],
    "plots": ["reward"],
}


SIZES = {"n_async": 8, "n_batch": 8, "group_size": 4, "l_max": 64, "l_cache": 16, "updates": 1}


@pytest.fixture
def files(tmp_path):
    study, base = tmp_path / "rates.yaml", tmp_path / "base.yaml"
    study.write_text(yaml.safe_dump(STUDY))
    playground = {"levels": [1, 1], "languages": ["en"]}  # which take 53 tokens at most
    raw = SMALL | {
        "data": SMALL["data"] | {"eval": "playground:", "playground": playground},
        "pipeline": SMALL["pipeline"] | SIZES,
        "evaluation": {"problems": 2, "samples": 2},
    }
    base.write_text(yaml.safe_dump(raw))
    return study, base


@pytest.fixture
def run_files(files, one_layer):
    """`files` of a study whose runs are made."""
    study, base = files
    base.write_text(yaml.safe_dump(yaml.safe_load(base.read_text()) | {"model": one_layer}))
    return study, base


def test_a_divergence_that_explodes_is_seen_beside_the_others(tmp_path):
    def finished(name, divergences):
        lines = [json.dumps({"update": i + 1, "kl": d}) for i, d in enumerate(divergences)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return FinishedRun(tmp_path / name)

    held, exploded = finished("held", [0.0, 0.02, 0.1, 0.3]), finished("far", [0.0, 1, 1e3, 1e8])
    assert plot_curve("kl", {"held": [held]}, "update").axes[0].get_yscale() == "linear"
    (axes,) = plot_curve("kl", {"held": [held], "far": [exploded]}, "update").axes
    assert axes.get_yscale() == "log"
    low, high = axes.get_ylim()
    assert 1e-3 < low < high < 1e9


def test_one_outlier_among_updates_does_not_hide_the_divergence(tmp_path):
    rows = [{"update": i + 1, "kl_reference": 10.0 ** (6 if i == 7 else -2)} for i in range(8)]
    tmp_path.joinpath("metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    # Two updates are the last quarter: the mean of 6 and −2.
    assert MEASURES["late_log_kl"].value(FinishedRun(tmp_path)) == pytest.approx(2.0)


@pytest.mark.slow
def test_a_study_runs_and_an_interrupted_one_goes_on(run_files, tmp_path):
    study, base = run_files
    finished = []

    def run():
        return tramontane.study(
            str(study),
            seeds=2,
            base=base,
            out=tmp_path / "out",
            on_finished=lambda name, done, total: finished.append((name, done, total)),
        )

    result = run()
    out = tmp_path / "out/rates"
    assert sorted(name for name, _, _ in finished) == [
        f"{arm}, seed_{seed}" for arm in ("fast", "slow") for seed in (0, 1)
    ]
    assert (result.seeds, result.lines) == (2, (1, 1))
    values = result.values["pass_at_1"]["fast"]
    assert values == [
        MEASURES["pass_at_1"].value(FinishedRun(out / f"fast/seed_{s}")) for s in (0, 1)
    ]
    recorded = json.loads((out / "results.json").read_text())
    # Two seeds are before the first look: a difference, and no verdict.
    assert recorded["verdicts"][1]["outcome"] == "undecided"
    page = (out / "study.md").read_text()
    assert "# Two learning rates" in page and "`trainer.learning_rate: 1e-06`" in page
    assert "Undecided.*" in page and (out / "reward.svg").stat().st_size > 1000

    # As if killed in the last run: that run alone resumes, and the page is the same.
    finished.clear()
    (out / "slow/seed_1/summary.json").unlink()
    assert run().values == result.values
    assert [name for name, _, _ in finished] == ["slow, seed_1"]

    changed = yaml.safe_load(base.read_text())
    changed["trainer"]["learning_rate"] = 2e-4
    base.write_text(yaml.safe_dump(changed))
    with pytest.raises(InputError, match="a run with different settings"):
        run()


def recorded_run(folder, seconds_of_update, pass_rates):
    """A run's folder with what the measures over time read; its start took five seconds."""
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as log:
        for i, rate in enumerate(pass_rates, 1):
            line = {"update": i, "wall_seconds": 5 + i * seconds_of_update, "pass_rate": rate}
            log.write(json.dumps(line) + "\n")
    summary = {"training_seconds": len(pass_rates) * seconds_of_update}
    (folder / "summary.json").write_text(json.dumps(summary))


def test_runs_are_compared_at_the_time_of_the_fastest(files, tmp_path):
    """The slow arm has done half of its updates when the fast one ends, after eight seconds."""
    rates = [i / 10 for i in range(8)]
    recorded_run(tmp_path / "fast/seed_0", 1.0, rates)
    recorded_run(tmp_path / "slow/seed_0", 2.0, rates)
    plan = Plan(load_study(str(files[0])), tmp_path, 1, base=files[1])
    for arm, seed, folder in plan.runs():
        write_settings(folder, plan.settings(arm, seed, folder))
    runs = finished_runs(plan)
    at_time = {arm: MEASURES["timed_pass_rate"].value(run) for arm, [run] in runs.items()}
    # The last quarter, from 6 to 8 s: updates 7 and 8 of the one, and update 4 of the other.
    assert at_time == {"fast": pytest.approx(0.65), "slow": pytest.approx(0.3)}


def test_languages_are_compared_with_english(tmp_path):
    def slices(**rates):
        return {"by_language": {code: {"pass_at_1": {"value": r}} for code, r in rates.items()}}

    evaluation = {"before": slices(en=0.2, fr=0.1, zh=0.3), "after": slices(en=0.7, fr=0.4, zh=0.6)}
    tmp_path.joinpath("summary.json").write_text(json.dumps({"evaluation": evaluation}))
    run = FinishedRun(tmp_path)
    found = {name: MEASURES[name].value(run) for name in ("pass_at_1_fr", "gain_others")}
    assert found == {"pass_at_1_fr": 0.4, "gain_others": pytest.approx(0.5 - 0.2)}
    assert MEASURES["language_gap"].value(run) == pytest.approx(0.7 - 0.5)
    assert math.isnan(MEASURES["pass_at_1_de"].value(run))


def test_right_solutions_differ_by_their_texts(tmp_path):
    def sample(group, verdict, text):
        return json.dumps({"group": group, "verdict": verdict, "text": text}) + "\n"

    samples = [
        *(sample(0, "right", text) for text in ("a", "b", "a ", "c")),  # 2 of 3 after the first
        *(sample(1, "right", text) for text in ("a", "a")),
        *(sample(2, "right", "a"), sample(2, "wrong", "b")),  # one alone
    ]
    tmp_path.joinpath("evaluation_after.jsonl").write_text("".join(samples))
    value = MEASURES["distinct_solutions"].value
    assert value(FinishedRun(tmp_path)) == pytest.approx((2 / 3 + 0) / 2)
    tmp_path.joinpath("evaluation_after.jsonl").write_text(samples[-1])
    assert math.isnan(value(FinishedRun(tmp_path)))


@pytest.mark.slow
def test_a_run_that_arms_share_is_kept_and_no_other_taken_for_it(tmp_path, one_layer):
    small = {"n_async": 16, "n_batch": 8, "group_size": 4, "updates": 1, "l_max": 64, "l_cache": 16}
    changes = {f"pipeline.{key}": value for key, value in small.items()}
    changes |= {"seed": 0, "model": one_layer}
    weights = trained(tmp_path / "teacher/run", changes)
    made = (tmp_path / "teacher/run/summary.json").stat().st_mtime_ns
    assert trained(tmp_path / "teacher/run", changes) == weights
    assert (tmp_path / "teacher/run/summary.json").stat().st_mtime_ns == made
    with pytest.raises(InputError, match=r"teacher/run: a run with different settings"):
        trained(tmp_path / "teacher/run", changes | {"trainer.learning_rate": 1e-5})


def test_collation_is_compared_with_batches_of_as_many_as_always_fit(tmp_path):
    def run(lengths, spread):
        keys = {"lengths": lengths, "sequences": 4096, "budget": 4096, "spread": spread}
        return collated(keys, 0, tmp_path)

    # Sequences of 102 tokens, 40 in a budget of 4,096: nothing is padded in the fixed batches, and
    # 103 microbatches have room for 103 · 4,096 tokens.
    equal = run("uniform", 1.0)
    assert equal == {
        "saved": pytest.approx(102 / 103 - 1),
        "fixed": 0.0,
        "collated": pytest.approx(1 - 102 / 103),
    }
    # The longest of a batch, of 4,096 // 171 = 23, is near the greatest, 5/3 of the mean.
    assert run("uniform", 5.0)["fixed"] == pytest.approx(1 - 3 / 5, abs=0.03)
    assert run("lognormal", 5.0)["collated"] < 0.02


@pytest.mark.slow
def test_arms_learn_from_the_rollouts_of_a_run_before_them(run_files, tmp_path):
    study, base = run_files
    offline = {"data.trajectories.sources": ["trajectories"]}
    changes = {
        "arms": {"online": {}, "offline": offline},
        "trajectories": {"trainer.learning_rate": 1e-12, "pipeline.diversity": "none"},
        "claims": [{"text": "Alike.", "arm": "offline", "against": "online", "expect": "equal"}],
    }
    study.write_text(yaml.safe_dump(STUDY | changes))

    def run():
        return tramontane.study(str(study), seeds=1, base=base, out=tmp_path / "out")

    run()
    out = tmp_path / "out/rates"
    made = (out / "trajectories/summary.json").stat().st_mtime_ns
    tokens = [
        sum(row.get("trajectory_tokens", 0) for row in FinishedRun(out / arm / "seed_0").updates)
        for arm in ("online", "offline")
    ]
    assert tokens[0] == 0 < tokens[1]
    page = (out / "study.md").read_text()
    assert "stands for: `pipeline.diversity: none`, `trainer.learning_rate: 1e-12`" in page
    # The data set stays the same when an arm is run again.
    (out / "offline/seed_0/summary.json").unlink()
    run()
    assert (out / "trajectories/summary.json").stat().st_mtime_ns == made


@pytest.mark.slow
def test_runs_that_cannot_start_are_named_before_any_starts(files, tmp_path):
    study, base = files
    raw = yaml.safe_load(base.read_text())
    raw["data"]["train"] = str(tmp_path / "missing.jsonl")
    base.write_text(yaml.safe_dump(raw))
    with pytest.raises(InputError, match=r"slow/seed_0.yaml: data .*no such file"):
        tramontane.study(str(study), seeds=1, base=base, out=tmp_path / "out")
    assert not [*(tmp_path / "out").rglob("*.log")]


@pytest.mark.slow
def test_a_run_that_fails_shows_the_end_of_its_output(files, tmp_path):
    study, base = files
    plan = Plan(load_study(str(study)), tmp_path / "out/rates", 1, base=base)
    for arm, seed, folder in plan.runs():
        write_settings(folder, plan.settings(arm, seed, folder))
        folder.mkdir()
        (folder / "config.yaml").write_text("name: cut")
    with pytest.raises(InputError, match=r"(?s)seed_0: the run failed \(exit code 2\).*cut short"):
        tramontane.study(str(study), seeds=1, base=base, out=tmp_path / "out")


def test_mistakes_in_a_study_are_named(files):
    study, _ = files
    raw = dict(STUDY, claims=[dict(STUDY["claims"][0], arm="fats")])
    study.write_text(yaml.safe_dump(raw))
    with pytest.raises(InputError, match=r"claims.0.arm: 'fats' is not an arm .* fast, slow"):
        load_study(str(study))
    raw = dict(STUDY, claims=[dict(STUDY["claims"][0], measure="pass_at_2")])
    study.write_text(yaml.safe_dump(raw))
    with pytest.raises(InputError, match=r"'pass_at_2' is not a measure"):
        load_study(str(study))
    with pytest.raises(InputError, match=r"'kv_cahce': no such study; did you mean 'kv_cache'"):
        load_study("kv_cahce")


WALKS = {
    "title": "Random walks",
    "question": "Does a drift matter?",
    "paper": "Nothing.",
    "runner": "tests.studies.walk:run_arm",
    "measures": {"end": {"title": "last place"}, "undefined": {"title": "undefined"}},
    "base": {"steps": 40},
    "scaled": ["steps"],
    "minutes": 0.5,
    "arms": {"none": {"drift": 0}, "right": {"drift": 1}},
    "claims": [
        {
            "text": "A drift moves the walk.",
            "measure": "end",
            "arm": "right",
            "against": "none",
            "expect": "higher",
        }
    ],
    "plots": ["place"],
    "over": "step",
}


@pytest.mark.slow
def test_arms_may_be_runs_of_a_function(tmp_path):
    file, folder = tmp_path / "walks.yaml", tmp_path / "out/walks"
    file.write_text(yaml.safe_dump(WALKS))
    folder.mkdir(parents=True)
    (folder / "stop").touch()  # one of the runs kills its process, once

    def run():
        # 0.6 of 1.5 minutes on two cores: 16 of 40 steps.
        return tramontane.study(str(file), seeds=3, budget=0.6, out=tmp_path / "out")

    with pytest.raises(InputError, match=r"seed_0: the run failed \(SIGKILL\)"):
        run()
    result = run()
    assert (result.seeds, result.lines) == (3, (16, 16))
    assert result.values["end"]["right"][0] - result.values["end"]["none"][0] == pytest.approx(16)
    assert result.verdicts[0][1].outcome == "holds"
    page = (folder / "study.md").read_text()
    assert "\n3 seeds for each arm; runs of " in page  # a line of its log may be many steps
    assert "\n| last place | " in page and "\n| undefined | " in page
    assert (folder / "place.svg").stat().st_size > 1000
    # The run that was killed continued: its steps come from two processes.
    processes = [
        len({row["process"] for row in FinishedRun(run).updates})
        for run in folder.glob("*/seed_*/")
    ]
    assert sorted(processes) == [1] * 5 + [2]
    # Another budget has other settings, and a base makes no sense.
    with pytest.raises(InputError, match="a run with different settings"):
        tramontane.study(str(file), seeds=3, budget=2, out=tmp_path / "out")
    # The remedy that the error names.
    for run in folder.glob("*/seed_*/"):
        shutil.rmtree(run)
    assert tramontane.study(str(file), seeds=1, budget=0.8, out=tmp_path / "out").share > 1
    with pytest.raises(InputError, match="do not change a config"):
        tramontane.study(str(file), base="configs/quickstart.yaml", out=tmp_path / "out")


def test_a_study_with_a_function_needs_no_plots(tmp_path):
    file = tmp_path / "walks.yaml"
    file.write_text(yaml.safe_dump({k: v for k, v in WALKS.items() if k not in ("plots", "over")}))
    tramontane.study(str(file), seeds=1, out=tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out/walks").glob("*.svg")) == ["arms.svg"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"measures": {}}, "measures: name the measures"),
        ({"runner": None}, "measures: measures belongs to a study with a runner"),
        ({"fixed_minutes": 0.5}, "fixed_minutes: at least as much as minutes, 0.5"),
        ({"claims": [WALKS["claims"][0] | {"measure": "ends"}]}, "did you mean 'end'"),
    ],
)
def test_a_study_with_a_function_declares_its_measures(changes, message, tmp_path):
    file = tmp_path / "walks.yaml"
    file.write_text(yaml.safe_dump(WALKS | changes))
    with pytest.raises(InputError, match=message):
        load_study(str(file))


@pytest.mark.parametrize("runner", ["tests.studies.walk", "tests.walk:run", "tests.studies.walk:r"])
def test_a_function_that_is_not_there_is_named_before_any_run(runner, tmp_path):
    file = tmp_path / "walks.yaml"
    file.write_text(yaml.safe_dump(WALKS | {"runner": runner}))
    with pytest.raises(InputError, match=runner):
        tramontane.study(str(file), out=tmp_path / "out")
    assert not list(tmp_path.glob("out/**/*.yaml"))


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "tramontane.studies.plots", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"'tramontane-rl\[studies\]'"):
        importlib.import_module("tramontane.studies.plots")
