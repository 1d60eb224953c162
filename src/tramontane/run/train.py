"""`tramontane train`, from a config to a finished run folder: builds and connects the workers."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tramontane.config import HELD_OUT, Config
from tramontane.config.device import machine, number_types
from tramontane.controller.conversations import start_conversations
from tramontane.controller.generators import GeneratorPool, generator_maker
from tramontane.controller.interruption import Interruption
from tramontane.controller.ledger import Ledger
from tramontane.controller.pipeline import Pipeline, Workers
from tramontane.controller.replay import Replay
from tramontane.controller.teachers import Teachers
from tramontane.controller.verifiers import Verifiers, start_verifiers
from tramontane.errors import InputError, reading
from tramontane.evaluation import EvaluationResult
from tramontane.interrupt import Interrupt
from tramontane.loopback import Address
from tramontane.models.shape import load_shape
from tramontane.placement import (
    TRAINER,
    Folder,
    Handle,
    Limit,
    WeightsLost,
    WorkerLost,
    call,
    release,
    started,
)
from tramontane.placement.place import Placement, place
from tramontane.placement.thread import torch_threads
from tramontane.run.card import write_card
from tramontane.run.checks import evaluation_warnings
from tramontane.run.cold_start import fine_tune
from tramontane.run.flattery import flattery_warning
from tramontane.run.folder import RunFolder
from tramontane.run.header import shown_prompt
from tramontane.run.input import RunInput
from tramontane.run.measurement import Judges, measure, recorded
from tramontane.run.parity_gate import check_long_parity, check_parity, check_quantized
from tramontane.run.prepare import Prepared
from tramontane.run.recorder import Recorder
from tramontane.run.screen import Screen
from tramontane.run.serving import address_of, answered
from tramontane.run.session import OnUpdate, Session
from tramontane.run.summary import BeforeAfter, TrainResult, summarize_run
from tramontane.run.targets import targets_of
from tramontane.trainer import Trainer
from tramontane.trainer.state import DamagedState
from tramontane.trainer.teacher import Teacher

OPENING_CHARACTERS = 1000  # shown of a conversation's first prompt
Results = dict[str, EvaluationResult]  # by name of the set
WriteReport = Callable[[Path], Path]


def train(
    config: Config,
    screen: Screen,
    folder: RunFolder | None = None,
    *,
    report: WriteReport | None = None,
    on_update: OnUpdate | None = None,
    given: RunInput | None = None,
) -> TrainResult:
    """Run a config to its end, or continue a run folder from its last checkpoint.

    Args:
        config: the run's config; the folder's when a run is resumed.
        screen: shows progress.
        folder: a new folder, or a run's to continue; the caller owns it. None: a new folder, owned
            here.
        report: writes the report into the run's folder at the end, and returns its path.
        on_update: called with the metrics of each update; again for those after the last checkpoint
            if the trainer is lost and restarted.
        given: the result of `read_input` for the config, if already called.

    Raises:
        InputError: before anything is started; or no update could be made; or the gradient is
            repeatedly not finite.
        NoSignal: no group can be learned from.
        ParityError: trainer and generator disagree on log-probs.
        WorkerLost: the trainer was lost more than `trainer.max_restarts` times, or cannot be
            restarted; or a generator or verifier cannot be replaced.
        WaitTimeout: a wait exceeded its timeout.
        KeyboardInterrupt: Ctrl-C before the first batch or during an evaluation, or a second
            Ctrl-C.
        SystemExit: after SIGTERM; see `checkpoint.grace`.
    """
    if folder is None:
        with RunFolder.new(config) as new:
            return train(config, screen, new, report=report, on_update=on_update, given=given)
    session = Session.open(config, screen, folder, on_update, given)
    folder.log_worker("controller", process=os.getpid(), machine=machine(config.trainer.device))
    with Interrupt(config.checkpoint.grace, session.announce) as interrupt:
        finished = False
        try:
            session, done = _run_sessions(session, interrupt)
            report = None if interrupt.requested is signal.SIGTERM else report
            result = _finish(session, done, report)
            finished = done.finished
            interrupt.end()
            return result
        finally:
            if interrupt.requested and not finished:
                screen.close()  # else its last page would appear below the line
                session.announce(f"stopped; continue with: {folder.resume_command}")


def _run_sessions(session: Session, interrupt: Interrupt) -> tuple[Session, _Done]:
    """Run a session, and another whenever the trainer is lost or cannot read its checkpoint;
    returns the last one and how it ended."""
    config, folder = session.config, session.folder
    restarts, limit = 0, config.trainer.max_restarts  # restarts since the newest checkpoint
    finished = False
    try:
        with (
            torch_threads(1),  # each worker has its own thread
            closing(place(config, folder.log_worker)) as placement,
        ):
            while True:
                try:
                    done = _run_session(session, placement, interrupt)
                    break
                except DamagedState as error:
                    ended: Exception = error.with_traceback(None)
                except (WorkerLost, WeightsLost) as error:
                    restarts = 0 if folder.newest_version > session.version else restarts
                    is_trainer = isinstance(error, WeightsLost) or error.worker == TRAINER
                    replaceable = is_trainer and placement.replaces_trainer
                    if not replaceable or interrupt.requested or restarts >= limit:
                        raise
                    ended = error.with_traceback(None)  # it holds generators and their models
                if isinstance(ended, DamagedState):
                    session = session.after_damage(ended)
                else:
                    restarts += 1
                    session = session.after_loss(ended)
        finished = done.finished
    finally:
        session.trackers.close(finished)
    return session, done


def _run_session(session: Session, placement: Placement, interrupt: Interrupt) -> _Done:
    """One session: the cold start, if not done yet, and the pipeline, with new workers."""
    placement.reserve()
    last, encoder = session.prepared.stages[-1], session.prepared.encoder
    failed = session.folder.log_event
    with (
        start_verifiers(last, placement, session.replaced) as verifiers,
        start_conversations(last, encoder, placement, session.replaced, failed) as conversations,
        address_of(session) as address,
    ):
        judges = Judges(verifiers, conversations)
        measured = _start_cold(session, placement, judges, interrupt)
        done = interrupt.run(_run(session, placement, judges, interrupt, address))
    if done.finished and not done.updates:
        raise InputError(
            f"{session.folder.path}: no update could be made: no problem is left to learn from, "
            f"since data.curriculum retired all; give harder ones"
        )
    return done._replace(measured=measured | done.measured)


def _start_cold(
    session: Session, placement: Placement, judges: Judges, interrupt: Interrupt
) -> dict[str, Results]:
    """Measure the base model and fine-tune it, if the config has a cold start; returns the
    measurement."""
    if not session.config.cold_start:
        return {}
    base = recorded(session, "base")
    if base is None:
        base = interrupt.run(_measure_base(session, placement, judges))
    fine_tune(session.config, session.folder, session.screen, interrupt)
    return {"base": base}


def _finish(session: Session, done: _Done, report: WriteReport | None) -> TrainResult:
    folder, measured, summary = session.folder, done.measured, dict[str, Any]()
    weights = folder.checkpoint(done.updates) / "weights"
    if done.finished:
        metrics = folder.metrics()
        summary = summarize_run(metrics, measured, session.seconds, session.config)
        if len(metrics) < done.updates:  # some are lost
            summary |= {"updates": done.updates, "trained_completion_tokens": None}
        # Of this process: with threads, this includes trainer and generators, but not verifiers.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        summary["peak_memory_mib"] = round(peak, 1)
        summary["number_types"] = number_types(session.config)
        summary["machine"] = machine(session.config.trainer.device)
        folder.write_json("summary.json", summary)
        with folder.writing(weights):
            write_card(weights, session.prepared, measured, summary)
        if warning := flattery_warning(folder.path, session.config.verifier):
            session.announce(warning)
    report_file = None
    if report:
        with folder.writing(folder.path / "report.html"):
            report_file = report(folder.path)
    if done.finished:
        files = {"report": report_file, "weights": weights, "rollouts": folder.rollouts}
        files |= {"metrics": folder.metrics_file}
        session.screen.summary(summary, {k: f for k, f in files.items() if f and f.exists()})
    return TrainResult(
        run_dir=folder.path,
        weights=weights,
        updates=done.updates,
        finished=done.finished,
        pass_at_1=BeforeAfter.of(measured),
        summary=summary,
        report=report_file,
    )


class _Done(NamedTuple):
    """Updates done, True if the run is complete, and the measurements at its ends: `base` with a
    cold start, `before` and, for a finished run, `after`."""

    updates: int
    finished: bool
    measured: dict[str, Results]


async def _run(
    session: Session,
    placement: Placement,
    judges: Judges,
    interrupt: Interrupt,
    address: Address | None,
) -> _Done:
    prepared, config, restored = session.prepared, session.config, session.restored
    replay = await _replay(prepared, judges.verifiers)
    ledger = Ledger(
        config, prepared.problems, prepared.prompts.encode, replay, _interruption(prepared)
    )
    if restored:
        with reading(restored.path / "pipeline.json"):
            ledger.restore(restored.pipeline.snapshot)
        if told := judges.conversations.fate(ledger.outstanding.values()):
            session.announce(told, logging.INFO)
    longest = await _longest_prompt(prepared, judges)
    if config.data.environment and (opening := judges.conversations.opening):
        shown = shown_prompt(opening, prepared.encoder, OPENING_CHARACTERS)
        session.announce(f"the model reads first: {shown}", logging.INFO)
    updates, limit = config.pipeline.updates, Limit.of(config.timeouts, "control")
    model: Any = placement.model(session.model)
    make = partial(Trainer.load, model, config.trainer, updates, config.seed)
    with ExitStack() as ending:
        stage = ledger.stages.config
        generators = _generators(session, placement, session.model, stage, longest)
        ending.callback(generators.close)
        if placement.generators_first:
            await generators.started()
        teachers = _teachers(prepared.config, placement, session.replaced)
        if teachers:
            ending.enter_context(teachers)
        trainer = placement.trainer(make)
        ending.callback(trainer.close)
        await generators.started()
        if teachers:
            await teachers.started()
        # So that it raises errors before anything is measured.
        await started(trainer, Limit.of(config.timeouts, "start"))
        measured = {"before": await _measure_end(session, generators, judges, "before", 0)}
        if HELD_OUT in measured["before"] and not session.version:
            for warning in evaluation_warnings(measured["before"][HELD_OUT]):
                session.announce(warning)
        await generators.resize(ledger.stages.config)
        workers = Workers(
            generators,
            judges.verifiers,
            trainer,
            placement.weights,
            judges.conversations,
            teachers.score if teachers else None,
            targets_of(config, prepared.encoder),
        )
        recorder = Recorder(session, generators, judges, trainer)
        pipeline = Pipeline(config, ledger, workers, recorder)
        if restored:
            state = Folder.of(restored.path / "trainer", "read")
            await call(trainer, "load_state", state, limit=limit)
            await release(trainer, state, limit)
            pipeline.check_trainer(await call(trainer, "stats", limit=limit))
            await pipeline.send_weights()
        await check_parity(prepared, generators, trainer)
        await check_long_parity(prepared, generators, trainer)
        if config.generator.quantized:
            session.announce(await check_quantized(prepared, generators, trainer))
        await recorder.catch_up()
        stop = partial(asyncio.get_running_loop().call_soon_threadsafe, pipeline.stop)
        with interrupt.ends_with(stop, recorder.when), _frozen():
            async with answered(session, generators, address):
                await pipeline.run()
        done = ledger.trained_version
        finished = done == updates or (ledger.stages.last and ledger.exhausted)
        finished = finished and not interrupt.requested  # else the last evaluation is still due
        if finished and done:
            await generators.clear()  # left-over groups of a finished run
            measured["after"] = await _measure_end(session, generators, judges, "after", done)
        return _Done(done, finished, measured)


def _teachers(
    config: Config, placement: Placement, replaced: Callable[[WorkerLost], None]
) -> Teachers | None:
    if config.teacher is None:
        return None
    teacher, top_k = config.teacher, config.trainer.objective.distill.top_k
    budget, vocabulary = config.trainer.microbatch_tokens, load_shape(config.model).vocabulary

    def make(name: str, model: str) -> Handle:
        portable: Any = placement.model(model)
        load = partial(Teacher.load, portable, teacher, budget, top_k, vocabulary)
        return placement.teacher(name, load)

    return Teachers(make, config, replaced)


async def _replay(prepared: Prepared, verifiers: Verifiers) -> Replay | None:
    if prepared.trajectories is None:
        return None
    await prepared.trajectories.regrade(verifiers)
    return prepared.trajectories.replay()


def _interruption(prepared: Prepared) -> Interruption | None:
    config, encoder = prepared.config.generator.interruption, prepared.encoder
    if config is None:
        return None
    closing = encoder.tags.closing
    ids = encoder.tokenizer(config.text + closing, add_special_tokens=False)["input_ids"]
    return Interruption(config, ids, closing)


async def _longest_prompt(prepared: Prepared, judges: Judges) -> int:
    """Upper bound of all prompts, in tokens, including those that environments begin with."""
    prompts, sample = prepared.prompts, prepared.sample
    fit = judges.conversations.fit
    return await fit(sample, prompts.encode, prepared.max_prompt, prompts.limit.room)


async def _measure_base(session: Session, placement: Placement, judges: Judges) -> Results:
    """Measure the base model before a cold start, with separate generators, so that fine-tuning
    then has the machine to itself."""
    base, stage = session.base, session.prepared.stages[-1]
    longest = await _longest_prompt(session.prepared, judges)
    with closing(_generators(session, placement, base, stage, longest)) as generators:
        await generators.started()
        return await _measure_end(session, generators, judges, "base", 0)


async def _measure_end(
    session: Session, generators: GeneratorPool, judges: Judges, when: str, version: int
) -> Results:
    """`measure` all sets, with slots for their longest completion; nothing may be in flight."""
    prepared = session.prepared
    if prepared.sets:
        longest = max(s.sampling.max_tokens for s in prepared.sets.values())
        await generators.resize(prepared.stages[-1], longest)
    return await measure(session, generators, judges, when, version)


def _generators(
    session: Session, placement: Placement, model: str, stage: Config, longest_prompt: int
) -> GeneratorPool:
    # Of the base model, never a checkpoint, which may be deleted by the time of a replacement; the
    # pool sends the newest weights.
    make = generator_maker(session.config, model, session.prepared.encoder, placement)
    return GeneratorPool(
        make,
        stage,
        session.replaced,
        session.folder.log_worker,
        longest_prompt,
        session.prepared.evaluated_l_max,
    )


@contextmanager
def _frozen() -> Iterator[None]:
    """Exclude the objects loaded so far from garbage collection: libraries have a few hundred
    thousand, and a full collection stops every worker in this process for 0.2 s. If the caller has
    already frozen objects, nothing is changed."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
