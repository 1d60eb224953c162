"""The rows and the config in docs/fine-tuning.md, saved and run as they are printed."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.docs.pages import blocks
from tests.paths import ROOT
from tramontane.cli import app

PAGE = ROOT / "docs/fine-tuning.md"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prompts", "chats", "messages"])
def test_the_pages_rows_are_learned(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = dict(zip(("prompts", "chats", "messages"), blocks(PAGE, "json"), strict=True))
    (tmp_path / "examples.jsonl").write_text(rows[kind])
    (tmp_path / "own_rows.yaml").write_text(blocks(PAGE, "yaml")[0])
    monkeypatch.chdir(tmp_path)
    app(["sft", "own_rows.yaml"], standalone_mode=False)
    AutoModelForCausalLM.from_pretrained(tmp_path / "own_rows")
    if kind == "prompts":
        capsys.readouterr()
        app(["generate", "own_rows", "What is 12 + 30?"], standalone_mode=False)
        assert "\\boxed{42}" in capsys.readouterr().out
