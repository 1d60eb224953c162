"""A worker process that is killed from outside."""

import os
import signal
import time

import pytest

from tramontane.placement.process import WorkerProcess

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
