"""Workers as Ray actors: one process each, on this machine or in a cluster.

Ray starts processes, assigns resources, and carries calls and weights. Dead and hung actors are
detected here and reported to the caller. Ray is not allowed to restart actors or repeat calls: a
worker's state would be lost, and a batch trained on twice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from tramontane.config import Config, Resources
from tramontane.errors import InputError
from tramontane.models.loading import local_folder
from tramontane.models.names import SHIPPED
from tramontane.models.weights import Weights
from tramontane.placement.actor import Actor
from tramontane.placement.files import Folder, folders_in, retrieve, send
from tramontane.placement.handle import (
    TRAINER,
    ConcurrentHandle,
    Handle,
    WaitTimeout,
    WeightsLost,
    WorkerDied,
    WorkerLost,
)
from tramontane.placement.pictures import Pictures
from tramontane.placement.printed import result_of
from tramontane.placement.ranks import (
    COLLECTIVE_SECONDS,
    Membership,
    collective_backend,
    joint_result,
)
from tramontane.placement.seats import on_gpu, seats
from tramontane.placement.stored import DifferenceWeights, DirectWeights, StoredWeights

logger = logging.getLogger("tramontane")

CONNECT_SECONDS = 10.0
EXIT_SECONDS = 2.0  # time for a process to exit after Ray asked it to
PRINTED_SECONDS = 1.0  # limit for an actor that is to end to say what was printed


_remote: Any = ray.remote
_ActorClass = _remote(concurrency_groups={"pulse": 1, "background": 1, "files": 1})(Actor)


class ActorHandle:
    """One actor. Calls run in order, background calls concurrently; errors reach the caller
    unchanged.

    A call has no time limit of its own. Meanwhile the process is asked for heartbeats, and counts
    as lost if it does not answer.
    """

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        heartbeat: float,
        note: Callable[..., None] = lambda name, **facts: None,
        pictures: Pictures | None = None,
    ) -> None:
        self.name, self._heartbeat, self._note = name, heartbeat, note
        self.pictures = pictures or Pictures()
        options = {"max_restarts": 0, "max_task_retries": 0, **options}
        self._actor: Any = _ActorClass.options(**options).remote()
        self._place: tuple[str, int] | None = None  # node and process, while known to be alive
        self._process = "no process yet"  # kept after its death: several calls may report it
        self._silent = False  # True once a heartbeat was missing
        self._mailbox = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._background = ThreadPoolExecutor(1, thread_name_prefix=f"{name} background")
        self.started: Future[None] = Future()

    def start(self, make: Callable[[], Any], membership: Membership | None = None) -> ActorHandle:
        self.started = self._mailbox.submit(self._start, make, membership)
        return self

    def submit(self, method: str, *args: Any) -> Future[Any]:
        return self._mailbox.submit(self._call_worker, method, *args)

    def release(self, folder: Folder) -> Future[None]:
        return self._mailbox.submit(retrieve, folder, self._files)

    def locate(self) -> Future[str]:
        """The node that the actor runs on, once a node has room for it."""
        return self._mailbox.submit(lambda: self._locate()[0])

    def lost(self) -> WorkerLost | None:
        """The loss of the process, if it is dead or gives no sign of life."""
        began, beat = time.monotonic(), self._actor.beat.remote()
        if not ray.wait([beat], timeout=self._heartbeat)[0]:
            return self._stalled("a check", began)
        try:
            ray.get(beat)
        except RayActorError as error:
            return self._died("a check", began, error)
        return None

    def submit_background(self, method: str, *args: Any) -> Future[Any]:
        return self._background.submit(self._call_in_background, method, *args)

    def close(self) -> None:
        """Kill the process."""
        for calls in (self._mailbox, self._background):
            calls.shutdown(wait=False, cancel_futures=True)
        if self._place is not None and not self._silent:
            self._hear()
        ray.kill(self._actor)
        if self._place is None:
            return
        # Ray only asks the process to exit, and a stopped process cannot react. Killing it while it
        # exits would make Ray print that it crashed.
        node, process = self._place
        if node == ray.get_runtime_context().get_node_id():
            _kill(process, patience=0 if self._silent else EXIT_SECONDS)
        elif self._silent:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            _remote(_kill).options(num_cpus=0, scheduling_strategy=there).remote(process)

    def _hear(self) -> None:
        printed = self._actor.printed.remote()
        with contextlib.suppress(RayActorError, GetTimeoutError):  # it has ended, or hangs
            result_of(ray.get(printed, timeout=PRINTED_SECONDS))

    def free_address(self) -> str:
        """An address on this actor's machine at which ranks can meet."""
        return str(self._mailbox.submit(ray.get, self._actor.free_address.remote()).result())

    def _locate(self) -> tuple[str, int]:
        began = time.monotonic()
        try:
            # Wait until a machine has room for the process, and its imports are done.
            self._place = place = ray.get(self._actor.beat.remote())
        except RayActorError as error:
            raise self._died("its start", began, error) from None
        self._process = f"process {place[1]}"
        return place

    def _start(self, make: Callable[[], Any], membership: Membership | None) -> None:
        _, process = self._locate()
        self._note(self.name, process=process)
        self._send(make)
        self._call("its start", self._actor.make, make, membership)

    def _call_in_background(self, method: str, *args: Any) -> Any:
        self.started.result()  # the worker may still be being made
        return self._call(method, self._actor.call_in_background, method, *args)

    def _call_worker(self, method: str, *args: Any) -> Any:
        self._send(*args)
        return self._call(method, self._actor.call, method, *map(self.pictures.sent, args))

    def _send(self, *args: Any) -> None:
        """Send the folders among the arguments that the actor's machine lacks."""
        node = self._place[0] if self._place else ""
        for folder in [folder for arg in args for folder in folders_in(arg)]:
            size = send(folder, node, self._files) if folder.kind != "written" else 0
            if size:
                self._note(self.name, received=str(folder.path), bytes=size)

    def _files(self, method: str, *args: Any) -> Any:
        return self._call("a transfer of files", self._actor.files, method, *args)

    def _call(self, what: str, method: Any, *args: Any) -> Any:
        began = time.monotonic()
        done = method.remote(*args)
        try:
            while not ray.wait([done], timeout=self._heartbeat)[0]:
                if not ray.wait([self._actor.beat.remote()], timeout=self._heartbeat)[0]:
                    raise self._stalled(what, began)
            return result_of(ray.get(done))
        except RayTaskError as error:
            if isinstance(error.cause, ObjectLostError):
                raise WeightsLost(
                    f"{self.name} cannot get the new weights: {error.cause}"
                ) from None
            raise error.cause from error
        except RayActorError as error:
            raise self._died(what, began, error) from None

    def _stalled(self, what: str, began: float) -> WaitTimeout:
        self._silent = True
        return WaitTimeout(
            f"{self.name} gave no sign of life for {self._heartbeat:g} s (timeouts.heartbeat), "
            f"{time.monotonic() - began:.0f} s into {what}",
            self.name,
        )

    def _died(self, what: str, began: float, error: RayActorError) -> WorkerDied:
        self._place = None
        reason = str(error).strip().splitlines()[-1].partition(" Some common causes")[0].strip()
        seconds = time.monotonic() - began
        return WorkerDied(
            f"{self.name} ({self._process}) died {seconds:.1f} s into {what}: {reason}", self.name
        )


class ActorRanks:
    """Several ranks of one worker, one actor each, joined by torch.distributed.

    They are numbered so that ranks on one machine are consecutive, which makes collectives fastest.
    Every call goes to all ranks, as collectives require; `joint_result` is the result.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Any],
        ranks: list[ActorHandle],
        backend: str,
        collective_seconds: float = COLLECTIVE_SECONDS,
    ) -> None:
        self.name, self._ranks, self._collective_seconds = name, ranks, collective_seconds
        self._mailbox = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.started: Future[None] = self._mailbox.submit(self._start, make, backend)

    def submit(self, method: str, *args: Any) -> Future[Any]:
        return self._mailbox.submit(self._broadcast, method, args)

    def release(self, folder: Folder) -> Future[None]:
        return self._mailbox.submit(
            lambda: self._result([rank.release(folder) for rank in self._ranks])
        )

    def close(self) -> None:
        self._mailbox.shutdown(wait=False, cancel_futures=True)
        for rank in self._ranks:
            rank.close()

    def _broadcast(self, method: str, args: tuple[Any, ...]) -> Any:
        # Serialized once, and shared by the ranks through Ray.
        sent = map(self._ranks[0].pictures.sent, args)
        stored = [arg if isinstance(arg, Folder) else ray.put(arg) for arg in sent]
        return self._result([rank.submit(method, *stored) for rank in self._ranks])

    def _start(self, make: Callable[[], Any], backend: str) -> None:
        located = [rank.locate() for rank in self._ranks]
        self._result(located)
        nodes = [node.result() for node in located]
        order = sorted(range(len(nodes)), key=lambda number: nodes.index(nodes[number]))
        self._ranks = [self._ranks[number] for number in order]
        address, count = self._ranks[0].free_address(), len(self._ranks)
        for number, rank in enumerate(self._ranks):
            rank.name = f"{self.name} rank {number}"
            rank.start(make, Membership(backend, address, number, count, self._collective_seconds))
        self._result([rank.started for rank in self._ranks])

    def _result(self, futures: list[Future[Any]]) -> Any:
        """Return the `joint_result` once all ranks have a result. A failed rank ends the call
        immediately, since its peers would wait for it in a collective."""
        wait(futures, return_when=FIRST_EXCEPTION)
        failed = [e for f in futures if f.done() and (e := f.exception())]
        if not failed:
            return joint_result([future.result() for future in futures])
        losses = (error for error in failed if isinstance(error, WorkerLost))
        # The peers of a lost rank may fail before its loss is known; report the loss.
        checks = (rank.lost() for rank in self._ranks)
        lost = next(losses, None) or next(filter(None, checks), None)
        if lost is None:
            raise failed[0]
        lost.worker = self.name
        raise lost


class Cluster:
    """The Ray cluster of a run: joined, or started on this machine and ended with the run.

    Raises:
        InputError: no cluster at `placement.address`, or too few CPUs or GPUs in it.
    """

    replaces_trainer, generators_first = True, False  # each process sees only its own GPUs
    _trainer_group: PlacementGroup | None = None

    def __init__(self, config: Config, note: Callable[..., None]) -> None:
        self._config, self._note, self.seats = config, note, seats(config, None)
        self._pictures = Pictures()
        cpus, gpus = self._needs()
        # A cluster that the caller started, e.g. in a notebook, is used and left running.
        self._ours = not ray.is_initialized()
        if self._ours:
            _start(config.placement.address, cpus)
        has = ray.cluster_resources()
        for kind, asked in (("CPU", cpus), ("GPU", gpus)):
            if has.get(kind, 0) < asked:
                self.close()
                raise InputError(
                    f"the Ray cluster has {has.get(kind, 0):g} {kind}s and the run asks for "
                    f"{asked:g}; lower generator.workers, verifier.workers, trainer.ranks or what "
                    f"placement gives each of them"
                )
        if has.get("GPU") and not gpus:
            logger.warning(
                "the Ray cluster has %g GPUs, and no worker of the run asks for one; to use them, "
                "set generator.device=cuda trainer.device=cuda",
                has["GPU"],
            )

    def reserve(self) -> None:
        """Reserve resources for the trainer's ranks: on one machine if they fit, otherwise on as
        few as possible.

        Raises:
            InputError: they are not available within `timeouts.start`.
        """
        config = self._config
        if config.trainer.ranks == 1:
            return
        # After the loss of a machine, Ray would cancel the group's actors while it places it again.
        if self._trainer_group is not None:
            remove_placement_group(self._trainer_group)
        resources = self._resources("trainer")
        bundle = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}
        bundle = {kind: count for kind, count in bundle.items() if count}
        self._trainer_group = placement_group([bundle] * config.trainer.ranks, strategy="PACK")
        if not self._trainer_group.wait(config.timeouts.start):
            raise InputError(
                f"the Ray cluster has no room for {config.trainer.ranks} ranks of the trainer with "
                f"{bundle} each, within {config.timeouts.start:g} s (timeouts.start); see which "
                f"machines are full with `ray status`"
            )

    def model(self, name: str) -> str | Folder:
        # A name that is not in this machine's cache is downloaded by each machine, and those of
        # this package are there.
        folder = None if name in SHIPPED else local_folder(name)
        return name if folder is None else Folder.of(folder, "model")

    def generator(self, number: int, make: Callable[[], Any]) -> ConcurrentHandle:
        return self._actor(f"generator {number}", self._resources("generator")).start(make)

    def judge(self, name: str, make: Callable[[], Any]) -> ConcurrentHandle:
        return self._actor(name, self._resources("verifier")).start(make)

    def trainer(self, make: Callable[[], Any]) -> Handle:
        config, resources = self._config, self._resources("trainer")
        if config.trainer.ranks == 1:
            return self._actor(TRAINER, resources).start(make)
        if self._trainer_group is None:
            self.reserve()
        assert self._trainer_group is not None
        in_group = partial(PlacementGroupSchedulingStrategy, self._trainer_group)
        ranks = [
            resources | {"scheduling_strategy": in_group(n)} for n in range(config.trainer.ranks)
        ]
        return self._ranks(TRAINER, make, ranks, config.trainer.device, config.timeouts.training)

    def teacher(self, name: str, make: Callable[[], Any]) -> Handle:
        config, limit = self._config.teacher, self._config.timeouts.scoring
        assert config is not None
        resources = self._resources("teacher")
        if config.ranks == 1:
            return self._actor(name, resources).start(make)
        return self._ranks(name, make, [resources] * config.ranks, config.device, limit)

    def _ranks(
        self,
        name: str,
        make: Callable[[], Any],
        options: list[dict[str, Any]],
        device: str,
        limit: float,
    ) -> ActorRanks:
        actors = [self._actor(f"{name} rank {n}", each) for n, each in enumerate(options)]
        return ActorRanks(name, make, actors, collective_backend(device), limit)

    def weights(self) -> Weights:
        config = self._config
        kinds = {"store": StoredWeights, "differences": DifferenceWeights, "nixl": DirectWeights}
        return kinds[config.placement.weights](getattr(torch, config.generator.dtype))

    def close(self) -> None:
        if self._ours:
            ray.shutdown()
        elif self._trainer_group is not None:
            remove_placement_group(self._trainer_group)

    def _actor(self, name: str, options: dict[str, Any]) -> ActorHandle:
        if self._config.placement.weights == "nixl":
            options = options | {"enable_tensor_transport": True}
        heartbeat = self._config.timeouts.heartbeat
        return ActorHandle(name, options, heartbeat, self._note, self._pictures)

    def _needs(self) -> tuple[float, float]:
        """CPUs and GPUs of all workers."""
        config = self._config
        workers = {
            "generator": config.generator.workers,
            "verifier": config.verifier.workers + config.conversation.workers * config.converses,
            "trainer": config.trainer.ranks,
        }
        if config.teacher:
            workers["teacher"] = config.teacher_processes
        each = [(n, self._resources(kind)) for kind, n in workers.items()]
        return sum(n * r["num_cpus"] for n, r in each), sum(n * r["num_gpus"] for n, r in each)

    def _resources(self, kind: str) -> dict[str, float]:
        """What Ray gives each worker of a kind."""
        resources: Resources = getattr(self._config.placement, kind)
        device = getattr(getattr(self._config, kind), "device", "cpu")
        gpus = float(on_gpu(device)) if resources.gpus is None else resources.gpus
        return {"num_cpus": resources.cpus, "num_gpus": gpus}


def _kill(process: int, patience: float = 0.0) -> None:
    """Kill a process unless it ends by itself within `patience` seconds."""
    deadline = time.monotonic() + patience
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(process, 0)
            time.sleep(0.01)
        os.kill(process, signal.SIGKILL)


def _start(address: str | None, cpus: float) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A record of every call is not used and grows to hundreds of megabytes.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # By default Ray's workers run at nice 15, behind every other process of the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    options: dict[str, Any] = {}
    if address is None:
        # On this machine workers may share cores, as threads do.
        options = {"num_cpus": max(os.cpu_count() or 1, int(cpus)), "include_dashboard": False}
    try:
        if address and address != "auto":  # Ray itself would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **options)
    except OSError as error:
        if address is None:  # e.g. a TMPDIR whose path is too long for Ray's sockets
            raise InputError(
                f"placement.kind: ray: Ray cannot start on this machine: {error}"
            ) from None
        raise InputError(
            f"placement.address {address!r}: no Ray cluster answers there ({error}); start one "
            f"with `ray start --head`, or remove the address"
        ) from None
