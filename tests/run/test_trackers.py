"""Trackers: what they write to disk is what metrics.jsonl says, over a resume too."""

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import pytest

from tests.forked import Command
from tests.runs import small_config
from tests.view.pages import SIZE, group
from tramontane.config import Config
from tramontane.errors import InputError
from tramontane.journals import read_log
from tramontane.run import trackers
from tramontane.run.changes import open_run
from tramontane.run.folder import RunFolder
from tramontane.run.screen import QuietScreen
from tramontane.run.trackers import (
    TABLE_ROWS,
    TRACKERS,
    Trackers,
    completion_rows,
    evaluation_values,
    update_values,
)
from tramontane.run.train import train

Points = dict[int, float]  # values by step
BLOCK, FULL, LAST = 32768, 1, 4  # of LevelDB's logs
WRITTEN_SECONDS = 60

LINE = {"update": 3, "loss": -0.5, "reward": 0.75, "staleness_mean": 1.0, "stage": "easy",
        "generator_tokens_per_second": 900.0, "staleness_histogram": {"0": 5}}  # fmt: skip
NAMED = {
    "train/loss": -0.5,
    "train/reward": 0.75,
    "async/staleness_mean": 1.0,
    "perf/generator_tokens_per_second": 900.0,
}
FIGURES = {"when": "update_3", "set": "held_out", "version": 3, "n_problems": 9,
           "format_rate": 0.5, "pass_at_1": {"value": 0.4, "low": 0.3, "high": 0.5},
           "maj_at_k": {"1": {"value": 0.4, "low": 0.3, "high": 0.5},
                        "4": {"value": 0.6, "low": 0.5, "high": 0.7}}}  # fmt: skip


@pytest.fixture(autouse=True)
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tracker writes below `tmp_path`, and reaches no server."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("TRACKIO_PROJECT", f"test-{uuid4().hex}")


def test_names_are_those_that_users_of_trackers_expect() -> None:
    assert update_values(LINE) == NAMED
    failed = update_values({"failures": {"reward 'brief': KeyError (a.py:6, in brief)": 3}})
    assert failed == {"train/failures.reward _brief_ KeyError _a.py_6_ in brief_": 3.0}
    values = evaluation_values(FIGURES)
    assert values["eval/pass_at_1"] == 0.4 and values["eval/pass_at_1_low"] == 0.3
    assert values["eval/maj_at_4"] == 0.6 and "eval/maj_at_1" not in values
    assert values["eval/format_rate"] == 0.5
    assert "eval/gsm8k/pass_at_1" in evaluation_values({**FIGURES, "set": "gsm8k"})


def read_tensorboard(folder: Path) -> dict[str, Points]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {
        tag: {event.step: event.value for event in found.Scalars(tag)}
        for tag in found.Tags()["scalars"]
    }


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file: LevelDB's log format after a header of 7 bytes."""
    place, parts = 7, b""
    while place < len(data):
        if (left := BLOCK - place % BLOCK) < 7:  # too little for a header: filler
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7].ljust(7, b"\0"))
        if place + 7 + length > len(data):  # being written
            return
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def whole_wandb_file(file: Path) -> list[Any]:
    """The records of a finished run, whose service writes the last ones after `finish` returns."""
    from wandb.proto.wandb_internal_pb2 import Record

    deadline = time.monotonic() + WRITTEN_SECONDS
    while time.monotonic() < deadline:
        records = [Record.FromString(data) for data in wandb_records(file.read_bytes())]
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.05)
    raise TimeoutError(f"{file} has no record of the run's end after {WRITTEN_SECONDS} s")


def read_wandb(folder: Path) -> dict[str, Points]:
    found: dict[str, Points] = {}
    names = set()
    for file in sorted(folder.glob("wandb/*/run-*.wandb")):
        names.add(file.stem)
        for record in whole_wandb_file(file):
            items = {".".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            for key, value in items.items():
                if "/" in key:
                    found.setdefault(key, {})[int(items["_step"])] = json.loads(value)
    assert len(names) == 1, "a resumed run is the same run"
    return found


def read_trackio(folder: Path) -> dict[str, Points]:
    from trackio.sqlite_storage import SQLiteStorage

    project = os.environ["TRACKIO_PROJECT"]
    runs = SQLiteStorage.get_runs(project)
    names = {run["name"] if isinstance(run, dict) else run for run in runs}
    assert len(names) == 1, "a resumed run is the same run"
    found: dict[str, Points] = {}
    for row in SQLiteStorage.get_logs(project, names.pop()):
        for key, value in row.items():
            if "/" in key:
                found.setdefault(key, {})[int(row["step"])] = value
    return found


def read_mlflow(folder: Path) -> dict[str, Points]:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("tramontane")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.data.params["pipeline.n_batch"] == "16"
    return {
        key: {m.step: m.value for m in client.get_metric_history(run.info.run_id, key)}
        for key in run.data.metrics
    }


READERS: dict[str, Callable[[Path], dict[str, Points]]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "trackio": read_trackio,
    "mlflow": read_mlflow,
}


def at(version: int, value: float, when: str, name: str = "held_out") -> dict[str, Any]:
    """Figures of an evaluation."""
    passed = {"value": value, "low": 0.0, "high": 1.0}
    return {**FIGURES, "version": version, "when": when, "set": name, "pass_at_1": passed}


def tracked(folder: Path, name: str, model: str = "tiny") -> Config:
    return small_config(folder, model=model, trackers=[name])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "wandb" else n for n in READERS]
)
def test_a_tracker_has_every_update_once_over_a_resume(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name, reason="a tracker is not installed: pip install")
    folder = tmp_path / "run"
    folder.mkdir()
    config = tracked(folder, name)
    said: list[str] = []
    first = Trackers(folder, config, said.append)
    first.log_evaluation(at(0, 0.1, "before"))
    first.log_evaluation(at(0, 0.2, "before", "gsm8k"))
    for update in (1, 2, 3):
        first.log_update({**LINE, "update": update, "loss": float(update)})
    first.log_evaluation(FIGURES)
    first.close(finished=False)
    # The checkpoint was that of update 2, so update 3 is done again.
    second = Trackers(folder, config, said.append, version=2, reached=3)
    for update in (3, 4):
        second.log_update({**LINE, "update": update, "loss": 10.0 * update})
        if update == 3:
            second.log_evaluation(at(3, 0.9, "update_3"))
    second.close(finished=False)
    # It was stopped before the evaluation at its end, which is all that is left.
    third = Trackers(folder, config, said.append, version=4, reached=4)
    third.log_evaluation(at(4, 0.6, "after"))
    third.close(finished=True)
    assert said == []
    found = READERS[name](folder)
    again = 30.0 if name == "tensorboard" else 3.0  # the others cannot replace a value
    assert found["train/loss"] == {1: 1.0, 2: 2.0, 3: again, 4: 40.0}
    again = 0.9 if name == "tensorboard" else 0.4
    measured = {0: 0.1, 3: again, 4: 0.6}
    assert found["eval/pass_at_1"] == {k: pytest.approx(v) for k, v in measured.items()}
    assert found["eval/gsm8k/pass_at_1"] == {0: pytest.approx(0.2)}
    assert {"train/reward", "async/staleness_mean"} <= found.keys()


@pytest.mark.slow
def test_a_run_and_its_resumed_part_are_one_in_tensorboard(tmp_path: Path, one_layer: str) -> None:
    pytest.importorskip("tensorboard", reason="a tracker is not installed: pip install")
    folder = tmp_path / "run"
    config = tracked(folder, "tensorboard", one_layer)
    train(config, QuietScreen())
    opened, changed = open_run(folder, ["pipeline.updates=3"])
    train(changed, QuietScreen(), opened)
    rows = RunFolder(folder).metrics()
    found = read_tensorboard(folder)
    for key in ("loss", "reward", "entropy", "grad_norm", "learning_rate", "completion_tokens"):
        expected = {row["update"]: pytest.approx(row[key], rel=1e-5) for row in rows}
        assert found[f"train/{key}"] == expected
    assert len(rows) == 3


class Failing:
    """A tracker that fails at the second update."""

    run_id = "x"

    def __init__(self, *_: Any) -> None:
        self.steps: list[int] = []

    def log(self, step: int, values: Any) -> None:
        if step == 2:
            raise ConnectionError("no such host")
        self.steps.append(step)

    def close(self, finished: bool) -> None:
        raise AssertionError("it is not asked again")


@pytest.mark.slow
def test_a_tracker_that_fails_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_layer: str
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Failing)
    monkeypatch.setattr(trackers, "find_spec", lambda name: True)
    folder = tmp_path / "run"
    sections = {"model": one_layer, "pipeline": {"updates": 3}}
    result = train(small_config(folder, trackers=["wandb"], **sections), QuietScreen())
    assert result.finished and len(RunFolder(folder).metrics()) == 3
    events = (folder / "events.log").read_text()
    assert events.count("tracker wandb failed") == 1 and "no such host" in events


def test_what_cannot_be_started_is_said_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path / "run", trackers=["mlflow"])
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'tramontane-rl\[mlflow\]'"):
        train(config, QuietScreen())
    assert not (tmp_path / "run").exists()

    def refuse(*_: Any) -> Any:
        raise ConnectionError("no API key")

    monkeypatch.setattr(trackers, "find_spec", lambda name: True)
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", refuse)
    with pytest.raises(InputError, match="mlflow could not be started: no API key"):
        train(config, QuietScreen())
    assert list(read_log(tmp_path / "run/metrics.jsonl")) == []


def test_one_that_cannot_start_again_is_left_out_and_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kept(Failing):
        run_id = "kept"
        steps: ClassVar[list[int]] = []

        def __init__(self, *_: Any) -> None: ...

        def close(self, finished: bool) -> None: ...

    monkeypatch.setitem(trackers.TRACKERS, "mlflow", Kept)
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Failing)
    config = small_config(tmp_path, trackers=["wandb", "mlflow"])
    said: list[str] = []
    Trackers(tmp_path, config, lambda text: None).close(finished=False)

    def refuse(*_: Any) -> Any:
        raise ConnectionError("no route to host")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", refuse)
    again = Trackers(tmp_path, config, said.append, version=4, reached=4)
    [failure] = said
    assert failure.startswith("tracker wandb could not be started, and gets nothing more")
    assert failure.endswith("no route to host")
    again.log_update({**LINE, "update": 5})
    again.close(finished=True)
    assert said == [failure]
    assert Kept.steps == [5]
    assert json.loads((tmp_path / "trackers.json").read_text())["wandb"] == "x"


# Modules of trackers. W&B's hangs in one of its calls; the other writes down what it gets.
WANDB = """
import atexit, os, threading

def reach(call):
    if call in os.environ["HANGS"]:
        threading.Event().wait()

class Run:
    id, step = "1", 0
    def log(self, values, step):
        reach("log")
    def finish(self, exit_code):
        reach("finish")

def init(**settings):
    reach("init")
    atexit.register(reach, "exit")
    return Run()
"""
TRACKIO = """
class Run:
    def log(self, values, step):
        print(f"trackio has {step}\\n", end="")  # one write: threads print side by side
    def finish(self):
        print("trackio is closed\\n", end="")

def init(**settings):
    return Run()
"""


def write_modules(folder: Path) -> None:
    folder.mkdir()
    for name, text in (("wandb", WANDB), ("trackio", TRACKIO)):
        (folder / f"{name}.py").write_text(text)


def hanging(folder: Path, call: str, code: str) -> tuple[list[str], float]:
    """The lines that some code prints in a process of its own, where W&B hangs in a call, and the
    seconds from the last line to the end of the process."""
    write_modules(folder / "modules")
    path = os.pathsep.join([str(folder / "modules"), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        env=os.environ | {"PYTHONPATH": path, "HANGS": call},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    )
    assert process.stdout
    try:
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip())
            printed = time.monotonic()
        process.wait(120)
        return lines, time.monotonic() - printed
    finally:
        process.kill()


TRACKING = """
import sys, time
from pathlib import Path
from tramontane.config import Config
from tramontane.errors import InputError
from tramontane.run import trackers

trackers.START_SECONDS = trackers.CALL_SECONDS = trackers.END_SECONDS = 0.5
config = Config(model="tiny", trackers=["wandb", "trackio"])
Path("run").mkdir()
try:
    tracked = trackers.Trackers(Path("run"), config, lambda text: print(text + "\\n", end=""))
except InputError as error:
    sys.exit(f"refused: {error}")
for update in (1, 2):
    tracked.log_update({"update": update, "loss": 1.0})
    time.sleep(0.6)
tracked.close(finished=True)
print("the end")
"""


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("init", "refused: trackers: wandb could not be started: no answer within 0.5 s; fix this"),
        ("log", "tracker wandb has not taken an update for 0.5 s, and gets nothing more"),
        ("finish", "tracker wandb had not sent everything after 0.5 s, and is left behind"),
    ],
)
def test_one_that_hangs_holds_up_neither_the_others_nor_the_end(
    tmp_path: Path, call: str, said: str
) -> None:
    lines, seconds = hanging(tmp_path, call, TRACKING)
    assert seconds < 30
    assert sum(line.startswith(said) for line in lines) == 1, lines
    if call == "init":
        assert lines[-2:] == ["trackio is closed", lines[-1]]
    else:
        expected = ["trackio has 1", "trackio has 2", "trackio is closed", "the end"]
        assert [line for line in lines if not line.startswith("tracker wandb")] == expected


COMMAND = """
import sys
from tramontane.cli import main, terminal
from tramontane.run import trackers

trackers.END_SECONDS = terminal.EXIT_SECONDS = 1
main()
"""


@pytest.mark.slow
def test_a_command_ends_whatever_its_tracker_hangs_in(tmp_path: Path, one_layer: str) -> None:
    config = tracked(tmp_path / "run", "wandb", one_layer)
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(config.model_dump(mode="json")))
    write_modules(tmp_path / "modules")
    script = tmp_path / "modules/command.py"  # beside them, it imports these
    script.write_text(COMMAND)
    command = Command(
        str(script), "train", str(file), folder=tmp_path, variables={"HANGS": "log finish exit"}
    )
    while "wandb had not sent everything after 1 s" not in command.printed:
        assert command.poll() is None, command.communicate()
        time.sleep(0.05)
    said = time.monotonic()
    command.wait()
    assert time.monotonic() - said < 30
    assert (tmp_path / "run/summary.json").is_file()


def test_one_name_needs_no_list(tmp_path: Path) -> None:
    assert small_config(tmp_path, trackers="wandb").trackers == ("wandb",)


def test_every_extra_of_a_tracker_is_declared() -> None:
    text = Path("pyproject.toml").read_text()
    assert all(f"\n{name} = [" in text for name in TRACKERS)


def table_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of the tables that a tracker has of a run, oldest first."""
    if name == "wandb":
        files = sorted(folder.glob("wandb/offline-run-*/files/media/table/*.table.json"))
        tables = [json.loads(file.read_text()) for file in files]
        return [dict(zip(t["columns"], row, strict=True)) for t in tables for row in t["data"]]
    if name == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        project = os.environ["TRACKIO_PROJECT"]
        [run] = SQLiteStorage.get_runs(project)
        logs = SQLiteStorage.get_logs(project, run["name"] if isinstance(run, dict) else run)
        return [r for row in logs if "completions" in row for r in row["completions"]["_value"]]
    if name == "mlflow":
        import mlflow

        [run_id] = [v for k, v in json.loads((folder / "trackers.json").read_text()).items()
                    if k == "mlflow"]  # fmt: skip
        place = Path(mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=""))
        tables = [json.loads(f.read_text()) for f in sorted(place.glob("completions/*.json"))]
        return [dict(zip(t["columns"], row, strict=True)) for t in tables for row in t["data"]]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    rows = []
    for event in found.Tensors("completions/text_summary"):
        header, _, *lines = event.tensor_proto.string_val[0].decode().splitlines()
        names = [cell.strip() for cell in header.strip("|").split("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        rows += [dict(zip(names, row, strict=True)) for row in cells]
    return rows


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "wandb" else n for n in READERS]
)
def test_a_tracker_has_a_table_of_completions_of_each_update(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name, reason="a tracker is not installed: pip install")
    said: list[str] = []
    folder = tmp_path / "run"
    folder.mkdir()
    sent = Trackers(folder, tracked(folder, name), said.append)
    for update in (10, 20):
        sent.log_update({**LINE, "update": update})
        sent.log_completions(update, [group(update + n, update, learned=True) for n in range(2)])
    sent.close(finished=True)
    assert said == []
    rows = table_of(folder, name)
    assert [str(row["step"]) for row in rows] == ["10"] * 2 * SIZE + ["20"] * 2 * SIZE
    assert [*rows[0]] == [
        *("step", "problem", "completion", "reward", "reward_correctness"),
        *("advantage", "verdict", "reason"),
    ]
    assert rows[1]["problem"] == "What is 10 + 1?" and rows[1]["verdict"] == "right"
    assert float(rows[1]["reward"]) == float(rows[1]["advantage"]) == 1.0
    assert "group 10 adds 1" in rows[1]["completion"]


def test_a_table_has_no_more_rows_than_its_limit() -> None:
    rows = completion_rows([group(n, 1, learned=False) for n in range(40)], 1)
    assert len(rows) == TABLE_ROWS and rows[-1]["advantage"] is None


@pytest.mark.slow
def test_a_run_sends_its_tables_when_they_are_due(tmp_path: Path, one_layer: str) -> None:
    pytest.importorskip("trackio", reason="a tracker is not installed: pip install")
    folder = tmp_path / "run"
    sections = {"model": one_layer, "pipeline": {"updates": 3}}
    config = small_config(folder, trackers=["trackio"], log_completions=2, **sections)
    train(config, QuietScreen())
    rows = table_of(folder, "trackio")
    assert {row["step"] for row in rows} == {2} and 0 < len(rows) <= TABLE_ROWS
    assert all(row["completion"] and row["problem"] for row in rows)
