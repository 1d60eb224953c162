"""The recipes: from a checkpoint to the paper's table, through kills between and within steps."""

import json
import os
import shutil
import signal

import pytest
import yaml
from typer.testing import CliRunner

from tests import forked
from tests.paths import ROOT
from tests.runs import SMALL, begun, small_config
from tramontane.cli import app
from tramontane.config import load_section, read_settings
from tramontane.errors import InputError
from tramontane.models.names import resolve
from tramontane.recipes.config import (
    AnswersConfig,
    GeneralConfig,
    MediumRecipe,
    RunSettings,
    SmallRecipe,
)
from tramontane.recipes.mixture import answer_settings, mix
from tramontane.recipes.recipe import KINDS, PAPER, run, steps_of, training_config
from tramontane.recipes.steps import begin
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train

SIZES = {
    "data": {"playground": {"levels": [1, 1], "languages": ["en", "fr"]}},
    "pipeline": {**SMALL["pipeline"], "l_max": 64, "n_minibatch": 16, "diversity": "none"},
    "trainer": SMALL["trainer"],
    "timeouts": SMALL["timeouts"],
    "evaluation": {"problems": 2, "samples": 1},
    "checkpoint": {"every": 1},
}
FASTER = {"learning_rate": 3e-4}
MEASURED = {"suites": ["playground"], "problems": 3, "samples": 2, "max_tokens": 64}
STAGES = [{"name": "short", "until": {"updates": 1}, "l_max": 48}, {"name": "long"}]


def medium(out):
    raw = {
        "out": str(out),
        "model": "tiny",
        "rl": {"set": {**SIZES, "stages": STAGES}},
        "compare": MEASURED,
    }
    return MediumRecipe.model_validate(raw)


def small(out, teacher, model="tiny"):
    raw = {
        "out": str(out),
        "model": model,
        "teacher": str(teacher),
        "harvest": {"early": 0},
        "answers": {"source": "playground:", "problems": 4, "samples": 2, "max_tokens": 64},
        "general": {"playground": [{"kinds": ["programs"]}]},
        "sft": {"epochs": 2, "set": {"batch_tokens": 1500, "learning_rate": 1e-4}},
        "select": MEASURED,
        "rl": {"set": SIZES},
        "compare": MEASURED,
    }
    return SmallRecipe.model_validate(raw)


def distilling(out, teacher, **changes):
    """The same recipe, with distillation in the place of the steps up to the fine-tuning."""
    recipe = small(out, teacher).model_dump()
    return SmallRecipe.model_validate(recipe | {"distill": "on_policy"} | changes)


class KillingScreen(QuietScreen):
    """Kills its process in the last step of the fine-tuning's second epoch but one, or at the first
    update of a training."""

    def __init__(self, at):
        self.at = at

    def phase(self, name, done, total):
        if name == self.at and done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def update(self, metrics):
        if self.at == "update":
            os.kill(os.getpid(), signal.SIGKILL)


def killed_at(recipe, moment):
    """A recipe that kills itself in the middle of a step, or before the comparison."""

    def announce(number, total, title, finished):
        if moment == "between" and number == total:
            os.kill(os.getpid(), signal.SIGKILL)

    run(SmallRecipe.model_validate_json(recipe), lambda: KillingScreen(moment), announce)


@pytest.mark.slow
def test_medium_then_small_through_kills_within_and_between_steps(tmp_path, one_layer):
    facts = run(medium(tmp_path / "medium"))
    assert facts["1_rl"]["updates"] == 2
    teacher = tmp_path / "medium/1_rl/run"
    metrics = [json.loads(line) for line in (teacher / "metrics.jsonl").open()]
    assert [row["stage"] for row in metrics] == ["short", "long"]
    report = (tmp_path / "medium/report.md").read_text()
    assert "| playground pass@1 |" in report
    assert "| | start | RL |" in report

    recipe, out = small(tmp_path / "small", teacher, one_layer), tmp_path / "small"
    times = {}
    for moment in ("fine-tuning", "update", "between"):
        killed = forked.start(killed_at, recipe.model_dump_json(), moment)
        assert forked.end(killed) == -signal.SIGKILL
        for done in out.glob("*/done.json"):
            # Finished steps are not done again.
            assert times.setdefault(done, done.stat().st_mtime_ns) == done.stat().st_mtime_ns
        if moment == "fine-tuning":
            assert list(out.glob("4_sft/model/resume/step_*"))
            assert not (out / "4_sft/done.json").exists()
        if moment == "update":
            assert not (out / "6_rl/done.json").exists()
    assert not (out / "report.md").exists()
    seen = []
    facts = run(recipe, announce=lambda *args: seen.append(args))
    assert [finished for *_, finished in seen] == [True] * 7 + [False]

    steps = [json.loads(line)["step"] for line in (out / "4_sft/model/sft_metrics.jsonl").open()]
    assert len(steps) == len(set(steps))
    kept = {path.name for path in (out / "4_sft/model/checkpoints").iterdir()}
    assert kept == {f"step_{facts['4_sft']['steps'] // 2}", f"step_{facts['4_sft']['steps']}"}
    assert facts["5_select"]["best"] in kept
    for step, start in (("6_rl", facts["5_select"]["weights"]), ("7_rl_only", one_layer)):
        rows = [json.loads(line) for line in (out / step / "run/metrics.jsonl").open()]
        assert [row["update"] for row in rows] == [1, 2]
        config = read_settings(out / step / "run/config.yaml")
        assert config["model"] == start
        assert config["generator"]["temperature"] == 1.0
        assert config["trainer"]["objective"]["magistral"]["eps_high"] == 0.3
    report = (out / "report.md").read_text()
    assert "| | start | teacher | SFT | RL | SFT+RL |" in report
    assert (out / "report.html").read_text().count("<th") == 6
    mixture = facts["3_mixture"]
    assert mixture["2_answers"] and mixture["general"]
    assert mixture["general"] == round(0.1 / 0.9 * (mixture["examples"] - mixture["general"]))
    changed = recipe.model_copy(update={"rl_only": False})
    with pytest.raises(InputError, match="already started with different settings \\(rl_only\\)"):
        run(changed)


@pytest.mark.slow
def test_distillation_in_the_place_of_fine_tuning_through_a_kill(tmp_path, one_layer):
    teacher, out = tmp_path / "teacher", tmp_path / "small"
    train(small_config(teacher, model=one_layer), QuietScreen())
    changes = {"updates": 3, "set": {"trainer": FASTER}}
    recipe = distilling(out, teacher, model=one_layer, distillation=changes)
    killed = forked.start(killed_at, recipe.model_dump_json(), "update")
    assert forked.end(killed) == -signal.SIGKILL
    assert (out / "1_distill/run/config.yaml").is_file()
    assert not (out / "1_distill/done.json").exists()

    facts = run(recipe)
    assert list(facts) == ["1_distill", "2_rl", "3_rl_only", "4_compare"]
    rows = [json.loads(line) for line in (out / "1_distill/run/metrics.jsonl").open()]
    assert [row["update"] for row in rows] == [1, 2, 3]
    assert all(row["teacher_divergence"] > 0 for row in rows)
    config = read_settings(out / "1_distill/run/config.yaml")
    assert config["teacher"]["model"] == str(teacher / "checkpoints/update_2/weights")
    assert config["trainer"]["learning_rate"] == FASTER["learning_rate"]
    for step, start in (("2_rl", facts["1_distill"]["weights"]), ("3_rl_only", one_layer)):
        config = read_settings(out / step / "run/config.yaml")
        assert (config["model"], config["teacher"]) == (start, None)
        assert config["trainer"]["objective"]["name"] == "magistral"
        assert config["trainer"]["learning_rate"] == SIZES["trainer"]["learning_rate"]
    report = (out / "report.md").read_text()
    assert "| | start | teacher | distillation | RL | distillation+RL |" in report
    with pytest.raises(InputError, match=r"already started with different settings \(distill\)"):
        run(recipe.model_copy(update={"distill": None}))


def test_distillation_changes_the_training_config_only_for_its_step(tmp_path):
    recipe = distilling(tmp_path, "tiny", distillation={"updates": 5, "set": {"seed": 3}})
    first, *_ = steps = steps_of(recipe)
    distilled, rl = first.training, steps[1].training
    assert distilled and rl and rl == steps[2].training
    assert distilled.teacher.model == "tiny"
    assert distilled.trainer.objective.name == "distill"
    assert distilled.trainer.objective.distill.top_k == 16
    assert (distilled.seed, distilled.pipeline.updates, distilled.pipeline.n_batch) == (3, 5, 16)
    assert distilled.generator.temperature == rl.generator.temperature == 1.0
    assert (rl.seed, rl.pipeline.updates, rl.teacher) == (0, 2, None)
    recipe.distillation.set = {"trainer.objective.distill.top_k": None, "model": "other"}
    with pytest.raises(InputError, match=r"distillation.set: the recipe decides model"):
        steps_of(recipe)


def test_a_teacher_that_cannot_score_the_model_is_refused_before_any_work(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(resolve("tiny"), other)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"<think>"', '"<thought>"'))
    with pytest.raises(InputError, match=r"step 1_distill\): teacher '.*other': its tokenizer"):
        run(distilling(tmp_path / "out", other))
    begun(small_config(tmp_path / "begun"))
    with pytest.raises(InputError, match="a run that has no checkpoint yet"):
        run(distilling(tmp_path / "out", tmp_path / "begun"))
    weights = tmp_path / "begun/checkpoints/update_1/weights"
    shutil.copytree(resolve("tiny"), weights)
    with pytest.raises(InputError, match="this run is not finished"):
        run(distilling(tmp_path / "out", tmp_path / "begun"))
    assert not (tmp_path / "out").exists()


def test_the_papers_values_are_defaults_that_the_config_replaces(tmp_path):
    recipe = small(tmp_path, "tiny")
    config = training_config(recipe, RunSettings(), PAPER)
    assert config.trainer.objective.magistral.eps_high == 0.3
    settings = RunSettings(config=str(ROOT / "configs/medium.yaml"))
    settings.set = {"data": {"train": "a.jsonl"}, "data.limit": 5, "stages.0.l_max": 9000}
    config = training_config(recipe, settings, PAPER)
    assert config.generator.temperature == 0.7  # the file's
    assert config.trainer.objective.magistral.eps_high == 0.28
    assert (config.data.train, config.data.limit) == ("a.jsonl", 5)
    assert config.data.system_prompt == "magistral"  # the rest of the section stays
    assert config.stages[0].l_max == 9000
    settings.set["model"] = "other"
    with pytest.raises(InputError, match="rl.set: the recipe decides model"):
        training_config(recipe, settings, PAPER)


def test_the_mixture_has_a_tenth_of_general_data_and_a_short_file_is_repeated(tmp_path):
    traces = tmp_path / "1_harvest" / "traces.jsonl"
    traces.parent.mkdir()
    traces.write_text("".join(json.dumps({"prompt": f"{i}", "response": "r"}) + "\n"
                              for i in range(90)))  # fmt: skip
    general = tmp_path / "general.jsonl"
    general.write_text("".join(json.dumps({"prompt": f"g{i}", "response": "s"}) + "\n"
                               for i in range(4)))  # fmt: skip
    out = tmp_path / "mixed.jsonl"
    facts = mix([traces], GeneralConfig(train=str(general)), 0, out)
    assert facts == {"1_harvest": 90, "general": 10, "examples": 100}
    prompts = [json.loads(line)["prompt"] for line in out.open()]
    assert sorted(p for p in prompts if p.startswith("g"))[:3] == ["g0", "g0", "g1"]
    assert prompts != sorted(prompts)
    first = out.read_text()
    mix([traces], GeneralConfig(train=str(general)), 0, out)
    assert out.read_text() == first


def test_open_prompts_need_no_answer(tmp_path):
    config = AnswersConfig(source="open.jsonl", keep="well_formed")
    found = answer_settings(config, "tiny").config
    assert found.data.domain == "open"
    assert found.verifier.domains["open"].format.needs_thoughts
    assert found.verifier.domains["open"].verifier is None


def test_recipes_that_cannot_start(tmp_path):
    recipe = medium(tmp_path)
    recipe.rl.set.pop("stages")
    with pytest.raises(InputError, match="the recipe trains in stages"):
        steps_of(recipe)
    with pytest.raises(InputError, match="not a run folder"):
        run(small(tmp_path / "small", tmp_path))
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(
    ("part", "changed", "match"),
    [
        ("compare", {"suites": ["typo.jsonl"]}, r"compare \(step 2_compare\): .*typo.jsonl"),
        ("compare", {"suites": ["x/a.jsonl", "y/a.jsonl"]}, "write NAME=y/a.jsonl"),
        ("compare", {"suites": ["aime24@missing.parquet"]}, "missing.parquet"),
        ("compare", {"max_tokens": 100_000}, "leave no room for a prompt"),
        ("rl", {"set": {**SIZES, "stages": STAGES, "data.train": "typo.jsonl"}}, "typo.jsonl"),
    ],
)
def test_a_recipe_reads_its_input_before_the_work(part, changed, match, tmp_path):
    recipe = medium(tmp_path / "out")
    section = getattr(recipe, part).model_copy(update=changed)
    with pytest.raises(InputError, match=match):
        run(recipe.model_copy(update={part: section}))
    with pytest.raises(InputError, match="no such folder"):
        run(recipe.model_copy(update={"model": str(tmp_path / "none")}))
    assert not (tmp_path / "out").exists()


def test_settings_of_steps_to_come_may_change(tmp_path):
    recipe = medium(tmp_path)
    steps = steps_of(recipe)
    begin(recipe, tmp_path, steps)
    (tmp_path / "1_rl").mkdir()
    (tmp_path / "1_rl/done.json").write_text("{}")
    # As an earlier version wrote it, which did not know a key.
    old = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    del old["compare"]["top_p"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(old))
    begin(recipe, tmp_path, steps)
    (tmp_path / "2_compare").mkdir()  # begun: its completions say what they were made with
    compare = recipe.compare.model_copy(update={"samples": 1})
    changed = recipe.model_copy(update={"compare": compare})
    begin(changed, tmp_path, steps_of(changed))
    assert read_settings(tmp_path / "recipe.yaml")["compare"]["samples"] == 1

    rl = RunSettings(set=recipe.rl.set | {"seed": 5})
    other = changed.model_copy(update={"rl": rl})
    with pytest.raises(InputError, match=r"already started with different settings \(rl\)"):
        begin(other, tmp_path, steps_of(other))
    (tmp_path / "2_compare/done.json").write_text("{}")
    with pytest.raises(InputError, match=r"already started with different settings \(compare\)"):
        begin(recipe, tmp_path, steps_of(recipe))
    with pytest.raises(InputError, match="recipe.yaml is a file; name a folder"):
        begin(recipe, tmp_path / "recipe.yaml/out", steps)


@pytest.mark.parametrize("name", ["recipe_medium_tiny", "recipe_small_tiny"])
def test_the_tiny_recipes_are_whole(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    kind = KINDS[name.split("_")[1]]
    steps = steps_of(load_section(kind, f"configs/{name}.yaml"))
    assert steps[-1].name.endswith("_compare")


def test_the_tiny_recipe_distills_in_four_steps(monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = load_section(SmallRecipe, "configs/recipe_small_tiny.yaml", ["distill=on_policy"])
    steps = [step.name for step in steps_of(recipe)]
    assert steps == ["1_distill", "2_rl", "3_rl_only", "4_compare"]
    recipe.rl_only = False
    steps = [step.name for step in steps_of(recipe)]
    assert steps == ["1_distill", "2_rl", "4_compare"]


LARGE = ["model=any", "rl.set.data.train=any.jsonl"]
FURTHER = ["teacher=any", "answers.source=any.jsonl", "general.train=any.jsonl"]
DISTILLED = ["distill=on_policy", "teacher=mistral-small-24b", *FURTHER[1:]]


@pytest.mark.parametrize(
    ("args", "steps"),
    [
        (["medium", "configs/recipe_medium.yaml", *LARGE, "--gpu", "h100"], 2),
        (["small", "configs/recipe_small.yaml", *LARGE, *FURTHER, "--gpu", "h200"], 8),
        (["small", "configs/recipe_small.yaml", *LARGE, *DISTILLED, "--gpu", "h200"], 4),
    ],
    ids=["medium", "small", "distillation"],
)
def test_the_recipes_for_a_real_checkpoint_pass_a_dry_run(args, steps, monkeypatch):
    monkeypatch.chdir(ROOT)
    shape = ["--dry-run", "--model-shape", "mistral-small-24b"]
    result = CliRunner().invoke(app, ["recipe", *args, *shape])
    assert result.exit_code == 0, result.exception
    assert f"{steps}  {steps}_compare" in result.stdout
    assert "fits in" in result.stdout
