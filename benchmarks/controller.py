"""The load of many generators on the controller: CPU, stalls of its event loop, and memory.

    python -m benchmarks.controller [--generators 64 1024 10000] [--live 64] [--mean 3000] ...

The controller is real: pipeline, ledger, pool of generators, staleness bound, problems, prompts,
and the recorder with its rollouts, metrics and checkpoints. So are its messages, which are pickled
and unpickled as on their way to and from another process. Generators, verifiers and the trainer are
clocks: a generator adds a token to each of its `--live` sequences every `--step` seconds, and the
trainer takes `--train` of the time that the generators take for a batch. The initial groups have
an age, as if the run had begun long before.

The event loop runs in virtual time: where it would sleep, its clock jumps to the next event. So any
number of generators runs on one core, and the CPU seconds of the controller for each virtual second
are its load in cores. The work of the simulated workers is measured and excluded. `stall` is the
CPU time of the longest pass of the loop over the callbacks that are due, in milliseconds; what
threads do meanwhile counts as CPU of the controller, and `python -m benchmarks.recording` measures
by how much they hold up the loop. `memory` is the peak of the whole process, in MiB, with its
libraries and the simulated workers' copies of their requests.

`--thin N` makes every completion N times shorter and every step N times longer: the same groups and
messages, with an Nth of the tokens, for when all of them do not fit into this machine's memory.

Prints a table, writes controller.json next to this file, and exits with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import random
import resource
import selectors
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.measure import Promise, finish, machine

GROUP = 16
FETCH_SECONDS, SWAP_SECONDS = 0.2, 0.01  # of a generator and a version of the weights
GRADE_SECONDS = 0.5  # of a group's verdicts
STEPS_PER_CALL = 8
PROMISED_CORES = 0.5  # at 1,024 generators
VOCAB = 1000
PASSED = (
    "live",
    "mean",
    "step",
    "train",
    "batches_in_flight",
    "checkpoint_every",
    "rollouts",
    "warm_up",
    "seconds",
)
SHOWN = (
    "generators",
    "tokens_per_second",
    "groups_per_second",
    "updates",
    "cores",
    "loop_cores",
    "stall_ms",
    "memory_mb",
)
PARTS = {"format": 0.1, "correctness": 0.9, "length": 0.0, "language": 0.1}


class Clock:
    """CPU seconds of the simulated workers, which are not the controller's."""

    simulated = 0.0

    @classmethod
    def leave_out(cls, work: Callable[[], Any]) -> Any:
        began = time.thread_time()
        result = work()
        cls.simulated += time.thread_time() - began
        return result


class VirtualSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Returns at once and moves the loop's clock on; waits in real time only for threads."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        loop = self.loop
        loop.end_pass()
        found = super().select(0)
        while not found and loop.threads and timeout != 0:
            found = super().select(0.01)
        if not found and timeout:
            loop.now += timeout
        loop.begin_pass()
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while nothing is due."""

    def __init__(self) -> None:
        self.now, self.threads = 0.0, 0
        self.passes: list[float] = []  # CPU seconds of each pass over the callbacks that are due
        self._began: tuple[float, float] | None = None
        selector = VirtualSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        self.threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._thread_ended)
        return future

    def _thread_ended(self, _: Any) -> None:
        self.threads -= 1

    def begin_pass(self) -> None:
        self._began = time.thread_time(), Clock.simulated

    def end_pass(self) -> None:
        if self._began:
            cpu, simulated = time.thread_time() - self._began[0], Clock.simulated
            self.passes.append(cpu - (simulated - self._began[1]))


@dataclass
class Sequence:
    """A request in a simulated generator."""

    request: Any
    length: int
    done: int = 0
    starts: list[tuple[int, int]] = field(default_factory=list)  # first token of each version


class Tokens:
    """Sampled tokens, cut from arrays that are made once."""

    def __init__(self, longest: int, vocabulary: list[int]) -> None:
        rng = random.Random(0)
        self.ids = array("i", rng.choices(vocabulary, k=longest))
        self.logprobs = array("f", [-rng.random() for _ in range(longest)])
        self.text = "<think>" + " and so it is" * (longest // 4) + "</think>\n\\boxed{3}"

    def text_of(self, tokens: int) -> str:
        return self.text[: 4 * tokens] + "</think>\n\\boxed{3}"


class SimulatedGenerator:
    """A `Handle` of a generator without a model. Calls run in order, one at a time."""

    def __init__(self, number: int, world: World) -> None:
        self.name, self._world, self._loop = f"generator {number}", world, world.loop
        self.started: Future[None] = Future()
        self.started.set_result(None)
        self._calls: deque[tuple[Future[Any], str, bytes]] = deque()
        self._running = False
        self._live: dict[tuple[int, int], Sequence] = {}
        self._version, self._busy = 0, 0.0

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Queue a call. The controller's part of a message is to pickle it."""
        future: Future[Any] = Future()
        self._calls.append((future, method, pickle.dumps(args, protocol=5)))
        self._next()
        return future

    def submit_background(self, method: str, *args: Any) -> Future[Any]:
        """A fetch of weights, which do not travel through the controller."""
        future: Future[Any] = Future()
        pickle.loads(pickle.dumps((method, args[0]), protocol=5))
        self._loop.call_later(FETCH_SECONDS, future.set_result, None)
        return future

    def close(self) -> None:
        self._calls.clear()

    def _next(self) -> None:
        while not self._running and self._calls:
            future, method, message = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            self._running = True
            seconds = Clock.leave_out(partial(self._begin, method, message))
            self._loop.call_later(seconds, self._end, future, method)

    def _begin(self, method: str, message: bytes) -> Any:
        return getattr(self, f"_{method}")(*pickle.loads(message))

    def _end(self, future: Future[Any], method: str) -> None:
        make = getattr(self, f"_end_{method}")
        message = Clock.leave_out(lambda: pickle.dumps(make(), protocol=5))
        # The controller's part of the answer is to unpickle it.
        future.set_result(pickle.loads(message))
        self._running = False
        self._next()

    def _poll(self, requests: list[Any], seconds: float = 0.0) -> float:
        world = self._world
        for r in requests:
            length = max(1, world.length(r.seed) - world.age(r.group))
            self._live[r.group, r.index] = Sequence(r, length, starts=[(0, self._version)])
        self._steps = max(STEPS_PER_CALL, round(seconds / world.step))
        self._busy += self._steps * world.step
        return self._steps * world.step

    def _end_poll(self) -> Any:
        from tramontane.types import Completion, Progress

        tokens, ended, grown = self._world.tokens, [], []
        for s in self._live.values():
            if s.starts[-1][1] != self._version:
                s.starts.append((s.done, self._version))
            before, s.done = s.done, min(s.length, s.done + self._steps)
            r = s.request
            if s.done < s.length:
                grown.append((r.group, r.index, before, s.done))
                continue
            stops = [*s.starts, (s.done, 0)]
            versions = array("i")
            for (first, version), (stop, _) in pairwise(stops):
                versions.extend([version] * (stop - first))
            ended.append(
                Completion(
                    *(r.group, r.index, r.prompt_ids),
                    *(tokens.ids[: s.done], tokens.logprobs[: s.done], versions),
                    *("stop", tokens.text_of(s.done)),
                )
            )
        for c in ended:
            del self._live[c.group, c.index]
        return Progress(ended, pack(tokens, grown, self._version), self._busy)

    def _swap(self, version: int) -> float:
        self._arriving = version
        return SWAP_SECONDS

    def _end_swap(self) -> float:
        self._version = self._arriving
        return SWAP_SECONDS

    def _cancel_all(self) -> float:
        return 0.0

    _end_cancel_all = _cancel_all


def pack(tokens: Tokens, grown: Iterable[tuple[int, int, int, int]], version: int) -> Any:
    """The growth of unfinished requests, given as (group, index, first new token, end)."""
    from tramontane.tokens import Growth

    growth = Growth()
    for group, index, start, stop in grown:
        growth.add(
            group,
            index,
            token_ids=tokens.ids[start:stop],
            logprobs=tokens.logprobs[start:stop],
            versions=array("i", [version]) * (stop - start),
        )
    return growth


class SimulatedTrainer:
    """A `Handle` of a trainer whose steps take a given time."""

    name = "trainer"

    def __init__(self, loop: VirtualLoop, seconds: float) -> None:
        self._loop, self._seconds, self._busy, self._version = loop, seconds, 0.0, 0
        self.started: Future[None] = Future()
        self.started.set_result(None)

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Make a call. A handle of a process packs its messages in a thread of its own."""
        future: Future[Any] = Future()

        def begin(_: Any) -> None:
            seconds, result = getattr(self, f"_{method}")(*args)
            self._loop.call_later(seconds, future.set_result, result)

        packing = self._loop.run_in_executor(None, partial(pickle.dumps, args, protocol=5))
        packing.add_done_callback(begin)
        return future

    def release(self, folder: Any) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def close(self) -> None: ...

    def _step(self, batch: Any) -> tuple[float, dict[str, Any]]:
        from tramontane.types import TrainedFigures

        self._busy += self._seconds
        self._version += 1
        tokens = Clock.leave_out(lambda: sum(len(s.token_ids) for s in batch.sequences))
        zeros = array("d", bytes(8 * len(batch.sequences))), array("f", bytes(4 * tokens))
        self._figures = TrainedFigures(*zeros)
        return self._seconds, {
            "trained_tokens": tokens,
            "computed_tokens": tokens,
            "skipped_steps": 0,
        }

    def _stats(self) -> tuple[float, dict[str, float]]:
        return 0.0, {"busy_seconds": self._busy, "version": self._version}

    def _learned(self) -> tuple[float, Any]:
        return 0.0, self._figures

    def _publish(self, weights: Any) -> tuple[float, Any]:
        return 0.1, weights

    def _state_saved(self) -> tuple[float, bool]:
        return 0.0, True

    def _save_weights(self, folder: Any, *_: Any) -> tuple[float, None]:
        path = folder.path / folder.part
        path.mkdir(parents=True)
        (path / "file").write_bytes(b"x")
        return 1.0, None

    _save_state = _save_weights


class SimulatedVerifiers:
    """Verdicts after a fixed time, half of them right."""

    def __init__(self, loop: VirtualLoop, stats: Any) -> None:
        self._loop, self._stats = loop, stats

    def score(self, problem: Any, responses: list[Any], lengths: tuple[int, int]) -> Future[Any]:
        from tramontane.types import Verdict

        pickle.dumps((problem, responses, lengths), protocol=5)
        future: Future[Any] = Future()
        verdicts = [
            Verdict(float(i % 2), {**PARTS}, "right" if i % 2 else "wrong", "", 0.01, "3")
            for i in range(len(responses))
        ]
        message = Clock.leave_out(lambda: pickle.dumps(verdicts, protocol=5))

        def end() -> None:
            self._stats.verdicts += len(responses)
            future.set_result(pickle.loads(message))

        self._loop.call_later(GRADE_SECONDS, end)
        return future

    def time_limit(self, problem: Any, completions: int) -> float:
        return 60.0

    def stats(self) -> Any:
        return self._stats


class World:
    """The simulated machines."""

    def __init__(
        self, loop: VirtualLoop, args: argparse.Namespace, groups: int, vocabulary: list[int]
    ) -> None:
        from tramontane.planning.simulate import lognormal

        self.loop, self.step = loop, args.step * args.thin
        self.longest = 5 * args.mean // args.thin
        self.tokens = Tokens(self.longest, vocabulary)
        self._first, self._oldest = groups, 3 * args.mean // args.thin

        lengths = lognormal(args.mean / args.thin, self.longest, 0.8)
        self.length = lambda seed: lengths(random.Random(seed))

    def age(self, group: int) -> int:
        """Tokens that the sequences of a group have before the start, which are not sampled."""
        return random.Random(group).randrange(self._oldest) if group < self._first else 0


def config_of(args: argparse.Namespace, generators: int, folder: Path) -> Any:
    from tramontane.config import Config

    n_async = generators * args.live
    return Config.model_validate(
        {
            "run_dir": str(folder),
            "rollouts": args.rollouts,
            "data": {"train": "playground:", "eval": None},
            "pipeline": {
                "updates": 10_000,
                "group_size": GROUP,
                "n_async": n_async,
                "n_batch": n_async // args.batches_in_flight,
                "max_staleness": 8 * args.batches_in_flight,
                "l_max": 512,
                "l_cache": 0,
            },
            "generator": {"workers": generators, "steps_per_call": STEPS_PER_CALL},
            "checkpoint": {"every": args.checkpoint_every},
        }
    )


async def measure(args: argparse.Namespace, generators: int, folder: Path) -> dict[str, float]:
    """The figures of `args.seconds` virtual seconds, after `args.warm_up` of warm-up."""
    from tramontane.controller.generators import GeneratorPool
    from tramontane.controller.ledger import Ledger
    from tramontane.controller.pipeline import Pipeline, Workers
    from tramontane.models.weights import CopiedWeights
    from tramontane.run import session as session_module
    from tramontane.run.measurement import Judges
    from tramontane.run.recorder import Recorder
    from tramontane.run.screen import QuietScreen
    from tramontane.run.train import _frozen
    from tramontane.verifier.pool import PoolStats

    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    # Simulated workers need none of the memory that the run's start would ask for.
    session_module.check_devices = lambda prepared: None
    session = session_module.Session.open(config_of(args, generators, folder), QuietScreen())
    pieces = session.prepared.encoder.tokenizer.convert_ids_to_tokens(list(range(VOCAB)))
    vocabulary = [i for i, piece in enumerate(pieces) if "<" not in piece]  # no tags
    world = World(loop, args, generators * args.live // GROUP, vocabulary)
    sizes = session.config.pipeline.model_copy(update={"l_max": world.longest})
    config = session.config.model_copy(update={"pipeline": sizes})
    ledger = Ledger(config, session.prepared.problems, session.prepared.prompts.encode)
    pool = GeneratorPool(
        lambda number, *size: SimulatedGenerator(number, world),
        config, session.replaced, session.folder.log_worker, max_prompt=300,
    )  # fmt: skip
    seconds_a_batch = args.mean * args.step / args.batches_in_flight
    trainer = SimulatedTrainer(loop, args.train * seconds_a_batch)
    verifiers = SimulatedVerifiers(loop, PoolStats())
    recorder = Recorder(session, pool, Judges(verifiers, None), trainer)  # type: ignore[arg-type]
    recorder._parity_due = False
    workers = Workers(pool, verifiers, trainer, lambda: CopiedWeights(None))  # type: ignore[arg-type]
    pipeline = Pipeline(config, ledger, workers, recorder)
    graded: Counter[str] = Counter()
    grade = ledger.grade

    def count(*given: Any) -> Any:
        graded["groups"] += 1
        return grade(*given)

    ledger.grade = count  # type: ignore[method-assign]
    with _frozen():
        running = asyncio.create_task(pipeline.run())
        await until(args.warm_up, running)
        loop.passes.clear()
        graded.clear()
        sampled = sum(generator.generated_tokens for generator in pool)
        start = time.process_time(), Clock.simulated, sampled, ledger.trained_version
        wall = time.perf_counter()
        await until(args.seconds, running)
        cpu = time.process_time() - start[0] - (Clock.simulated - start[1])
        generated = sum(generator.generated_tokens for generator in pool) - start[2]
        updates = ledger.trained_version - start[3]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    seconds = args.seconds
    known = sum(len(r.token_ids) for m in pool for r in m.requests.values())
    return {
        "generators": generators,
        "in_flight": pool.in_flight,
        "tokens_per_second": generated / seconds,
        "groups_per_second": graded["groups"] / seconds,
        "updates": updates,
        "cores": cpu / seconds,
        "us_per_token": 1e6 * cpu / generated,
        "ms_per_group": 1e3 * cpu / max(1, graded["groups"]),
        "loop_cores": sum(loop.passes) / seconds,
        "stall_ms": 1e3 * max(loop.passes),
        "memory_mb": resident() / 2**20,
        "known_tokens": known,
        "wall_seconds": time.perf_counter() - wall,
    }


async def until(seconds: float, running: asyncio.Task[None]) -> None:
    """Let virtual seconds pass.

    Raises:
        Exception: the pipeline's.
    """
    done, _ = await asyncio.wait({running}, timeout=seconds)
    if done:
        running.result()
        raise RuntimeError("the pipeline ended")


def resident() -> int:
    """Peak memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def run(generators: int, options: list[str]) -> dict[str, float]:
    """Measure one number of generators, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.controller", "--measure", str(generators)]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, check=True, text=True)
    return {key: float(value) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}


def promises(rows: list[dict[str, float]]) -> list[Promise]:
    """The controller of 1,024 generators takes less than half a core."""
    return [
        Promise(
            f"{row['generators']:,.0f} generators: the controller takes at most "
            f"{PROMISED_CORES} cores",
            f"{row['cores']:.2f}",
            row["cores"] <= PROMISED_CORES,
        )
        for row in rows
        if row["generators"] <= 1024 and row["thin"] == 1
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--generators", type=int, nargs="+", default=[64, 1024, 10_000])
    parser.add_argument("--live", type=int, default=64, help="sequences of each generator")
    parser.add_argument("--mean", type=int, default=3000, help="mean tokens of a completion")
    parser.add_argument("--step", type=float, default=0.03, help="seconds of a decode step")
    parser.add_argument("--train", type=float, default=0.8)
    parser.add_argument("--batches-in-flight", type=int, default=16, help="n_async / n_batch")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="updates")
    parser.add_argument("--rollouts", default="all")
    parser.add_argument("--thin", type=int, help="by default 1, and 16 above 4,000 generators")
    parser.add_argument("--warm-up", type=float, default=15.0, help="virtual seconds")
    parser.add_argument("--seconds", type=float, default=45.0, help="virtual seconds")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        with tempfile.TemporaryDirectory() as folder:
            measuring = measure(args, args.measure, Path(folder) / "run")
            print(json.dumps(VirtualLoop().run_until_complete(measuring)))
        return
    rows = []
    for generators in args.generators:
        thin = args.thin or (16 if generators > 4000 else 1)
        options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in PASSED]
        rows.append(run(generators, [*options, f"--thin={thin}"]) | {"thin": thin})
        if rows[1:] == []:
            print(" ".join(f"{name:>18}" for name in SHOWN))
        print(" ".join(f"{rows[-1][name]:>18,.2f}" for name in SHOWN), flush=True)
    options = {name: getattr(args, name) for name in PASSED}
    finish(__file__, {"machine": machine(), **options, "rows": rows}, promises(rows))


if __name__ == "__main__":
    main()
