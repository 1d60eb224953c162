"""`tramontane train`, from a config to a finished run folder: workers are built and joined here."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from tramontane.config import Config
from tramontane.controller.generators import GeneratorPool, slots
from tramontane.controller.ledger import Ledger
from tramontane.controller.pipeline import Pipeline, Workers
from tramontane.controller.verifiers import Grader, VerifierActors
from tramontane.errors import InputError
from tramontane.evaluation import EvaluationResult, evaluate, summarize
from tramontane.generator import Generator
from tramontane.placement import Handle, Limit, WorkerLost, call, started
from tramontane.placement.place import Placement, place
from tramontane.run.folder import RunFolder, read_log
from tramontane.run.prepare import Prepared, prepare, resolved
from tramontane.run.recorder import Recorder
from tramontane.run.report import write_report
from tramontane.trainer import Trainer, parity
from tramontane.types import SamplingParams, TrainSequence
from tramontane.verifier import VerifierPool

PROBE_TOKENS = 32
Verifiers = VerifierPool | VerifierActors
Lost = Callable[[WorkerLost], None]
T = TypeVar("T")


def train(config: Config, screen: Any, resume: RunFolder | None = None) -> dict[str, Any]:
    """Run a config to its end, or a run folder on from its last checkpoint.

    Returns:
        The summary, as written to `summary.json`, with `run_dir` and `report` added.

    Raises:
        InputError: before anything is started.
        ParityError: trainer and generator disagree about log-probs.
        WorkerStalled: a wait outlasted its timeout.
    """
    began = time.monotonic()
    prepared = prepare(config)
    folder = resume or RunFolder.create(config)
    checkpoint = folder.whole_checkpoint(partial(_say, folder, screen)) if resume else None
    state = json.loads((checkpoint / "pipeline.json").read_bytes()) if checkpoint else None
    folder.rewind(state["version"] if state else 0)
    screen.start(f"{config.name} → {folder.path}", resolved(prepared), config.pipeline.updates)
    began -= state["seconds"] if state else 0.0
    lost = partial(_note_lost, folder, screen)
    folder.log_worker("controller", process=os.getpid())
    with (
        _one_thread(),
        closing(place(config, folder.log_worker)) as placement,
        _verifiers(config, placement, lost) as pool,
    ):
        before = _measure("before", config.model, prepared, pool, folder, screen)
        interrupt = Interrupt()
        run = _run(
            prepared, placement, pool, lost, folder, screen, checkpoint, state, began, interrupt
        )
        ended, finished = interrupt.complete(run)
        if finished and not ended:
            raise InputError(
                f"{folder.path}: no update could be made: no problem is left to learn from, since "
                f"data.curriculum retired all; give harder ones"
            )
        summary: dict[str, Any] = {"updates": ended}
        if finished:
            weights = folder.checkpoints / f"step_{ended}" / "weights"
            after = _measure("after", str(weights), prepared, pool, folder, screen)
            summary = _summary(folder, before, after)
            summary["wall_seconds"] = round(time.monotonic() - began, 2)
            folder.write_json("summary.json", summary)
    with folder.room_for(folder.path / "report.html"):
        report = write_report(folder.path)
    if finished:
        screen.summary(summary, report)
    return summary | {"finished": finished, "run_dir": str(folder.path), "report": str(report)}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Each worker computes in one torch thread; whoever called gets theirs back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _frozen() -> Iterator[None]:
    """Spare the garbage collector what is loaded by now: libraries have objects by the hundred
    thousand, and to go through them stops every worker in this process for 0.2 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _verifiers(config: Config, placement: Placement, lost: Lost) -> Verifiers:
    sizes = config.by_stage()[-1].pipeline  # of the evaluations; training says its own
    if not config.placement.replaces_workers:  # its processes are kept alive by the pool
        return VerifierPool(config.verifier, sizes.l_max, sizes.l_cache)
    make = partial(Grader, config.verifier, sizes.l_max, sizes.l_cache)
    return VerifierActors(
        lambda number: placement.verifier(number, make),
        config.verifier.workers,
        config.timeouts,
        lost,
    )


def _note_lost(folder: RunFolder, screen: Any, lost: WorkerLost) -> None:
    folder.log_event(f"replaced: {lost}")
    screen.status({"replaced": str(lost)})


def _say(folder: RunFolder, screen: Any, event: str) -> None:
    folder.log_event(event)
    screen.warn(event)


async def _run(
    prepared: Prepared,
    placement: Placement,
    pool: Verifiers,
    lost: Lost,
    folder: RunFolder,
    screen: Any,
    checkpoint: Path | None,
    state: dict[str, Any] | None,
    began: float,
    interrupt: Interrupt,
) -> tuple[int, bool]:
    """Start the workers, run the pipeline, and return the number of updates done, and whether
    these are all."""
    config, sizes = prepared.config, prepared.config.pipeline
    ledger = Ledger(config, prepared.problems, prepared.encode)
    if state:
        ledger.restore(state)

    def generator(number: int) -> Handle:
        # Never from a checkpoint, which a replacement would find deleted: it gets the newest
        # weights. Its sizes are those of the stage that the run is in then.
        at = ledger.stages.config
        size = slots(at), prepared.max_prompt + at.pipeline.l_max
        make = partial(Generator.load, config.model, config.generator, *size)
        return placement.generator(number, make)

    generators = GeneratorPool(generator, config, lost, folder.log_worker, prepared.max_prompt)
    trainer = placement.trainer(
        partial(Trainer.load, config.model, config.trainer, sizes.updates, config.seed)
    )
    try:
        await generators.started()
        await started(trainer, Limit.of(config.timeouts, "start"))
        gate = partial(_parity_gate, prepared, generators, trainer)
        recorder = Recorder(
            config,
            folder,
            generators,
            trainer,
            pool,
            prepared.tokenizer,
            screen,
            gate,
            lambda name, weights: _measure(name, str(weights), prepared, pool, folder, screen),
            began,
            state["version"] if state else -1,
        )
        workers = Workers(generators, pool, trainer, placement.weights)
        pipeline = Pipeline(config, ledger, workers, recorder)
        if checkpoint and state:
            limit = Limit.of(config.timeouts, "start")
            await call(trainer, "load_state", checkpoint.absolute() / "trainer", limit=limit)
            await pipeline.send_weights()
        await gate()
        loop = asyncio.get_running_loop()
        with interrupt.stops(loop, pipeline), _frozen():
            await pipeline.run()
        done = ledger.trained_version
        return done, done == sizes.updates or (ledger.stages.last and ledger.exhausted)
    finally:
        generators.close()
        trainer.close()


class Interrupt:
    """The first Ctrl-C ends the pipeline after the update under way; the second is an ordinary one.

    In a notebook, where a loop runs already, the pipeline's loop has a thread of its own, and the
    interrupt reaches the thread that waits for it.
    """

    def __init__(self) -> None:
        self._stop: Callable[[], object] | None = None

    def complete(self, run: Coroutine[Any, Any, T]) -> T:
        """Run to the end."""
        if not _in_a_loop():
            return asyncio.run(run)
        future = ThreadPoolExecutor(1).submit(asyncio.run, run)
        try:
            return future.result()
        except KeyboardInterrupt:
            if self._stop is None:
                raise
            self._stop()
            return future.result()

    @contextmanager
    def stops(self, loop: asyncio.AbstractEventLoop, pipeline: Pipeline) -> Iterator[None]:
        """Within this block, an interrupt stops the pipeline."""
        # Only the main thread may set signal handlers.
        handles = threading.current_thread() is threading.main_thread()

        def first() -> None:
            if handles:
                loop.remove_signal_handler(signal.SIGINT)
            stopping.append(loop.create_task(pipeline.stop()))

        stopping: list[asyncio.Task[None]] = []  # asyncio itself holds tasks only weakly
        self._stop = partial(loop.call_soon_threadsafe, first)
        if handles:
            loop.add_signal_handler(signal.SIGINT, first)
        try:
            yield
        finally:
            self._stop = None
            if handles:
                loop.remove_signal_handler(signal.SIGINT)


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _parity_gate(prepared: Prepared, generators: GeneratorPool, trainer: Handle) -> None:
    """Refuse to run when the trainer and a generator disagree about the same tokens."""
    config = prepared.config
    limit = Limit.of(config.timeouts, "start")
    tolerance = parity.tolerance(config.trainer, config.generator)
    temperature = config.generator.temperature
    for generator in generators:
        completions = await generator.ask(
            "start",
            "probe",
            prepared.probes,
            min(PROBE_TOKENS, config.pipeline.l_max),
            config.seed,
            temperature,
        )
        sequences = [TrainSequence.of(c) for c in completions]
        logprobs = await call(trainer, "logprobs", sequences, temperature, limit=limit)
        mismatch = parity.compare([c.logprobs for c in completions], logprobs)
        if mismatch.mean <= tolerance:
            continue
        ids = completions[0].prompt_ids + completions[0].token_ids
        weights = await generator.ask("start", "weights")
        trained = await call(trainer, "weights", limit=limit)
        hidden = await generator.ask("start", "hidden_states", ids)
        computed = await call(trainer, "hidden_states", ids, limit=limit)
        parity.check(
            mismatch,
            tolerance,
            (parity.fingerprint(weights), parity.fingerprint(trained)),
            (hidden, computed),
            {"dtype": (config.generator.dtype, config.trainer.dtype)},
            coarse="bfloat16" in (config.generator.dtype, config.trainer.dtype),
        )


def _measure(
    when: str,
    model: str,
    prepared: Prepared,
    pool: Verifiers,
    folder: RunFolder,
    screen: Any,
) -> EvaluationResult | None:
    """Evaluate a checkpoint on the held-out problems."""
    if not prepared.held_out:
        return None
    config = prepared.config
    rows_file = folder.path / f"evaluation_{when}.jsonl"
    unfinished = rows_file.with_suffix(".partial")
    if when == "before" and rows_file.is_file():  # a resumed run has it already
        return summarize(list(read_log(rows_file)))
    # In the last stage's sizes, before as after: what was learnt shows where it has room.
    sizes, settings = prepared.stages[-1].pipeline, config.evaluation
    max_len = prepared.max_prompt + sizes.l_max
    generator = Generator.load(model, config.generator, sizes.n_async, max_len)
    with folder.room_for(unfinished):
        result = evaluate(
            generator,
            pool,
            prepared.held_out,
            tokenizer=prepared.tokenizer,
            samples=settings.samples,
            sampling=SamplingParams(sizes.l_max, settings.temperature, settings.top_p),
            seed=config.seed,
            system_prompt=config.data.system_prompt,
            write_to=unfinished,
            on_progress=partial(screen.phase, f"evaluation {when}"),
            timeout_s=Limit.of(config.timeouts, "verification", "start").seconds,
        )
        unfinished.replace(rows_file)
    folder.log_evaluation({"when": when} | result.to_dict())
    return result


def _summary(
    folder: RunFolder, before: EvaluationResult | None, after: EvaluationResult | None
) -> dict[str, Any]:
    """The run in figures, from its own records."""
    metrics = folder.metrics()
    pauses = [m["weight_update_pause_ms"] for m in metrics]
    tokens = sum(sum(m["staleness_histogram"].values()) for m in metrics)
    ages = [(int(age), count) for m in metrics for age, count in m["staleness_histogram"].items()]

    walls = np.diff([0.0, *(m["wall_seconds"] for m in metrics)])
    walls[0] = walls[1:].mean() if len(walls) > 1 else walls[0]  # the first counts the start too

    def mean(key: str) -> float:
        """Over time: an update counts as long as it took."""
        return float(np.average([m[key] for m in metrics], weights=walls))

    summary: dict[str, Any] = {}
    if before and after:
        pairs = {"before": before, "after": after}
        summary["pass_at_1"] = {k: r.pass_at_1.to_dict() for k, r in pairs.items()}
        for name in ("format_rate", "language_rate", "mean_thinking_tokens"):
            summary[name] = {k: getattr(r, name) for k, r in pairs.items()}
        summary["evaluation"] = {k: r.to_dict() for k, r in pairs.items()}
    return summary | {
        "updates": len(metrics),
        "groups_unscorable": sum(m["groups_unscorable"] for m in metrics),
        "unscorable_trained": sum(m["unscorable_trained"] for m in metrics),
        "training_seconds": float(walls.sum()),
        "trained_completion_tokens": tokens,
        "trained_tokens_per_second": tokens / float(walls.sum()),
        "generator_idle_fraction": mean("generator_idle_fraction"),
        "generator_held_fraction": mean("generator_held_fraction"),
        "trainer_idle_fraction": mean("trainer_idle_fraction"),
        "verifier_idle_fraction": mean("verifier_idle_fraction"),
        "padding_fraction": mean("padding_fraction"),
        "weight_update_pause_ms": {
            "p50": float(np.percentile(pauses, 50)),
            "p99": float(np.percentile(pauses, 99)),
        },
        "staleness": {
            "mean": sum(age * count for age, count in ages) / tokens,
            "max": max(age for age, _ in ages),
        },
    }


def open_run(path: str | Path) -> tuple[RunFolder, Config]:
    """A run to resume.

    Raises:
        InputError: not a run folder, or a finished run.
    """
    folder, config = RunFolder.open(path)
    if (folder.path / "summary.json").is_file():
        raise InputError(f"{path}: this run is finished; see its report.html")
    return folder, config
