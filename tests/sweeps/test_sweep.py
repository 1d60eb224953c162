"""A sweep: refused as a whole or run as a whole, killed and continued, a failed run by itself."""

import csv
import os
import signal
from pathlib import Path

import pytest
import yaml

import tramontane
from tests.forked import Command
from tests.run.test_resume import wait_until
from tests.runs import SMALL
from tramontane.errors import InputError
from tramontane.run.folder import RunFolder
from tramontane.workplace import owned_folder


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(SMALL))
    return file


def test_all_faults_are_named_with_their_cells_before_any_run(config, tmp_path):
    keys = ["trainer.learning_rate=1e-4,fast", "pipeline.l_max=96,-1", "lernrate=1,2", "seed=0,1"]
    with pytest.raises(InputError) as error:
        tramontane.sweep(config, keys, out=tmp_path / "out")
    text = str(error.value)
    assert "every cell: " in text and "lernrate: unknown key" in text
    assert "cell learning_rate=fast,l_max=96,lernrate=1,seed=0 and 7 more: " in text
    assert "not 'fast'" in text
    assert "cell learning_rate=1e-4,l_max=-1,lernrate=1,seed=0 and 7 more: " in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["run_dir=a,b"], "set by the sweep"),
        (["trainer.learning_rate=1e-4,0.0001"], "the same run as learning_rate=1e-4"),
        (["trainer.learning_rate=[1e-4,3e-4]"], "several values .* separated by commas: seed=0,1"),
        (["data.playground.levels=1,2"], r"a list, not 1; write data.playground.levels: \[1\]"),
    ],
)
def test_values_that_make_no_run_are_refused(keys, message, config, tmp_path):
    with pytest.raises(InputError, match=message):
        tramontane.sweep(config, keys, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_has_one_sweep_at_a_time_and_its_runs_their_settings(config, tmp_path):
    out = tmp_path / "out"
    with owned_folder(out, "swept"), pytest.raises(InputError, match="being swept by process"):
        tramontane.sweep(config, ["seed=0,1"], out=out)
    (out / "seed=1").mkdir(parents=True)
    with pytest.raises(InputError, match="seed=1: a run with different settings"):
        tramontane.sweep(config, ["seed=0,1"], out=out)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_run_that_cannot_start_is_refused_with_the_others(config, tmp_path):
    with pytest.raises(InputError) as error:
        tramontane.sweep(config, ["model=tiny,nowhere/model", "seed=0,1"], out=tmp_path / "out")
    text = str(error.value)
    assert "cell model=nowhere-model-" in text and "and 1 more: " in text
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_dry_run_lists_the_cells_and_leaves_nothing(config, tmp_path):
    keys = ["trainer.learning_rate=1e-4,3e-4", "seed=0,1"]
    found = tramontane.sweep(config, keys, out=tmp_path / "out", at_once=1, dry_run=True)
    assert found.together == 1
    assert [row["config"]["seed"] for row in found.table.rows] == [0, 1, 0, 1]
    assert {row["state"] for row in found.table.rows} == {"not started"}
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_killed_sweep_continues_and_a_failed_run_does_not_stop_the_others(tmp_path, one_layer):
    out, file = tmp_path / "out", tmp_path / "small.yaml"
    small = SMALL | {"model": one_layer, "checkpoint": {"every": 1}}
    file.write_text(yaml.safe_dump(small | {"pipeline": SMALL["pipeline"] | {"updates": 3}}))
    asked = ("sweep", str(file), "trainer.learning_rate=1e-4,3e-4", "seed=0,1", "--out", str(out))
    process = Command(*asked)
    taken: list[Path] = []
    wait_until(
        lambda: bool(taken.extend(out.glob("*/checkpoints/update_1/manifest.json")) or taken),
        process,
    )
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    begun = taken[0].parents[2]
    before = RunFolder(begun).metrics()[0]["wall_seconds"]
    broken = out / "learning_rate=0.0003,seed=1"
    broken.mkdir(exist_ok=True)
    (broken / "config.yaml").write_text("name: cut")
    (out / f"{broken.name}.yaml").exists() or (out / f"{broken.name}.yaml").write_text("")
    process = Command(*asked)
    text = process.communicate()
    assert process.poll() == 2, text
    assert f"{broken.name}: the run failed (exit code 2)" in text
    assert "4/4" in text
    for folder in out.glob("learning_rate=*/"):
        assert RunFolder(folder).finished == (folder != broken)
    # What the killed run had trained was not trained again.
    assert RunFolder(begun).metrics()[0]["wall_seconds"] == before
    rows = list(csv.DictReader((out / "table.csv").open()))
    assert [row["seed"] for row in rows if row["state"] == "finished"] == ["0", "1", "0"]
    assert rows[0]["trainer.learning_rate"] == "0.0001" and float(rows[0]["reward"]) > 0
    assert (out / "table.md").read_text().count("\n") == 6
