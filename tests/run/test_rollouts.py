"""Rollouts in Parquet: what is written is what pandas-like readers and our own get back."""

import io
import math
from array import array
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.controller.driven import verdict
from tests.runs import small_config
from tramontane.audit.audit import audit
from tramontane.batches import Batch, BatchSettings
from tramontane.controller.observer import Update
from tramontane.errors import InputError
from tramontane.journals import read_log
from tramontane.run.columns import TOKEN_FIELDS
from tramontane.run.folder import RunFolder
from tramontane.run.metrics import conversation_metrics
from tramontane.run.rollouts import (
    COLUMNS,
    SAMPLED_GROUPS,
    file_name,
    files,
    groups_to_record,
    read_rollouts,
    write_rollouts,
)
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.tokens import INSERTED, EarlierSequence, floats
from tramontane.types import (
    Completion,
    FilterReason,
    Group,
    Problem,
    ToolCall,
    TrainedFigures,
    TurnRecord,
)
from tramontane.view.report import write_report

PROBLEM = Problem("p", "math", "1 + 1?", "2", language="en", difficulty=3)
SETTINGS = BatchSettings("", 1.0, 8, 8)


def completion(group: int, index: int, spans: list[tuple[int, int]]) -> Completion:
    versions = [version for version, tokens in spans for _ in range(tokens)]
    ids = [7 * i + index for i in range(len(versions))]
    logprobs = [-0.1 * i - 1e-3 * index for i in range(len(versions))]
    return Completion(group, index, [1], ids, logprobs, versions, "stop", f"text {group}/{index}")


def group(number: int, spans: list[list[tuple[int, int]]]) -> Group:
    completions = [completion(number, i, s) for i, s in enumerate(spans)]
    verdicts = [verdict(right=i % 2 == 0) for i in range(len(spans))]
    return Group(number, PROBLEM, completions, verdicts)


SPANS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=4)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(SPANS, min_size=1, max_size=3), max_size=4))
def test_rows_come_back_as_they_were_written(spans: list[list[list[tuple[int, int]]]]) -> None:
    groups = [group(number, sequences) for number, sequences in enumerate(spans)]
    reasons = [FilterReason("unscorable", "late") if g.id % 2 else None for g in groups]
    file = io.BytesIO()
    write_rollouts(file, 5, list(zip(groups, reasons, strict=True)), ["correctness"])
    rows = list(read_rollouts(file))  # type: ignore[arg-type]
    whole = [(g, c, v) for g in groups for c, v in zip(g.completions, g.verdicts, strict=True)]
    assert len(rows) == len(whole)
    for row, (g, c, v) in zip(rows, whole, strict=True):
        assert (row["update"], row["group"], row["index"]) == (5, g.id, c.index)
        assert (row["problem"], row["reference"], row["difficulty"]) == ("1 + 1?", "2", 3)
        assert (row["token_ids"], row["versions"]) == ([*c.token_ids], [*c.versions])
        assert floats(row["logprobs"]) == c.logprobs  # exactly: float32 in, float32 out
        assert (row["text"], row["reward"], row["parts"]) == (c.text, v.reward, v.parts)
        assert row["filtered"] == (None if g.id % 2 == 0 else "unscorable")
    spans_column = pq.read_table(file, columns=["version_spans"])["version_spans"].to_pylist()
    # Neighboring spans differ, so a span is a run.
    assert all(a["version"] != b["version"] for s in spans_column for a, b in pairwise(s))


def test_the_columns_are_those_that_are_documented(tmp_path: Path) -> None:
    file = io.BytesIO()
    write_rollouts(file, 1, [(group(0, [[(0, 3)]]), None)], ["format", "correctness"])
    schema = pq.read_schema(file)
    assert schema.names == [*(field.name for field in COLUMNS), "parts"]
    assert [f.name for f in schema.field("parts").type] == ["format", "correctness"]
    assert {f.name for f in TOKEN_FIELDS} <= set(schema.names)
    page = Path("docs/pipeline.md").read_text()
    assert all(f"`{name}`" in page for name in schema.names)


@pytest.mark.parametrize(("policy", "trained", "filtered"), [("all", 40, 3), ("none", 0, 0)])
def test_groups_that_are_recorded(tmp_path: Path, policy: str, trained: int, filtered: int) -> None:
    assert counts(tmp_path, policy) == (trained, filtered)


def test_a_sample_has_some_groups_of_each_kind(tmp_path: Path) -> None:
    assert counts(tmp_path, "sample") == (-(-40 // SAMPLED_GROUPS), 1)


def counts(tmp_path: Path, policy: str) -> tuple[int, int]:
    batch = Batch(0, [group(i, [[(0, 1)]]) for i in range(40)], SETTINGS)
    reason = FilterReason("no diversity")
    filtered = [(group(i, [[(0, 1)]]), reason) for i in range(40, 43)]
    update = Update(1, batch, filtered, {}, 0.0, 0.0)
    found = groups_to_record(update, small_config(tmp_path, rollouts=policy))
    return sum(r is None for _, r in found), sum(r is not None for _, r in found)


@pytest.mark.slow
def test_a_run_without_rollouts_has_a_report_and_no_audit(tmp_path: Path, one_layer: str) -> None:
    config = small_config(
        tmp_path, model=one_layer, rollouts="none", pipeline={"updates": 1, "n_batch": 16}
    )
    train(config, QuietScreen())
    assert files(RunFolder(tmp_path).rollouts) == []
    assert write_report(tmp_path).is_file()
    with pytest.raises(InputError, match="rollouts: none"):
        audit(tmp_path)


def test_a_trained_group_has_the_trainers_advantages_and_log_ratios(tmp_path: Path) -> None:
    batch = Batch(0, [group(0, [[(0, 2)], [(0, 3)]]), group(1, [[(0, 1)], []])], SETTINGS)
    sampled = floats([p for c in batch.completions for p in c.logprobs])
    trained = floats([p + 0.25 for p in sampled])
    batch.learned = TrainedFigures(array("d", [1.5, -1.5, 0.5, -0.5]), trained)
    batch.share_learned()
    filtered = (group(2, [[(0, 1)]]), FilterReason("no diversity"))
    file = io.BytesIO()
    write_rollouts(file, 1, [*((g, None) for g in batch.groups), filtered], ["correctness"])
    rows = list(read_rollouts(file))  # type: ignore[arg-type]
    assert [r["advantage"] for r in rows] == [1.5, -1.5, 0.5, -0.5, None]
    found = [r["log_ratios"] for r in rows]
    assert [ratios if ratios is None else len(ratios) for ratios in found] == [2, 3, 1, 0, None]
    assert [x for ratios in found[:4] for x in ratios] == pytest.approx([0.25] * 6, abs=1e-6)


@pytest.mark.slow
def test_a_runs_rollouts_hold_what_its_metrics_say(tmp_path: Path, one_layer: str) -> None:
    config = small_config(tmp_path, model=one_layer, pipeline={"updates": 2, "n_minibatch": 8})
    train(config, QuietScreen())
    for metrics in RunFolder(tmp_path).metrics():
        rows = list(read_rollouts(tmp_path / "rollouts" / file_name(metrics["update"])))
        trained = [row for row in rows if row["filtered"] is None]
        ratios = [math.exp(x) for row in trained for x in row["log_ratios"]]
        assert sum(ratios) / len(ratios) == pytest.approx(metrics["ratio"], rel=1e-5)
        for first in range(0, 16, 8):  # normalized in each minibatch, in the order of the batch
            advantages = np.array([row["advantage"] for row in trained[first : first + 8]])
            assert advantages.mean() == pytest.approx(0, abs=1e-9)
            assert advantages.std() == pytest.approx(1)
        assert all(row["advantage"] is None for row in rows if row["filtered"])
    timeline = list(read_log(tmp_path / "timeline.jsonl"))
    steps = [r for r in timeline if (r["worker"], r["activity"]) == ("trainer", "step")]
    assert len(steps) == 2
    assert steps[0]["began"] + steps[0]["seconds"] <= steps[1]["began"]


def conversations() -> Group:
    """A forked conversation with two calls, and one that ended at once."""
    calls = [ToolCall("add", {"a": [1]}, "3", seconds=0.5), ToolCall("", {}, "not JSON", True, 0.1)]
    turns = [
        TurnRecord(0, 2, 0, "call", [{"role": "tool", "content": "3 \ud83d"}], calls, 0.5, 2.0),
        TurnRecord(0, 1, 1, "answer", reward=1.0, seconds=1.0),
    ]
    forked = Completion(7, 0, [1, 4], [5], [-0.5], [1], "stop", "call\n\nanswer", turns=turns)
    forked.ending = "completed"
    forked.earlier = [EarlierSequence([1], [2, 3, 9], [-1.0, -2.0, 0.0], [0, 0, INSERTED])]
    failed = Completion(7, 1, [1], [5, 6], [-1.0, -3.0], [1, 1], "stop")
    failed.ending, failed.ending_reason = "environment_failed", "KeyError: 'a'"
    learned = TrainedFigures(array("d", [1.0, -1.0]), floats([-1, -2, 0, -1.5, -1, -2.5]))
    return Group(7, PROBLEM, [forked, failed], [verdict(True), verdict(False)], learned)


def test_conversations_are_recorded_turn_by_turn(tmp_path: Path) -> None:
    group = conversations()
    with (tmp_path / "update_000001.parquet").open("wb") as file:
        write_rollouts(file, 1, [(group, None)], ["correctness"])
    forked, failed = read_rollouts(tmp_path / "update_000001.parquet")
    assert (forked["ending"], forked["ending_reason"]) == ("completed", "")
    first, second = forked["turns"]
    assert first["calls"][0]["name"] == "add" and first["calls"][0]["arguments"] == '{"a": [1]}'
    answered = {"role": "tool", "content": "3 ?", "image_files": [], "image_tokens": None}
    assert first["calls"][1]["error"] and first["messages"] == [answered]
    assert (second["sequence"], second["reward"], second["seconds"]) == (1, 1.0, 1.0)
    (earlier,) = forked["earlier"]
    assert (earlier["prompt_ids"], earlier["token_ids"]) == ([1], [2, 3, 9])
    assert earlier["version_spans"] == [
        {"version": 0, "tokens": 2},
        {"version": INSERTED, "tokens": 1},
    ]
    assert forked["log_ratios"] == [-1.0] and failed["log_ratios"] == [0.0, 0.5]
    assert failed["ending_reason"] == "KeyError: 'a'" and failed["turns"] == []


def test_figures_of_conversations() -> None:
    assert conversation_metrics([]) == {}
    figures = conversation_metrics([conversations()])
    assert (figures["turns"], figures["calls"], figures["calls_parsed"]) == (1.0, 1.0, 0.5)
    assert (figures["sampled_tokens"], figures["inserted_tokens"]) == (2.5, 0.5)
    assert (figures["forked_rate"], figures["calls_failed"]) == (0.5, 0.5)
    assert {e: x for e, x in figures["endings"].items() if x} == {
        "completed": 0.5,
        "environment_failed": 0.5,
    }
    assert figures["step_seconds"] == {"environment": 1.5, "add": 0.5}
    assert figures["step_seconds_max"] == {"environment": 2.0, "add": 0.5}
