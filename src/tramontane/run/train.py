"""`tramontane train`, from a config to a finished run folder: workers are built and joined here."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial

import torch

from tramontane.config import HELD_OUT, Config
from tramontane.controller.generators import GeneratorPool, slots
from tramontane.controller.ledger import Ledger
from tramontane.controller.pipeline import Pipeline, Workers
from tramontane.controller.verifiers import Grader, VerifierActors
from tramontane.errors import InputError
from tramontane.generator import Generator
from tramontane.placement import Handle, Limit, call, started
from tramontane.placement.place import Placement, place
from tramontane.run.cold_start import fine_tune
from tramontane.run.folder import RunFolder
from tramontane.run.gate import check_parity
from tramontane.run.interrupt import Interrupt
from tramontane.run.learning_signal import evaluation_warnings
from tramontane.run.measurement import measure
from tramontane.run.recorder import Recorder
from tramontane.run.screen import Screen
from tramontane.run.session import OnUpdate, Session, Verifiers
from tramontane.run.summary import BeforeAfter, TrainResult, summarize_run
from tramontane.trainer import Trainer
from tramontane.verifier import VerifierPool


def train(
    config: Config,
    screen: Screen,
    resume: RunFolder | None = None,
    *,
    report: bool = False,
    on_update: OnUpdate | None = None,
) -> TrainResult:
    """Run a config to its end, or continue a run folder from its last checkpoint.

    Args:
        config: the run's config; that of the folder when a run is resumed.
        screen: shows progress.
        resume: the folder of a run to continue.
        report: also draw `report.html`, which takes a few seconds.
        on_update: called with the metrics of each update.

    Raises:
        InputError: before anything is started; or when no update could be made; or when the
            gradient stays not finite.
        NoSignal: no group can be learnt from.
        ParityError: trainer and generator disagree about log-probs.
        WorkerStalled: a wait outlasted its timeout.
    """
    session = Session.open(config, screen, resume, on_update)
    folder = session.folder
    folder.log_worker("controller", process=os.getpid())
    with (
        _one_thread(),
        closing(place(config, folder.log_worker)) as placement,
        _verifiers(session, placement) as verifiers,
    ):
        measured = {}
        if config.cold_start:
            measured["base"] = measure(session, verifiers, "base", config.model)
            fine_tune(session)
        measured["before"] = measure(session, verifiers, "before", session.model)
        before = measured["before"].get(HELD_OUT)
        if before and not session.version:
            for warning in evaluation_warnings(before):
                session.announce(warning)
        interrupt = Interrupt()
        updates, finished = interrupt.run(_run(session, placement, verifiers, interrupt))
        if finished and not updates:
            raise InputError(
                f"{folder.path}: no update could be made: no problem is left to learn from, since "
                f"data.curriculum retired all; give harder ones"
            )
        weights, summary = folder.checkpoints / f"step_{updates}" / "weights", {}
        if finished:
            measured["after"] = measure(session, verifiers, "after", weights)
            summary = summarize_run(folder.metrics(), measured, session.seconds)
            folder.write_json("summary.json", summary)
    report_file = folder.path / "report.html" if report else None
    if report_file:
        from tramontane.run.report import write_report  # its matplotlib takes a second to import

        with folder.room_for(report_file):
            write_report(folder.path)
    if finished:
        screen.summary(summary, report_file)
    return TrainResult(
        run_dir=folder.path,
        weights=weights,
        updates=updates,
        finished=finished,
        pass_at_1=BeforeAfter.of(measured),
        summary=summary,
        report=report_file,
    )


async def _run(
    session: Session, placement: Placement, verifiers: Verifiers, interrupt: Interrupt
) -> tuple[int, bool]:
    """Start the workers and run the pipeline.

    Returns:
        The number of updates done, and True if the run has no more to do.
    """
    prepared, config, restored = session.prepared, session.config, session.restored
    ledger = Ledger(config, prepared.problems, prepared.prompts.encode)
    if restored:
        ledger.restore(restored.state)
    generators = _generators(session, placement, ledger)
    updates = config.pipeline.updates
    make = partial(Trainer.load, session.model, config.trainer, updates, config.seed)
    trainer = placement.trainer(make)
    limit = Limit.of(config.timeouts, "start")
    try:
        await generators.started()
        await started(trainer, limit)
        workers = Workers(generators, verifiers, trainer, placement.weights)
        recorder = Recorder(session, generators, verifiers, trainer)
        pipeline = Pipeline(config, ledger, workers, recorder)
        if restored:
            await call(trainer, "load_state", restored.path.absolute() / "trainer", limit=limit)
            await pipeline.send_weights()
        await check_parity(prepared, generators, trainer)
        with interrupt.calls(pipeline.stop), _frozen():
            await pipeline.run()
        done = ledger.trained_version
        return done, done == updates or (ledger.stages.last and ledger.exhausted)
    finally:
        generators.close()
        trainer.close()


def _generators(session: Session, placement: Placement, ledger: Ledger) -> GeneratorPool:
    config, prepared = session.config, session.prepared
    longest_prompt, response = prepared.max_prompt, prepared.encoder.response

    def make(number: int) -> Handle:
        # Loads the base model, never a checkpoint, which a replacement might find deleted: the
        # pool sends the newest weights. Sizes are those of the stage at the time of the call.
        stage = ledger.stages.config
        sizes = slots(stage), longest_prompt + stage.pipeline.l_max
        load = partial(Generator.load, session.model, config.generator, *sizes, response)
        return placement.generator(number, load)

    log_worker = session.folder.log_worker
    return GeneratorPool(make, config, session.replaced, log_worker, longest_prompt)


def _verifiers(session: Session, placement: Placement) -> Verifiers:
    """The verifiers, at the sizes of the last stage, which evaluations use; training passes the
    sizes of its stage with every group."""
    config, sizes = session.config, session.prepared.stages[-1].pipeline
    if not config.placement.replaces_workers:  # the pool itself keeps its processes alive
        return VerifierPool(config.verifier, sizes.l_max, sizes.l_cache)
    make = partial(Grader, config.verifier, sizes.l_max, sizes.l_cache)
    return VerifierActors(
        lambda number: placement.verifier(number, make),
        config.verifier.workers,
        config.timeouts,
        config.verifier,
        session.replaced,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let each worker compute in one torch thread; the caller's number is restored at the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _frozen() -> Iterator[None]:
    """Exclude the objects loaded so far from garbage collection: libraries have some hundred
    thousand, and a full collection stops every worker in this process for 0.2 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
