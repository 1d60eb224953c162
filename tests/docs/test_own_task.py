"""The task of one's own in docs/your-rewards.md: short, complete, and run as it is printed."""

import json
from pathlib import Path

import pytest

import tramontane
from tests.docs.pages import blocks
from tests.forked import Command
from tests.paths import ROOT
from tramontane.run.rollouts import read_run

PAGE = ROOT / "docs/your-rewards.md"


def block(language: str, start: str) -> str:
    return next(body for body in blocks(PAGE, language) if body.startswith(start))


PROBLEMS = block("json", '{"problem": "What is 38')
TASK = block("python", "# my_task.py")
CONFIG = block("yaml", "# task.yaml")
NOTEBOOK = block("python", "import re, tramontane\n")


def test_the_task_takes_30_lines_and_the_notebook_ten() -> None:
    lines = [line for part in (PROBLEMS, TASK, CONFIG) for line in part.splitlines()]
    assert sum(bool(line.strip()) for line in lines) <= 30
    assert sum(bool(line.strip()) for line in NOTEBOOK.splitlines()) <= 10


@pytest.mark.slow
def test_the_task_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "estimates.jsonl").write_text(PROBLEMS)
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "task.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = ["pipeline.updates=1", "pipeline.diversity=none", "evaluation.samples=2"]
    result = tramontane.train("task.yaml", settings, quiet=True, report=False)
    assert result.finished
    rows = list(read_run(result.run_dir))
    assert {"right", "wrong"} <= {row["verdict"] for row in rows}
    ranges = {p["problem"]: p["range"] for p in map(json.loads, PROBLEMS.splitlines())}
    for row in rows:
        if row["verdict"] == "right":
            low, high = ranges[row["problem"]]
            boxed = row["text"].rpartition("\\boxed{")[2].partition("}")[0]
            assert low <= float(boxed) <= high
        assert row["parts"]["brief"] in (0.0, 0.1)
    # The checkpoint is measured under the run's prompts and graded in its domain.
    measured = tramontane.evaluate(result.weights, samples=1, write_to=tmp_path / "eval.jsonl")
    assert measured.n_problems == 4
    rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").open()]
    assert {row["domain"] for row in rows} == {"estimates"}


@pytest.mark.slow
def test_the_notebooks_lines_train(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        NOTEBOOK.replace('"pipeline.updates": 5', '"pipeline.updates": 1')
    )
    done = Command("main.py", folder=tmp_path)
    printed = done.communicate()
    assert done.wait() == 0, printed
    [metrics] = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").open()]
    assert 0 < metrics["reward_close"] <= 1
