"""A checkpoint of Magistral Small's shape, as it is published, through the commands."""

import json
import re
import time
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from typer.testing import CliRunner

from tests import forked
from tests.magistral import write_magistral
from tests.paths import ROOT
from tramontane.cli import app
from tramontane.models.wrapped import PARENT

SECONDS = 120.0  # limit of a server's answer
SMALL = [
    "pipeline.updates=2", "pipeline.n_async=16", "pipeline.n_batch=16", "pipeline.group_size=4",
    "pipeline.l_max=24", "pipeline.l_cache=8", "trainer.microbatch_tokens=1024",
    "evaluation.problems=4", "evaluation.samples=1", "trainer.learning_rate=1e-3",
]  # fmt: skip
REWARD = """
def parity(problem, text, n_tokens):
    return len(text) % 2
"""
CUSTOM = "verifier.reward.custom=[{function: rewards_of_magistral.parity, malformed: true}]"


def run(*args: str) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 0, (args, result.exception, result.output)
    return result.output


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """The checkpoint's folder; the working directory is another, with a reward function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rewards_of_magistral.py").write_text(REWARD)
    return str(write_magistral(tmp_path / "magistral"))


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(20, 52).view(2, 16)).logits


def check_export(folder: Path, parent: str) -> None:
    """The weights load by any tool, name their parent, and go back into it."""
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["MistralForCausalLM"] and config["model_type"] == "mistral"
    assert config[PARENT] == {"model": parent, "revision": None}
    assert {"tokenizer.json", "tekken.json", "chat_template.jinja"} <= {
        path.name for path in folder.iterdir()
    }
    run("transplant", str(folder))
    whole = folder.with_name(f"{folder.name}-whole")
    before, after = load_file(f"{parent}/model.safetensors"), load_file(whole / "model.safetensors")
    assert {*before} == {*after}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith("language_model.") for name in changed)
    assert not (whole / "consolidated.safetensors").exists()  # which has the old weights
    language = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    multimodal = AutoModelForImageTextToText.from_pretrained(whole, dtype=torch.float32)
    torch.testing.assert_close(logits(multimodal), logits(language), atol=0.05, rtol=0.05)


def check_served(parent: str) -> None:
    server = forked.Command("serve", parent, "--max-tokens", "8")
    try:
        while not (found := re.search(r"^http://\S+$", server.printed, re.M)):
            assert server.poll() is None, server.printed
            time.sleep(0.05)
        body = {"model": parent, "messages": [{"role": "user", "content": "Hi"}], "seed": 1}
        answer = httpx.post(f"{found[0]}/chat/completions", json=body, timeout=SECONDS)
        assert answer.status_code == 200, answer.text
        assert 1 <= len(answer.json()["choices"][0]["token_ids"]) <= 8
    finally:
        server.process.kill()
        server.wait()


@pytest.mark.slow(30)
def test_every_command_takes_the_checkpoint_as_published(parent, tmp_path):
    assert "ok" in run("doctor", "--chat", parent)
    run("generate", parent, "What is 6 times 7?", "--max-tokens", "8")
    run("eval", parent, "playground:", "--problems", "2", "--samples", "2", "--max-tokens", "8")
    run("plan", f"model={parent}", "gpus=8")
    check_served(parent)

    sft = {
        "model": parent, "steps": 3, "warmup_steps": 0, "batch_tokens": 1024,
        "microbatch_tokens": 1024, "learning_rate": 1e-2,
    }  # fmt: skip
    Path("sft.yaml").write_text(yaml.safe_dump(sft))
    run("sft", "sft.yaml", "output=tuned")
    check_export(Path("tuned"), parent)
    run("sft", "sft.yaml", "output=adapted", "lora.rank=4")
    check_export(Path("adapted"), parent)

    quickstart = str(ROOT / "configs" / "quickstart.yaml")
    said = run("train", quickstart, f"model={parent}", CUSTOM, *SMALL, "--dry-run")
    assert "[THINK] … [/THINK]" in said and "[INST]" in said
    for name, keys in (("full", []), ("lora", ["trainer.lora.rank=4"])):
        run("train", quickstart, f"model={parent}", CUSTOM, *SMALL, f"name={name}", *keys)
        check_export(Path(f"runs/{name}/checkpoints/update_2/weights"), parent)
    run("transplant", "runs/full")
    run(
        "eval",
        "runs/full",
        "playground:",
        "--problems",
        "2",
        "--samples",
        "1",
        "--max-tokens=8",
        "--out",
        "again.jsonl",
    )
    assert Path("runs/full-whole/config.json").is_file()
