"""A run with a cold start: base → fine-tuning → reinforcement learning, in one folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.runs import small_config
from tramontane.config import Config
from tramontane.errors import InputError
from tramontane.run.folder import RunFolder
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train

ROWS = [{"id": f"s{n}", "problem": f"{n} + {n}", "answer": str(2 * n)} for n in range(3)]


def config_of(folder: Path, model: str = "tiny", **changes: Any) -> Config:
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return small_config(
        folder / "run",
        model=model,
        data={"eval": "playground:"},
        pipeline={"updates": 1, "l_max": 48, "diversity": "none"},
        evaluation={
            "problems": 4,
            "samples": 1,
            "also": {"sums": {"source": str(folder / "sums.jsonl"), "samples": 2}},
        },
        cold_start={
            "steps": 4,
            "batch_tokens": 512,
            "microbatch_tokens": 512,
            "learning_rate": 1e-3,
            "warmup_steps": 1,
            "checkpoint_every": 1,
            "log_every": 1,
        }
        | changes,
    )


def weights(folder: Path) -> Mapping[str, Any]:
    return load_file(folder / "model.safetensors")


class CountsThreads(QuietScreen):
    """Notes how many threads torch uses in the cold start."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def phase(self, name: str, done: int, total: int) -> None:
        if name == "cold start":
            self.threads.append(torch.get_num_threads())


class StopsTheStart(QuietScreen):
    """Interrupts the run, as Ctrl-C does, after the second step of the cold start."""

    def phase(self, name: str, done: int, total: int) -> None:
        if (name, done) == ("cold start", 2):
            raise KeyboardInterrupt


@pytest.mark.slow(28)
def test_base_start_and_end_are_measured_and_an_interrupted_start_goes_on(
    tmp_path: Path, one_layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    screen = CountsThreads()
    result = train(config_of(whole, one_layer), screen)
    assert screen.threads and {*screen.threads} == {1}  # of each step, on however many cores
    run = result.run_dir
    summary = json.loads((run / "summary.json").read_text())
    for name in ("base", "sft", "rl"):
        figures = summary[name]
        assert 0 <= figures["format_rate"] <= 1
        for estimate in (figures["pass_at_1"], figures["sums"]):
            assert 0 <= estimate["low"] <= estimate["value"] <= estimate["high"] <= 1
    assert summary["pass_at_1"] == {
        "before": summary["sft"]["pass_at_1"],
        "after": summary["rl"]["pass_at_1"],
    }
    assert summary["minutes"] == pytest.approx(summary["wall_seconds"] / 60, abs=0.06)
    for when in ("base", "before", "after"):
        assert len((run / f"evaluation_{when}_sums.jsonl").read_text().splitlines()) == 6
        assert len((run / f"evaluation_{when}.jsonl").read_text().splitlines()) == 4
    base, sft, rl = weights(Path(one_layer)), weights(run / "sft"), weights(result.weights)

    def distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
        return sum(float((a[key].float() - b[key].float()).square().sum()) for key in a)

    # Reinforcement learning went on from the fine-tuned model: it moved less than the start did.
    assert 0 < distance(sft, rl) < 0.5 * distance(base, sft)

    with pytest.raises(KeyboardInterrupt):
        train(config_of(stopped, one_layer), StopsTheStart())
    folder, config = RunFolder.open(stopped / "run")
    measured = (folder.path / "evaluation_base.jsonl").stat().st_mtime_ns
    train(config, QuietScreen(), folder)
    assert (folder.path / "evaluation_base.jsonl").stat().st_mtime_ns == measured
    steps = (folder.path / "sft" / "sft_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [1, 2, 3, 4]
    resumed = weights(folder.path / "sft")
    assert all((resumed[key] == sft[key]).all() for key in sft)


def test_examples_that_cannot_be_learned_from_are_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "2 + 2", "answer": "4"}\n')
    config = config_of(tmp_path, data={"train": str(tmp_path / "pairs.jsonl")})
    with pytest.raises(InputError, match="no text in field 'response'"):
        train(config, QuietScreen())
    assert not (tmp_path / "run").exists()


def test_a_set_cannot_take_the_name_of_the_held_out_problems(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'held_out' names the problems of data.eval"):
        small_config(tmp_path, evaluation={"also": {"held_out": {"source": "playground:"}}})
