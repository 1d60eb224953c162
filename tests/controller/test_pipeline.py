"""The controller's invariants, over real workers and the shipped base model."""

import asyncio
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file

from tests import forked
from tests.runs import small_config
from tramontane.batches import TrainBatch
from tramontane.config import Config
from tramontane.controller import pipeline as pipeline_module
from tramontane.controller.observer import Update
from tramontane.controller.pipeline import Pipeline
from tramontane.controller.staleness import room
from tramontane.controller.waits import Waits
from tramontane.models.loading import load_tokenizer
from tramontane.placement.handle import WaitTimeout
from tramontane.run.checkpoint import read_pipeline
from tramontane.run.folder import RunFolder
from tramontane.run.recorder import Recorder
from tramontane.run.rollouts import read_run
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.trainer import Trainer
from tramontane.types import FilterKind

pytestmark = pytest.mark.slow


class WatchedPipeline(pipeline_module.Pipeline):
    """Checks the invariants at every change of state."""

    most_in_flight = 0

    def _notify(self) -> None:
        in_flight = self.generators.in_flight
        assert 0 <= in_flight <= self.sizes.n_async
        assert self.batches.qsize() <= 1
        waiting = sum(len(g.requests) for g in self.ledger.outstanding.values())
        assert waiting == in_flight
        super()._notify()

    def _hand_out(self) -> None:
        super()._hand_out()
        type(self).most_in_flight = max(self.most_in_flight, self.generators.in_flight)


def rollouts(folder: Path) -> list[dict[str, Any]]:
    return list(read_run(folder))


def pending(folder: Path) -> set[int]:
    checkpoint = RunFolder(folder).whole_checkpoint(pytest.fail)
    assert checkpoint is not None
    return {group.thaw().id for group, _ in read_pipeline(checkpoint).snapshot.all_groups()}


def check_ledger(folder: Path, config: Config) -> None:
    """Every problem handed out is trained on once, filtered with a reason, or pending."""
    groups = defaultdict(list)
    for row in rollouts(folder):
        groups[row["group"]].append(row)
    size = config.pipeline.group_size
    for rows in groups.values():
        assert sorted(r["index"] for r in rows) == list(range(size))
        assert len({(r["update"], r["filtered"], r["filtered_detail"]) for r in rows}) == 1
        assert rows[0]["filtered"] in (None, *get_args(FilterKind))
        assert (rows[0]["filtered"] is None) == (rows[0]["filtered_detail"] is None)
    kept = {g for g, rows in groups.items() if rows[0]["filtered"] is None}
    filtered = {g for g, rows in groups.items() if rows[0]["filtered"]}
    left = pending(folder)
    assert not (kept | filtered) & left
    checkpoint = RunFolder(folder).whole_checkpoint(pytest.fail)
    assert checkpoint is not None
    handed_out = read_pipeline(checkpoint).snapshot.next_group
    assert kept | filtered | left == set(range(handed_out))
    per_update = defaultdict(int)
    for g in kept:
        per_update[groups[g][0]["update"]] += len(groups[g])
    assert set(per_update.values()) == {config.pipeline.n_batch}
    assert len(per_update) == config.pipeline.updates


def weights(folder: Path, update: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoints/update_{update}/weights/model.safetensors")


def check_completions(rows: list[dict[str, Any]], config: Config) -> None:
    """Every completion is recorded whole, long or short, and is not too stale."""
    ages = [r["update"] - 1 - v for r in rows if r["filtered"] is None for v in r["versions"]]
    assert 0 <= min(ages)
    assert 1 <= max(ages) <= config.pipeline.max_staleness
    tokenizer = load_tokenizer("tiny")
    for row in rows:
        tokens = row["token_ids"]
        assert tokenizer.decode(tokens, skip_special_tokens=True) == row["text"]
        assert len(tokens) == len(row["versions"]) == len(row["logprobs"])
        if row["finish_reason"] == "length":
            l_max = {at.pipeline.l_max for at in config.by_stage()}
            assert len(tokens) in l_max and tokens[-1] != tokenizer.eos_token_id
        else:
            assert tokens[-1] == tokenizer.eos_token_id
        assert row["versions"] == sorted(row["versions"])
    # Weights really changed under sequences in flight.
    assert any(len(set(r["versions"])) > 1 for r in rows)


@pytest.mark.parametrize("slots", [None, 5])
def test_asynchronous_run_keeps_its_invariants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int | None, one_layer: str
) -> None:
    """With a slot for each completion in flight, and with queues in the generators. The same is
    checked on Ray while workers die, in `placement/test_survival.py`."""
    monkeypatch.setattr("tramontane.run.train.Pipeline", WatchedPipeline)
    monkeypatch.setattr(WatchedPipeline, "most_in_flight", 0)
    # Updates of few completions, so that several updates happen during one sequence.
    sizes = {"updates": 8, "n_async": 32, "n_batch": 8, "group_size": 4, "max_staleness": 4}
    generator = {"workers": 2, "slots": slots}
    config = small_config(tmp_path, model=one_layer, pipeline=sizes, generator=generator)
    train(config, QuietScreen())
    check_ledger(tmp_path, config)
    assert WatchedPipeline.most_in_flight == 32
    check_completions(rollouts(tmp_path), config)


@pytest.mark.parametrize("bound", [0, 16])
def test_generators_wait_only_where_the_bound_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int, one_layer: str
) -> None:
    """Counts the groups that could be handed out while a generator had no work; measures no
    time."""
    waits: list[tuple[int, int]] = []

    class Counting(Waits):
        async def end_of(self, awaited: Any, name: str) -> None:
            if name.startswith("collect"):
                ledger, n = self._ledger, self._ledger.sizes.groups_per_batch
                allowed = room(
                    len(ledger.outstanding),
                    generator_version=ledger.generator_version,
                    next_version=ledger.next_version,
                    per_batch=n,
                    max_staleness=bound,
                )
                useful = n * (ledger.sizes.updates - ledger.next_version) - len(ledger.outstanding)
                waits.append((allowed, useful))
            await super().end_of(awaited, name)

    monkeypatch.setattr("tramontane.controller.pipeline.Waits", Counting)
    sizes = {"updates": 4, "n_async": 32, "n_batch": 8, "group_size": 4, "max_staleness": bound}
    config = small_config(tmp_path, model=one_layer, pipeline=sizes, generator={"workers": 2})
    train(config, QuietScreen())
    assert all(allowed <= 0 or useful <= 0 for allowed, useful in waits)
    held = [wait for wait in waits if wait[1] > 0]
    # With a bound of 0 both wait for every update but the last; far from the bound, neither does.
    assert len(held) >= 2 * 3 if bound == 0 else held == []
    metrics = RunFolder(tmp_path).metrics()
    assert all(0 <= m["generator_held_fraction"] <= 1 for m in metrics)
    if bound == 0:
        assert all(m["generator_held_fraction"] > 0 for m in metrics)


def test_the_next_update_begins_before_the_last_one_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_layer: str
) -> None:
    """Updates that the recorder holds are the exception: the first for the gate, the third for its
    checkpoint."""
    begun: list[int] = []
    begins = {number: threading.Event() for number in range(1, 6)}
    step = Trainer.step

    def noted(self: Trainer, batch: TrainBatch) -> dict[str, float]:
        begun.append(batch.version + 1)
        begins[batch.version + 1].set()
        return step(self, batch)

    class Patient(Recorder):
        async def trained(self, update: Update, pipeline: Pipeline) -> None:
            held = self.holds(update.number)
            if not held and update.number < self.updates:
                assert await asyncio.to_thread(begins[update.number + 1].wait, 60)
            await super().trained(update, pipeline)
            if held:
                assert begun[-1] == update.number

    monkeypatch.setattr(Trainer, "step", noted)
    monkeypatch.setattr("tramontane.run.train.Recorder", Patient)
    config = small_config(
        tmp_path,
        model=one_layer,
        pipeline={"updates": 5, "n_async": 32, "n_batch": 16, "max_staleness": 2},
        checkpoint={"every": 3},
        timeouts={"batch": 60},
    )
    train(config, QuietScreen())
    assert begun == [1, 2, 3, 4, 5]
    assert [m["update"] for m in RunFolder(tmp_path).metrics()] == begun
    check_ledger(tmp_path, config)


def test_synchronous_runs_with_a_seed_are_equal_bit_for_bit(tmp_path: Path, one_layer: str) -> None:
    metrics = []
    sizes = {"updates": 2, "n_batch": 16, "max_staleness": 0}
    sections: dict[str, Any] = {"model": one_layer, "pipeline": sizes, "generator": {"slots": 10}}
    for name in ("a", "b"):
        train(small_config(tmp_path / name, **sections), QuietScreen())
        metrics.append(RunFolder(tmp_path / name).metrics())
    a, b = weights(tmp_path / "a", 2), weights(tmp_path / "b", 2)
    assert all(torch.equal(a[k], b[k]) for k in a)
    timed = ("second", "idle", "held", "pause")
    for one, other in zip(*metrics, strict=True):
        assert one["staleness_max"] == 0
        for key in one:
            if not any(t in key for t in timed):
                assert one[key] == other[key], key
    assert [r["text"] for r in rollouts(tmp_path / "a")] == [
        r["text"] for r in rollouts(tmp_path / "b")
    ]


def train_from_json(config: str) -> None:
    train(Config.model_validate_json(config), QuietScreen())


@pytest.mark.usefixtures("forked_ranks")
def test_a_synchronous_run_gives_the_same_bits_wherever_its_workers_are(
    tmp_path: Path, ray_cluster: Any, one_layer: str
) -> None:
    """On threads, with the trainer in a process of its own, and in a process that joins a cluster
    by its address."""
    sizes = {"updates": 2, "n_batch": 16, "max_staleness": 0}
    sections: dict[str, Any] = {"model": one_layer, "pipeline": sizes}
    for kind in ("thread", "process"):
        train(small_config(tmp_path / kind, placement={"kind": kind}, **sections), QuietScreen())
    joined = {"kind": "ray", "address": ray_cluster.address}
    config = small_config(tmp_path / "ray", placement=joined, **sections)
    assert forked.end(forked.start(train_from_json, config.model_dump_json())) == 0
    a, *others = (weights(tmp_path / kind, 2) for kind in ("thread", "process", "ray"))
    assert all(torch.equal(a[k], b[k]) for b in others for k in a)


def test_another_seed_gives_another_run(tmp_path: Path, one_layer: str) -> None:
    texts = []
    sizes = {"updates": 1, "n_async": 8, "n_batch": 8, "group_size": 4}
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        config = small_config(folder, seed=seed, model=one_layer, pipeline=sizes)
        train(config, QuietScreen())
        texts.append({r["text"] for r in rollouts(folder)})
    assert texts[0] != texts[1]


def test_a_wait_that_lasts_too_long_ends_the_run_and_is_named(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", timeouts={"training": 0.001})
    with pytest.raises(WaitTimeout, match=r"trainer\.step .* \(timeouts\.training\)") as raised:
        train(config, QuietScreen())
    if sys.version_info >= (3, 11):
        assert raised.value.__notes__ == ["raised in the task 'train'"]


def test_the_parity_check_has_its_own_limit(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", timeouts={"control": 0.001})
    with pytest.raises(WaitTimeout, match=r"\(timeouts\.control\)"):
        train(config, QuietScreen())


def test_each_task_is_named_after_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_layer: str
) -> None:
    names: set[str] = set()

    class Listing(pipeline_module.Pipeline):
        def _notify(self) -> None:
            names.update(task.get_name() for task in asyncio.all_tasks())
            super()._notify()

        async def _start_sending(self) -> asyncio.Task[float]:
            sending = await super()._start_sending()
            names.add(sending.get_name())  # it may be over before anything else happens
            return sending

    monkeypatch.setattr("tramontane.run.train.Pipeline", Listing)
    sizes = {"n_async": 16, "n_batch": 8, "group_size": 4}
    config = small_config(tmp_path, model=one_layer, pipeline=sizes, generator={"workers": 2})
    train(config, QuietScreen())
    assert names >= {"feed", "collect generator 0", "collect generator 1", "batch", "train"}
    assert names >= {"finish update 1", "send weights 1", "grade group 0"}


def test_a_wait_for_a_batch_that_never_comes_ends_in_an_error_that_names_it(
    tmp_path: Path,
) -> None:
    config = small_config(
        tmp_path / "run",
        # Too short for an answer: every completion is malformed, and a group soon filtered.
        pipeline={
            "l_max": 8,
            "l_cache": 4,
            "n_async": 8,
            "n_batch": 8,
            "max_groups_without_signal": 100_000,
        },
        timeouts={"batch": 2.5},
    )
    with pytest.raises(WaitTimeout, match="filtered since update 0 .*no diversity"):
        train(config, QuietScreen())


def test_parity_gate_refuses_a_generator_at_another_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tramontane.generator import Generator
    from tramontane.trainer.parity import ParityError

    probe = Generator.probe

    def hotter(self: Any, prompts: Any, tokens: int, seed: int, temperature: float) -> Any:
        return probe(self, prompts, tokens, seed, temperature * 1.5)

    monkeypatch.setattr(Generator, "probe", hotter)
    with pytest.raises(ParityError, match="look at the output head and the temperature"):
        train(small_config(tmp_path / "run"), QuietScreen())
