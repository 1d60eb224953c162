"""The process of an environment worker, as a pool sees it."""

import asyncio
import os
import runpy
import signal
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread, Timer

import pytest

from tests import forked
from tests.environments.worlds import Waits
from tramontane.config import Config
from tramontane.data.prompts import PromptEncoder
from tramontane.environments import host as host_module
from tramontane.environments.host import Call, EnvironmentHost
from tramontane.environments.process import MAX_STUCK, STACK, memory_of_conversations, serve
from tramontane.environments.protocol import Broken, Continued, Lost, Started
from tramontane.environments.running import THREADS
from tramontane.environments.worker import EnvironmentWorker
from tramontane.errors import InputError
from tramontane.models.loading import load_tokenizer
from tramontane.placement.process import READY
from tramontane.temporary import process_folder
from tramontane.types import Completion, Problem

pytestmark = pytest.mark.xdist_group("environment process")

WORLDS = "tests.environments.worlds"
SECONDS = 60.0  # limit of every wait


def run_module(folder, connection):
    """`python -m tramontane.environments.process DESCRIPTOR` in a fork, which has its imports. What
    it prints is in the folder."""
    os.setsid()
    output = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.argv = ["process", str(connection.fileno())]
    sys.modules.pop(serve.__module__)
    runpy.run_module(serve.__module__, run_name="__main__")


class Process:
    """One process, and its socket."""

    def __init__(self, folder, **data):
        self.folder = folder
        settings = {"step_timeout": 20.0}
        settings |= {k: data.pop(k) for k in ("memory_mb", "step_timeout") if k in data}
        config = Config(model="tiny", data=data, conversation=settings)
        self.ours, theirs = Pipe()
        with theirs:
            self._process = forked.start(run_module, folder, theirs)
        self.pid = self._process.pid
        self.ours.send((config, PromptEncoder(load_tokenizer("tiny"), config.data), str(folder)))
        self.number = 0

    @property
    def printed(self):
        return (self.folder / "printed").read_text()

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

    def wait(self):
        """The exit code."""
        self._process.join(SECONDS)
        return self._process.exitcode

    def close(self):
        self.ours.close()
        self._process.kill()
        assert self.wait() is not None


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """One process for several tests: it takes seconds to start."""
    folder = tmp_path_factory.mktemp("worker")
    made = Process(folder, environment=f"{WORLDS}:Odd", memory_mb=128)
    assert made.receive() == READY
    yield made
    made.close()


@pytest.fixture
def begin(tmp_path):
    """Begins a process of an environment, which ends with the test."""
    begun = []

    def begin(environment):
        begun.append(Process(tmp_path, environment=environment))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()


def answered_by(worker, behavior, index):
    started = worker.ask("start", (0, index), problem(behavior), 7)
    return worker.ask("step", (0, index), completion((0, index), started, "x"), 1000)


def completion(key, started, text):
    tokenizer = load_tokenizer("tiny")
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    n = len(ids)
    return Completion(*key, started.prompt_ids, ids, [0.0] * n, [0] * n, "stop")


def problem(behavior=""):
    return Problem("1", "math", "Go on.", metadata={"behavior": behavior})


def test_conversations_are_answered_side_by_side(worker):
    own = {"environment": f"{WORLDS}:Guess"}
    slow_start = worker.ask("start", (0, 0), problem("hang"), 7)
    quick_start = worker.ask("start", (0, 1), Problem("1", "math", "?", metadata=own), 7)
    assert isinstance(slow_start, Started) and slow_start.ending is None
    slow = worker.send("step", (0, 0), completion((0, 0), slow_start, "x"), 1000)
    quick = worker.send("step", (0, 1), completion((0, 1), quick_start, "50"), 1000)
    first, answered = worker.receive()
    assert first == quick and isinstance(answered, Continued)
    assert answered.turn.messages == [{"role": "user", "content": "lower"}]
    second, answered = worker.receive()
    assert second == slow and answered.ending == "completed"
    assert worker.ask("close", (0, 0)) is None
    again = worker.ask("step", (0, 0), completion((0, 0), slow_start, "x"), 1000)
    assert again == Lost()  # of a conversation that it does not know


def test_a_burst_of_requests_is_read_before_its_answers_are(worker):
    long = Problem("1", "math", "Go on. " * 300)  # a few of them fill the socket either way
    numbers = []
    burst = Thread(
        target=lambda: numbers.extend(worker.send("start", (1, i), long, 7) for i in range(300)),
        daemon=True,
    )
    burst.start()
    burst.join(SECONDS)
    assert not burst.is_alive()
    answered = [worker.receive()[0] for _ in numbers]
    assert sorted(answered) == numbers


def test_a_process_that_is_asked_to_end_leaves_that_to_its_pool(worker):
    os.kill(worker.pid, signal.SIGTERM)
    assert answered_by(worker, "stack", 1).turn.messages[0]["content"] == str(STACK)


def test_the_stacks_of_many_threads_are_not_counted_as_memory():
    def of(n_async, *tools):
        data, pipeline = {"tools": tools}, {"n_async": n_async}
        limits = {"memory_mb": 64}
        return memory_of_conversations(
            Config(model="tiny", data=data, pipeline=pipeline, conversation=limits)
        )

    assert of(THREADS) == of(THREADS - 8, "calculator") == 64 << 20
    assert of(THREADS + 8) == (64 << 20) + 8 * STACK
    assert of(THREADS + 8, "calculator") == (64 << 20) + 16 * STACK


def test_memory_is_limited(worker):
    answered = answered_by(worker, "memory", 2)
    assert answered.ending == "environment_failed" and "MemoryError" in answered.reason
    assert answered_by(worker, "", 3).ending == "completed"


def test_temporary_files_are_the_processes_own(worker):
    file = Path(answered_by(worker, "file", 4).turn.messages[0]["content"])
    assert file.parent == worker.folder != Path(tempfile.gettempdir())


def test_a_process_killed_in_a_step_leaves_nothing(worker):
    """The last test of this process."""
    forked = int(answered_by(worker, "fork", 5).turn.messages[0]["content"])
    started = worker.ask("start", (0, 6), problem("spawn"), 7)
    worker.send("step", (0, 6), completion((0, 6), started, "x"), 1000)
    marker = worker.folder / "child"
    deadline = time.monotonic() + SECONDS
    while not (marker.exists() and marker.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(worker.pid, signal.SIGKILL)
    assert worker.wait() == -signal.SIGKILL
    with pytest.raises((EOFError, ConnectionResetError)):  # although what it forked lives on
        worker.receive()
    os.kill(forked, signal.SIGKILL)
    child = Path(f"/proc/{int(marker.read_text())}/stat")
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def served(use, environment, **conversation):
    """What a process serves, here in a task: `use` has the other end of its socket."""
    data = {"train": "playground:", "environment": f"{WORLDS}:{environment}"}
    config = Config(model="tiny", data=data, conversation=conversation)
    ours, theirs = Pipe()

    def ask(number, method, *arguments):
        ours.send((number, method, arguments))
        assert ours.poll(SECONDS)
        found, result = ours.recv()
        assert found == number
        return result

    async def run():
        worker = EnvironmentWorker(config, PromptEncoder(load_tokenizer("tiny"), config.data))
        serving = asyncio.create_task(serve(theirs, worker))
        await asyncio.to_thread(use, ask, ours)
        await asyncio.wait_for(serving, SECONDS)

    with theirs:
        asyncio.run(run())


def test_a_problem_that_cannot_be_used_fails_alone_and_a_closed_socket_ends_the_process():
    def use(ask, ours):
        with ours:
            own = Problem("1", "math", "?", metadata={"environment": "nowhere:Shop"})
            refused = ask(0, "start", (0, 0), own, 7)
            assert isinstance(refused, InputError) and "nowhere" in str(refused)
            started = ask(1, "start", (0, 1), problem(), 7)
            other = completion((0, 1), replace(started, prompt_ids=[5]), "50")
            broken = ask(2, "step", (0, 1), other, 1000)
            assert isinstance(broken, Broken) and "worker.py" in str(broken)
            assert ask(3, "close", (0, 1)) is None

    with pytest.raises(EOFError):
        served(use, "Guess")


def test_answers_that_wait_for_room_in_the_socket_do_not_mix():
    def use(ask, ours):
        with ours:
            started = [ask(i, "start", (0, i), problem("wide"), 7) for i in range(4)]
            for i, each in enumerate(started):
                ours.send((i, "step", ((0, i), completion((0, i), each, "x"), 1000)))
            time.sleep(0.1)  # each is larger than the socket has room for
            for _ in started:
                assert ours.poll(SECONDS)
                (message,) = ours.recv()[1].turn.messages
                assert message["content"] == "x" * 300_000

    with pytest.raises(EOFError):
        served(use, "Odd")


def test_a_process_with_many_steps_that_do_not_end_ends_itself():
    def use(ask, ours):
        def start(index):
            while (started := ask(index, "start", (0, index), problem(), 7)).ending:
                pass  # the machine is busy
            return completion((0, index), started, "x")

        def step(*turns):
            for turn in turns:
                ours.send((turn.index, "step", ((0, turn.index), turn, 1000)))
            for _ in turns:
                assert ours.poll(SECONDS)
                assert ours.recv()[1].ending == "step_timeout"

        *first, last = [start(index) for index in range(MAX_STUCK + 1)]
        step(*first)
        assert ask(0, "close", (9, 9)) is None
        step(last)  # it still answers
        ours.send((0, "close", ((0, 0),)))

    try:
        Waits.gate.clear()
        served(use, "Waits", step_timeout=0.05)
    finally:
        Waits.gate.set()


def test_a_config_that_cannot_be_used_is_the_first_message(begin):
    worker = begin("nowhere:Shop")
    assert "data.environment: " in worker.receive()
    assert worker.wait() == 0


def test_a_process_ends_with_its_environment(begin):
    worker = begin(f"{WORLDS}:Odd")
    assert worker.receive() == READY
    started = worker.ask("start", (0, 0), problem("die"), 7)
    worker.send("step", (0, 0), completion((0, 0), started, "x"), 1000)
    with pytest.raises((EOFError, ConnectionResetError)):
        worker.receive()
    assert worker.wait() == 9


@pytest.mark.parametrize("unread", [False, True])
def test_a_process_ends_with_its_pool(begin, unread):
    """Whether or not it has read all answers, and whatever steps are under way."""
    worker = begin(f"{WORLDS}:Waits")
    assert worker.receive() == READY
    started = worker.ask("start", (0, 0), problem(), 7)
    worker.send("step", (0, 0), completion((0, 0), started, "x"), 1000)
    worker.send("close", (9, 9))
    assert worker.ours.poll(SECONDS)
    if not unread:
        worker.receive()
    worker.ours.close()
    assert worker.wait() == 0
    assert worker.printed == ""


def test_what_is_printed_is_on_its_way_before_the_answer(begin):
    """Whatever text it is, and also once an environment has closed standard output for all."""
    worker = begin(f"{WORLDS}:Odd")
    assert worker.receive() == READY
    assert answered_by(worker, "print", 0).ending == "completed"
    assert worker.printed == "whole\nhalf\\ud800"


def host_of(environment):
    data = {"train": "playground:", "environment": f"{WORLDS}:{environment}"}
    config = Config(model="tiny", data=data)
    return EnvironmentHost(config, PromptEncoder(load_tokenizer("tiny"), config.data))


def test_calls_that_a_dead_process_was_not_sent_are_lost_as_well():
    host = host_of("Guess")
    problem = Problem("0", "math", "Hello", "1", metadata={"long": "x" * 10_000_000})
    calls = [Call(n, "start", (n, 0), (problem, n), SECONDS) for n in range(3)]
    try:
        host.exchange([], 0.0)  # starts the process
        process = host._process.process
        os.kill(process.pid, signal.SIGSTOP)  # so that the first call fills the socket
        Timer(0.5, os.killpg, (process.pid, signal.SIGKILL)).start()
        answers, restarts = host.exchange(calls, SECONDS)
    finally:
        host.close()
    lost = Lost("signal 9 (Killed)")
    assert sorted(answers) == [(n, lost) for n in range(3)] and restarts == 1


def test_answers_that_a_process_gave_before_it_ended_are_read(monkeypatch):
    host = host_of("Odd")

    def exchange(number, behavior):
        call = Call(number, "start", (number, 0), (problem(behavior), 7), SECONDS)
        found = host.exchange([call], SECONDS)[0]
        while not found:
            found = host.exchange([], SECONDS)[0]
        ((_, started),) = found
        step = completion((number, 0), started, "x"), 1000
        return Call(number, "step", (number, 0), step, SECONDS)

    try:
        answered, dies = exchange(0, ""), exchange(1, "die")
        process = host._process.process
        with monkeypatch.context() as patched:
            patched.setattr(host_module, "READ_AT_ONCE", 0)
            host.exchange([answered], 0.0)
            assert host._process.connection.poll(SECONDS)
        # This process is slow: the other has ended when it looks.
        monkeypatch.setattr(host_module, "wait", lambda *_: process.wait(SECONDS))
        (first, lost), restarts = host.exchange([dies], SECONDS)
    finally:
        host.close()
    assert first[0] == 0 and first[1].ending == "completed"
    assert lost == (1, Lost("exit code 9")) and restarts == 1


def test_a_late_call_ends_its_process_and_another_answers(monkeypatch):
    host, answers = host_of("Guess"), []
    calls = [Call(n, "start", (n, 0), (problem(), n), (1 + n) * SECONDS) for n in range(5)]
    try:
        host.exchange([], 0.0)
        begun = time.monotonic()
        assert host.exchange([], 0.1) == ([], 0) and time.monotonic() - begun > 0.09
        os.kill(host._process.process.pid, signal.SIGSTOP)
        assert host.exchange([*calls[:2], Call(9, "close", (0, 0), (), 0.0)], 0.0) == ([], 0)
        monkeypatch.setattr(host_module, "LATE_SECONDS", -SECONDS)  # the first is late by now
        how = "killed, since a step was late"
        assert host.exchange([], 0.0) == ([(0, Lost(how, late=True)), (1, Lost(how))], 1)
        monkeypatch.setattr(host_module, "LATE_SECONDS", SECONDS)
        monkeypatch.setattr(host_module, "READ_AT_ONCE", 2)
        unsent = [*calls, Call(9, "close", (9, 0), (), 0.0)]
        while len(answers) < 5:
            found, _ = host.exchange(unsent, SECONDS)
            assert len(found) <= 2
            answers, unsent = answers + found, []
        waits = Problem("1", "math", "?", metadata={"environment": f"{WORLDS}:Waits"})
        unsent, found = [Call(5, "start", (5, 0), (waits, 5), SECONDS)], []
        while not found:
            found, unsent = host.exchange(unsent, SECONDS)[0], []
        ((_, started),) = found
        step = Call(6, "step", (5, 0), (completion((5, 0), started, "x"), 1000), 0.0)
        os.kill(host._process.process.pid, signal.SIGSTOP)
        assert host.exchange([step, calls[0]], 0.0) == ([], 1)
        os.kill(host._process.process.pid, signal.SIGCONT)
        assert host._process.connection.poll(SECONDS)  # one has its answer, the other is late
        monkeypatch.setattr(host_module, "READ_AT_ONCE", 0)
        assert host.exchange([], 0.0) == ([], 1)
        monkeypatch.setattr(host_module, "READ_AT_ONCE", 2)
        monkeypatch.setattr(host_module, "LATE_SECONDS", -0.1)
        (first, late), restarts = host.exchange([], 0.0)
        assert first[0] == 0 and late == (6, Lost(how, late=True)) and restarts == 2
        host.exchange([], 0.0)
        process = host._process.process
        os.kill(process.pid, signal.SIGSTOP)
        assert host.exchange([calls[0]], 0.0) == ([], 2)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(SECONDS) == -signal.SIGKILL
        told = host.exchange([calls[1]], SECONDS)  # which says so at once
        last = host._process.process
    finally:
        host.close()
    assert sorted(number for number, _ in answers) == [0, 1, 2, 3, 4]
    assert all(isinstance(answer, Started) for _, answer in answers)
    assert told == ([(0, Lost("signal 9 (Killed)"))], 3)
    assert last.poll() is not None


def test_a_closed_host_leaves_no_descriptor_and_no_folder():
    host_of("Guess").close()  # the first one makes what stays
    before, folders = set(os.listdir("/proc/self/fd")), set(process_folder().iterdir())
    host = host_of("Guess")
    host.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert set(process_folder().iterdir()) == folders
    assert host.restarts == 0  # it still exists: nothing waits for it to be collected
