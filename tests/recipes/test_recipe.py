"""The recipes: from a checkpoint to the paper's table, through kills between and within steps."""

import json
import os
import signal

import pytest
from typer.testing import CliRunner

from tests import forked
from tests.paths import ROOT
from tests.runs import SMALL
from tramontane.cli import app
from tramontane.config import load_section, read_settings
from tramontane.errors import InputError
from tramontane.recipes.config import (
    AnswersConfig,
    GeneralConfig,
    MediumRecipe,
    RunSettings,
    SmallRecipe,
)
from tramontane.recipes.mixture import answer_settings, mix
from tramontane.recipes.recipe import KINDS, run, steps_of
from tramontane.recipes.steps import begin, training_config
from tramontane.run.screen import QuietScreen

SIZES = {
    "data": {"playground": SMALL["data"]["playground"]},
    "pipeline": {**SMALL["pipeline"], "n_minibatch": 32, "diversity": "none"},
    "trainer": SMALL["trainer"],
    "timeouts": SMALL["timeouts"],
    "evaluation": {"problems": 2, "samples": 1},
    "checkpoint": {"every": 1},
}
MEASURED = {"suites": ["playground"], "problems": 3, "samples": 2, "max_tokens": 64}
STAGES = [{"name": "short", "until": {"updates": 1}, "l_max": 64}, {"name": "long"}]


def medium(out):
    raw = {
        "out": str(out),
        "model": "tiny",
        "rl": {"set": {**SIZES, "stages": STAGES}},
        "compare": MEASURED,
    }
    return MediumRecipe.model_validate(raw)


def small(out, teacher):
    raw = {
        "out": str(out),
        "model": "tiny",
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
def test_medium_then_small_through_kills_within_and_between_steps(tmp_path):
    facts = run(medium(tmp_path / "medium"))
    assert facts["1_rl"]["updates"] == 2
    teacher = tmp_path / "medium/1_rl/run"
    metrics = [json.loads(line) for line in (teacher / "metrics.jsonl").open()]
    assert [row["stage"] for row in metrics] == ["short", "long"]
    report = (tmp_path / "medium/report.md").read_text()
    assert "| playground pass@1 |" in report
    assert "| | start | RL in stages |" in report

    recipe, out = small(tmp_path / "small", teacher), tmp_path / "small"
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
    for step, start in (("6_rl", facts["5_select"]["weights"]), ("7_rl_only", "tiny")):
        rows = [json.loads(line) for line in (out / step / "run/metrics.jsonl").open()]
        assert [row["update"] for row in rows] == [1, 2]
        config = read_settings(out / step / "run/config.yaml")
        assert config["model"] == start
        assert config["generator"]["temperature"] == 1.0
        assert config["trainer"]["objective"]["magistral"]["eps_high"] == 0.3
    report = (out / "report.md").read_text()
    assert "| | start | teacher | SFT only | RL only | SFT + RL |" in report
    assert (out / "report.html").read_text().count("<th>") == 6
    mixture = facts["3_mixture"]
    assert mixture["general"] == round(0.1 / 0.9 * (mixture["examples"] - mixture["general"]))
    changed = recipe.model_copy(update={"rl_only": False})
    with pytest.raises(InputError, match="already started with different settings \\(rl_only\\)"):
        run(changed)


def test_the_papers_values_are_defaults_that_the_config_replaces():
    papers = {"generator.temperature": 1.0, "trainer.objective.magistral.eps_high": 0.3}
    config = training_config(RunSettings(), papers, {"model": "tiny"})
    assert config.trainer.objective.magistral.eps_high == 0.3
    settings = RunSettings(config=str(ROOT / "configs/medium.yaml"))
    settings.set = {"data": {"train": "a.jsonl"}, "data.limit": 5, "stages.0.l_max": 9000}
    config = training_config(settings, papers, {"model": "tiny"})
    assert config.generator.temperature == 0.7  # the file's
    assert config.trainer.objective.magistral.eps_high == 0.28
    assert (config.data.train, config.data.limit) == ("a.jsonl", 5)
    assert config.data.system_prompt == "magistral"  # the rest of the section stays
    assert config.stages[0].l_max == 9000
    settings.set["model"] = "other"
    with pytest.raises(InputError, match="rl.set: the recipe decides model"):
        training_config(settings, papers, {"model": "tiny"})


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
    with pytest.raises(InputError, match="no checkpoint"):
        run(recipe.model_copy(update={"model": str(tmp_path / "none")}))
    assert not (tmp_path / "out").exists()


def test_settings_of_steps_to_come_may_change(tmp_path):
    recipe = medium(tmp_path)
    steps = steps_of(recipe).steps()
    begin(recipe, tmp_path, steps)
    (tmp_path / "1_rl").mkdir()
    (tmp_path / "1_rl/done.json").write_text("{}")
    (tmp_path / "2_compare").mkdir()  # begun: its completions say what they were made with
    compare = recipe.compare.model_copy(update={"samples": 1})
    changed = recipe.model_copy(update={"compare": compare})
    begin(changed, tmp_path, steps_of(changed).steps())
    assert read_settings(tmp_path / "recipe.yaml")["compare"]["samples"] == 1

    rl = RunSettings(set=recipe.rl.set | {"seed": 5})
    other = changed.model_copy(update={"rl": rl})
    with pytest.raises(InputError, match=r"already started with different settings \(rl\)"):
        begin(other, tmp_path, steps_of(other).steps())
    (tmp_path / "2_compare/done.json").write_text("{}")
    with pytest.raises(InputError, match=r"already started with different settings \(compare\)"):
        begin(recipe, tmp_path, steps_of(recipe).steps())
    with pytest.raises(InputError, match="recipe.yaml is a file; name a folder"):
        begin(recipe, tmp_path / "recipe.yaml/out", steps)


@pytest.mark.parametrize("name", ["recipe_medium_tiny", "recipe_small_tiny"])
def test_the_tiny_recipes_are_whole(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    kind = KINDS[name.split("_")[1]]
    steps = steps_of(load_section(kind, f"configs/{name}.yaml"))
    assert steps.steps()[-1].name.endswith("_compare")


LARGE = ["model=any", "rl.set.data.train=any.jsonl"]
FURTHER = ["teacher=any", "answers.source=any.jsonl", "general.train=any.jsonl"]


@pytest.mark.parametrize(
    ("args", "steps"),
    [
        (["medium", "configs/recipe_medium.yaml", *LARGE, "--gpu", "h100"], 2),
        (["small", "configs/recipe_small.yaml", *LARGE, *FURTHER, "--gpu", "h200"], 8),
    ],
    ids=["medium", "small"],
)
def test_the_recipes_for_a_real_checkpoint_pass_a_dry_run(args, steps, monkeypatch):
    monkeypatch.chdir(ROOT)
    shape = ["--dry-run", "--model-shape", "mistral-small-24b"]
    result = CliRunner().invoke(app, ["recipe", *args, *shape])
    assert result.exit_code == 0, result.exception
    assert f"{steps}  {steps}_compare" in result.stdout
    assert "fits in" in result.stdout
