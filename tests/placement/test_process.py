"""A worker process that is killed from outside."""

import fcntl
import os
import signal
import tempfile
import time

import pytest

from tramontane.placement.process import WorkerProcess
from tramontane.temporary import process_folder

SECONDS = 30.0  # limit of every wait
MODULE = """
import subprocess, sys
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[1]))
command = ["sleep", "600"]
children = [subprocess.Popen(command), subprocess.Popen(command, start_new_session=True)]
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
    worker = WorkerProcess("worker", "forking_worker")
    children = worker.ready(lambda: "settings").recv()
    assert all(map(is_running, children))
    if way == "kill":
        worker.kill()
    if way == "died":
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait(SECONDS)
    assert "signal 9" in worker.stop()
    end = time.monotonic() + SECONDS
    while any(map(is_running, children)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(is_running, children))


def test_what_a_process_and_its_children_print_goes_nowhere(tmp_path, monkeypatch, capfd):
    lines = ["import os, subprocess", "print('printed')", "os.write(1, b'written')"]
    loud = "\n".join([*lines, "subprocess.run(['echo', 'from a child'])"])
    (tmp_path / "loud_worker.py").write_text(MODULE.replace("connection.recv()\n", loud))
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = WorkerProcess("worker", "loud_worker")
    worker.ready(lambda: "settings").recv()
    worker.process.wait(SECONDS)
    worker.stop()
    assert capfd.readouterr().out == ""


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
    worker = WorkerProcess("worker", "serving_worker")
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
    worker = WorkerProcess("worker", "tests.placement.forks")
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
