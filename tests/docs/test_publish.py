"""The page about publishing: another tool's measurement of a checkpoint, as printed there."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks
from tests.paths import ROOT
from tramontane.models.loading import load_model, load_tokenizer

PAGE = ROOT / "docs/publish.md"
SECONDS = 580.0  # limit of lm_eval, whose imports alone take a minute on a busy machine


@pytest.mark.slow
def test_lm_eval_measures_a_checkpoint(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("lm_eval")
    if not program.exists():
        pytest.skip("lm_eval is not installed")
    weights = tmp_path / "runs/own/checkpoints/update_16/weights"
    load_model("tiny").save_pretrained(weights)
    load_tokenizer("tiny").save_pretrained(weights)
    rows = [{"problem": f"What is {n} + 2 - 1?", "answer": str(n + 1)} for n in range(2, 18)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/sums.yaml").write_text(blocks(PAGE, "yaml")[0])
    [line] = [block for block in blocks(PAGE, "") if "lm_eval --model" in block.replace("\\\n", "")]
    variable, *command = shlex.split(line.replace("\\\n", ""))
    name, _, value = variable.partition("=")
    environment = os.environ | {name: value, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [program, *command[1:], "--log_samples"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    [samples] = (tmp_path / "lm_eval").rglob("samples_sums_*.jsonl")
    found = [json.loads(sample) for sample in samples.open()]
    assert len(found) == len(rows)
    # The base answers in the format, and is right now and then: the boxes were found and compared.
    assert sum(sample["filtered_resps"] != ["[invalid]"] for sample in found) > len(rows) / 2
    [results] = (tmp_path / "lm_eval").rglob("results_*.json")
    score = json.loads(results.read_text())["results"]["sums"]["exact_match,boxed"]
    assert 0 < score < 1
    assert score == sum(sample["exact_match"] for sample in found) / len(rows)
