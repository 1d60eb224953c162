"""A worker in a process of its own, or several ranks of one, one process each, joined by
torch.distributed (gloo on CPU).

Every call goes to all ranks, as collectives require; `joint_result` is the result.
"""

from __future__ import annotations

import multiprocessing as mp
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tramontane.errors import InputError
from tramontane.interrupt import leave_to_controller
from tramontane.models.weights import Weights
from tramontane.placement.files import Folder, on_this_machine
from tramontane.placement.handle import WorkerDied
from tramontane.placement.seats import rank_device
from tramontane.temporary import die_with_parent

COLLECTIVE_SECONDS = 3600.0  # timeouts.training by default
END_SECONDS = 10.0  # time for a process to end after it was killed or closed its pipe
GRACE_SECONDS = 10.0  # wait for the report of a rank's death after its peers failed
# A plain fork would copy torch's threads and locks, and the state of CUDA.
START_METHOD = "spawn"


def collective_backend(device: str) -> str:
    """torch.distributed backend for ranks on `device`."""
    return "nccl" if device.startswith("cuda") else "gloo"


class Membership(NamedTuple):
    """One rank's place in a process group. No collective may last longer than `seconds`."""

    backend: str
    address: str
    rank: int
    ranks: int
    seconds: float

    def join(self) -> None:
        """Wait for the other ranks and form the group."""
        dist.init_process_group(
            self.backend,
            init_method=self.address,
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=self.seconds),
        )


def joint_result(results: list[Any]) -> Any:
    """Rank 0's result. Weights are the rows of all ranks."""
    first, *others = results
    if isinstance(first, Weights):
        first.merge(others)
    return first


class RankFailed(RuntimeError):
    """A rank raised an exception; the message holds its traceback."""


class ProcessRanks:
    """`ranks` processes on this machine that each hold a worker made by `make()`.

    The current device of each process is its rank's (`rank_device`). No collective among the ranks
    may last longer than `collective_seconds`. Calls raise `WorkerDied` if a rank's process has
    ended, and `RankFailed` if a rank raised an exception.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Any],
        ranks: int,
        device: str,
        collective_seconds: float = COLLECTIVE_SECONDS,
    ) -> None:
        self.name = name
        backend = collective_backend(device)
        context: Any = mp.get_context(START_METHOD)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            membership = Membership(backend, address, rank, ranks, collective_seconds)
            process = context.Process(
                target=_rank_main,
                args=(theirs, on_this_machine(make), membership, rank_device(device, rank)),
                name=f"{name}-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._mailbox = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.started: Future[None] = self._mailbox.submit(self._collect)

    @property
    def processes(self) -> list[int]:
        """The process of each rank."""
        return [process.pid for process in self._processes]

    def submit(self, method: str, *args: Any) -> Future[Any]:
        return self._mailbox.submit(self._broadcast, method, args)

    def release(self, folder: Folder) -> Future[None]:
        return self._mailbox.submit(lambda: None)  # the ranks use the folder directly

    def close(self) -> None:
        """Kill the processes and wait for their end: their devices may be needed immediately."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(END_SECONDS)
        self._mailbox.shutdown(wait=False)

    def _broadcast(self, method: str, args: tuple[Any, ...]) -> Any:
        message = pickle.dumps((method, [*map(on_this_machine, args)]), pickle.HIGHEST_PROTOCOL)
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError:
                raise self._died(rank) from None
        return self._collect()

    def _died(self, rank: int) -> WorkerDied:
        self._processes[rank].join(END_SECONDS)  # its pipe is closed, so the process is ending
        code = self._processes[rank].exitcode
        return WorkerDied(f"{self.name} rank {rank} died (exit code {code})", self.name)

    def _failed(self, rank: int, error: str) -> Exception:
        """The error of a call in which a rank raised an exception: the death of another rank, if
        that is the cause."""
        deadline = time.monotonic() + GRACE_SECONDS
        while (seconds := deadline - time.monotonic()) > 0:
            dead = [n for n, p in enumerate(self._processes) if p.exitcode not in (None, 0)]
            if dead:
                return self._died(dead[0])
            running = [p.sentinel for p in self._processes if p.exitcode is None]
            if not running:
                break
            wait_for_any(running, seconds)
        return RankFailed(f"{self.name} rank {rank} failed:\n{error}")

    def _collect(self) -> Any:
        """Return the `joint_result` once all ranks have answered. A failed rank ends the call
        immediately, since its peers would wait for it in a collective."""
        waiting = set(range(len(self._pipes)))
        results: list[Any] = [None] * len(self._pipes)
        while waiting:
            answered = wait_for_any([self._pipes[rank] for rank in waiting])
            for rank in [r for r in waiting if self._pipes[r] in answered]:
                waiting.remove(rank)
                try:
                    ok, value = self._pipes[rank].recv()
                except (EOFError, OSError):
                    raise self._died(rank) from None
                if isinstance(value, InputError):
                    raise value
                if not ok:
                    raise self._failed(rank, value)
                results[rank] = value
        return joint_result(results)


def _rank_main(
    pipe: Connection, make: Callable[[], Any], membership: Membership, device: str
) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    leave_to_controller(signal.SIGINT, signal.SIGTERM)  # terminals signal every process, too
    try:
        if device.startswith("cuda"):
            torch.cuda.set_device(device)  # before NCCL chooses one
        if membership.ranks > 1:
            membership.join()
        worker = make()
        pipe.send((True, None))
        while True:
            method, args = pickle.loads(pipe.recv_bytes())
            value = getattr(worker, method)(*args)
            counts = membership.rank == 0 or isinstance(value, Weights)
            pipe.send((True, value if counts else None))
    except EOFError:
        return
    except InputError as error:
        pipe.send((False, error))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
