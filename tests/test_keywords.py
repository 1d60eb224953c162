"""Keywords that the package's functions do not have, answered with what they are here."""

import inspect
import re
from pathlib import Path

import pytest

import tramontane
from tramontane.errors import InputError


@pytest.mark.parametrize(
    ("command", "keyword", "answer"),
    [
        ("train", "num_generations", 'TRL; here it is the key pipeline.group_size, overrides={"'),
        ("train", "reward_funcs", "TRL; here it is rewards=[…]"),
        ("train", "train_dataset", "TRL; here it is data=…"),
        ("train", "eval_dataset", 'TRL; here it is data={"train": …, "eval": …}'),
        ("train", "environment_factory", "TRL; here it is environment=…"),
        ("train", "args", "TRL; there is no such key here (the fields of GRPOConfig are keys here"),
        ("train", "max_steps", "pipeline.updates"),
        ("train", "seed", 'here it is the key seed, overrides={"seed": …}'),
        ("train", "learning_rate", "trainer.learning_rate"),
        ("train", "reward", "did you mean rewards?"),
        ("train", "quite", "did you mean quiet?"),  # codespell:ignore
        ("train", "zork", "it has config, overrides, model, data, rewards, environment, tools"),
        ("dry_run", "tool", "did you mean tools?"),
        ("dry_run", "quiet", "it has config"),
        ("evaluate", "n_samples", "did you mean samples?"),
        ("generate", "max_new_tokens", "here it is max_tokens=…"),
        ("evaluate", "n", "here it is samples=…"),
        ("sft", "learning_rate", 'overrides={"learning_rate": …}'),
        ("curate", "input", "did you mean inputs?"),
    ],
)
def test_an_unknown_keyword_is_answered(command: str, keyword: str, answer: str) -> None:
    function = getattr(tramontane, command)
    with pytest.raises(InputError, match=re.escape(answer)) as error:
        function(**{keyword: 1})
    assert str(error.value).startswith(f"tramontane.{command}({keyword}=…): unknown keyword; ")


def test_every_function_says_its_keywords_and_keeps_its_signature() -> None:
    for name in set(tramontane.__all__) - {"InputError", "Reward"}:
        function = getattr(tramontane, name)
        assert inspect.signature(function).parameters and function.__doc__
        with pytest.raises(InputError, match="unknown keyword"):
            function(no_such_keyword=1)


@pytest.mark.usefixtures("forked_workers")
def test_one_text_stands_for_a_list_of_one(tmp_path: Path) -> None:
    """A text is also a sequence of letters."""
    config = tmp_path / "small.yaml"
    config.write_text("name: small\nmodel: tiny\ndata: {train: nowhere.jsonl}\n")
    with pytest.raises(InputError, match="no such file"):
        tramontane.sweep(config, "seed=0,1", out=tmp_path / "sweep")
    with pytest.raises(InputError, match="no such file"):
        tramontane.compare(["tiny"], str(tmp_path / "nowhere.jsonl"), tmp_path / "comparison")
    examples = tmp_path / "sft.yaml"
    examples.write_text("model: tiny\noutput: out\ndata: {train: nowhere.jsonl}\n")
    for given in ("steps=2.5", ["steps=2.5"], {"steps": 2.5}):
        with pytest.raises(InputError, match="steps"):
            tramontane.sft(examples, given)


def test_what_is_no_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for model in ("tiny", str(tmp_path)):
        with pytest.raises(InputError, match=f"but a model; give it as the key model={model}"):
            tramontane.train(model)
    with pytest.raises(InputError, match="plan of type str: give its keys"):
        tramontane.plan("plan.yaml")  # type: ignore[arg-type]
