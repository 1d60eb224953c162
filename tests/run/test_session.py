"""Whole runs of unusual shapes: several ranks, recomputed caches, other data, measurements midway,
and what `tramontane.train` returns."""

import io
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import tramontane
from tests.controller.test_pipeline import rollouts, weights
from tests.paths import DATA, ROOT
from tests.run.test_distillation import DISTILL
from tests.runs import small_config
from tests.view.reports import answers_of
from tramontane.config import TrainerConfig, load_config
from tramontane.data.tokenizer import train_tokenizer
from tramontane.errors import InputError
from tramontane.journals import read_log
from tramontane.models.loading import load_model
from tramontane.placement.handle import WorkerDied
from tramontane.placement.seats import Seats
from tramontane.placement.thread import LocalPlacement
from tramontane.run import train as train_module
from tramontane.run.folder import RunFolder
from tramontane.run.prepare import prepare
from tramontane.run.screen import LiveDisplay, QuietScreen
from tramontane.run.session import Session
from tramontane.run.train import train
from tramontane.trainer import Trainer
from tramontane.view.report import write_report


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_train_what_one_does(tmp_path: Path, one_layer: str) -> None:
    sizes = {"updates": 1, "n_batch": 16, "n_minibatch": 8, "max_staleness": 0}
    for ranks in (1, 2):
        config = small_config(
            tmp_path / str(ranks), model=one_layer, pipeline=sizes, trainer={"ranks": ranks}
        )
        train(config, QuietScreen())
    one, two = weights(tmp_path / "1", 1), weights(tmp_path / "2", 1)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=2e-6, rtol=1e-4)
    a, b = (RunFolder(tmp_path / n).metrics()[0] for n in ("1", "2"))
    assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
    assert a["completion_tokens"] == b["completion_tokens"]


@pytest.mark.parametrize(("worker", "more"), [("trainer", {}), ("teacher", DISTILL)])
def test_others_start_on_a_generators_gpu_after_its_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str, more: dict[str, Any]
) -> None:
    """While a trainer loads, a generator would take the trainer's memory for its own."""
    generators: list[bool] = []
    start = LocalPlacement.generator

    def generator(placement: LocalPlacement, number: int, make: Any) -> Any:
        handle = start(placement, number, make)
        handle.started.add_done_callback(lambda future: generators.append(True))
        return handle

    def other(placement: LocalPlacement, *args: Any) -> Any:
        raise InputError(f"{len(generators)} generators have started")

    monkeypatch.setattr(LocalPlacement, "generator", generator)
    monkeypatch.setattr(LocalPlacement, worker, other)
    monkeypatch.setattr(Seats, "beside_generator", lambda seats, devices: True)
    with pytest.raises(InputError, match="2 generators have started"):
        train(small_config(tmp_path, generator={"workers": 2}, **more), QuietScreen())


def test_a_trainer_that_cannot_start_ends_the_run_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def load(path: str, config: TrainerConfig, updates: int, seed: int) -> Trainer:
        raise InputError(f"no trainer of seed {seed}")

    async def measure(session: Session, generators: Any, judges: Any, when: str, done: int) -> Any:
        measured.append(when)
        return {}

    monkeypatch.setattr(Trainer, "load", load)
    monkeypatch.setattr(train_module, "_measure_end", measure)
    with pytest.raises(InputError, match="no trainer of seed 3"):
        train(small_config(tmp_path, seed=3), QuietScreen())
    assert measured == []


@pytest.mark.slow
def test_recomputed_caches_and_a_measurement_midway(tmp_path: Path, one_layer: str) -> None:
    config = small_config(
        tmp_path,
        model=one_layer,
        data={"eval": "playground:"},
        pipeline={"updates": 3, "n_batch": 16, "n_async": 32, "max_staleness": 2},
        generator={"kv_cache": "recompute", "steps_per_call": 2},
        evaluation={"problems": 8, "samples": 2, "every": 2},
    )
    result = train(config, QuietScreen())
    lines = [json.loads(x) for x in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [x["when"] for x in lines] == ["before", "update_2", "after"]
    assert result.pass_at_1.before is not None
    assert lines[0]["pass_at_1"] == result.pass_at_1.before.to_dict()
    assert [x["version"] for x in lines] == [0, 2, 3]
    # Held-out problems are not trained on.
    seen = {row["problem"] for row in rollouts(tmp_path)}
    held = [json.loads(x) for x in (tmp_path / "evaluation_before.jsonl").read_text().splitlines()]
    assert not seen & {row["problem"] for row in held}


@pytest.mark.slow
def test_a_run_that_is_measured_after_training_only(tmp_path: Path, one_layer: str) -> None:
    also = {"sums": {"source": "playground:", "problems": 4}}
    config = small_config(
        tmp_path,
        model=one_layer,
        data={"eval": "playground:"},
        pipeline={"updates": 1, "n_batch": 16, "n_async": 32},
        evaluation={"problems": 8, "samples": 2, "before": False, "also": also},
    )
    screen = io.StringIO()
    result = train(config, LiveDisplay(Console(file=screen, width=100)), report=write_report)
    lines = list(read_log(tmp_path / "evaluations.jsonl"))
    assert [(x["when"], x["set"]) for x in lines] == [("after", "held_out"), ("after", "sums")]
    assert result.pass_at_1.before is None and result.pass_at_1.after is not None
    after = result.pass_at_1.after
    assert result.summary["pass_at_1"] == {"after": after.to_dict()}
    assert "base" not in result.summary
    assert result.summary["rl"]["sums"] == lines[1]["pass_at_1"]
    assert f"pass@1: – → {after.value:.3f}" in screen.getvalue()
    assert f"pass@1, sums: – → {lines[1]['pass_at_1']['value']:.3f}" in screen.getvalue()
    assert result.report == tmp_path / "report.html"
    shown = answers_of(result.report)["summary"]["passed"]
    assert shown == [["after", pytest.approx(after.to_dict(), rel=1e-5)]]


@pytest.mark.slow
def test_a_file_of_own_problems_moves_the_weights(tmp_path: Path, one_layer: str) -> None:
    file = tmp_path / "own.jsonl"
    rows = [{"id": f"own-{n}", "problem": f"What is {n} + 4?", "answer": str(n + 4)}
            for n in range(2, 42)]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    updates: list[float] = []
    result = tramontane.train(
        small_config(
            tmp_path / "run", model=one_layer, data={"train": str(file)}, pipeline={"n_batch": 16}
        ),
        quiet=True,
        report=False,
        on_update=lambda metrics: updates.append(metrics["grad_norm"]),
    )
    assert (result.finished, result.updates, result.report) == (True, 2, None)
    assert result.pass_at_1 == (None, None)
    assert not (result.run_dir / "report.html").exists()
    assert result.summary == json.loads((result.run_dir / "summary.json").read_text())
    assert len(updates) == 2 and all(norm > 0 for norm in updates)
    trained = {row["problem_id"] for row in rollouts(result.run_dir) if row["filtered"] is None}
    assert trained <= {row["id"] for row in rows} and len(trained) > 1
    # Adam's first steps move each weight that has a gradient by about the learning rate.
    before = load_model(one_layer).state_dict()
    after = load_file(result.weights / "model.safetensors")
    moved = max(float((after[name] - before[name]).abs().max()) for name in after)
    assert 1e-5 < moved < 1e-3


@pytest.mark.slow
def test_gsm8k_config_runs_a_random_model_and_rewards_without_spread_move_nothing(
    tmp_path: Path,
) -> None:
    data = DATA / "gsm8k_train.jsonl.gz"
    if not data.is_file():
        pytest.skip(f"needs the GSM8K file {data}")
    model = tmp_path / "model"
    tokenizer = train_tokenizer(["Natalia sold clips to 48 friends. How many clips?"] * 50, 600)
    torch.manual_seed(0)
    architecture = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(architecture).save_pretrained(model)
    tokenizer.save_pretrained(model)
    config = load_config(
        ROOT / "configs/gsm8k.yaml",
        [
            f"model={model}",
            f"run_dir={tmp_path / 'run'}",
            f"data.train={data}",
            f"data.eval={DATA / 'gsm8k_test.jsonl.gz'}",
            "data.overlong_prompts=drop",  # six, for a tokenizer this small
            "pipeline.updates=2",
            "pipeline.n_batch=8",
            "pipeline.n_async=16",
            "pipeline.group_size=4",
            "pipeline.l_max=16",
            "pipeline.l_cache=8",
            # A random model writes noise, and all noise earns 0.
            "pipeline.diversity=none",
            "generator.device=cpu",
            "trainer.device=cpu",
            "verifier.workers=1",
            "evaluation.problems=4",
            "evaluation.every=0",
        ],
    )
    result = train(config, QuietScreen())
    assert result.updates == 2
    assert result.pass_at_1.after is not None and result.pass_at_1.after.value == 0
    rows = rollouts(tmp_path / "run")
    assert len(rows) == 16
    assert all(row["problem_id"].startswith("gsm8k") for row in rows)
    assert all(row["verdict"] == "malformed" and row["parts"]["format"] == 0 for row in rows)
    # All rewards are 0, so all advantages are: the weights must not move.
    first = LlamaForCausalLM.from_pretrained(model).state_dict()
    last = weights(tmp_path / "run", 2)
    # Weights are saved in the generator's number type.
    assert all(torch.equal(first[name].to(last[name].dtype), last[name]) for name in last)


def test_events_go_to_the_run_folder_and_to_the_standard_logger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    folder.log_event("replaced: generator 0")
    folder.log_event("stage long begins", logging.INFO)
    assert [(r.name, r.levelname, r.message) for r in caplog.records] == [
        ("tramontane.run", "WARNING", "replaced: generator 0")
    ]
    lines = (tmp_path / "events.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "replaced: generator 0",
        "stage long begins",
    ]


def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(InputError, match=r"trainer\.device .* no GPU"):
        prepare(small_config(tmp_path, trainer={"device": "cuda"}))


def test_a_lost_worker_is_logged_with_its_reason(tmp_path: Path) -> None:
    session = Session.open(small_config(tmp_path), QuietScreen(), RunFolder(tmp_path / "run"))
    session.replaced(WorkerDied("generator 0 died 0.3 s into poll", "generator 0"))
    [row] = read_log(tmp_path / "run/workers.jsonl")
    assert (row["worker"], row["lost"]) == ("generator 0", "generator 0 died 0.3 s into poll")


def test_activities_too_short_to_be_seen_are_not_logged(tmp_path: Path) -> None:
    session = Session.open(small_config(tmp_path), QuietScreen(), RunFolder(tmp_path / "run"))
    now = time.time()
    session.spent("trainer", "step", now)
    session.spent("trainer", "wait for a batch", now - 2)
    [row] = read_log(tmp_path / "run/timeline.jsonl")
    assert row["activity"] == "wait for a batch" and row["began"] == round(now - 2, 3)
    assert row["seconds"] == pytest.approx(2, abs=1)
