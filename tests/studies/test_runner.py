"""Ctrl-C of a study: its arms end in bounded time, and what is done is kept."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.forked import Command
from tests.run.test_resume import wait_until
from tests.runs import SMALL
from tramontane.errors import InputError
from tramontane.run.folder import RunFolder
from tramontane.studies import runner
from tramontane.studies.runner import end

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

    def begin(files: Sequence[Path], log: Path, cores: int) -> subprocess.Popen[bytes]:
        code = f"import sys, time; {codes[files[0].name]}"
        return started.setdefault(files[0].name, subprocess.Popen([sys.executable, "-c", code]))

    def ended(files: Sequence[Path], code: int) -> None:
        raise InputError(f"{files[0]}: {code}")

    monkeypatch.setattr(runner, "_start", begin)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    jobs = [([Path(name)], Path(f"{name}.log")) for name in ("works", "fails", "waits")]
    with pytest.raises(InputError, match="fails: 3"):
        runner._work(jobs, 1, ended)
    assert started["works"].wait(10) == -signal.SIGTERM and "waits" not in started


@pytest.mark.slow
def test_ctrl_c_of_a_study_ends_its_arms_with_a_checkpoint_each(tmp_path: Path) -> None:
    sizes = SMALL["pipeline"] | {"updates": 1000, "n_batch": 16}
    base = SMALL | {"pipeline": sizes, "checkpoint": {"every": 1000}}
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
