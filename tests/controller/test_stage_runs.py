"""Runs with stages over real workers: sizes, settings, resumption, and an early end."""

import json
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.controller.test_pipeline import WatchedPipeline, pending, rollouts, weights
from tests.runs import small_config
from tramontane.config import Config, PlaygroundConfig, VerifierConfig
from tramontane.controller.observer import Update
from tramontane.controller.pipeline import Pipeline
from tramontane.data import playground
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.generator import Generator
from tramontane.models import loading
from tramontane.run.changes import open_run
from tramontane.run.folder import RunFolder
from tramontane.run.prepare import prepare, resolved
from tramontane.run.recorder import Recorder
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.types import Completion, SamplingParams
from tramontane.verifier.reward import grade, length_penalty

pytestmark = pytest.mark.slow

SIZES = {"updates": 4, "n_async": 24, "n_batch": 16, "group_size": 4, "max_staleness": 2}
STAGES: list[dict[str, Any]] = [
    {"name": "short", "until": {"updates": 2}, "l_max": 40, "l_cache": 20, "temperature": 0.7},
    {"name": "long", "n_async": 12, "n_batch": 8, "n_minibatch": 4, "temperature": 1.3},
]


def check_stages(folder: Path, config: Config) -> None:
    """Each update is of one stage's sizes and settings; nothing is trained on twice, or lost."""
    groups = defaultdict(list)
    for row in rollouts(folder):
        groups[row["group"]].append(row)
    size, stages = config.pipeline.group_size, config.by_stage()
    names = [stage.name for stage in config.stages]
    metrics = RunFolder(folder).metrics()
    of_update = {m["update"]: stages[names.index(m["stage"])] for m in metrics}
    trained: dict[int, int] = defaultdict(int)
    for rows in groups.values():
        assert sorted(r["index"] for r in rows) == list(range(size))
        assert len({(r["update"], r["filtered"]) for r in rows}) == 1
        if rows[0]["filtered"] is None:
            sizes = of_update[rows[0]["update"]].pipeline
            trained[rows[0]["update"]] += size
            for row in rows:
                n = len(row["token_ids"])
                assert n <= sizes.l_max
                if row["verdict"] != "malformed":
                    penalty = length_penalty(n, sizes.l_max, sizes.l_cache)
                    assert row["parts"]["length"] == pytest.approx(penalty)
    assert trained == {u: at.pipeline.n_batch for u, at in of_update.items()}
    assert set(groups) | pending(folder) == set(range(max(set(groups) | pending(folder)) + 1))
    assert not set(groups) & pending(folder)
    events = (folder / "events.log").read_text()
    assert "stage 'short' ended after update 2 (2 updates); stage 'long' begins" in events
    late = [row for row in rollouts(folder) if row["update"] > 2]
    assert 40 < max(len(row["token_ids"]) for row in late) <= 96
    # All of the second stage was begun under the weights that ended the first, or newer ones.
    assert min(min(row["versions"]) for row in late) == 2
    for m in metrics:
        # Keys and values of older weights cost a little; another temperature would a lot.
        assert m.get("mismatch_age_0", 0) < 0.01
        assert m["staleness_max"] <= config.pipeline.max_staleness


def test_every_stage_is_run_by_its_own_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_layer: str
) -> None:
    """The same is checked on Ray while workers die, in `placement/test_survival.py`."""
    resized: list[tuple[int, int]] = []
    resize = Generator.resize

    def noted(self: Generator, slots: int, max_len: int) -> None:
        resize(self, slots, max_len)
        resized.append((slots, max_len))
        assert self.stats()["cache_bytes"] == 0

    monkeypatch.setattr("tramontane.run.train.Pipeline", WatchedPipeline)
    monkeypatch.setattr(Generator, "resize", noted)
    sections = {"model": one_layer, "generator": {"workers": 2}}
    config = small_config(tmp_path, pipeline=SIZES, stages=STAGES, **sections)
    train(config, QuietScreen())
    check_stages(tmp_path, config)
    assert [m["stage"] for m in RunFolder(tmp_path).metrics()] == ["short"] * 2 + ["long"] * 2
    prompt = prepare(config).max_prompt
    assert resized == [((12 - 4) // 2 + 4, prompt + 96)] * 2


class Crash(Exception):
    pass


def crash_at(monkeypatch: pytest.MonkeyPatch, update: int) -> None:
    """Have the next run end without warning once this update is recorded, its checkpoint taken."""

    class Crashing(Recorder):
        async def trained(self, done: Update, pipeline: Pipeline) -> None:
            await super().trained(done, pipeline)
            if done.number == update:
                raise Crash

    monkeypatch.setattr("tramontane.run.train.Recorder", Crashing)


def test_synchronous_stages_give_the_same_bits_through_resumptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_layer: str
) -> None:
    """The run is resumed at the end of the first stage, and in the middle of the second."""
    sections: dict[str, Any] = {
        "model": one_layer,
        "pipeline": SIZES | {"max_staleness": 0, "updates": 4, "l_max": 64},
        "stages": [{**STAGES[0], "until": {"at_ceiling": 0.01, "window": 2}}, STAGES[1]],
        "data": {"limit": 30, "curriculum": {"retire_after": 1, "too_hard": {"after": 1}}},
        "checkpoint": {"every": 1},
    }
    train(small_config(tmp_path / "whole", **sections), QuietScreen())
    folder, config = None, small_config(tmp_path / "cut", **sections)
    for update in (2, 3):
        with monkeypatch.context() as patch:
            crash_at(patch, update)
            with pytest.raises(Crash):
                train(config, QuietScreen(), folder)
        folder, config = open_run(tmp_path / "cut")
    train(config, QuietScreen(), folder)

    a, b = weights(tmp_path / "whole", 4), weights(tmp_path / "cut", 4)
    assert all(torch.equal(a[k], b[k]) for k in a)
    one, other = (RunFolder(tmp_path / n).metrics() for n in ("whole", "cut"))
    same = ("loss", "stage", "reward", "problems_visited", "problems_retired", "problems_resting")
    assert [[m[k] for k in same] for m in one] == [[m[k] for k in same] for m in other]
    assert [m["stage"] for m in one] == ["short", "short", "long", "long"]
    assert all(m["problems_visited"] >= 4 for m in one)
    assert any(m["problems_resting"] + m["problems_retired"] for m in one)
    files = [(tmp_path / n / "problems.jsonl").read_text() for n in ("whole", "cut")]
    assert files[0] == files[1]
    counted = sum(json.loads(line)["samples"] for line in files[0].splitlines())
    assert counted == len(rollouts(tmp_path / "whole"))


def test_asynchronous_stages_killed_and_resumed_lose_no_group(
    tmp_path: Path, one_layer: str
) -> None:
    stages = [{**STAGES[0], "until": {"updates": 2}}, STAGES[1]]
    config = small_config(
        tmp_path / "run",
        model=one_layer,
        pipeline=SIZES | {"updates": 6},
        stages=stages,
        checkpoint={"every": 1},
    )
    killed = forked.start(forked.train_killed_at, config.model_dump_json(), 3)
    assert forked.end(killed) == -signal.SIGKILL
    folder, resumed = open_run(tmp_path / "run")
    train(resumed, QuietScreen(), folder)
    check_stages(tmp_path / "run", config)
    assert [m["stage"] for m in folder.metrics()] == ["short"] * 2 + ["long"] * 4


def test_a_run_whose_problems_are_all_solved_ends_early_and_cleanly(tmp_path: Path) -> None:
    """Four problems that are solved each time; two per batch make two updates."""
    file = tmp_path / "solved.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in solved_greedily(4)))
    config = small_config(
        tmp_path / "run",
        data={"train": str(file), "curriculum": {"retire_after": 1}},
        pipeline={
            "updates": 5,
            "n_batch": 4,
            "n_async": 4,
            "group_size": 2,
            "max_staleness": 0,
            "diversity": "none",
        },
        generator={"temperature": 0.001},
        trainer={"parity_tolerance": 1.0},
    )
    result = train(config, QuietScreen())
    assert result.finished and result.updates == 2
    assert "no problem is left after update 2" in (tmp_path / "run/events.log").read_text()
    rows = [json.loads(x) for x in (tmp_path / "run/problems.jsonl").read_text().splitlines()]
    assert [(r["visits"], r["pass_rate"], r["retired"]) for r in rows] == [(1, 1.0, True)] * 4
    with pytest.raises(InputError, match="finished"):
        open_run(tmp_path / "run")


def solved_greedily(count: int) -> list[dict[str, str]]:
    """Problems with the answers that the shipped base model gives at temperature 0."""
    world = PlaygroundConfig(levels=(1, 2), languages=("en",))
    drawn = playground.problems("train", 0, world.levels, world.languages, world.kinds, count=48)
    problems = list(drawn)
    generator = Generator.load("tiny", small_config(Path()).generator, 48, 300)
    tokenizer = loading.load_tokenizer("tiny")
    sampling = SamplingParams(96, temperature=0)
    generator.submit(
        [
            Completion.requested(i, 0, PromptEncoder(tokenizer).encode(p.problem), i, sampling)
            for i, p in enumerate(problems)
        ]
    )
    found = []
    while generator.pending():
        for c in generator.step():
            problem = problems[c.group]
            told = grade(problem, c.text, len(c.token_ids), VerifierConfig(), 96, 32)
            if told.answer is not None and told.verdict in ("right", "wrong"):
                found.append({"problem": problem.problem, "answer": told.answer})
    assert len(found) >= count
    return found[:count]


def test_resolved_arithmetic_has_a_line_a_stage(tmp_path: Path) -> None:
    config = small_config(tmp_path, pipeline=SIZES, stages=STAGES)
    lines = resolved(prepare(config))
    assert lines["stage short"].startswith("2 updates; l_max 40, penalty from 20; n_async 24, ")
    assert lines["stage long"].startswith("to update 4; l_max 96, penalty from 64; n_async 12, ")
    assert "n_batch 8, n_minibatch 4, about 1.5 policies a sequence" in lines["stage long"]
    short, long = (
        float(lines[f"stage {n}"].split("KV cache ")[1].split()[0]) for n in ("short", "long")
    )
    # Twice the length, half the sequences.
    assert long <= short
    # One sequence takes 1.95 MiB in the first stage and 2.27 in the second: 5 KiB a position, in
    # lanes of 304 and 96, or of 352 and 112.
    tight = {"kv_cache_mib": 5, "workers": 2}
    lines = resolved(
        prepare(small_config(tmp_path, pipeline=SIZES, stages=STAGES, generator=tight))
    )
    assert lines["generators"] == "2, of 1, 1 slots"
    tight = {"kv_cache_mib": 2}
    with pytest.raises(InputError, match=r"stages\.1: .*kv_cache_mib 2 .* lower stages\.1\.l_max"):
        prepare(small_config(tmp_path, pipeline=SIZES, stages=STAGES, generator=tight))
    context = loading.context_length(loading.load_config("tiny")) or 0
    stages = [STAGES[0], {**STAGES[1], "l_max": context - 10}]
    with pytest.raises(InputError, match=rf"context of {context:,} leaves 10 next to completions"):
        prepare(small_config(tmp_path, pipeline=SIZES, stages=stages))
