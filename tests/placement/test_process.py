"""A worker process that is killed from outside."""

import contextlib
import fcntl
import os
import re
import signal
import socket
import struct
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tramontane.imports import command_of
from tramontane.placement import warm
from tramontane.placement.process import WorkerProcess
from tramontane.temporary import process_folder

SECONDS = 30.0  # limit of every wait
MODULE = """
import subprocess, sys
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[1]))
command = ["sleep", "600"]
children = [subprocess.Popen(command), subprocess.Popen(command, start_new_session=True)]
children.append(subprocess.Popen(command, start_new_session=True, env={"PATH": "/bin:/usr/bin"}))
assert connection.recv() == "settings"
connection.send("")
connection.send([child.pid for child in children])
connection.recv()
"""


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("way", ["stop", "kill", "died"])
def test_nothing_that_a_process_started_outlives_it(way, tmp_path, monkeypatch):
    (tmp_path / "forking_worker.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = WorkerProcess("worker", "forking_worker", "reward")
    children = worker.ready(lambda: "settings").recv()
    assert all(map(is_running, children))
    if way == "kill":
        worker.kill()
    if way == "died":
        os.kill(children.pop(), signal.SIGKILL)  # it has no mark, and then no parent
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait(SECONDS)
    assert "signal 9" in worker.stop()
    end = time.monotonic() + SECONDS
    while any(map(is_running, children)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(is_running, children))


def printed_by(code, tmp_path, monkeypatch):
    """What a worker that runs `code` and ends leaves on standard error."""
    (tmp_path / "loud_worker.py").write_text(MODULE.replace("connection.recv()\n", code))
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = WorkerProcess("worker", "loud_worker", "reward")
    worker.ready(lambda: "settings").recv()
    worker.process.wait(SECONDS)
    worker.stop()


def test_what_a_process_and_its_children_print_is_shown_by_line(tmp_path, monkeypatch, capfd):
    lines = ["import os, subprocess", "print('printed')", "os.write(1, b'in two\\nlines')"]
    lines += ["subprocess.run(['echo', 'from a child'])", "print('with\\ta tab,', '\\033[31mred')"]
    lines += ["print('an error', file=sys.stderr)", "print('5%\\r100%')"]
    code = "\n".join(["from tramontane.placement.printed import print_by_line", "print_by_line()"])
    printed_by("\n".join([code, *lines]), tmp_path, monkeypatch)
    found = capfd.readouterr()
    assert found.out == ""  # which may be a command's own output
    assert found.err.splitlines() == [
        "reward: printed",
        "reward: in two",
        "reward: linesfrom a child",
        "reward: with\ta tab, ·[31mred",
        "reward: an error",
        "reward: 100%",
    ]


def test_a_child_that_holds_the_pipe_does_not_hold_up_the_end(tmp_path, monkeypatch, capfd):
    """One that nothing marks, and that prints without end."""
    code = """
import os
child = subprocess.Popen(["yes"], start_new_session=True, env={})
print(child.pid, file=open("pid", "w"), flush=True)
"""
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    try:
        printed_by(code, tmp_path, monkeypatch)
        assert time.monotonic() - began < SECONDS / 3
        assert "reward: y" in capfd.readouterr().err
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


SERVING = """
import sys
from tramontane.placement.process import serve

def prepare(config, folder):
    (folder / "file").write_text("")

serve(int(sys.argv[1]), prepare)
"""


def test_a_process_whose_folder_is_gone_ends_without_a_word(tmp_path, monkeypatch, capfd):
    """A run that ends removes the folder, perhaps while a process still starts."""
    (tmp_path / "serving_worker.py").write_text(SERVING)
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = WorkerProcess("worker", "serving_worker", "reward")
    worker.start((None, str(tmp_path / "gone")))
    assert worker.process.wait(SECONDS) == 0
    worker.stop()
    assert capfd.readouterr().err == ""


def test_an_interrupt_while_the_temporary_folder_is_made_leaves_none(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", interrupt)
        with pytest.raises(KeyboardInterrupt):
            process_folder()
    assert list(tmp_path.iterdir()) == []
    assert process_folder().parent == tmp_path


def test_what_a_worker_forks_ends_by_sigterm_and_answers_nothing(tmp_path):
    worker = WorkerProcess("worker", "tests.placement.forks", "reward")
    try:
        connection = worker.ready(lambda: (None, str(tmp_path)))

        def done(task):
            connection.send(task)
            assert connection.poll(SECONDS), f"{task} hangs"
            return connection.recv()

        assert done("pool") == []
        assert set(done("terminated")) == {-signal.SIGTERM}
        assert done("program") == -signal.SIGTERM
        assert done("returns") == worker.process.pid
        assert done("SIGTERM") == "alive"  # the worker itself is the controller's to end
        assert not connection.poll(0.1)
    finally:
        worker.stop()


def test_workers_end_with_the_process_that_forked_them_and_new_ones_start(tmp_path, monkeypatch):
    monkeypatch.setattr(warm, "_servers", {})
    worker = WorkerProcess("worker", "tests.placement.forks", "reward")
    try:
        worker.ready(lambda: (None, str(tmp_path)))
        server = warm._servers[frozenset()]._process
        os.kill(server.pid, signal.SIGKILL)
        assert worker.process.wait(SECONDS) == -signal.SIGKILL
        connection = worker.ready(lambda: (None, str(tmp_path)))
        connection.send("returns")
        assert connection.poll(SECONDS)
        assert warm._servers[frozenset()]._process.pid != server.pid
    finally:
        worker.stop()


def test_a_fork_of_a_process_has_a_fork_of_its_server(tmp_path, monkeypatch):
    """Which serves that process alone, has its imports, and is replaced once it is killed."""
    monkeypatch.setattr(warm, "_servers", {})
    worker = WorkerProcess("worker", "tests.placement.forks", "reward")
    worker.ready(lambda: (None, str(tmp_path)))
    server = warm._servers[frozenset()]._process.pid

    def parents():
        other = WorkerProcess("worker", "tests.placement.forks", "reward")
        for _ in range(2):
            other.ready(lambda: (None, str(tmp_path)))
            status = Path(f"/proc/{other.process.pid}/stat").read_text()
            yield int(status.rpartition(") ")[2].split()[1])
            os.kill(int(status.rpartition(") ")[2].split()[1]), signal.SIGKILL)
            other.process.wait(SECONDS)
        other.stop()

    try:
        warm.divide()
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            os.write(writing, struct.pack("2i", *parents()))
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        divided, fresh = struct.unpack("2i", os.read(reading, 8))
        assert len({server, divided, fresh}) == 3
        assert warm._servers[frozenset()]._divided is None
        assert worker.process.poll() is None  # the first one's workers stay
        worker.stop()
        assert worker.ready(lambda: (None, str(tmp_path)))
    finally:
        worker.stop()


def test_a_worker_has_the_variables_folder_and_path_of_its_start(tmp_path, monkeypatch):
    """And so does what it starts, by which all of it is found."""
    code = "import os; print(sorted(os.environ.items()), os.getcwd(), file=open('seen', 'w'))\n"
    code += "print(open('/proc/self/environ').read(), file=open('shown', 'w'))\n"
    monkeypatch.setenv("CHANGED_AFTER_THE_START", "yes")
    monkeypatch.chdir(tmp_path)
    printed_by(code, tmp_path, monkeypatch)
    seen = (tmp_path / "seen").read_text()
    assert "('CHANGED_AFTER_THE_START', 'yes')" in seen
    assert str(tmp_path) in seen
    mark = re.search(rf"\('{warm.MARK}', '(\w+)'\)", seen)[1]
    assert f"{warm.MARK}={mark}" in (tmp_path / "shown").read_text()


def test_variables_are_there_when_the_server_imports(tmp_path):
    """OMP_NUM_THREADS has to be. The worker has the words of its command, and may be ended."""
    code = "import os; servers = open(f'/proc/{os.getppid()}/environ').read()\n"
    code += "print(os.environ['CHOSEN'], servers, flush=True)"
    for chosen, end in (("one", "1"), ("another", "import time; time.sleep(600)")):
        with (tmp_path / chosen).open("wb") as output:
            command = ["timeit", "-n", "1", "-r", "1", "-s", code, end]
            variables = {"CHOSEN": chosen}
            worker = warm.fork(command, "1" * 32, output.fileno(), variables=variables)
        if chosen == "another":
            while "CHOSEN=" not in (tmp_path / chosen).read_text():
                assert worker.poll() is None
                time.sleep(0.01)
            worker.send_signal(signal.SIGTERM)
        assert worker.wait(SECONDS) == (0 if chosen == "one" else -signal.SIGTERM)
        seen = (tmp_path / chosen).read_text()
        assert seen.startswith(f"{chosen} ") and f"CHOSEN={chosen}" in seen


def test_several_threads_may_wait_for_one_worker(tmp_path):
    for _ in range(20):
        worker = WorkerProcess("worker", "tests.placement.forks", "reward")
        worker.ready(lambda: (None, str(tmp_path)))
        process = worker.process
        with ThreadPoolExecutor(8) as pool:
            waiting = [pool.submit(process.wait, SECONDS) for _ in range(8)]
            worker.kill()
            assert {w.result() for w in waiting} == {-signal.SIGKILL}
        worker.stop()


def test_the_process_that_forks_says_nothing_when_its_user_dies_in_a_request():
    ours, theirs = socket.socketpair()
    server = subprocess.Popen(
        command_of("tramontane.placement.warm", str(theirs.fileno())),
        pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    theirs.close()
    ours.sendall(struct.pack("q", 100))
    ours.close()
    assert server.communicate(timeout=SECONDS)[1] == "" and server.returncode == 0
