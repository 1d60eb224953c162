"""The table of runs: what it says of runs that are known, damaged, running or not begun."""

import csv
import json
import os
import socket
import time
from pathlib import Path

from tramontane.config import Config, parse, sealed
from tramontane.run.folder import RunFolder
from tramontane.view.table import curve, run_row, table_of


def made(path: Path, **keys: object) -> Path:
    config = {"model": "tiny", "data": {"train": "playground:"}, **keys}
    folder = RunFolder(path)
    path.mkdir()
    folder.write_config(parse(Config, config, "test"))
    for update in (1, 2):
        folder.log({"update": update, "wall_seconds": 5.0 * update, "reward": 0.1 * update,
                    "endings": {"completed": update}})  # fmt: skip
    return path


def test_keys_that_differ_and_the_newest_results_are_the_columns(tmp_path: Path) -> None:
    runs = [made(tmp_path / f"run-{n}", name=f"r{n}", seed=n) for n in range(2)]
    folder = RunFolder(runs[0])
    for when, value in (("before", 0.1), ("update_1", 0.2), ("after", 0.3)):
        passed = {"value": value, "low": value - 0.05, "high": value + 0.05}
        votes = {"1": passed, "4": passed}
        folder.log_evaluation({"when": when, "set": "held_out", "pass_at_1": passed,
                               "maj_at_k": votes})  # fmt: skip
    folder.log_evaluation({"when": "before", "set": "hard", "pass_at_1": passed})
    folder.write_json("summary.json", {"wall_seconds": 60, "machine": "a machine |\none"})
    table = table_of(dict.fromkeys(runs))
    assert table.keys == ["seed"] and table.results == ["pass@1", "maj@4", "reward"]
    assert [row["state"] for row in table.rows] == ["finished", "stopped"]
    assert table.metrics == ["endings.completed", "reward"]
    lines = table.markdown().splitlines()
    assert lines[2] == (
        "| run-0 | finished | 0 | 0.300 [0.250, 0.350] | 0.300 [0.250, 0.350] | 0.200 | 2/100 "
        "| 1:00 | a machine \\| one |"
    )
    rows = list(csv.DictReader(table.csv().splitlines()))
    assert float(rows[0]["pass@1 low"]) == 0.25 and rows[1]["pass@1"] == ""
    assert rows[1]["seconds"] == "10.0"


def test_a_damaged_run_has_its_error_and_the_others_their_figures(tmp_path: Path) -> None:
    runs = [made(tmp_path / f"run-{n}", seed=n) for n in range(3)]
    (made(tmp_path / "other", seed=9) / "config.yaml").write_text("name: of another version\n")
    (runs[1] / "config.yaml").write_text("name: [")
    (runs[2] / "metrics.jsonl").write_text('{"update": 1, "reward": 0.5}\nnot JSON\n{"upd')
    table = table_of(dict.fromkeys([*runs, tmp_path / "absent", tmp_path / "other"]))
    assert table.keys == ["seed"]
    states = ["stopped", "damaged", "stopped", "not started", "stopped"]
    assert [row["state"] for row in table.rows] == states
    assert "config.yaml" in table.rows[1]["fault"]
    assert table.rows[2]["results"]["reward"] == {"value": 0.5}
    assert curve(runs[2], "reward") == [(1, None, 0.5)]
    assert curve(runs[0], "endings.completed") == [(1, 5.0, 1), (2, 10.0, 2)]


def test_a_run_counts_as_running_while_its_process_lives(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    owner = {"host": socket.gethostname(), "since": "now", "work": "trained"}
    (run / ".lease").touch()

    def state(**changes: object) -> object:
        (run / ".lock").write_text(json.dumps(owner | {"process": os.getpid()} | changes))
        return run_row(run)["state"]

    assert state() == "running"
    assert state(process=2**22 + 1) == "stopped"  # above the system's largest
    assert state(host="elsewhere", process=1) == "running"
    old = time.time() - 60
    os.utime(run / ".lease", (old, old))
    assert state(host="elsewhere", process=1) == "stopped"


def test_the_config_of_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    keys = {"name": "a: [b", "data": {"train": "x\n- y\nname: z", "eval": None}}
    config = parse(Config, {"model": "tiny", **keys}, "test")
    for number in range(2):  # the second from the parts of the first
        folder = RunFolder(tmp_path / str(number))
        folder.path.mkdir()
        folder.write_config(config.model_copy(update={"seed": number}))
        read = folder.config()
        assert read.seed == number and read.model_dump(exclude={"seed"}) == config.model_dump(
            exclude={"seed"}
        )
    assert "name" in sealed(config)


def test_a_run_that_goes_on_is_read_again(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    assert curve(run, "reward")[-1] == (2, 10.0, 0.2) and run_row(run)["update"] == 2
    RunFolder(run).log({"update": 3, "wall_seconds": 15.0, "reward": 0.3})
    assert curve(run, "reward")[-1] == (3, 15.0, 0.3) and run_row(run)["update"] == 3
    RunFolder(run).write_json("summary.json", {"wall_seconds": 16})
    assert run_row(run)["state"] == "finished" and run_row(run)["seconds"] == 16
