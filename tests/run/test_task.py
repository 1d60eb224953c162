"""A task given as Python objects: rows, functions and settings become a run that can be resumed."""

import json
import subprocess
import sys
import threading
from decimal import Decimal
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

import tramontane
from tests.forked import Command
from tests.run.rewards import names_the_sum
from tramontane.config import load_config
from tramontane.data.load import load_problems
from tramontane.errors import InputError
from tramontane.run.folder import RunFolder
from tramontane.run.rollouts import read_run
from tramontane.run.task import Reward, config_of, new_run, one_or_more
from tramontane.verifier import functions

ROWS: list[dict[str, object]]
ROWS = [{"prompt": f"What is {n} + {n}?", "sum": 2 * n} for n in range(7)]
ROWS += [{"prompt": [{"role": "user", "content": "What is 7 + 7?"}], "sum": 14}]
SIZES = {
    "pipeline.updates": 1,
    "pipeline.n_async": 16,
    "pipeline.n_batch": 16,
    "pipeline.group_size": 4,
    "pipeline.l_max": 48,
    "pipeline.diversity": "none",
}


def made(data=None, rewards=(), settings=None, config=None, model=None):
    return config_of(config, settings, model=model, data=data, rewards=rewards)


@pytest.mark.slow
def test_rows_and_a_function_train_a_model(tmp_path, one_layer):
    settings = SIZES | {"run_dir": str(tmp_path / "run")}
    result = tramontane.train(
        model=one_layer, data=ROWS, rewards=[names_the_sum], overrides=settings, quiet=True
    )
    assert result.finished
    run, config = RunFolder.open(tmp_path / "run")
    [metrics] = run.metrics()
    assert 0 <= metrics["reward_names_the_sum"] <= 1
    assert metrics.keys().isdisjoint({"reward_correctness", "reward_format", "language_rate"})
    # The folder has all that a resumed run needs.
    kept = Path(config.data.train)
    assert kept.parent == (tmp_path / "run/data").absolute()
    assert [json.loads(line) for line in kept.open()] == ROWS
    rows = list(read_run(tmp_path / "run"))
    for row in rows:
        named = row["parts"]["names_the_sum"]
        assert (row["verdict"] == "right") == (named == 1.0)


@pytest.mark.slow
def test_a_run_of_python_objects_goes_on_from_its_folder_alone(tmp_path, one_layer):
    """The rows are in the folder; a function without an import path is in its config."""
    bonus = 0.25

    def closure(problem, text, n_tokens):
        return bonus

    run, sizes = tmp_path / "run", SIZES | {"run_dir": str(tmp_path / "run")}
    tramontane.train(
        model=one_layer, data=ROWS, rewards=[names_the_sum, closure], overrides=sizes, quiet=True
    )
    result = tramontane.train(resume=run, overrides=["pipeline.updates=2"], quiet=True)
    assert (result.updates, result.finished) == (2, True)
    for metrics in RunFolder(run).metrics():
        assert metrics["reward_closure"] == 0.25
        assert 0 <= metrics["reward_names_the_sum"] <= 1


SCRIPT = """
import re, tramontane

NUMBER = re.compile(r"[0-9]+")

def numbers(text):
    return NUMBER.findall(text)

def names_the_sum(problem, text, n_tokens):
    return float(str(problem.metadata["sum"]) in numbers(text))

def check(problem, answer):
    return str(problem.metadata["sum"]) == answer

result = tramontane.train(model="tiny", quiet=True, report=False, **arguments)
print("finished", result.finished, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script", "interactive"])
def test_functions_of_main_work_in_the_workers(tmp_path, how):
    """Functions of a script or an interactive session take their helpers and globals along."""
    run = tmp_path / "run"
    rows = [row | {"domain": "sums"} for row in ROWS]
    arguments = (
        f"dict(data={rows!r}, rewards=[names_the_sum], overrides={SIZES | {'run_dir': str(run)}!r} "
        f"| {{'verifier.domains.sums.verifier': check, 'verifier.domains.sums.format': 'boxed'}})"
    )
    script = "import sys\n" + SCRIPT.replace("**arguments", f"**{arguments}")
    if how == "script":
        (tmp_path / "main.py").write_text(script)
        printed = Command("main.py", folder=tmp_path).communicate()
    else:  # each statement ends with an empty line, as it is typed
        done = subprocess.run(
            [sys.executable, "-i", "-q"],
            cwd=tmp_path,
            input=script.replace("\n\ndef", "\n\n\ndef"),
            capture_output=True,
            text=True,
            timeout=400,
        )
        printed = done.stderr
    assert "finished True" in printed, printed
    rows = list(read_run(run))
    assert {row["verdict"] for row in rows} <= {"right", "wrong", "malformed"}
    assert "right" in {row["verdict"] for row in rows}


def test_a_function_without_an_import_path_travels_by_value():
    bonus = 0.5

    def closure(problem, text, n_tokens):
        return bonus

    config, _ = made(ROWS, [closure, Reward(lambda p, text, n: 0.25, 2.0, "constant")])
    first, second = config.verifier.reward.custom
    assert (first.name, second.name, second.weight) == ("closure", "constant", 2.0)
    assert functions.load(first.function)(None, "", 0) == 0.5
    assert functions.load(second.function)(None, "", 0) == 0.25


def test_a_function_of_a_module_is_named_by_its_path():
    config, _ = made(ROWS, [names_the_sum, "tests.run.rewards.names_the_sum_again"])
    assert [r.function for r in config.verifier.reward.custom] == [
        "tests.run.rewards.names_the_sum",
        "tests.run.rewards.names_the_sum_again",
    ]


def test_a_single_reward_or_tool_needs_no_list():
    assert one_or_more("rewards.brief") == ["rewards.brief"]
    assert one_or_more(Reward("rewards.brief")) == [Reward("rewards.brief")]
    found = tramontane.dry_run(model="tiny", data=ROWS, rewards=names_the_sum).config
    assert [reward.name for reward in found.verifier.reward.custom] == ["names_the_sum"]


def test_none_is_no_reward_and_no_tool() -> None:
    assert one_or_more(None) == []
    with pytest.raises(InputError, match="give a config to start a run"):
        tramontane.train(rewards=None, tools=None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rewards": {"close": names_the_sum}}, r"rewards: .* type dict; give a function, its"),
        (
            {"rewards": [(names_the_sum, 0.5)]},
            r"type tuple; .* tramontane.Reward\(function, weight",
        ),
        ({"rewards": [0.5]}, "rewards: 0.5 is of type float; give a function"),
        ({"model": object()}, "model: an object of type object; give a folder or a name"),
        (
            {"environment": lambda: None},
            r"data.environment: [^:]*<lambda> \(.*\) is a function, not",
        ),
    ],
)
def test_objects_of_another_type_are_answered_with_the_right_one(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        tramontane.dry_run(**{"model": "tiny", "data": ROWS} | given)


def test_a_check_takes_an_environment_and_tools_as_a_run_does() -> None:
    rows = [{"problem": f"Guess {n}", "low": 1, "high": n + 2, "secret": 1} for n in range(4)]
    environment = "tests.environments.worlds:TrlCounter"
    # Before the rows, which have no answer for the verifier that no key chose.
    with pytest.raises(InputError, match="has `get_reward`; set conversation.reward to last"):
        tramontane.dry_run(model="tiny", data=rows, environment=environment)


def test_all_kinds_of_data():
    config, rows = made(Dataset.from_list(ROWS[:6]), [names_the_sum])
    assert rows == {"data.python.jsonl": ROWS[:6]}
    assert (config.data.eval, config.data.domain) == (None, "task")
    both = DatasetDict(train=Dataset.from_list(ROWS[:6]), test=Dataset.from_list(ROWS[7:]))
    config, rows = made(both, [names_the_sum])
    assert rows == {"train.python.jsonl": ROWS[:6], "test.python.jsonl": ROWS[7:]}
    assert Path(config.data.eval).name == "test.python.jsonl"
    config, rows = made({"train": "playground:", "eval": ROWS[:2]})
    assert (config.data.train, list(rows)) == ("playground:", ["eval.python.jsonl"])
    config, rows = made("reasoning_gym:chain_sum")
    assert (config.data.train, config.data.eval, rows) == ("reasoning_gym:chain_sum", None, {})


def test_numbers_reach_a_reward_as_numbers(tmp_path):
    """NumPy's and pandas' integers, decimals and tensors: as text, every reward would be 0."""
    import numpy as np  # here: the workers that load this module have little memory
    import pandas
    import torch

    frame = pandas.DataFrame({"prompt": ["1 + 1?", "2 + 2?"], "sum": [2, 4]})
    for rows in (
        frame,
        [{"prompt": "1 + 1?", "sum": np.int64(2)}, {"prompt": "2 + 2?", "sum": Decimal(4)}],
        [{"prompt": "1 + 1?", "sum": torch.tensor(2)}, {"prompt": "2 + 2?", "sum": 4}],
    ):
        config, found = made(rows, [names_the_sum], {"run_dir": str(tmp_path / "run")})
        with new_run(config, found) as (_, config):
            problems = load_problems(
                config.data.train, config.data, split="train", limit=None, seed=0,
                domains=config.verifier.domains,
            )  # fmt: skip
            names = [(p.id, p.where, repr(p.metadata["sum"])) for p in problems]
        assert names == [("data-0", "data[0]", "2"), ("data-1", "data[1]", "4")]


def test_errors_in_evaluated_rows_name_the_row():
    with pytest.raises(InputError, match=r"^data\[1\]: no answer .* data\.fields"):
        tramontane.evaluate("tiny", [{"problem": "?", "answer": "1"}, {"problem": "?"}])


def test_a_name_that_means_many_things_leaves_the_grading_to_rewards():
    """Rows as users of TRL have them, with a reward that reads the column itself."""
    rows = [{"prompt": "1 + 1?", "solution": "2", "ground_truth": "2"}]
    assert made(rows, [names_the_sum])[0].data.domain == "task"
    assert made(rows)[0].data.domain is None
    fields = {"data.fields": {"answer": "solution"}}
    assert made(rows, [names_the_sum], fields)[0].data.domain is None


def of_trl(completions, answer, **kwargs):
    return [float(a in c) for a, c in zip(answer, completions, strict=True)]


def test_functions_of_trl_alone_grade_the_rows(tmp_path):
    rows = [{"prompt": "What is 1 + 1?", "answer": "2"}]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(rows[0]) + "\n")
    for data in (rows, str(file), file):
        config, _ = made(data, [of_trl])
        weights = config.verifier.reward
        assert config.data.domain == "task"
        assert (weights.language, weights.length) == (0, 0)
        config, _ = made(data, [of_trl], {"verifier.reward.length": 0.2})
        assert (config.verifier.reward.language, config.verifier.reward.length) == (0, 0.2)
    assert made(ROWS, [names_the_sum])[0].verifier.reward.language == 0
    given = load_config("configs/quickstart.yaml")
    assert made(ROWS, [names_the_sum], config=given)[0].verifier.reward.language == 0


def test_rows_with_an_answer_keep_the_verifier():
    answered = [{"prompt": "What is 1 + 1?", "answer": "2"}]
    assert made(answered, [names_the_sum])[0].data.domain is None
    mapped = [{"prompt": "What is 1 + 1?", "label": "2"}]
    fields = {"data.fields": {"answer": "label"}}
    assert made(mapped, [names_the_sum], fields)[0].data.domain is None
    assert made(mapped, [names_the_sum])[0].data.domain == "task"
    assert made(mapped)[0].data.domain is None


def test_objects_are_laid_over_a_config(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("model: null\nname: own\nverifier: {reward: {length: 0}}\n")
    config, _ = made(ROWS, [names_the_sum], {"pipeline.updates": 7}, path, model="tiny")
    assert (config.name, config.model, config.pipeline.updates) == ("own", "tiny", 7)
    assert config.verifier.reward.length == 0
    again, _ = made(config=load_config(path, ["model=tiny"]), settings=["name=other"])
    assert again.name == "other"
    with pytest.raises(InputError, match=r"own\.yaml: pipeline\.update: .*did you mean"):
        made(config=path, model="tiny", settings={"pipeline.update": 7})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": [1, 2]}, r"^data\[0\] is of type int; give a list of dicts"),
        ({"data": []}, "^data: no rows"),
        ({"data": {"train": ROWS, "test": []}}, r"^data\['test'\]: no rows"),
        ({"data": [*ROWS[:3], {"sum": {1}}]}, r"^data\[3\]: field 'sum' holds a value of type set"),
        (
            {"data": {"train": ROWS, "test": [{"a": "\ud800"}]}},
            r"^data\['test'\]\[0\]: field 'a' has half of a surrogate pair",
        ),
        ({"settings": {"data.limit": {1}}}, r"^data\.limit: a value of type set: give a list"),
        (
            {"rewards": [lambda p, text: 1.0]},
            r"^reward lambda \(p, text\), .*test_task\.py:\d+, is called with \(problem, text, ",
        ),
        ({"data": {"dev": ROWS}}, "must have the split train"),
        ({"rewards": [lambda p, t, n: 1.0]}, "reward '<lambda>': the name must be"),
        ({"rewards": [Reward(lambda p, t, n: 1.0, name="x"), "x"]}, "'x' is not an import path"),
        ({"settings": {"verifier.reward.format": -1}}, "verifier.reward.format: "),
    ],
)
def test_objects_that_cannot_be_meant(arguments, message):
    with pytest.raises(InputError, match=message):
        made(**arguments)


def test_a_function_that_holds_what_cannot_be_sent_is_refused_at_once():
    lock = threading.Lock()

    def locked(problem, text, n_tokens):
        return float(lock.locked())

    with pytest.raises(InputError, match="cannot be sent to worker processes .* move the function"):
        made(ROWS, [locked])


def test_a_run_that_cannot_start_leaves_nothing_behind(tmp_path):
    settings = SIZES | {"run_dir": str(tmp_path / "run")}
    with pytest.raises(InputError, match=r"^data\[0\]: no answer"):
        tramontane.train(model="tiny", data=ROWS, overrides=settings, quiet=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="give resume alone|without a config"):
        tramontane.train(resume=tmp_path / "run", data=ROWS)


def test_a_dry_run_reports_sizes_and_makes_no_folder(tmp_path):
    settings = SIZES | {"run_dir": str(tmp_path / "run")}
    found = tramontane.dry_run(model="tiny", data=ROWS, rewards=[names_the_sum], overrides=settings)
    assert found.longest_prompt > 0
    assert not (tmp_path / "run").exists()
