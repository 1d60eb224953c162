"""The page about one's own model, followed with a model of each of its three kinds."""

import json
from pathlib import Path

import pytest

import tramontane
from tests.data.chat_templates import make_checkpoint
from tests.docs.pages import blocks
from tests.paths import ROOT
from tramontane.config import load_config, load_section
from tramontane.config.sft import SFTConfig

CONFIGS = blocks(ROOT / "docs/bring-your-own-model.md", "yaml")
[TEACHING] = blocks(ROOT / "docs/gemma.md", "yaml")
KINDS = ("qwen3", "r1-distill", "base")
BEGINNINGS = {"r1-distill": "<think>\n", "base": "<think>"}


def test_there_is_a_config_of_each_kind() -> None:
    assert len(CONFIGS) == len(KINDS)


@pytest.mark.parametrize(("kind", "text"), zip(KINDS, CONFIGS, strict=True), ids=KINDS)
def test_the_page_leads_to_a_run(
    kind: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(8)]
    for name in ("train.jsonl", "test.jsonl"):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("own.yaml").write_text(text)
    model = make_checkpoint(tmp_path / "model", kind, context=16384)
    config = load_config("own.yaml", [f"model={model}"])
    begins = BEGINNINGS.get(kind, "")

    lines = tramontane.dry_run(config).lines
    assert lines["thinking tags"].startswith("<think> … </think>")
    assert lines["thinking tags"].endswith(repr(begins) if begins else "</think>")

    texts = tramontane.generate(model, "What is 6 times 7?", config, n=2, max_tokens=8)
    assert all(text.startswith(begins) for text in texts)

    result = tramontane.evaluate(
        model, "test.jsonl", config, samples=1, max_tokens=8, write_to="eval.jsonl"
    )
    assert (result.n_problems, result.format_rate) == (8, 0.0)
    found = [json.loads(line) for line in Path("eval.jsonl").read_text().split("\n") if line]
    assert all(row["text"].startswith(begins) for row in found)
    opened = [not row["reason"].startswith("does not start with <think>") for row in found]
    assert opened == [row["text"].startswith("<think>") for row in found]


@pytest.mark.slow
def test_a_base_model_is_taught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gemma.yaml").write_text(TEACHING)
    model = make_checkpoint(tmp_path / "model", "base", context=1024)
    config = load_section(SFTConfig, "gemma.yaml", [f"model={model}", "steps=1", "device=cpu"])
    assert tramontane.sft(config) == Path("models/gemma3-tuned")
    assert Path("models/gemma3-tuned/model.safetensors").is_file()
