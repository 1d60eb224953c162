"""The tool `python` on every rung of the sandbox that works here."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer

import pytest

from tests.rungs import why_not
from tramontane.config import Config, VerifierConfig
from tramontane.environments import python
from tramontane.environments.python import ANSWER_CHARACTERS, CODE_BYTES, Python
from tramontane.errors import InputError
from tramontane.temporary import process_folder
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.sandbox import server

CONFIG = VerifierConfig(code_timeout_s=20.0, code_memory_mb=200)  # enough on a loaded machine
GONE_SECONDS = 20.0  # limit for killed processes to be gone


@pytest.fixture(
    params=["bubblewrap", "namespaces", pytest.param("landlock", marks=pytest.mark.slow)]
)
def rung(request, monkeypatch):
    if reason := why_not(request.param):
        pytest.skip(f"{request.param} does not work here: {reason}")
    monkeypatch.setattr(sandbox, "probe", lambda: request.param)
    monkeypatch.setattr(python, "CLOCK_FACTOR", 50.0)  # the machine may be busy
    return request.param


@pytest.fixture
def tool(rung):
    tool = Python(CONFIG)
    before = below(os.getpid())
    yield tool
    tool.close()
    wait_until_gone(below(os.getpid()) - before)
    assert not list(process_folder().glob("python-*"))


def below(pid):
    """Processes that a process started, with theirs."""
    children = {
        int(child)
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for child in task.read_text().split()
    }
    return children.union(*map(below, children))


def wait_until_gone(pids):
    deadline = time.monotonic() + GONE_SECONDS
    while running := [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists()]:
        assert time.monotonic() < deadline, running
        time.sleep(0.02)


def test_names_modules_and_files_stay_between_calls(tool):
    assert tool.python("import math\nx = 3\ndef twice(n): return 2 * n") == ""
    assert tool.python("twice(x) + math.comb(4, 2)") == "12"
    assert tool.python("") == tool.python("# nothing") == ""
    assert tool.python("open('a.txt', 'w').write('kept')") == "4"
    assert tool.python("print(open('a.txt').read())\n_ + 1") == "kept\n5"


def test_an_answer_has_what_is_printed_in_order_then_the_value_or_the_traceback(tool):
    code = "import sys\nprint('é')\nprint('two', file=sys.stderr)\nprint('three')\n'value'"
    assert tool.python(code) == "é\ntwo\nthree\n'value'"
    failed = tool.python("print('before')\n1 / 0").splitlines()
    assert failed[0] == "before" and failed[-1] == "ZeroDivisionError: division by zero"
    assert failed[1:-1] == [
        "Traceback (most recent call last):",
        '  File "<session>", line 2, in <module>',
    ]
    assert tool.python("if x").endswith("SyntaxError: expected ':'")
    assert tool.python("raise SystemExit(3)").endswith("SystemExit: 3")
    assert "EOFError" in tool.python("input()")
    assert tool.python("sys.stdout.close()\nsys.stderr = None") == ""
    assert tool.python("'still here'") == "'still here'"
    assert tool.python(f"print('a' * {ANSWER_CHARACTERS})\n") == "a" * ANSWER_CHARACTERS
    ends = "a" * (ANSWER_CHARACTERS // 2), "z" * (ANSWER_CHARACTERS // 2)
    long = tool.python(f"print('a' * 50_000 + {ends[1]!r})")
    assert long == f"{ends[0]}\n… (48,000 characters omitted) …\n{ends[1]}"


def test_calls_side_by_side_do_not_mix(tool):
    tool.python("n = 0")
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(tool.python, ["n += 1\nn"] * 24))
    assert sorted(map(int, answers)) == list(range(1, 25))


def test_nothing_runs_between_calls(tool):
    tool.python(
        "import threading, time\nn = 0\ndef count():\n    global n\n    while True: n += 1\n"
        "threading.Thread(target=count, daemon=True).start()"
    )
    first, second = (int(tool.python(f"m = n\ntime.sleep({s})\nn - m")) for s in (0.1, 0.1))
    before = int(tool.python("n"))
    time.sleep(0.5)
    assert int(tool.python("n")) - before < (first + second) / 2


def test_a_call_that_breaks_a_limit_ends_the_session_and_the_next_begins_another(rung):
    tool = Python(VerifierConfig(code_timeout_s=0.25, code_memory_mb=200))
    for code, reason in (
        ("while True: pass", "timed out after 0.25 s"),
        ("import time; time.sleep(60)", "timed out after 0.5 s, most of it asleep"),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", "printed more than 16 MB"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timed out"),
        ("import os; os._exit(3)", "exit code 3"),
        ("import os; os._exit(0)", "ended its session"),
        ("import os; os.close(3)", "exit code 1"),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9"),
    ):
        tool.python("kept = 1")
        with pytest.raises(ValueError, match=reason) as caught:
            tool.python(code)
        assert "restarted" in str(caught.value)
        assert "NameError" in tool.python("kept")
    tool.close()


def test_time_of_earlier_calls_does_not_count(rung):
    tool = Python()
    tool.start(Config(model="tiny", verifier=VerifierConfig(code_timeout_s=0.25)))
    spin = "import time\nend = time.process_time() + 0.1\nwhile time.process_time() < end: pass"
    for _ in range(4):
        assert tool.python(spin) == ""
    tool.close()


def test_memory_and_files_are_limited(tool):
    assert tool.python("b = bytearray(10**9)").endswith("MemoryError")
    children = (
        "import os\nfor _ in range(4):\n    if os.fork() == 0:\n        b = bytearray(10**8)\n"
    )
    with pytest.raises(ValueError, match="needed more than 200 MB"):
        tool.python(f"{children}        while True: pass\nimport time; time.sleep(9)")
    # The file system of namespaces is full; elsewhere the folder is measured, at the end of a call
    # too: allocation alone is over before the first look.
    for write in ("os.write(f, bytes(15 << 20))", "os.posix_fallocate(f, 0, 15 << 20)"):
        loop = "for n in range(9):\n    f = os.open(str(n), os.O_CREAT | os.O_RDWR)"
        try:
            answer = tool.python(f"import os\n{loop}; {write}")
        except ValueError as error:
            answer = str(error)
        assert "No space left" in answer or "wrote more than 64 MB" in answer


def test_there_is_no_network_and_no_other_file(tool):
    assert "PermissionError" in tool.python("import socket; socket.socket()")
    hidden = tool.python(f"open({str(Path(__file__))!r})")
    assert hidden.startswith("Traceback") and "Error: " in hidden


def test_code_that_is_too_long_is_refused_and_the_session_stays(tool):
    tool.python("x = 1")
    with pytest.raises(ValueError, match="longer than 32,768 bytes"):
        tool.python("#" * (CODE_BYTES + 1))
    assert tool.python("x".ljust(CODE_BYTES)) == "1"


def test_a_call_whose_sandbox_ends_with_its_server_is_not_blamed(rung):
    tool = Python(CONFIG)
    tool.python("x = 1")
    Timer(0.1, server._servers[rung, 0]._process.kill).start()
    with pytest.raises(RuntimeError, match=server.ENDED):
        tool.python("import time; time.sleep(20)")
    assert "NameError" in tool.python("x")
    tool.close()


def test_a_session_without_a_sandbox_needs_the_users_consent(monkeypatch):
    monkeypatch.setattr(sandbox, "probe", lambda: "rlimits")
    tool = Python()
    with pytest.raises(InputError, match=r"set verifier\.allow_unsandboxed"):
        tool.python("1 + 1")
    tool.start(Config(model="tiny", verifier=VerifierConfig(allow_unsandboxed=True)))
    assert tool.python("1 + 1") == "2"
    tool.close()


def test_many_sessions_live_at_once_with_users_of_their_own(rung):
    tools = [Python(CONFIG) for _ in range(6)]
    for number, tool in enumerate(tools):
        tool.python(f"import os\nx = {number}")
    assert [tool.python("x") for tool in tools] == [str(n) for n in range(6)]
    if os.geteuid() == 0:
        assert len({tool.python("os.getuid()") for tool in tools}) == 6
    tools[0].close()
    assert [tool.python("x") for tool in tools[1:]] == [str(n) for n in range(1, 6)]
    for tool in tools:
        tool.close()


def test_nothing_outlives_a_killed_worker(rung):
    code = f"""
import time
from tramontane.environments.python import Python
from tramontane.verifier.code import sandbox
sandbox.probe = lambda: {rung!r}
tool = Python()
tool.python("import os, time\\nos.fork() or os.setsid() or time.sleep(99)")
print("ready", flush=True)
time.sleep(99)
"""
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert worker.stdout.readline() == "ready\n"
    started = below(worker.pid)
    assert started
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    wait_until_gone(started)
