"""Whole runs whose completions are conversations: killed, resumed, on Ray, with vLLM."""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.controller.test_pipeline import check_ledger, rollouts, weights
from tests.docs.pages import blocks
from tests.paths import ROOT
from tests.run.test_resume import start, wait_until
from tests.runs import small_config
from tramontane.config import Config, load_config
from tramontane.models.loading import load_tokenizer
from tramontane.run.changes import open_run
from tramontane.run.checkpoint import read_pipeline
from tramontane.run.folder import RunFolder
from tramontane.run.metrics import waited_for
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.tokens import INSERTED
from tramontane.types import FAILED, Completion

VLLM = pytest.param("vllm", marks=pytest.mark.vllm)


def talking(folder: Path, **sections: Any) -> Config:
    sections["pipeline"] = {"l_max": 192, "diversity": "none"} | sections.get("pipeline", {})
    data = {"environment": "tests.controller.talking:Talk"} | sections.pop("data", {})
    return small_config(folder, data=data, **sections)


def elsewhere(kind: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The model, and the sections of a config that move the workers to Ray, or the generator to
    vLLM, which has the shipped model."""
    if kind == "vllm":
        request.getfixturevalue("vllm_environment")
        return {"generator": {"kind": kind}}
    model = {"model": request.getfixturevalue("one_layer")}
    if kind == "thread":
        return model
    # Joined by its address from another process, too.
    address = request.getfixturevalue("ray_cluster").address
    return model | {"placement": {"kind": kind, "address": address}}


def check_turns(rows: list[dict[str, Any]]) -> None:
    """A turn's tokens are its text, and only what is between two turns was inserted."""
    tokenizer = load_tokenizer("tiny")
    for row in rows:
        spans = [range(turn["start"], turn["end"]) for turn in row["turns"]]
        sampled = [i for i, version in enumerate(row["versions"]) if version != INSERTED]
        assert sampled == [i for span in spans for i in span]
        for turn, span in zip(row["turns"], spans, strict=True):
            ids = [row["token_ids"][i] for i in span]
            ids = ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids
            assert tokenizer.decode(ids) == turn["text"]
        assert row["text"] == "\n\n".join(turn["text"] for turn in row["turns"])
        assert row["ending"] in ("completed", "max_tokens", "context_full")
        assert len(row["token_ids"]) <= 192
        for i, span in enumerate(spans[1:]):
            put = tokenizer.decode(row["token_ids"][spans[i].stop : span.start])
            assert "Go on!" in put
    assert len({len(row["turns"]) for row in rows}) > 2


@pytest.mark.slow
def test_an_exception_fails_its_conversation_and_not_the_run(
    tmp_path: Path, one_layer: str
) -> None:
    data = {"environment": "tests.controller.talking:Tears"}
    config = talking(tmp_path, model=one_layer, data=data, pipeline={"updates": 2})
    train(config, QuietScreen())
    events = (tmp_path / "events.log").read_text()
    assert events.count("Traceback") == 1 and "conversation " in events
    assert "AttributeError: 'NoneType' object has no attribute 'copy'" in events
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 2]


@pytest.mark.slow
def test_a_synchronous_run_of_conversations_killed_and_resumed_repeats(
    tmp_path: Path, one_layer: str
) -> None:
    sizes = {"updates": 3, "n_batch": 8, "group_size": 4, "max_staleness": 0}
    sections = {"model": one_layer, "pipeline": sizes, "generator": {"workers": 2}}
    train(talking(tmp_path / "whole", **sections), QuietScreen())
    cut = talking(tmp_path / "cut", checkpoint={"every": 1}, **sections)
    killed = forked.start(forked.train_killed_at, cut.model_dump_json(), 2)
    assert forked.end(killed) == -signal.SIGKILL
    folder, config = open_run(tmp_path / "cut")
    train(config, QuietScreen(), folder)
    a, b = weights(tmp_path / "whole", 3), weights(tmp_path / "cut", 3)
    assert all(torch.equal(a[k], b[k]) for k in a)
    one, other = (rollouts(tmp_path / n) for n in ("whole", "cut"))
    assert [r["token_ids"] for r in one] == [r["token_ids"] for r in other]
    check_turns(one)
    for metrics in RunFolder(tmp_path / "whole").metrics():
        assert metrics["waited_for"].keys() == {"environment"}
        assert 0 < metrics["waited_for"]["environment"] < metrics["wall_seconds"]


def under_way(checkpoint: Path) -> dict[tuple[int, int], Completion]:
    """The unfinished conversations of a checkpoint."""
    return {
        (request.group, request.index): request.copy()
        for group, _ in read_pipeline(checkpoint).snapshot.all_groups()
        for request in group.thaw().requests
    }


def newest_is_amid_conversations(run: Path) -> bool:
    taken = sorted((run / "checkpoints").glob("update_[0-9]"))
    return bool(taken) and any(request.turns for request in under_way(taken[-1]).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "replay"),
    [
        ("thread", False),
        ("ray", True),
        pytest.param("vllm", False, marks=pytest.mark.vllm),
        pytest.param("vllm", True, marks=pytest.mark.vllm),
    ],
)
def test_a_run_killed_amid_conversations_loses_none(
    tmp_path: Path, kind: str, replay: bool, request: pytest.FixtureRequest
) -> None:
    sizes = {"updates": 6, "n_batch": 8, "n_async": 24, "group_size": 4, "max_staleness": 4}
    config = talking(
        tmp_path / "run",
        pipeline=sizes,
        checkpoint={"every": 2},
        conversation={"replay": replay},
        data={"environment": "tests.controller.talking:Slow"},
        **elsewhere(kind, request),
    )
    process = start(config, tmp_path)
    wait_until(partial(newest_is_amid_conversations, tmp_path / "run"), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    folder, resumed = open_run(tmp_path / "run")
    checkpoint = folder.whole_checkpoint(pytest.fail)
    assert checkpoint is not None
    begun, update = under_way(checkpoint), int(checkpoint.name.removeprefix("update_"))
    assert any(request.turns for request in begun.values())
    train(resumed, QuietScreen(), folder)
    check_ledger(tmp_path / "run", config)
    rows = rollouts(tmp_path / "run")
    check_turns(rows)
    kept = [r for r in rows if (r["group"], r["index"]) in begun and r["update"] > update]
    assert kept
    for row in kept:
        before = begun[row["group"], row["index"]]
        same = row["token_ids"][: len(before.token_ids)] == before.token_ids.tolist()
        # Without a replay, only a first turn goes on where it was.
        assert same or (bool(before.turns) and not replay)
    metrics = folder.metrics()
    assert max(m["staleness_max"] for m in metrics) <= 4
    restarted = metrics[-1]["conversations_replayed" if replay else "conversations_restarted"]
    n = sum(bool(request.turns) for request in begun.values())
    assert restarted == n
    again = f"{n} replayed, 0 restarted" if replay else f"0 replayed, {n} restarted"
    assert f"{n} conversations under way: {again}" in (tmp_path / "run/events.log").read_text()


@pytest.mark.slow
def test_tool_integrated_reasoning_runs_at_a_tiny_size(tmp_path: Path, one_layer: str) -> None:
    """`configs/tir.yaml`, on the playground's sessions."""
    data = ["train=playground:", "eval=null", "playground={levels: [1, 2], kinds: [sessions]}"]
    sizes = "{updates: 2, group_size: 4, n_batch: 8, n_async: 8, l_max: 160, l_cache: 64}"
    given = [*(f"data.{key}" for key in data), f"pipeline={sizes}", "pipeline.diversity=none"]
    given += ["generator.device=cpu", "trainer.device=cpu", "trainer.microbatch_tokens=2048"]
    given += [
        f"model={one_layer}",
        f"run_dir={tmp_path}",
        "conversation.workers=1",
        "verifier.workers=1",
    ]
    config = load_config(ROOT / "configs" / "tir.yaml", given)
    assert config.data.tools == ("python",)
    train(config, QuietScreen())
    rows = [row for row in rollouts(tmp_path) if row["update"] is not None]
    assert len(rows) == 16 and all(row["ending"] not in FAILED for row in rows)


def trained_on_two_turns(config: Config) -> list[dict[str, Any]]:
    """The completed conversations of a run whose harness asks twice."""
    assert train(config, QuietScreen()).updates == 2
    folder = Path(str(config.run_dir))
    check_ledger(folder, config)
    rows = rollouts(folder)
    assert {row["ending"] for row in rows} <= {"completed", "max_tokens", "context_full"}
    done = [row for row in rows if row["ending"] == "completed"]
    assert len(done) > len(rows) / 2 and all(len(row["turns"]) == 2 for row in done)
    return done


@pytest.mark.slow
def test_a_run_trains_on_what_a_harness_does(tmp_path: Path, monkeypatch: Any) -> None:
    """The harness of docs/endpoint.md, with the client of OpenAI."""
    pytest.importorskip("openai", reason="openai is not installed")
    harness = next(b for b in blocks(ROOT / "docs" / "endpoint.md", "python") if "class " in b)
    (tmp_path / "docs_reviewer.py").write_text(harness)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = small_config(
        tmp_path / "run",
        data={"environment": "docs_reviewer:Reviewer"},
        pipeline={"l_max": 192, "diversity": "none"},
        conversation={"reward": "last"},
    )
    trained_on_two_turns(config)
    metrics = RunFolder(tmp_path / "run").metrics()
    assert all(m["groups_unscorable"] == 0 and m["parked_share"] < 1 for m in metrics)
    # None are parked during an update whose conversations had all ended before it.
    assert metrics[0]["parked_share"] > 0


TRAINS = """vf.TrainClientConfig(
            base_url=base_url, renderer_model_name=TINY, renderer={"name": "default"}
        )"""


@pytest.mark.slow
@pytest.mark.parametrize("client", ["messages", "tokens"])
def test_a_run_trains_on_a_multi_turn_environment_of_verifiers(
    tmp_path: Path, monkeypatch: Any, client: str
) -> None:
    """The harness of docs/endpoint.md, with either client."""
    pytest.importorskip("verifiers", reason="needs tramontane-rl[verifiers]", exc_type=ImportError)
    harness = next(b for b in blocks(ROOT / "docs" / "endpoint.md", "python") if "Player" in b)
    harness = harness.replace("my_taskset", "checked_sums_taskset")
    if client == "tokens":
        sent = 'vf.EvalClientConfig(base_url=base_url, api_key_var="NO_KEY")'
        assert sent in harness
        tiny = load_tokenizer("tiny").name_or_path
        harness = f"TINY = {tiny!r}\n{harness.replace(sent, TRAINS)}"
    (tmp_path / f"docs_{client}.py").write_text(harness)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "tests/verifier"))
    tasks = tmp_path / "tasks.jsonl"
    rows = [{"problem": f"Task {i}", "answer": "-", "idx": i} for i in range(5)]
    tasks.write_text("\n".join(map(json.dumps, rows)))
    config = small_config(
        tmp_path / "run",
        data={"environment": f"docs_{client}:Player", "train": str(tasks)},
        pipeline={"l_max": 320, "diversity": "none"},
        conversation={"reward": "last"},
    )
    done = trained_on_two_turns(config)
    put = [row["turns"][0]["messages"] for row in done]
    assert all("Check it." in messages[0]["content"] for messages in put if messages)
    assert {row["turns"][1]["reward"] for row in done} & {0.2, 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ray", VLLM])
def test_conversations_elsewhere(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    """The environments and a tool on Ray, or the tokens from vLLM."""
    data, where = {"tools": ["calculator"]}, elsewhere(kind, request)
    sizes = {"updates": 2, "n_batch": 16, "n_async": 16, "group_size": 4}
    config = talking(tmp_path, pipeline=sizes, data=data, **where)
    train(config, QuietScreen())
    check_ledger(tmp_path, config)
    rows = rollouts(tmp_path)
    check_turns(rows)
    assert all("calculator" in load_tokenizer("tiny").decode(row["prompt_ids"]) for row in rows)
    for metrics in RunFolder(tmp_path).metrics():
        assert sum(metrics["endings"].values()) == pytest.approx(1)
        assert metrics["sampled_tokens"] > metrics["inserted_tokens"] > 0
        assert (
            0 < metrics["step_seconds"]["environment"] <= metrics["step_seconds_max"]["environment"]
        )


def test_the_trainer_s_wait_is_counted_by_tool_and_once() -> None:
    steps = [(0.0, 2.0, "python"), (1.0, 3.0, "python"), (2.5, 2.6, "python"), (2.0, 9.0, "search")]
    assert waited_for((1.5, 4.0), steps) == {"python": 1.5, "search": 2.0}
    assert waited_for((9.0, 10.0), steps) == {}
