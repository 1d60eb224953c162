"""Handles over real threads and processes: order, errors, deaths, timeouts."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from pydantic import ValidationError

from tests.forked import Command
from tests.placement.workers import Awaited, Meeting, Worker
from tests.runs import small_config, unheard
from tramontane.errors import InputError
from tramontane.models.loading import check_device
from tramontane.placement import Handle, Limit, WaitTimeout, WorkerDied, call, started
from tramontane.placement.place import check, place
from tramontane.placement.ranks import ProcessRanks, rank_device
from tramontane.placement.thread import LocalPlacement, ThreadHandle
from tramontane.run.folder import RunFolder
from tramontane.run.prepare import prepare

PATIENCE = 300.0  # seconds until a worker that does not answer counts as hung
LIMIT = Limit(PATIENCE, "timeouts.start")


@pytest.fixture(params=["thread", "ranks", "actor"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "actor":
        request.getfixturevalue("ray_cluster")
    return str(request.param)


def make(kind, worker=Worker):
    if kind == "thread":
        return ThreadHandle("worker", worker)
    if kind == "ranks":
        return ProcessRanks("worker", worker, 2, "cpu")
    return actors(worker, 1)


def actors(worker, ranks: int, heartbeat: float = 30.0, **options):
    from tramontane.placement.actors import ActorHandle, ActorRanks

    cpu = {"num_cpus": 1.0, **options}
    if ranks == 1:
        return ActorHandle("worker", cpu, heartbeat).start(worker)
    each = [ActorHandle(f"worker rank {n}", cpu, heartbeat) for n in range(ranks)]
    return ActorRanks("worker", worker, each, "gloo")


@pytest.mark.slow
def test_calls_run_in_order_waits_are_bounded_and_errors_reach_the_caller(kind) -> None:
    handle = make(kind)

    async def use() -> None:
        await started(handle, LIMIT)
        futures = [handle.submit("note", n) for n in range(5)]
        assert await asyncio.wrap_future(futures[-1]) == [0, 1, 2, 3, 4]
        short = Limit(0.05, "timeouts.training")
        with pytest.raises(WaitTimeout, match=r"worker\.slow .* 0\.05 s \(timeouts\.training\)"):
            await call(handle, "slow", 0.5, limit=short)
        with pytest.raises(InputError, match="fix this"):
            await call(handle, "wrong", limit=LIMIT)

    asyncio.run(use())
    handle.close()


@pytest.mark.parametrize("kind", ["thread", "actor"], indirect=True)
def test_background_calls_run_in_order_next_to_the_others(kind, tmp_path) -> None:
    handle = make(kind)
    handle.started.result()
    first = handle.submit_background("wait_for", tmp_path / "first")
    second = handle.submit_background("wait_for", tmp_path / "second")
    handle.submit("note", 1).result()
    handle.submit("make", tmp_path / "second").result()
    handle.submit("note", 2).result()
    assert not first.done() and not second.done()
    handle.submit("make", tmp_path / "first").result()
    assert first.result(PATIENCE) == second.result(PATIENCE) == [1, 2]
    with pytest.raises(InputError, match="fix this"):
        handle.submit_background("wrong").result()
    handle.close()


@pytest.mark.parametrize("kind", ["thread", "actor"], indirect=True)
def test_a_background_call_waits_until_the_worker_is_made(kind, tmp_path) -> None:
    handle = make(kind, partial(Awaited, tmp_path / "made"))
    noted = handle.submit_background("note", 1)
    time.sleep(0.2)  # time for a call that does not wait to fail
    assert not noted.done()
    (tmp_path / "made").touch()
    assert noted.result(PATIENCE) == [1]
    handle.close()


def test_threads_on_gpus_have_streams_of_their_own_devices(monkeypatch, tmp_path) -> None:
    """Decoding goes before training; a call returns once its stream's work is done."""
    made: list[tuple[str, int]] = []
    waits: list[str] = []

    class Stream:
        def __init__(self, device: torch.device, priority: int) -> None:
            made.append((str(device), priority))
            self.synchronize = partial(waits.append, str(device))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    device = {"device": "cuda"}
    config = small_config(tmp_path, generator={"workers": 2} | device, trainer=device)
    placement = LocalPlacement(config, unheard)
    handles: list[Handle] = []
    for start in (placement.trainer, *(partial(placement.generator, n) for n in range(2))):
        handles.append(start(Worker))
        handles[-1].started.result(PATIENCE)
    generator = placement.generator(1, Worker)
    assert generator.submit_background("note", 1).result(PATIENCE) == [1]
    for handle in (*handles, generator):
        handle.close()
    assert made == [("cuda", 0), ("cuda:1", -1), ("cuda:2", -1), ("cuda:2", -1), ("cuda:2", 0)]
    assert sorted(waits) == ["cuda", "cuda:1", *["cuda:2"] * 3]


def test_calls_dropped_at_close_are_cancelled(tmp_path) -> None:
    handle = ThreadHandle("worker", Worker)
    slow = handle.submit("slow", 0.5, tmp_path / "begun")
    dropped = handle.submit("note", 1)
    wait_for((tmp_path / "begun").exists)
    handle.close()
    assert slow.done()
    assert dropped.cancelled()


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("kind", ["ranks", "actor"], indirect=True)
@pytest.mark.slow
def test_a_full_disk_is_named_where_the_writer_is_another_process(kind, tmp_path) -> None:
    handle = make(kind)
    full = pytest.raises(InputError, match="File too large; make room")
    with full, RunFolder(tmp_path).writing(tmp_path / "weights"):
        asyncio.run(call(handle, "save_weights", tmp_path / "file", limit=LIMIT))
    handle.close()


@pytest.mark.usefixtures("forked_ranks")
def test_a_worker_that_cannot_be_made_says_why(kind) -> None:
    handle = make(kind, partial(Worker, "no such model"))
    with pytest.raises(InputError, match="no such model"):
        asyncio.run(started(handle, LIMIT))
    handle.close()


@pytest.mark.parametrize(
    ("device", "devices"),
    [
        ("cpu", ["cpu", "cpu", "cpu"]),
        ("cuda", ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda:2", ["cuda:2", "cuda:3", "cuda:4"]),
    ],
)
def test_each_rank_on_a_machine_has_a_gpu_of_its_own(device: str, devices: list[str]) -> None:
    assert [rank_device(device, rank) for rank in range(3)] == devices


def test_ranks_need_as_many_gpus_as_there_are(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda")
    check_device("cuda:1")
    with pytest.raises(InputError, match="needs the device 'cuda:2', but torch sees 2"):
        check_device("cuda:2")
    trainer = {"ranks": 2, "device": "cuda:1"}
    config = small_config(tmp_path, trainer=trainer)
    with pytest.raises(InputError, match="trainer.ranks needs the device 'cuda:2'"):
        prepare(config)
    distills = {"trainer": {"objective": {"name": "distill"}}, "pipeline": {"diversity": "none"}}
    taught = distills | {"teacher": trainer | {"model": "tiny"}}
    with pytest.raises(InputError, match="teacher.ranks needs the device 'cuda:2'"):
        prepare(small_config(tmp_path, **taught))
    for name, settings in (("trainer", {"trainer": trainer}), ("teacher", taught)):
        with pytest.raises(ValidationError, match=f"lets ranks share a GPU.*of the {name}"):
            small_config(tmp_path, **settings, placement={name: {"gpus": 0.5}})


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_survives_ctrl_c_and_is_named_with_its_signal_when_it_dies() -> None:
    handle = ProcessRanks("trainer", Worker, 2, "cpu")
    handle.started.result(PATIENCE)
    os.kill(handle.submit("pid").result(PATIENCE), signal.SIGINT)
    assert handle.submit("note", 7).result(PATIENCE) == [7]
    os.kill(handle.submit("pid").result(PATIENCE), signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"trainer rank 0 died \(exit code -9\)"):
        handle.submit("note", 1).result(PATIENCE)
    # And the next call, where the pipe is known to be broken.
    with pytest.raises(WorkerDied, match="rank 0 died"):
        handle.submit("note", 1).result(PATIENCE)
    handle.close()


def wait_for(condition, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_actor_imports_torch_only_for_its_worker_and_is_named_when_it_is_killed(
    ray_cluster, tmp_path
) -> None:
    """A fresh process, as a user's: `tests.placement.warm_actors` leaves those with variables of
    their own to Ray."""
    handle = actors(Worker, 1, runtime_env={"env_vars": {"FRESH": "1"}})
    assert handle.submit("imported", "torch", "transformers").result(PATIENCE) == set()
    pid = handle.submit("pid").result(PATIENCE)
    slow = handle.submit("slow", 600.0, tmp_path / "begun")
    wait_for((tmp_path / "begun").exists)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=rf"worker \(process {pid}\) died \d+\.\d s into slow"):
        slow.result(PATIENCE)
    for submit in (handle.submit, handle.submit_background):  # later calls name the process too
        with pytest.raises(WorkerDied, match=rf"\(process {pid}\) died .* into note"):
            submit("note", 1).result(PATIENCE)
    handle.close()


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_though_its_peers_fail_too(ray_cluster) -> None:
    handle = actors(Meeting, 2)
    handle.started.result(PATIENCE)
    dead = handle._ranks[1].submit("pid").result(PATIENCE)
    late = handle.submit("meet", dead)
    with pytest.raises(WorkerDied, match=rf"worker rank 1 \(process {dead}\) died"):
        late.result(PATIENCE)
    handle.close()


@pytest.mark.parametrize(
    ("seconds", "patience", "code"), [(0.1, 10.0, 7), (600.0, 0.1, -signal.SIGKILL)]
)
def test_a_process_is_killed_only_if_it_does_not_exit(seconds, patience, code) -> None:
    """Ray would report a worker that is killed while it exits as crashed."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'tramontane-rl[ray]'")
    from tramontane.placement.actors import _kill

    program = f"import sys, time; time.sleep({seconds}); sys.exit(7)"
    process = subprocess.Popen([sys.executable, "-c", program])
    # Someone else waits for it, as Ray does; else its entry would remain.
    threading.Thread(target=process.wait, daemon=True).start()
    _kill(process.pid, patience)
    assert process.wait(PATIENCE) == code


@pytest.mark.slow
def test_an_actor_that_gives_no_sign_of_life_is_lost_and_killed(ray_cluster, tmp_path) -> None:
    handle = actors(Worker, 1, heartbeat=2.0)
    pid = handle.submit("pid").result(PATIENCE)
    # Busy is not stopped: this outlasts the heartbeat.
    assert handle.submit("slow", 2.5).result(PATIENCE) is None
    slow = handle.submit("slow", 600.0, tmp_path / "begun")
    wait_for((tmp_path / "begun").exists)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WaitTimeout, match=r"worker gave no sign of life for 2 s .* into slow"):
        slow.result(PATIENCE)
    handle.close()
    wait_for(lambda: not os.path.exists(f"/proc/{pid}/exe"))


def test_without_ray_the_error_says_how_to_get_it(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'tramontane-rl\[ray\]'"):
        check(small_config(tmp_path, placement={"kind": "ray"}))
    check(small_config(tmp_path))


def test_a_cluster_that_is_too_small_is_refused(ray_cluster, tmp_path) -> None:
    config = small_config(tmp_path, placement={"kind": "ray", "generator": {"cpus": 70}})
    with pytest.raises(InputError, match=r"has \d+ CPUs and the run asks for 72; lower"):
        place(config, print)


def test_no_cluster_at_the_address_is_said(tmp_path) -> None:
    pytest.importorskip("ray")
    config = "placement:\n  kind: ray\n  address: 127.0.0.1:1\n"
    file = tmp_path / "config.yaml"
    file.write_text(config)
    # In a process that has joined no cluster yet.
    command = Command("train", str(file), f"run_dir={tmp_path / 'run'}")
    printed = command.communicate()
    assert command.wait() == 2, printed
    assert "no Ray cluster answers" in printed, printed
