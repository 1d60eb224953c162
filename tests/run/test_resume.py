"""Runs that are killed or interrupted and then resumed; those that are killed are processes."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import yaml

from tests import forked
from tests.controller.test_pipeline import check_ledger, rollouts, weights
from tests.forked import Command
from tests.runs import small_config
from tramontane.config import Config
from tramontane.controller.pipeline import Pipeline
from tramontane.generator import Generator
from tramontane.models import int8
from tramontane.run.changes import open_run
from tramontane.run.checkpoint import read_pipeline
from tramontane.run.folder import RunFolder
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.types import Completion, Progress

pytestmark = pytest.mark.slow

PATIENCE = 600  # seconds until a run that makes no progress counts as hung


def start(config: Config, tmp_path: Path) -> Command:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return Command("train", str(file))


class Process(Protocol):
    """A process that a test waits for: `Command`, or one of `subprocess`."""

    def poll(self) -> int | None: ...

    def communicate(self) -> object: ...


def wait_until(condition: Callable[[], bool], process: Process) -> None:
    """Poll until the condition holds; fails if the process ends before, or after PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no progress within {PATIENCE} s"
        time.sleep(0.05)


def wait_for_updates(folder: Path, updates: int, process: Process) -> None:
    metrics = folder / "metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= updates, process
    )


def in_flight(checkpoint: Path) -> list[Completion]:
    """A checkpoint's requests that were part way."""
    groups = (group.thaw() for group, _ in read_pipeline(checkpoint).snapshot.all_groups())
    return [request for group in groups for request in group.requests if request.token_ids]


def kill_in_flight(process: Command, run: Path) -> None:
    """Kill a run whose newest checkpoint, the third or a later one, has completions in flight."""
    examined: set[Path] = set()

    def caught() -> bool:
        if examined.issuperset(run.glob("checkpoints/update_[3-9]")):
            return False
        os.killpg(process.pid, signal.SIGSTOP)  # no other checkpoint follows meanwhile
        examined.update(run.glob("checkpoints/update_[3-9]"))
        if in_flight(max(examined)):
            return True
        os.killpg(process.pid, signal.SIGCONT)
        return False

    wait_until(caught, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


IN_EIGHT_BITS: dict[str, Any] = {  # whose input channels in full are chosen anew by a new process
    "generator": {"weights": "int8", "dtype": "float32"},
    "trainer": {"dtype": "float32", "lora": {"rank": 4}},
}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        pytest.param(
            IN_EIGHT_BITS,
            marks=pytest.mark.skipif(
                not int8.is_exact(), reason="this processor has no instructions for int8"
            ),
        ),
    ],
    ids=["full", "int8 and adapters"],
)
def test_synchronous_run_killed_and_resumed_gives_the_same_weights(
    tmp_path: Path, sections: dict[str, Any], one_layer: str
) -> None:
    sizes = {"updates": 3, "n_batch": 16, "max_staleness": 0}
    sections = {"pipeline": sizes, "model": one_layer} | sections
    whole = small_config(tmp_path / "whole", **sections)
    train(whole, QuietScreen())

    cut = small_config(tmp_path / "cut", checkpoint={"every": 1}, **sections)
    killed = forked.start(forked.train_killed_at, cut.model_dump_json(), 2)
    assert forked.end(killed) == -signal.SIGKILL
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


def test_asynchronous_run_killed_and_resumed_loses_no_group_and_no_token(
    tmp_path: Path, one_layer: str
) -> None:
    # Killed before half of the run: more is still to be generated than was.
    sizes = {"updates": 7, "n_batch": 16, "n_async": 48, "max_staleness": 3}
    config = small_config(
        tmp_path / "run", model=one_layer, pipeline=sizes, checkpoint={"every": 1}
    )
    kill_in_flight(start(config, tmp_path), tmp_path / "run")
    folder, resumed = open_run(tmp_path / "run", ["trainer.learning_rate=1e-5"])
    checkpoint = folder.whole_checkpoint(pytest.fail)
    assert checkpoint is not None
    begun = {(r.group, r.index): r.versions.tolist() for r in in_flight(checkpoint)}
    assert begun, "no completion was in flight at the checkpoint"

    train(resumed, QuietScreen(), folder)
    check_ledger(tmp_path / "run", config)
    versions = {(r["group"], r["index"]): r["versions"] for r in rollouts(tmp_path / "run")}
    ended = begun.keys() & versions.keys()
    assert ended
    # The tokens from before the kill are still there, under the weights that sampled them.
    for key in ended:
        assert versions[key][: len(begun[key])] == begun[key]
    assert max(m["staleness_max"] for m in folder.metrics()) <= 8
    # The learning rate was lowered at the checkpoint.
    assert [m["learning_rate"] for m in folder.metrics()] == [1e-4] * 3 + [1e-5] * 4


@pytest.mark.usefixtures("forked_ranks")
def test_ctrl_c_ends_with_a_checkpoint_and_the_run_goes_on(tmp_path: Path, one_layer: str) -> None:
    """With ranks in processes, which get the signal too; the run resumes with one rank."""
    sizes = {"updates": 4, "n_batch": 16}
    config = small_config(tmp_path / "run", model=one_layer, pipeline=sizes, trainer={"ranks": 2})
    process = start(config, tmp_path)
    wait_for_updates(tmp_path / "run", 1, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the run gets it
    output = process.communicate()
    assert process.wait() == 130, output
    assert "Traceback" not in output
    assert "stopping after this update" in output
    assert "again to stop now" in output
    assert "--resume" in output
    folder, resumed = open_run(tmp_path / "run")
    done = len(folder.metrics())
    assert 1 <= done < 4
    checkpoint = folder.whole_checkpoint(pytest.fail)
    assert checkpoint is not None
    assert checkpoint.name == f"update_{done}"
    assert (tmp_path / "run/report.html").is_file()
    resumed.trainer.ranks = 1
    train(resumed, QuietScreen(), folder)
    check_ledger(tmp_path / "run", config)


def test_synchronous_run_stopped_in_a_round_and_resumed_gives_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_layer: str
) -> None:
    sizes = {"updates": 3, "n_batch": 32, "n_async": 16, "max_staleness": 0}
    train(small_config(tmp_path / "whole", model=one_layer, pipeline=sizes), QuietScreen())
    stopped_in_a_round: list[bool] = []
    stopped = threading.Event()
    poll = Generator.poll

    class Watched(Pipeline):
        def stop(self) -> None:
            stopped_in_a_round.append(self.ledger.in_mid_round)
            stopped.set()
            super().stop()

    def interrupted(self: Generator, requests: list[Completion], *args: float) -> Progress:
        """Sends Ctrl-C when the second round has begun, and holds it until the run stops."""
        progress = poll(self, requests, *args)
        if requests and self.version == 1 and not stopped.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            assert stopped.wait(PATIENCE)
        return progress

    monkeypatch.setattr("tramontane.run.train.Pipeline", Watched)
    monkeypatch.setattr(Generator, "poll", interrupted)
    cut = small_config(tmp_path / "cut", model=one_layer, pipeline=sizes)
    result = train(cut, QuietScreen())
    assert stopped_in_a_round == [True]
    assert (result.finished, result.updates, result.summary) == (False, 1, {})
    assert result.weights == tmp_path / "cut/checkpoints/update_1/weights"
    folder, config = open_run(tmp_path / "cut")
    assert train(config, QuietScreen(), folder).finished

    a, b = weights(tmp_path / "whole", 3), weights(tmp_path / "cut", 3)
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_checkpoints_while_groups_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_layer: str
) -> None:
    """Polls are slow here, so that requests are on their way between controller and generator when
    checkpoints are taken: the snapshot must hold them."""
    poll = Generator.poll

    def slow(self: Generator, requests: list[Completion], seconds: float) -> Progress:
        progress = poll(self, requests, seconds)
        time.sleep(0.1)
        return progress

    monkeypatch.setattr(Generator, "poll", slow)
    sizes = {"updates": 8, "n_batch": 8, "n_async": 64, "group_size": 4, "max_staleness": 7}
    config = small_config(tmp_path, model=one_layer, pipeline=sizes, checkpoint={"every": 1})
    train(config, QuietScreen())
    check_ledger(tmp_path, config)


def test_a_cut_metrics_line_and_a_partial_checkpoint_are_forgotten(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.rollouts.mkdir()
    folder.checkpoints.mkdir()
    for update in (1, 2):
        folder.log({"update": update})
        folder.write_rollouts(update, [], ["format"])
        partial = folder.checkpoint_dir(update)
        (partial / "pipeline.json").write_text("{}")
        folder.commit_checkpoint(partial, keep=2)
    with folder.metrics_file.open("a") as file:
        file.write('{"update": 3, "rew')
    folder.checkpoint_dir(3)  # never committed
    folder.write_rollouts(3, [], ["format"])
    latest = folder.whole_checkpoint(pytest.fail)
    assert latest is not None
    assert latest.name == "update_2"
    folder.rewind(2)
    assert [p.name for p in sorted(folder.checkpoints.iterdir())] == ["update_1", "update_2"]
    assert [m["update"] for m in folder.metrics()] == [1, 2]
    assert sorted(p.name for p in folder.rollouts.iterdir()) == [
        "update_000001.parquet",
        "update_000002.parquet",
    ]


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    for update in (2, 10, 9):
        folder.commit_checkpoint(folder.checkpoint_dir(update), keep=2)
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["update_10", "update_9"]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("placement", ["thread", "process"])
def test_a_truncated_run_killed_and_resumed_keeps_every_sampling_mask(
    placement: str, tmp_path: Path, one_layer: str
) -> None:
    """Tokens whose allowed tokens were lost on the way, in a message, a checkpoint or a resume,
    would show as a mismatch of what generator and trainer compute."""
    sizes = {"updates": 7, "n_batch": 16, "n_async": 48, "max_staleness": 3}
    config = small_config(
        tmp_path / "run",
        model=one_layer,
        pipeline=sizes,
        checkpoint={"every": 1},
        generator={"top_p": 0.95, "top_k": 20, "dtype": "float32"},
        trainer={"dtype": "float32", "learning_rate": 1e-8},  # staleness shows as no mismatch
        placement={"kind": placement},
    )
    kill_in_flight(start(config, tmp_path), tmp_path / "run")
    folder, resumed = open_run(tmp_path / "run")
    checkpoint = folder.whole_checkpoint(pytest.fail)
    assert checkpoint is not None
    begun = in_flight(checkpoint)
    assert begun, "no completion was in flight at the checkpoint"
    groups = [group.thaw() for group, _ in read_pipeline(checkpoint).snapshot.all_groups()]
    for r in [*begun, *(c for group in groups for c in group.completions)]:
        assert r.allowed is not None
        assert len(r.allowed) == len(r.token_ids)
        assert max(r.allowed.counts) <= 20
    train(resumed, QuietScreen(), folder)
    metrics = folder.metrics()
    assert len(metrics) == 7
    names = [f"mismatch_age_{age}_max" for age in ("0", "1", "2plus")]
    found = [m[name] for m in metrics for name in names if name in m]
    assert len(found) > 7
    assert max(found) < 5e-3  # a lost mask is seen as up to −log 0.95
