"""A trainer that is lost: the run starts it again from the newest checkpoint, within its bound."""

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.controller.test_pipeline import check_ledger, rollouts
from tests.runs import small_config
from tests.view.reports import answers_of
from tramontane.config import Config
from tramontane.placement import WorkerDied
from tramontane.run import trackers
from tramontane.run.changes import open_run
from tramontane.run.manifest import damage
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.view.report import write_report

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]

SIZES = {"updates": 5, "n_async": 32, "n_batch": 8, "group_size": 4, "max_staleness": 2}


def config(run_dir: Path, model: str, **trainer: Any) -> Config:
    return small_config(
        run_dir,
        model=model,
        pipeline=SIZES,
        trainer={"ranks": 2} | trainer,
        checkpoint={"every": 2},
    )


def killing(*updates: int, rank: int = 1) -> Callable[[Mapping[str, Any]], None]:
    """Kill a rank of the trainer after each of these updates, in this order."""
    plan = [*updates]

    def kill(metrics: Mapping[str, Any]) -> None:
        if plan and metrics["update"] == plan[0]:
            plan.pop(0)
            name = f"trainer-{rank}"
            (process,) = [p for p in multiprocessing.active_children() if p.name == name]
            assert process.pid
            os.kill(process.pid, signal.SIGKILL)

    return kill


def test_a_killed_rank_restarts_the_trainer_within_its_bound(
    tmp_path: Path, one_layer: str
) -> None:
    """Rank 1 is killed before the first checkpoint, after it, and again with no newer one."""
    restarting = config(tmp_path, one_layer, max_restarts=1)
    with pytest.raises(WorkerDied, match=r"trainer rank 1 died \(exit code -9\)"):
        train(restarting, QuietScreen(), on_update=killing(1, 3, 3))
    folder, resumed = open_run(tmp_path, ["trainer.ranks=1"])
    assert train(resumed, QuietScreen(), folder).finished
    check_ledger(tmp_path, resumed)
    assert [m["update"] for m in folder.metrics()] == [1, 2, 3, 4, 5]
    trained = [(r["group"], r["index"]) for r in rollouts(tmp_path) if r["filtered"] is None]
    assert len(trained) == len(set(trained)) == 5 * SIZES["n_batch"]

    rows = [json.loads(line) for line in (tmp_path / "workers.jsonl").read_text().splitlines()]
    restarts = [row for row in rows if "restarted_from" in row]
    assert [row["restarted_from"] for row in restarts] == [0, 2]
    assert all("trainer rank 1 died (exit code -9)" in row["lost"] for row in restarts)
    assert (tmp_path / "events.log").read_text().count("trainer restarted: lost after update") == 2
    shown = answers_of(write_report(tmp_path))["summary"]["restarts"]
    assert [row["restarted_from"] for row in shown] == [0, 2]
    assert all("trainer rank 1 died (exit code -9)" in row["lost"] for row in shown)


def test_a_trainer_in_a_process_of_its_own_is_restarted(tmp_path: Path, one_layer: str) -> None:
    sections = {"placement": {"kind": "process"}, "checkpoint": {"every": 2}}
    alone = small_config(tmp_path, model=one_layer, pipeline=SIZES, **sections)
    assert train(alone, QuietScreen(), on_update=killing(3, rank=0)).finished
    check_ledger(tmp_path, alone)
    assert "trainer restarted: lost after update 3" in (tmp_path / "events.log").read_text()


class StartedOnce:
    """A tracker whose server is gone after its first start."""

    run_id = "1"
    starts = 0

    def __init__(self, *_: Any) -> None:
        StartedOnce.starts += 1
        if StartedOnce.starts > 1:
            raise ConnectionError("no route to host")

    def log(self, step: int, values: Any) -> None: ...

    def close(self, finished: bool) -> None: ...


def test_a_tracker_that_cannot_start_again_ends_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_layer: str
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "wandb", StartedOnce)
    monkeypatch.setattr(trackers, "find_spec", lambda name: True)
    sections = {"pipeline": SIZES | {"updates": 3}, "trainer": {"ranks": 2}, "model": one_layer}
    tracked = small_config(tmp_path, trackers=["wandb"], **sections)
    assert train(tracked, QuietScreen(), on_update=killing(1)).finished
    assert StartedOnce.starts == 2
    events = (tmp_path / "events.log").read_text()
    assert events.count("trainer restarted") == 1
    assert events.count("tracker wandb could not be started") == 1


def test_without_restarts_a_lost_trainer_ends_the_run(tmp_path: Path, one_layer: str) -> None:
    with pytest.raises(WorkerDied, match="trainer rank 1 died"):
        train(config(tmp_path, one_layer, max_restarts=0), QuietScreen(), on_update=killing(1))
    assert not (tmp_path / "events.log").exists()


class KilledWhileWriting(threading.Thread):
    """Kills rank 1 once, after it has begun to write its part of a checkpoint of the run in
    `folder` and before it has ended: `update` is that of the checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.update, self.over = folder, 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.0005) and not self.update:
            for begun in self.folder.glob("checkpoints/update_*.partial/trainer"):
                self._strike(begun)

    def _strike(self, begun: Path) -> None:
        ranks = [p for p in multiprocessing.active_children() if p.name == "trainer-1"]
        if not ranks or (begun / "checksums_1").exists():
            return
        process = ranks[0].pid
        assert process
        os.kill(process, signal.SIGSTOP)  # a stopped process writes nothing more
        if begun.is_dir() and not (begun / "checksums_1").exists():
            self.update = int(begun.parent.stem.removeprefix("update_"))
            os.kill(process, signal.SIGKILL)
        else:
            os.kill(process, signal.SIGCONT)


def test_a_rank_killed_while_it_writes_a_checkpoint_leaves_none(
    tmp_path: Path, one_layer: str
) -> None:
    sizes = SIZES | {"updates": 4}
    config = small_config(
        tmp_path,
        model=one_layer,
        pipeline=sizes,
        trainer={"ranks": 2},
        checkpoint={"every": 1, "keep": sizes["updates"]},
    )
    killer = KilledWhileWriting(tmp_path)
    killer.start()
    assert train(config, QuietScreen()).finished
    killer.over.set()
    killer.join()
    assert killer.update, "no rank was found writing"
    rows = [json.loads(line) for line in (tmp_path / "workers.jsonl").read_text().splitlines()]
    restarts = [row["restarted_from"] for row in rows if "restarted_from" in row]
    assert restarts == [killer.update - 1]  # the checkpoint that rank 1 wrote did not count
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"update_{update}" for update in range(1, sizes["updates"] + 1)]
    assert [damage(tmp_path / "checkpoints" / name) for name in names] == [None] * len(names)
    check_ledger(tmp_path, config)
