"""SIGTERM and Ctrl-C in every phase of real runs: exit codes, checkpoints, what stays behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.forked import Command
from tests.paths import ROOT
from tests.run.test_resume import wait_for_updates, wait_until
from tests.runs import SMALL, small_config
from tramontane.config import Config
from tramontane.interrupt import Interrupt
from tramontane.journals import read_log
from tramontane.run.changes import open_run
from tramontane.run.folder import RunFolder
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.temporary import PREFIX, process_folder

pytestmark = pytest.mark.slow

# No group is dropped: nothing here depends on what is learned.
MANY = {"updates": 1000, "n_batch": 16, "diversity": "none"}
WARM_CLUSTER = str(ROOT / "tests/placement/warm_cluster.py")
NEVER = 1_000_000  # updates between two checkpoints: none but a signal's is taken


def started(config: Config, tmp_path: Path) -> Command:
    """A run, in one process with a temporary folder of its own."""
    file, temporary = tmp_path / "config.yaml", tmp_path / "tmp"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    temporary.mkdir()
    return Command("train", str(file), temporary=temporary)


def terminate(process: Command, kill: Callable[[int, int], None] = os.kill) -> str:
    """Send SIGTERM, and return the output of the process, which must end by it in time."""
    began = time.monotonic()
    kill(process.pid, signal.SIGTERM)
    output = process.communicate()
    assert process.wait() == 143, output
    assert time.monotonic() - began < 30
    assert "Traceback" not in output
    return output


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("sections", "kill"),
    [
        ({}, os.kill),
        ({"trainer": {"ranks": 2}}, os.killpg),
    ],
    ids=["threads", "ranks"],
)
def test_sigterm_takes_a_checkpoint_and_leaves_no_files(
    tmp_path: Path, sections: dict[str, Any], kill: Callable[[int, int], None], one_layer: str
) -> None:
    """A job system signals the process, or all of its group."""
    sections = {"model": one_layer, "checkpoint": {"every": NEVER}} | sections
    config = small_config(tmp_path / "run", pipeline=MANY, **sections)
    check_stopped(started(config, tmp_path), tmp_path, kill)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_sigterm_takes_a_checkpoint_on_a_ray_cluster_of_the_runs_own(
    tmp_path: Path, ray_actors: dict[str, str], one_layer: str
) -> None:
    """Ray keeps its own logs. Actors that start as a user's do are checked in
    `placement/test_survival.py`."""
    sections = {"model": one_layer, "checkpoint": {"every": NEVER}, "placement": {"kind": "ray"}}
    config = small_config(tmp_path / "run", pipeline=MANY, **sections)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    # Ray's sockets would have too long a path in a temporary folder of the test.
    process = Command(WARM_CLUSTER, "train", str(file), variables=ray_actors)
    check_stopped(process, tmp_path)


def check_stopped(
    process: Command, tmp_path: Path, kill: Callable[[int, int], None] = os.kill
) -> None:
    """Terminate a run after two updates, and check what it says and leaves."""
    wait_for_updates(tmp_path / "run", 2, process)
    output = terminate(process, kill)
    assert "SIGTERM: stopping after this update" in output
    assert f"tramontane train --resume {tmp_path / 'run'}" in output
    folder, _ = open_run(tmp_path / "run")
    assert 2 <= folder.newest_version == len(folder.metrics()) < 1000
    assert folder.whole_checkpoint(pytest.fail)


def test_an_update_longer_than_the_grace_is_given_up(tmp_path: Path, one_layer: str) -> None:
    sizes = {"updates": 2, "n_batch": 64, "n_async": 64, "l_max": 768}
    checkpoint = {"every": NEVER, "grace": 0.5}
    config = small_config(tmp_path / "run", model=one_layer, pipeline=sizes, checkpoint=checkpoint)
    process = started(config, tmp_path)
    wait_until((tmp_path / "run/timeline.jsonl").is_file, process)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 143
    assert time.monotonic() - began < 5
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_signal_while_an_event_loop_is_made_leaves_none_open() -> None:
    made: list[asyncio.AbstractEventLoop] = []

    class Policy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            os.kill(os.getpid(), signal.SIGINT)
            made.append(super().new_event_loop())
            return made[0]

    asyncio.set_event_loop_policy(Policy())
    try:
        with Interrupt(warn=lambda _: None) as interrupt, pytest.raises(KeyboardInterrupt):
            interrupt.run(asyncio.sleep(60))
    finally:
        asyncio.set_event_loop_policy(None)
    assert [loop.is_closed() for loop in made] == [True]


def test_sigterm_and_ctrl_c_while_the_run_starts(tmp_path: Path) -> None:
    for number, (sent, code) in enumerate([(signal.SIGTERM, 143), (signal.SIGINT, 130)]):
        place = tmp_path / str(number)
        place.mkdir()
        process = started(small_config(place / "run", pipeline=MANY), place)
        wait_until((place / "run/workers.jsonl").is_file, process)  # no worker has started yet
        os.kill(process.pid, sent)
        output = process.communicate()
        assert process.wait() == code, output
        assert "Traceback" not in output
        assert list((place / "tmp").iterdir()) == []


@pytest.mark.parametrize("after", ["reading the data", "loading torch"])
def test_ctrl_c_before_the_header_leaves_no_traceback(tmp_path: Path, after: str) -> None:
    """While the data are read, and while torch and the model are imported."""
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(small_config(tmp_path / "run").model_dump(mode="json")))
    command = [sys.executable, "-u", "-m", "tramontane", "train", str(file)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    )
    assert process.stdout
    assert any(after in line for line in iter(process.stdout.readline, ""))
    time.sleep(0.2)  # in the middle of it
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_ctrl_c_while_a_dataclass_is_made_ends_a_module_with_130(tmp_path: Path) -> None:
    """A dataclass executes a text, and Python remembers that one was interrupted."""
    (tmp_path / "early.py").write_text(
        "import signal\nfrom tramontane.cli import terminal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # also where it is ignored
        "text = 'import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)'\n"
        "terminal.app = lambda: exec(text)\nterminal.main()\n"
    )
    command = [sys.executable, "-m", "early"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


def test_an_evaluation_is_given_up_for_the_checkpoint_and_taken_by_the_resumed_run(
    tmp_path: Path, one_layer: str
) -> None:
    evaluation = {"every": 1, "problems": 300, "samples": 8, "before": False}
    config = small_config(
        tmp_path / "run",
        model=one_layer,
        data={"eval": "playground:"},
        evaluation=evaluation,
        pipeline=MANY | {"updates": 2},
        checkpoint={"every": NEVER},
    )
    process = started(config, tmp_path)
    wait_until((tmp_path / "run/evaluation_update_1.partial").is_file, process)
    terminate(process)
    folder, resumed = open_run(tmp_path / "run")
    assert folder.newest_version == len(folder.metrics()) == 1
    assert not folder.evaluations_file.exists()
    resumed.evaluation.problems = 4
    train(resumed, QuietScreen(), folder)
    assert [row["when"] for row in read_log(folder.evaluations_file)] == ["update_1", "after"]


def test_a_cold_start_is_saved_after_the_step_under_way(tmp_path: Path, one_layer: str) -> None:
    rows = tmp_path / "sft.jsonl"
    rows.write_text('{"prompt": "1 + 1?", "response": "<think>2</think>2"}\n' * 8)
    start = {"data": {"train": str(rows)}, "steps": 4000, "batch_tokens": 64, "log_every": 1}
    config = small_config(tmp_path / "run", model=one_layer, cold_start=start)
    process = started(config, tmp_path)
    log = tmp_path / "run/sft.partial/sft_metrics.jsonl"
    wait_until(lambda: log.is_file() and log.stat().st_size > 0, process)
    assert "after this step" in terminate(process)
    (state,) = (tmp_path / "run/sft.partial/resume").iterdir()
    assert int(state.name.removeprefix("step_")) == len(log.read_text().splitlines())
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path, one_layer: str) -> None:
    sizes = {"updates": 2, "n_batch": 64, "n_async": 64, "l_max": 768}
    process = started(small_config(tmp_path / "run", model=one_layer, pipeline=sizes), tmp_path)
    wait_until((tmp_path / "run/timeline.jsonl").is_file, process)
    os.kill(process.pid, signal.SIGINT)
    wait_until(lambda: "again to stop now" in process.printed, process)
    os.kill(process.pid, signal.SIGINT)
    began = time.monotonic()
    assert process.wait() == 130
    assert time.monotonic() - began < 40
    assert RunFolder(tmp_path / "run").metrics() == []


def test_the_next_process_deletes_what_a_killed_one_left(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", pipeline=MANY)
    process = started(config, tmp_path)
    wait_until(lambda: any((tmp_path / "tmp").glob(f"{PREFIX}*/verifier-*/*")), process)
    (left,) = (tmp_path / "tmp").iterdir()
    other = "import sys; from tramontane.temporary import process_folder; print(process_folder())"
    command = [sys.executable, "-c", other]
    env = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    subprocess.run(command, env=env, check=True, capture_output=True)
    assert left.is_dir()  # its process lives
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert left.is_dir()
    subprocess.run(command, env=env, check=True, capture_output=True)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_recipe_and_a_study_pass_the_signal_on(tmp_path: Path, one_layer: str) -> None:
    settings = {k: v for k, v in SMALL.items() if k not in ("name", "model")}
    settings |= {"pipeline": SMALL["pipeline"] | MANY, "checkpoint": {"every": NEVER}}
    file = tmp_path / "recipe.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": "recipe",
                "model": one_layer,
                "out": str(tmp_path / "recipe"),
                "rl": {"set": settings | {"stages": [{"name": "only"}]}},
                "compare": {"suites": ["playground"], "problems": 4, "samples": 1},
            }
        )
    )
    process = Command("recipe", "medium", str(file))
    wait_for_updates(tmp_path / "recipe/1_rl/run", 2, process)
    terminate(process)
    folder, _ = open_run(tmp_path / "recipe/1_rl/run")
    assert folder.newest_version == len(folder.metrics()) >= 2

    settings["pipeline"] |= {"n_batch": 64, "n_async": 64}  # whole groups in every arm
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump(settings | {"name": "base", "model": one_layer}))
    process = Command(
        "study", "group_size", "--seeds", "1", "--base", str(base), "--out", str(tmp_path / "s")
    )
    arms = tmp_path / "s" / "group_size"
    wait_until(lambda: any(arms.glob("*/seed_0/metrics.jsonl")), process)
    terminate(process)
    for run in arms.glob("*/seed_0/metrics.jsonl"):
        folder, _ = open_run(run.parent)
        assert folder.newest_version == len(folder.metrics())


def test_folders_of_other_processes_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ours, theirs = process_folder(), tmp_path / f"{PREFIX}abandoned"
    (theirs / "closed").mkdir(parents=True)
    (theirs / "closed" / "file").touch()
    (theirs / "closed").chmod(0)
    monkeypatch.setattr("tramontane.temporary._own", {})
    assert process_folder() != ours
    assert ours.is_dir()
    assert not theirs.exists()
