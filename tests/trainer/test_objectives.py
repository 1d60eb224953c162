"""Objectives are chosen by name; the example in the docs is one of a user's own."""

import json
import re

import pytest

import tramontane
from tests.docs.pages import blocks
from tests.paths import ROOT
from tests.runs import small_config
from tests.trainer.rollouts import SUMS, TEMPERATURE, batch, trainer, with_own_logprobs
from tramontane.config import BUILT_IN_OBJECTIVES, ObjectiveConfig, TrainerConfig, parse
from tramontane.errors import InputError
from tramontane.run.prepare import prepare
from tramontane.trainer import objectives
from tramontane.trainer.objectives import load_objective

DOCS = ROOT / "docs" / "your-objective.md"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, in which a user's modules are found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def refused(**objective):
    with pytest.raises(InputError) as error:
        parse(TrainerConfig, {"objective": objective}, "run.yaml")
    return str(error.value)


def test_the_example_in_the_docs_is_trained_with(folder):
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    (folder / "asymre.py").write_text(code)
    t = trainer(objective={"name": "asymre", "custom": {"delta": -0.5}})
    b = with_own_logprobs(t, batch())
    seen = []
    advantages = t.objective.advantages
    t.objective.advantages = lambda *args: seen.append(advantages(*args)) or seen[-1]
    metrics = t.step(b)
    expected = [
        s.reward - sum(sibling.reward for sibling in group) / len(group) + 0.5
        for group in b.groups
        for s in group
    ]
    assert seen[0].tolist() == pytest.approx(expected)
    assert metrics["ratio"] == pytest.approx(1)
    assert metrics["grad_norm"] > 0
    assert refused(name="asymre", custom={"delta": 1}).startswith(
        "run.yaml: objective.custom.delta: Input should be less than or equal to 0"
    )
    assert "objective.custom.gamma: Extra inputs" in refused(name="asymre", custom={"gamma": 1})


@pytest.mark.slow
def test_the_page_is_followed_to_the_end_of_a_run(folder):
    (folder / "asymre.py").write_text(blocks(DOCS, "python")[0])
    (folder / "asymre.yaml").write_text(blocks(DOCS, "yaml")[0])
    short = ["pipeline.updates=1", "pipeline.n_batch=32", "data={train: 'playground:', eval: null}"]
    result = tramontane.train("asymre.yaml", short, quiet=True, report=False)
    (metrics,) = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").open()]
    assert metrics["ratio"] == pytest.approx(1, abs=0.05)


def test_advantages_may_depend_on_summed_log_probs():
    t = trainer(objective={"name": SUMS}, learning_rate=1e-2)
    b = with_own_logprobs(t, batch())
    reference = [sum(s.logprobs) for s in b.sequences]
    t.step(b)
    now = [sum(logprobs) for logprobs in t.logprobs(b.sequences, TEMPERATURE)]
    squares, expected = [], []
    for g in range(4):
        members = range(4 * g, 4 * g + 4)
        rewards = [s.reward for s in b.groups[g]]
        values = [r - 0.1 * (now[i] - reference[i]) for r, i in zip(rewards, members, strict=True)]
        for value, i in zip(values, members, strict=True):
            length = len(b.sequences[i].token_ids)
            squares += [(value - sum(values) / 4) ** 2] * length
            expected += [now[i]] * length
    metrics = t.step(b)
    assert metrics["advantage_squared"] == pytest.approx(sum(squares) / len(squares), rel=1e-3)
    assert metrics["sequence_logprob"] == pytest.approx(sum(expected) / len(expected), rel=1e-4)


def test_a_need_that_nobody_provides_is_an_error(folder):
    (folder / "attentive.py").write_text(
        "from tramontane.config import ObjectiveOptions\n"
        "class Options(ObjectiveOptions):\n"
        "    needs = property(lambda self: frozenset({'attention', 'entropy'}))\n"
        "def advantages(): pass\n"
        "def loss(): pass\n"
    )
    provided = ", ".join(sorted(objectives.PROVIDED))
    message = f"^objective 'attentive' needs attention, but the trainer provides only {provided}$"
    with pytest.raises(InputError, match=message):
        load_objective(ObjectiveConfig(name="attentive"))
    with pytest.raises(InputError, match=message):  # so that `--dry-run` says it too
        prepare(small_config(folder / "run", trainer={"objective": {"name": "attentive"}}))


def test_an_unknown_objective_is_an_error_that_lists_the_known_ones():
    names = ", ".join(BUILT_IN_OBJECTIVES)
    assert refused(name="zzz.yyy") == (
        "run.yaml: objective.name: no objective 'zzz.yyy', and no module of that name; "
        f"choose from {names}"
    )
    assert "did you mean 'magistral'? " in refused(name="magistrale")
    assert "no objective '../loss'" in refused(name="../loss")


def test_a_module_that_is_no_objective_is_refused(folder):
    assert refused(name="json") == (
        "run.yaml: objective.name: module 'json' is not an objective: "
        "it has no Options, no advantages, no loss"
    )
    (folder / "plain_options.py").write_text(
        "class Options: pass\ndef advantages(): pass\ndef loss(): pass\n"
    )
    assert "must derive from tramontane.config.ObjectiveOptions" in refused(name="plain_options")
    (folder / "broken_objective.py").write_text("import a_missing_package")
    with pytest.raises(ModuleNotFoundError, match="a_missing_package"):
        ObjectiveConfig(name="broken_objective")


@pytest.mark.parametrize("name", BUILT_IN_OBJECTIVES)
def test_each_section_has_its_file(name):
    config = ObjectiveConfig(name=name)
    objective = load_objective(config)
    objective = getattr(objective, "_objective", objective)  # with a charge, it is wrapped
    assert objective.__name__ == f"tramontane.trainer.objectives.{name}"
    assert config.options is getattr(config, name)
