"""Runs that are resumed with changes."""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tramontane
from tests.controller.test_pipeline import check_ledger
from tests.run.test_learning_signal import cut_short
from tests.runs import begun, small_config
from tests.view.reports import answers_of
from tramontane.config import Config
from tramontane.errors import InputError
from tramontane.run.changes import (
    begins_again,
    changes_cold_start,
    check_changes,
    open_run,
    record_changes,
)
from tramontane.run.checks import NoSignal
from tramontane.run.folder import RunFolder
from tramontane.trainer.optimizer import lr_at

SIZES = {"updates": 4, "n_batch": 16, "n_async": 32}


def train(config: Config | None = None, stop_after: int = 0, **keywords: Any) -> Any:
    def stop(metrics: Mapping[str, Any]) -> None:
        if metrics["update"] == stop_after:
            signal.raise_signal(signal.SIGINT)

    return tramontane.train(config, quiet=True, on_update=stop, report=False, **keywords)


@pytest.mark.slow
def test_changes_take_effect_are_recorded_and_shown(tmp_path: Path, one_layer: str) -> None:
    run = tmp_path / "run"
    trainer = {"learning_rate": 1e-3, "schedule": "linear", "microbatch_tokens": 2048}
    sizes = SIZES | {"l_max": 48, "diversity": "none"}
    config = small_config(run, model=one_layer, pipeline=sizes, trainer=trainer)
    assert not train(config, stop_after=1).finished
    done = len(RunFolder(run).metrics())
    overrides = [
        "trainer.learning_rate=1e-4",
        "trainer.microbatch_tokens=1024",
        "trainer.objective.magistral.eps_high=0.3",
        "generator.workers=2",
        "pipeline.n_async=16",
        "timeouts.batch=200",
    ]
    assert not train(resume=run, overrides=overrides, stop_after=done + 1).finished
    second = len(RunFolder(run).metrics())
    assert done < second < 4
    result = train(resume=run, overrides={"trainer.learning_rate": 1e-5})
    assert result.finished and result.updates == 4

    # The scheduled learning rate of each update, under the value that it began with.
    rates = [m["learning_rate"] for m in RunFolder(run).metrics()]
    peaks = [1e-3 if n < done else 1e-4 if n < second else 1e-5 for n in range(4)]
    assert rates == [pytest.approx(lr_at(n, 4, 0, "linear", peaks[n])) for n in range(4)]
    before = config.model_dump()
    rows = [json.loads(line) for line in (run / "changes.jsonl").read_text().splitlines()]
    assert [(r["update"], r["key"], r["before"], r["after"]) for r in rows] == [
        (done + 1, "pipeline.n_async", 32, 16),
        (done + 1, "generator.workers", 1, 2),
        (done + 1, "trainer.learning_rate", 1e-3, 1e-4),
        (done + 1, "trainer.microbatch_tokens", 2048, 1024),
        (done + 1, "trainer.objective.magistral.eps_high", 0.28, 0.3),
        (done + 1, "timeouts.batch", before["timeouts"]["batch"], 200.0),
        (second + 1, "trainer.learning_rate", 1e-4, 1e-5),
    ]
    changed = RunFolder(run).config()
    assert (changed.trainer.learning_rate, changed.generator.workers) == (1e-5, 2)
    events = (run / "events.log").read_text()
    assert f"changed from update {second + 1} on: trainer.learning_rate 0.0001 → 1e-05" in events
    check_ledger(run, changed)

    # A finished run continues when it gets more updates.
    with pytest.raises(InputError, match=r"finished.*pipeline\.updates=8"):
        train(resume=run)
    result = tramontane.train(resume=run, overrides=["pipeline.updates=5"], quiet=True)
    assert result.finished and result.updates == 5 == result.summary["updates"]
    assert [m["update"] for m in RunFolder(run).metrics()] == [1, 2, 3, 4, 5]
    rates = [m["learning_rate"] for m in RunFolder(run).metrics()]
    assert rates[4] == pytest.approx(1e-5 / 5)
    check_ledger(run, RunFolder(run).config())
    changes = answers_of(run / "report.html")["summary"]["changes"]
    assert "trainer.objective.magistral.eps_high" in {change["key"] for change in changes}


@pytest.mark.slow
def test_a_run_without_updates_begins_again_with_any_change(tmp_path: Path, one_layer: str) -> None:
    run = tmp_path / "run"
    config = cut_short(
        run,
        model=one_layer,
        data={"eval": "playground:"},
        evaluation={"problems": 4, "samples": 2},
    )
    with pytest.raises(NoSignal):
        train(config)
    result = train(resume=run, overrides=["pipeline.l_max=96", "data.playground.levels=[1, 1]"])
    assert result.finished and result.updates == 2
    assert result.pass_at_1.before is not None
    # Measured again: completions of four tokens cannot be right.
    assert result.summary["format_rate"]["before"] > 0
    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [row["when"] for row in rows] == ["before", "after"]
    assert [row["key"] for row in RunFolder(run).changes()] == [
        "data.playground.levels",
        "pipeline.l_max",
    ]


def folder_at(path: Path, version: int) -> RunFolder:
    """A run folder that looks as if it had a checkpoint."""
    folder = begun(small_config(path, pipeline=SIZES))
    (folder.checkpoints / f"update_{version}").mkdir()
    return folder


def test_what_may_not_change_is_refused_with_the_reason_and_the_remedy(tmp_path: Path) -> None:
    folder_at(tmp_path / "run", 3)
    with pytest.raises(InputError) as error:
        open_run(tmp_path / "run", ["pipeline.l_max=200", "seed=4", "trainer.learning_rate=1e-5"])
    message = str(error.value)
    assert "pipeline.l_max: groups under way were handed out with it" in message
    assert "seed: groups under way drew from it" in message
    assert "learning_rate" not in message
    assert "update_3/weights, as its model, with seed=4 pipeline.l_max=200" in message


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("pipeline.l_max=200", True),
        ("data.system_prompt=magistral", False),
        ("data.effort.low={phrase: Be brief.}", False),
        ("seed=4", False),
    ],
)
def test_a_run_that_begins_again_keeps_a_cold_start_that_would_be_the_same(
    tmp_path: Path, override: str, kept: bool
) -> None:
    folder = folder_at(tmp_path / "run", 0)
    (folder.path / "sft").mkdir()
    (folder.path / "evaluation_base.jsonl").touch()
    changes = check_changes(folder, folder.config([override]))
    assert begins_again(folder, changes)
    folder.forget_start(cold_start=changes_cold_start(changes))
    assert (folder.path / "sft").is_dir() == kept
    assert not (folder.path / "evaluation_base.jsonl").exists()
    assert not list(folder.checkpoints.iterdir())


@pytest.mark.parametrize(
    ("version", "override", "message"),
    [
        (3, "pipeline.updates=2", "updates 2 is below the 3 updates that are done"),
        (3, "trainer.learning_rat=2", "did you mean 'learning_rate'"),
        (3, "trainer.ranks=3000", "3000 ranks share a minibatch"),
        (0, "run_dir=elsewhere", "run_dir: the run has its folder already"),
    ],
)
def test_changes_that_make_no_sense_are_refused(
    tmp_path: Path, version: int, override: str, message: str
) -> None:
    folder_at(tmp_path / "run", version)
    before = (tmp_path / "run/config.yaml").read_text()
    with pytest.raises(InputError, match=message):
        open_run(tmp_path / "run", [override])
    assert (tmp_path / "run/config.yaml").read_text() == before


def test_a_change_begins_earlier_when_the_run_falls_back_to_an_older_checkpoint(
    tmp_path: Path,
) -> None:
    folder = folder_at(tmp_path / "run", 2)
    folder.write_changes([{"update": 5, "key": "timeouts.batch", "before": 1, "after": 2}])
    record_changes(folder, folder.config(), [], version=2)
    assert [row["update"] for row in folder.changes()] == [3]
