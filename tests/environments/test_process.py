"""The process of an environment worker, as a pool sees it."""

import os
import signal
import subprocess
import tempfile
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

from tramontane.config import Config
from tramontane.environments.process import READY
from tramontane.environments.protocol import Continued, Started
from tramontane.imports import command_of
from tramontane.models.loading import load_tokenizer
from tramontane.types import Completion, Problem

WORLDS = "tests.environments.worlds"
SECONDS = 60.0  # limit of every wait


class Process:
    """One process, and its socket."""

    def __init__(self, folder, **data):
        self.folder = folder
        settings = {"step_timeout": 20.0}
        settings |= {k: data.pop(k) for k in ("memory_mb", "step_timeout") if k in data}
        config = Config(model="tiny", data=data, conversation=settings)
        self.ours, theirs = Pipe()
        self.process = subprocess.Popen(
            command_of("tramontane.environments.process", str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        theirs.close()
        self.ours.send((config, None, str(folder)))
        self.number = 0

    def receive(self):
        assert self.ours.poll(SECONDS)
        return self.ours.recv()

    def send(self, method, *arguments):
        self.number += 1
        self.ours.send((self.number, method, arguments))
        return self.number

    def ask(self, method, *arguments):
        number = self.send(method, *arguments)
        found, result = self.receive()
        assert found == number
        return result

    def close(self):
        self.ours.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)
        self.process.stdout.close()


@pytest.fixture
def process(tmp_path):
    made = []

    def make(**data):
        made.append(Process(tmp_path, **data))
        return made[-1]

    yield make
    for each in made:
        each.close()


def completion(key, started, text):
    tokenizer = load_tokenizer("tiny")
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    n = len(ids)
    return Completion(*key, started.prompt_ids, ids, [0.0] * n, [0] * n, "stop")


def problem(behaviour=""):
    return Problem("1", "math", "Go on.", metadata={"behaviour": behaviour})


def test_conversations_are_answered_side_by_side(process):
    worker = process(environment="row")
    assert worker.receive() == READY
    talks = {}
    for index, environment in enumerate(("Odd", "Guess")):
        given = Problem(
            "1",
            "math",
            "?",
            metadata={"environment": f"{WORLDS}:{environment}", "behaviour": "hang"},
        )
        talks[index] = worker.ask("start", (0, index), given, 7)
        assert isinstance(talks[index], Started) and talks[index].ending is None
    slow = worker.send("step", (0, 0), completion((0, 0), talks[0], "x"), 1000)
    quick = worker.send("step", (0, 1), completion((0, 1), talks[1], "50"), 1000)
    first, answered = worker.receive()
    assert first == quick and isinstance(answered, Continued)
    assert answered.turn.messages == [{"role": "user", "content": "lower"}]
    second, answered = worker.receive()
    assert second == slow and answered.ending == "completed"
    assert worker.ask("close", (0, 0)) is None
    error = worker.ask("step", (0, 0), completion((0, 0), talks[0], "x"), 1000)
    assert isinstance(error, KeyError)
    # It ends with its pool, and what environments printed went nowhere.
    worker.ours.close()
    assert worker.process.wait(SECONDS) == 0
    assert worker.process.stdout.read() == b""


def test_a_config_that_cannot_be_used_is_the_first_message(process):
    worker = process(environment="nowhere:Shop")
    assert "data.environment: " in worker.receive()
    assert worker.process.wait(SECONDS) == 0


def test_an_environment_that_ends_the_process_is_seen_by_the_pool(process):
    worker = process(environment=f"{WORLDS}:Odd")
    assert worker.receive() == READY
    started = worker.ask("start", (0, 0), problem("die"), 7)
    worker.send("step", (0, 0), completion((0, 0), started, "x"), 1000)
    with pytest.raises((EOFError, ConnectionResetError)):
        worker.receive()
    assert worker.process.wait(SECONDS) == 9


def test_a_process_killed_in_a_step_leaves_nothing(process, tmp_path):
    worker = process(environment=f"{WORLDS}:Odd")
    assert worker.receive() == READY
    started = worker.ask("start", (0, 0), problem("spawn"), 7)
    worker.send("step", (0, 0), completion((0, 0), started, "x"), 1000)
    marker = Path(tmp_path) / "child"
    deadline = time.monotonic() + SECONDS
    while not (marker.exists() and marker.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(worker.process.pid, signal.SIGKILL)
    assert worker.process.wait(SECONDS) == -signal.SIGKILL
    child = Path(f"/proc/{int(marker.read_text())}/stat")
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_memory_is_limited(process):
    worker = process(environment=f"{WORLDS}:Odd", memory_mb=128)
    assert worker.receive() == READY
    started = worker.ask("start", (0, 0), problem("memory"), 7)
    answered = worker.ask("step", (0, 0), completion((0, 0), started, "x"), 1000)
    assert answered.ending == "environment_failed" and "MemoryError" in answered.reason
    started = worker.ask("start", (0, 1), problem(), 7)
    assert started.ending is None


def test_temporary_files_are_the_processes_own(process, tmp_path):
    worker = process(environment=f"{WORLDS}:Odd")
    assert worker.receive() == READY
    started = worker.ask("start", (0, 0), problem("file"), 7)
    answered = worker.ask("step", (0, 0), completion((0, 0), started, "x"), 1000)
    assert Path(answered.turn.messages[0]["content"]).parent == tmp_path
    assert tmp_path != Path(tempfile.gettempdir())
