"""Runs that are killed, interrupted or damaged, as real processes, and go on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from tests.controller.test_pipeline import check_ledger, rollouts, weights
from tests.runs import small_config
from tramontane.config import Config
from tramontane.generator import Generator
from tramontane.run.folder import RunFolder
from tramontane.run.screen import QuietScreen
from tramontane.run.session import open_run
from tramontane.run.train import train
from tramontane.types import Progress, Request


def start(config: Config, tmp_path: Path) -> subprocess.Popen[str]:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return command("train", str(file))


def command(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tramontane.cli", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_updates(folder: Path, updates: int, process: subprocess.Popen[str]) -> None:
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not metrics.exists() or len(metrics.read_text().splitlines()) < updates:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no progress within 300 s"
        time.sleep(0.05)


def test_synchronous_run_killed_and_resumed_gives_the_same_weights(tmp_path: Path) -> None:
    sizes = {"updates": 3, "n_batch": 16, "max_staleness": 0}
    whole = small_config(tmp_path / "whole", pipeline=sizes)
    train(whole, QuietScreen())

    cut = small_config(tmp_path / "cut", pipeline=sizes, checkpoint={"every": 1})
    process = start(cut, tmp_path)
    wait_for_updates(tmp_path / "cut", 2, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    folder, config = open_run(tmp_path / "cut")
    train(config, QuietScreen(), folder)

    a, b = weights(tmp_path / "whole", 3), weights(tmp_path / "cut", 3)
    assert all(torch.equal(a[k], b[k]) for k in a)
    one, other = (RunFolder(tmp_path / n).metrics() for n in ("whole", "cut"))
    assert [m["update"] for m in other] == [1, 2, 3]
    assert [m["loss"] for m in one] == [m["loss"] for m in other]
    assert [r["text"] for r in rollouts(tmp_path / "whole")] == [
        r["text"] for r in rollouts(tmp_path / "cut")
    ]


def test_asynchronous_run_killed_and_resumed_loses_no_group(tmp_path: Path) -> None:
    sizes = {"updates": 6, "n_batch": 16, "n_async": 48, "max_staleness": 3}
    config = small_config(tmp_path / "run", pipeline=sizes, checkpoint={"every": 2})
    process = start(config, tmp_path)
    wait_for_updates(tmp_path / "run", 3, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    checkpoint = RunFolder(tmp_path / "run").whole_checkpoint(pytest.fail)
    assert checkpoint is not None
    state = json.loads((checkpoint / "pipeline.json").read_text())
    # Something was under way, and its tokens were kept.
    assert state["groups"]
    begun = {
        (r["group"], r["index"]): r["token_ids"]
        for g in state["groups"]
        for r in g["requests"]
        if r["token_ids"]
    }
    folder, resumed = open_run(tmp_path / "run")
    train(resumed, QuietScreen(), folder)
    check_ledger(tmp_path / "run", config)
    lengths = {(r["group"], r["index"]): len(r["tokens"]) for r in rollouts(tmp_path / "run")}
    assert all(len(begun[key]) <= lengths[key] for key in begun if key in lengths)
    assert max(m["staleness_max"] for m in folder.metrics()) <= 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_ends_with_a_checkpoint_and_the_run_goes_on(tmp_path: Path, ranks: int) -> None:
    sizes = {"updates": 6, "n_batch": 16}
    config = small_config(tmp_path / "run", pipeline=sizes, trainer={"ranks": ranks})
    process = start(config, tmp_path)
    wait_for_updates(tmp_path / "run", 1, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the run gets it
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "Traceback" not in output
    assert "--resume" in output
    folder, resumed = open_run(tmp_path / "run")
    done = len(folder.metrics())
    assert 1 <= done < 6
    checkpoint = folder.whole_checkpoint(pytest.fail)
    assert checkpoint is not None
    assert checkpoint.name == f"step_{done}"
    assert (tmp_path / "run/report.html").is_file()
    train(resumed, QuietScreen(), folder)
    check_ledger(tmp_path / "run", config)


def test_synchronous_run_stopped_midway_and_resumed_gives_the_same_weights(tmp_path: Path) -> None:
    sizes = {"updates": 3, "n_batch": 32, "n_async": 16, "max_staleness": 0}
    train(small_config(tmp_path / "whole", pipeline=sizes), QuietScreen())

    process = start(small_config(tmp_path / "cut", pipeline=sizes), tmp_path)
    wait_for_updates(tmp_path / "cut", 1, process)
    time.sleep(0.3)  # into a round of the next update
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=120) == 0
    folder, config = open_run(tmp_path / "cut")
    train(config, QuietScreen(), folder)

    a, b = weights(tmp_path / "whole", 3), weights(tmp_path / "cut", 3)
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_checkpoints_while_groups_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow polls: whatever is on its way between controller and generator is in the snapshot."""
    poll = Generator.poll

    def slow(self: Generator, requests: list[Request]) -> Progress:
        progress = poll(self, requests)
        time.sleep(0.1)
        return progress

    monkeypatch.setattr(Generator, "poll", slow)
    sizes = {"updates": 8, "n_batch": 8, "n_async": 64, "group_size": 4, "max_staleness": 7}
    config = small_config(tmp_path, pipeline=sizes, checkpoint={"every": 1})
    train(config, QuietScreen())
    check_ledger(tmp_path, config)


def test_a_cut_metrics_line_and_a_partial_checkpoint_are_forgotten(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.rollouts.mkdir()
    folder.checkpoints.mkdir()
    for update in (1, 2):
        folder.log({"update": update})
        folder.write_rollouts(update, [{"update": update}])
        folder.commit_checkpoint(folder.checkpoint_dir(update), keep=2)
    with folder.metrics_file.open("a") as file:
        file.write('{"update": 3, "rew')
    folder.checkpoint_dir(3)  # never committed
    folder.write_rollouts(3, [])
    latest = folder.whole_checkpoint(pytest.fail)
    assert latest is not None
    assert latest.name == "step_2"
    folder.rewind(2)
    assert [p.name for p in sorted(folder.checkpoints.iterdir())] == ["step_1", "step_2"]
    assert [m["update"] for m in folder.metrics()] == [1, 2]
    assert sorted(p.name for p in folder.rollouts.iterdir()) == [
        "update_000001.jsonl",
        "update_000002.jsonl",
    ]


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    for update in (2, 10, 9):
        folder.commit_checkpoint(folder.checkpoint_dir(update), keep=2)
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["step_10", "step_9"]
