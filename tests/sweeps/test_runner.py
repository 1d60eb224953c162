"""Processes next to each other: as many as fit; Ctrl-C ends them, and what is done is kept."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.forked import Command
from tests.paths import ROOT
from tests.run.test_resume import wait_until
from tests.runs import SMALL
from tramontane import dry_run
from tramontane.errors import InputError
from tramontane.run.folder import RunFolder
from tramontane.run.prepare import DryRunResult
from tramontane.sweeps import runner
from tramontane.sweeps.needs import needs_of
from tramontane.sweeps.runner import Job, Needs, Room, end, work
from tramontane.temporary import exit_of

SLEEP = "import signal, time; {}; print(flush=True); time.sleep(600)"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def start(what: str = "pass") -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SLEEP.format(what)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    return process


def test_processes_end_in_time() -> None:
    heeds, deaf = start(), start(DEAF)
    began = time.monotonic()
    end([heeds, deaf], 0.5)
    assert (heeds.wait(10), deaf.wait(10)) == (-signal.SIGTERM, -signal.SIGKILL)
    assert time.monotonic() - began < 5


def test_if_one_process_fails_the_others_end_and_no_other_starts(monkeypatch) -> None:
    codes = {"fails": "sys.exit(3)", "works": "time.sleep(600)"}
    started: dict[str, subprocess.Popen[bytes]] = {}

    def begin(job: Job, gpus: object) -> subprocess.Popen[bytes]:
        code = f"import sys, time; {codes[job.files[0].name]}"
        return started.setdefault(job.files[0].name, subprocess.Popen([sys.executable, "-c", code]))

    def ended(job: Job, code: int) -> None:
        raise InputError(f"{job.files[0]}: {code}")

    monkeypatch.setattr(runner, "_start", begin)
    jobs = [Job([Path(name)], Path(f"{name}.log")) for name in ("works", "fails", "waits")]
    with pytest.raises(InputError, match="fails: 3"):
        work(jobs, ended, Room(2, 0.0))
    assert started["works"].wait(10) == -signal.SIGTERM and "waits" not in started


def test_processes_take_cores_and_memory_until_none_is_left() -> None:
    room = Room(4, 10.0)
    half = Needs(cores=1, memory=5.0)
    assert room.take(half) == () and room.take(half) == ()
    assert room.take(Needs(memory=0.1)) is None  # memory
    room.release(half, ())
    assert room.take(Needs(cores=4)) is None  # cores
    assert room.take(Needs(cores=3, memory=5.0)) == ()


def test_an_empty_machine_takes_any_process_and_no_second() -> None:
    room = Room(2, 1.0)
    large = Needs(cores=8, memory=2.0, gpus=1)
    assert room.take(large) == ()
    assert room.take(large) is None
    room.release(large, ())
    assert room.take(large) == ()


def test_each_process_has_its_own_gpus_or_shares_those_with_memory_left() -> None:
    room = Room(16, 100.0, {"3": 80.0, "5": 80.0, "6": 80.0})
    pair = Needs(gpus=2, gpu_memory=50.0)
    assert room.take(pair) == ("3", "5")
    assert room.take(pair) is None  # one GPU is left
    assert room.take(Needs(gpus=1, gpu_memory=60.0)) == ("6",)
    assert room.take(Needs(gpus=1, gpu_memory=25.0)) == ("3",)
    assert room.take(Needs(gpus=1, gpu_memory=31.0)) is None
    room.release(pair, ("3", "5"))
    assert room.take(pair) == ("3", "5")


def test_the_limit_of_processes_holds_where_more_would_fit() -> None:
    room = Room(16, 100.0, at_once=2)
    assert [room.take(Needs()) for _ in range(3)] == [(), (), None]


@pytest.mark.slow
def test_ctrl_c_of_a_study_ends_its_arms_with_a_checkpoint_each(
    tmp_path: Path, one_layer: str
) -> None:
    sizes = SMALL["pipeline"] | {"updates": 1000, "n_batch": 16}
    base = SMALL | {"model": one_layer, "pipeline": sizes, "checkpoint": {"every": 1000}}
    study = {
        "title": "Rates",
        "question": "Which?",
        "paper": "Nothing.",
        "arms": {"slow": {"trainer.learning_rate": 1e-6}, "fast": {}},
        "claims": [{"text": "Fast.", "arm": "fast", "against": "slow", "expect": "higher"}],
    }
    files = tmp_path / "rates.yaml", tmp_path / "base.yaml"
    for file, content in zip(files, (study, base), strict=True):
        file.write_text(yaml.safe_dump(content))
    out = tmp_path / "out"
    asked = ("study", str(files[0]), "--base", str(files[1]), "--seeds", "1", "--out", str(out))
    process = Command(*asked)
    begun: list[Path] = []

    def trains() -> bool:
        begun[:] = [f.parent for f in out.rglob("metrics.jsonl") if f.stat().st_size]
        return len(begun) == min(2, os.cpu_count() or 1)

    wait_until(trains, process)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait() == 130, process.printed
    assert "the same command continues" in process.printed
    assert time.monotonic() - began < 30
    for folder in map(RunFolder, begun):
        assert folder.newest_version == len(folder.metrics()) > 0


def on_gpus(gib: str, *keys: str) -> DryRunResult:
    """The sizes of the quickstart on GPUs of so many GiB."""
    config, shape = ROOT / "configs/quickstart.yaml", ROOT / "src/tramontane/tiny_base/config.json"
    return dry_run(config, ["trainer.device=cuda", *keys], gpu=gib, model_shape=str(shape))


def test_a_run_takes_the_gpus_and_the_memory_of_its_dry_run() -> None:
    found = on_gpus("80", "generator.device=cuda:1")
    *gpus, machine = found.memory.loads
    needs = needs_of(found.config, found.memory, 4)
    assert needs == Needs(4, machine.needed, 2, max(load.needed for load in gpus))
    assert needs.gpu_memory > 0
    small = on_gpus("0.1", "generator.device=cuda")
    with pytest.raises(InputError, match="GiB, and"):
        needs_of(small.config, small.memory, 4)


def test_a_killed_process_is_reported_by_its_signal() -> None:
    killed = subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert exit_of(killed.returncode) == "SIGKILL"
    assert exit_of(2) == "exit code 2"
