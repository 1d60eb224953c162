"""Teachers' scores of batches, from threads and from processes that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from array import array
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.runs import small_config, unheard
from tests.trainer.rollouts import VOCAB, model
from tramontane.batches import Batch, BatchSettings, TrainBatch, TrainSequence
from tramontane.config import Config, ObjectiveConfig
from tramontane.controller.teachers import Teachers
from tramontane.placement import Handle, WorkerDied, WorkerLost
from tramontane.placement.thread import LocalPlacement, ThreadHandle
from tramontane.trainer import sharding
from tramontane.trainer.teacher import Teacher
from tramontane.types import Completion, Group, Problem, Verdict
from tramontane.verifier.math.normalize import vote

SETTINGS = BatchSettings("", 0.9, 32, 8)
MODELS = {"general": model(seed=1), "coder": model(seed=2)}


def teacher(name: str) -> Teacher:
    return Teacher(MODELS[name], budget=64, top_k=3, vocabulary=VOCAB)


def config(tmp_path: Path, kind: str, workers: int = 1, ranks: int = 1) -> Config:
    teachers = {"model": "general", "domains": {"code": "coder"}, "workers": workers}
    teachers |= {"ranks": ranks, "dtype": "float32"}
    return small_config(
        tmp_path,
        teacher=teachers,
        placement={"kind": kind},
        pipeline={"diversity": "none"},
        trainer={"objective": {"name": "distill"}},
    )


def batch() -> Batch:
    groups = []
    for number in range(6):
        problem = Problem(str(number), "code" if number % 3 == 0 else "math", "")
        ids = [array("i", [number, n, 7, 5 + n]) for n in range(2)]
        flat = array("f", [-1.0] * 4)
        completions = [
            Completion(number, n, [1, 2, 3], t, flat, array("i", [0] * 4), "stop")
            for n, t in enumerate(ids)
        ]
        verdicts = [Verdict(1.0, {}, "right") for _ in completions]
        groups.append(Group(number, problem, completions, verdicts))
    return Batch(0, groups, SETTINGS)


def expected(found: Batch) -> list[tuple[float, ...]]:
    """By the teacher of each domain, one group at a time."""
    scores = []
    for group in found.groups:
        name = "coder" if group.problem.domain == "code" else "general"
        sequences = [TrainSequence.of(c) for c in group.completions]
        scores += teacher(name).score(sequences, SETTINGS.temperature)
    return [(*s.logprobs, *s.top_logprobs.ravel()) for s in scores]


def given(found: TrainBatch) -> list[tuple[float, ...]]:
    taught = [s.teacher for s in found.sequences]
    return [(*s.logprobs, *s.top_logprobs.ravel()) for s in taught if s is not None]


def made_here(name: str, model_name: str) -> Handle:
    return ThreadHandle(name, partial(teacher, model_name))


@pytest.mark.parametrize("workers", [1, 2])
def test_each_group_is_scored_by_the_teacher_of_its_domain(tmp_path: Path, workers: int) -> None:
    scored = batch()
    with Teachers(made_here, config(tmp_path, "thread", workers), pytest.fail) as teachers:
        made = scored.train_batch(vote)
        asyncio.run(teachers.score(scored, made))
    want = expected(scored)
    assert len(want) == 12
    for got, values in zip(given(made), want, strict=True):
        assert got == pytest.approx(values, abs=1e-5)


def test_a_stage_has_a_teacher_of_its_own(tmp_path: Path) -> None:
    stages = [{"name": "first", "until": {"updates": 1}, "teacher": "coder"}, {"name": "second"}]
    given_config = config(tmp_path, "thread").model_dump()
    del given_config["teacher"]["domains"]
    staged = Config.model_validate(given_config | {"stages": stages})
    scores = {}
    with Teachers(made_here, staged, pytest.fail) as teachers:
        for name in ("first", "second"):
            found = batch()
            found.settings = replace(SETTINGS, stage=name)
            made = found.train_batch(vote)
            asyncio.run(teachers.score(found, made))
            scores[name] = given(made)
    sequences = batch().train_batch(vote).sequences
    for name, model_name in (("first", "coder"), ("second", "general")):
        want = teacher(model_name).score(sequences, SETTINGS.temperature)
        for got, values in zip(scores[name], want, strict=True):
            expect = (*values.logprobs, *values.top_logprobs.ravel())
            assert got == pytest.approx(expect, abs=1e-5)
    with pytest.raises(ValidationError, match="the run has no teacher to replace"):
        small_config(tmp_path, stages=stages)


def test_the_added_term_asks_about_sampled_groups_alone(tmp_path: Path) -> None:
    found, settings = batch(), config(tmp_path, "thread")
    for group in found.groups[1::2]:  # trajectories
        group.id = -1
    objective = ObjectiveConfig.model_validate({"add": {"distill": 1.0}})
    trainer = settings.trainer.model_copy(update={"objective": objective})
    asked = []
    for each in (settings, settings.model_copy(update={"trainer": trainer})):
        made = found.train_batch(vote)
        with Teachers(made_here, each, pytest.fail) as teachers:
            asyncio.run(teachers.score(found, made))
        asked.append([s.teacher is not None for s in made.sequences])
    assert asked == [[True] * 12, [True, True, False, False] * 3]


class Noted(ThreadHandle):
    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


def test_a_teacher_has_the_limit_of_a_start_before_that_of_its_scores(tmp_path: Path) -> None:
    def make(name: str, model_name: str) -> Handle:
        def slowly() -> MortalTeacher:
            time.sleep(0.3)
            return MortalTeacher(model_name, [])

        return ThreadHandle(name, slowly)

    settings, scored = config(tmp_path, "thread"), batch()
    for start, fails in ((0.05, True), (30.0, False)):
        limits = settings.timeouts.model_copy(update={"start": start, "scoring": 0.15})
        timed = settings.model_copy(update={"timeouts": limits})
        with Teachers(make, timed, pytest.fail) as teachers:
            if fails:
                with pytest.raises(WorkerLost, match=r"0\.05 s \(timeouts\.start\)"):
                    asyncio.run(teachers.started())
            else:
                asyncio.run(teachers.score(scored, scored.train_batch(vote)))


class MortalTeacher:
    """Dies as often as is left of `deaths`."""

    def __init__(self, name: str, deaths: list[str]) -> None:
        self.name, self.deaths = name, deaths

    def score(self, share: list[TrainSequence], temperature: float) -> list[tuple[str, float]]:
        if self.deaths:
            raise WorkerDied(self.deaths.pop(0))
        return [(self.name, temperature)] * len(share)


@pytest.mark.parametrize(
    ("kind", "deaths", "failure"),
    [("process", 4, None), ("process", 5, "death 4"), ("thread", 1, "death 0")],
)
def test_a_lost_teacher_is_replaced_a_few_times_unless_it_is_a_thread(
    tmp_path: Path, kind: str, deaths: int, failure: str | None
) -> None:
    left, lost = [f"death {n}" for n in range(deaths)], list[str]()
    made_with: list[tuple[str, str]] = []
    handles: list[Noted] = []

    def make(name: str, model_name: str) -> Handle:
        made_with.append((name, model_name))
        deaths = left if name == "teacher 2" else []
        handles.append(Noted(name, lambda: MortalTeacher(model_name, deaths)))
        return handles[-1]

    scored = batch()
    replaced = lambda error: lost.append(str(error))  # noqa: E731
    with Teachers(make, config(tmp_path, kind, workers=2), replaced) as teachers:
        asyncio.run(teachers.started())
        assert made_with == [
            ("teacher 0", "general"),
            ("teacher 1", "general"),
            ("teacher 2", "coder"),
            ("teacher 3", "coder"),
        ]
        made = scored.train_batch(vote)
        if failure:
            with pytest.raises(WorkerDied, match=failure):
                asyncio.run(teachers.score(scored, made))
        else:
            asyncio.run(teachers.score(scored, made))
            for group, sequences in zip(scored.groups, made.groups, strict=True):
                name = "coder" if group.problem.domain == "code" else "general"
                assert [s.teacher for s in sequences] == [(name, 0.9)] * 2
        lost_ones = [h for h in handles if h.name == "teacher 2"][: len(lost)]
        assert [h for h in handles if h.closed] == lost_ones
    assert all(h.closed for h in handles)
    assert lost == [f"death {n}" for n in range(deaths - bool(failure))]
    assert made_with[4:] == [("teacher 2", "coder")] * len(lost)


class SlowTeacher:
    """A teacher that notes its process when it is first asked, and then does not answer."""

    def __init__(self, name: str, note: Path) -> None:
        self._teacher, self._note = teacher(name), note

    def score(self, *given: object) -> object:
        if not self._note.exists():
            self._note.write_text(str(os.getpid()))
            time.sleep(3600)
        return self._teacher.score(*given)  # type: ignore[arg-type]


class Shard(Teacher):
    """A rank of a teacher that says how much of it it holds."""

    def held(self) -> int:
        return sum(sharding.local(p).numel() for p in self.model.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_teacher_on_several_ranks_holds_shards_and_scores_as_one(
    kind: str, tmp_path: Path
) -> None:
    settings, lost = config(tmp_path, kind, ranks=2), list[WorkerLost]()
    assert settings.teacher is not None
    for name, each in MODELS.items():
        each.save_pretrained(tmp_path / name)
    placement, handles = LocalPlacement(settings, unheard), list[Handle]()

    def make(name: str, model_name: str) -> Handle:
        path = str(tmp_path / model_name)
        load = partial(Shard.load, path, settings.teacher, 64, 3, VOCAB)
        handles.append(placement.teacher(name, load))
        return handles[-1]

    scored = batch()
    with Teachers(make, settings, lost.append) as teachers:
        made = scored.train_batch(vote)
        asyncio.run(teachers.score(scored, made))
        assert handles[0].submit("held").result() < 0.6 * MODELS["general"].num_parameters()
        few = replace(batch(), groups=batch().groups[1:2])  # one sequence, so a rank has none
        few.groups[0].completions.pop()
        few.groups[0].verdicts.pop()
        one = few.train_batch(vote)
        asyncio.run(teachers.score(few, one))
        for found, of in ((made, batch()), (one, few)):
            for got, values in zip(given(found), expected(of), strict=True):
                assert got == pytest.approx(values, abs=1e-5)
        os.kill(handles[0].processes[1], signal.SIGKILL)  # type: ignore[attr-defined]
        again = batch().train_batch(vote)
        asyncio.run(teachers.score(batch(), again))
    assert [error.worker for error in lost] == ["teacher 0"]
    assert given(again) == given(made)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_teacher_that_is_killed_is_replaced_and_asked_again(tmp_path: Path) -> None:
    settings = config(tmp_path, "process")
    placement, lost = LocalPlacement(settings, unheard), list[WorkerLost]()
    note = tmp_path / "process"

    def make(name: str, model_name: str) -> Handle:
        slow = model_name == "coder"
        load = partial(SlowTeacher, model_name, note) if slow else partial(teacher, model_name)
        return placement.teacher(name, load)

    def kill() -> None:
        while not note.exists() or not note.read_text():
            time.sleep(0.05)
        os.kill(int(note.read_text()), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    scored = batch()
    with Teachers(make, settings, lost.append) as teachers:
        made = scored.train_batch(vote)
        asyncio.run(teachers.score(scored, made))
    assert [error.worker for error in lost] == ["teacher 1"]
    for got, values in zip(given(made), expected(scored), strict=True):
        assert got == pytest.approx(values, abs=1e-5)
