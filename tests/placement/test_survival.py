"""Workers that are killed or stopped, as real processes, in the middle of real runs on Ray."""

import os
import re
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from chaos.processes import alive, marked, workers
from chaos.processes import command as command_line
from tests.controller.test_pipeline import (
    WatchedPipeline,
    check_completions,
    check_ledger,
    rollouts,
)
from tests.controller.test_stage_runs import SIZES as STAGED
from tests.controller.test_stage_runs import STAGES, check_stages
from tests.forked import Command
from tests.placement.test_placement import wait_for
from tests.placement.workers import Meeting, Worker
from tests.run.test_resume import wait_for_updates
from tests.runs import small_config
from tramontane.config import Config
from tramontane.controller.pooled_generator import PooledGenerator
from tramontane.placement import WaitTimeout
from tramontane.placement.place import place
from tramontane.run.changes import open_run
from tramontane.run.folder import RunFolder
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.types import Progress

pytestmark = pytest.mark.slow


class Harm:
    """Sends signals to workers of a pipeline on Ray.

    Args:
        plan: update → (worker, signal), sent once the update is done and the worker has a process.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plan: dict[int, tuple[str, int]]):
        from tramontane.placement.actors import ActorHandle, Cluster

        self.handles: dict[str, Any] = {}
        self.known: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
        self.last_version: dict[int, int] = {}
        harm, make, record = self, Cluster._actor, PooledGenerator._record

        def remembered(cluster: Cluster, name: str, resources: Any) -> ActorHandle:
            harm.handles[name] = make(cluster, name, resources)
            return harm.handles[name]

        def watched(generator: PooledGenerator, progress: Progress) -> None:
            grown = progress.grown.versions
            versions = [*grown, *(c.versions[-1] for c in progress.completions)]
            if versions:  # a poll asked for ahead may find nothing to do
                newest = max(versions)
                assert newest >= harm.last_version.get(id(generator), 0)
                harm.last_version[id(generator)] = newest
            record(generator, progress)

        class Harmed(WatchedPipeline):
            def _notify(self) -> None:
                for update in [u for u in plan if u <= self.ledger.trained_version]:
                    name, number = plan[update]
                    if place := harm.handles[name]._place:
                        del plan[update]
                        for member in self.generators:
                            for key, request in member.requests.items():
                                harm.known[key] = [*request.versions], [*request.logprobs]
                        os.kill(place[1], number)
                super()._notify()

        monkeypatch.setattr(Cluster, "_actor", remembered)
        monkeypatch.setattr(PooledGenerator, "_record", watched)
        monkeypatch.setattr("tramontane.run.train.Pipeline", Harmed)


PATIENCE = 300.0  # seconds until a process that does not end counts as left behind
RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
SIZES = {"n_async": 32, "n_batch": 8, "group_size": 4, "max_staleness": 2}


@pytest.fixture(scope="module")
def dead_controller(
    tmp_path_factory: pytest.TempPathFactory, ray_cluster: Any, one_layer: str
) -> tuple[Config, str]:
    """A run's config, and a mark in the environment of its processes, of which one is stopped, and
    the controller was killed. It has a cluster of its own, whose actors start as a user's do."""
    folder = tmp_path_factory.mktemp("dead")
    name, value = "TRAMONTANE_TEST", str(folder)
    config = small_config(
        folder / "run",
        model=one_layer,
        pipeline=SIZES | {"updates": 6},
        placement={"kind": "ray"},
        checkpoint={"every": 1},
    )
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    process = Command("train", str(file), variables={name: value})
    try:
        wait_for_updates(folder / "run", 2, process)
        os.kill(workers(folder / "run")["generator 0"], signal.SIGSTOP)
        assert len(marked(f"{name}={value}")) > 6
    finally:
        os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return config, f"{name}={value}"


def wait_for_the_end(mark: str, but: tuple[str, ...] = ()) -> None:
    """Wait until no process has the mark, except those whose command lines start with `but`."""
    deadline = time.monotonic() + PATIENCE
    while left := [line for line in map(command_line, marked(mark)) if not line.startswith(but)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_dead_controller_leaves_no_worker_and_its_run_goes_on(
    dead_controller: tuple[Config, str], ray_cluster: Any
) -> None:
    """A stopped worker ends too, although it cannot notice the death."""
    config, mark = dead_controller
    wait_for_the_end(mark, but=RAYS_AGENTS)
    folder, resumed = open_run(config.run_dir)
    train(resumed, QuietScreen(), folder)
    check_ledger(folder.path, config)


def test_generators_and_verifiers_that_die_or_hang_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: Any, one_layer: str
) -> None:
    """One generator dies between two stages of the run, and one hangs in the second stage."""
    harm = Harm(
        monkeypatch,
        {
            0: ("verifier 0", signal.SIGKILL),
            2: ("generator 0", signal.SIGKILL),
            4: ("generator 1", signal.SIGSTOP),
        },
    )
    config = small_config(
        tmp_path,
        model=one_layer,
        pipeline=STAGED | {"updates": 8},
        stages=STAGES,
        generator={"workers": 2},
        placement={"kind": "ray"},
        timeouts={"heartbeat": 3.0},
    )
    train(config, QuietScreen())
    check_stages(tmp_path, config)

    events = (tmp_path / "events.log").read_text()
    assert "replaced: generator 0 (process " in events
    assert "replaced: verifier 0 (process " in events
    assert "generator 1 gave no sign of life for 3 s (timeouts.heartbeat)" in events
    rows = rollouts(tmp_path)
    check_completions(rows, config)
    begun = 0
    for row in rows:
        versions, logprobs = harm.known.get((row["group"], row["index"]), ([], []))
        begun += bool(versions)
        assert row["versions"][: len(versions)] == versions
        assert row["logprobs"][: len(versions)] == logprobs
    assert begun


def test_a_dead_rank_of_the_trainer_is_named_and_the_trainer_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: Any, one_layer: str
) -> None:
    Harm(monkeypatch, {3: ("trainer rank 1", signal.SIGKILL)})
    config = small_config(
        tmp_path,
        model=one_layer,
        pipeline=SIZES | {"updates": 5},
        placement={"kind": "ray"},
        trainer={"ranks": 2},
        checkpoint={"every": 2},
    )
    assert train(config, QuietScreen()).finished
    check_ledger(tmp_path, config)
    assert [m["update"] for m in RunFolder(tmp_path).metrics()] == [1, 2, 3, 4, 5]
    events = (tmp_path / "events.log").read_text()
    # Update 3 is recorded while the trainer is at the next one: it may be written or not.
    restart = (
        r"trainer restarted: lost after update [23], continues from update 2: trainer rank 1 \("
    )
    assert len(re.findall(restart, events)) == 1


def test_ranks_on_two_nodes_are_numbered_node_by_node(tmp_path: Path, ray_cluster: Any) -> None:
    """No node has room for all ranks; each rank reaches the others."""
    from tramontane.placement.actors import ActorHandle

    second = ray_cluster.add_node(num_cpus=5)
    config = small_config(
        tmp_path,
        placement={"kind": "ray", "trainer": {"cpus": 2}},
        trainer={"ranks": 3},
        pipeline={"n_batch": 48, "group_size": 8},
    )
    with closing(place(config, lambda name, **facts: None)) as placement:
        trainer: Any = placement.trainer(Meeting)
        trainer.started.result(PATIENCE)
        nodes = [rank._place[0] for rank in trainer._ranks]
        assert len(set(nodes)) == 2
        assert nodes == sorted(nodes, key=nodes.index)
        trainer.submit("meet", 0).result(PATIENCE)
        trainer.close()
    # A stopped process of another node ends too, although it cannot react.
    stopped = ActorHandle("stopped", {"num_cpus": 5.0}, heartbeat=2.0).start(Worker)
    process = stopped.submit("pid").result(PATIENCE)
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(WaitTimeout):
        stopped.submit("note", 1).result(PATIENCE)
    stopped.close()
    wait_for(lambda: not alive(process))
    ray_cluster.remove_node(second)


def test_a_node_that_goes_away_is_all_of_its_workers_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: Any, one_layer: str
) -> None:
    """Only the second node has room for the generator; a third joins when the second goes."""
    nodes, lost = [ray_cluster.add_node(num_cpus=5)], []
    harm = Harm(monkeypatch, {})

    class Moved(WatchedPipeline):
        def _notify(self) -> None:
            if self.ledger.trained_version == 1 and not lost:
                lost.append(harm.handles["generator 0"]._place[0])
                ray_cluster.remove_node(nodes.pop())
                nodes.append(ray_cluster.add_node(num_cpus=5))
            super()._notify()

    monkeypatch.setattr("tramontane.run.train.Pipeline", Moved)
    config = small_config(
        tmp_path,
        model=one_layer,
        pipeline=SIZES | {"updates": 4},
        placement={"kind": "ray", "generator": {"cpus": 5}},
    )
    train(config, QuietScreen())
    check_ledger(tmp_path, config)
    places = [harm.handles[name]._place for name in ("generator 0", "trainer")]
    assert all(place is None or place[0] != lost[0] for place in places)
    assert "replaced: generator 0 (process " in (tmp_path / "events.log").read_text()
    ray_cluster.remove_node(nodes.pop())


def test_a_dead_controller_leaves_no_agent_of_its_cluster(
    dead_controller: tuple[Config, str],
) -> None:
    """The last test here: Ray's agents try for 60 s to report that their cluster has ended."""
    wait_for_the_end(dead_controller[1])
