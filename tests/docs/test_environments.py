"""The code of docs/environments.md, run."""

import asyncio
import sys

import pytest
import yaml

import tramontane
from tests.controller.test_pipeline import rollouts
from tests.docs.pages import blocks
from tests.environments.templates import tokenizer_of
from tests.environments.test_worker import Talk, call
from tests.paths import ROOT
from tests.runs import SMALL
from tramontane.config import Config
from tramontane.data.prompts import PromptEncoder
from tramontane.environments import loading
from tramontane.environments.worker import EnvironmentWorker
from tramontane.errors import InputError
from tramontane.models.loading import load_tokenizer

TOOL, SHOP = blocks(ROOT / "docs" / "environments.md", "python")


@pytest.fixture
def modules(tmp_path, monkeypatch):
    (tmp_path / "docs_tools.py").write_text(TOOL)
    (tmp_path / "docs_shop.py").write_text(SHOP)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("docs_tools", "docs_shop"):
        sys.modules.pop(name, None)


def test_a_tool_takes_ten_lines_and_an_environment_thirty():
    assert len(TOOL.splitlines()) <= 10 and len(SHOP.splitlines()) <= 30


def test_they_run(modules):
    data = {"environment": "docs_shop:Shop", "tools": ["docs_tools:convert"]}
    config = Config(model="tiny", data=data)
    loading.check(config.data)
    worker = EnvironmentWorker(config, PromptEncoder(tokenizer_of("qwen2.5")))

    async def run():
        talk = Talk(worker, seed=0)  # 17 coins
        await talk.begin()
        await talk.say("melon" + call("convert", amount=3, rate="1.5"))
        answers = [message["content"] for message in talk.turns[0].messages]
        assert answers == ["4.5", "That is not sold here."]
        await talk.say(call("convert", amount=3, rate=0))
        assert talk.turns[1].messages[0]["content"] == "error: ValueError: a rate is above 0"
        for fruit in ["pear"] * 5:
            answered = await talk.say(fruit)
        assert answered.turn.messages[0]["content"] == "2 coins are left."
        answered = await talk.say("apple")
        assert answered.ending == "completed" and answered.turn.reward == 1.0

    asyncio.run(run())


@pytest.mark.slow
def test_they_are_trained_with_from_yaml_and_from_python(modules, tmp_path, one_layer):
    named = {"environment": "docs_shop:Shop", "tools": ["docs_tools:convert"]}
    sizes = SMALL["pipeline"] | {"l_max": 160, "diversity": "none", "updates": 1}
    raw = SMALL | {"model": one_layer, "pipeline": sizes, "conversation": {"reward": "last"}}
    config = tmp_path / "shop.yaml"
    config.write_text(yaml.safe_dump(raw | {"data": SMALL["data"] | named}))
    by_yaml, by_python = tmp_path / "yaml", tmp_path / "python"
    quiet = {"quiet": True, "report": False}
    tramontane.train(config, [f"run_dir={by_yaml}"], **quiet)
    defined = {"__name__": "__main__"}
    exec(TOOL + SHOP, defined)  # as in a notebook: no worker can import them
    given = {"environment": defined["Shop"], "tools": [defined["convert"]]}
    tramontane.train(Config.model_validate(raw | {"run_dir": str(by_python)}), **given, **quiet)
    for run in by_yaml, by_python:
        rows = rollouts(run)
        assert len(rows) >= 16 and not any(r["ending"] == "environment_failed" for r in rows)
        answers = [m["content"] for r in rows for turn in r["turns"] for m in turn["messages"]]
        assert "That is not sold here." in answers
        assert all("Spend" in load_tokenizer("tiny").decode(row["prompt_ids"]) for row in rows)
    for name, value in given.items():
        with pytest.raises(InputError, match="without a config, model, .*environment or tools"):
            tramontane.train(resume=by_python, **{name: value})
