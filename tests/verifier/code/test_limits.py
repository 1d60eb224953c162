"""Limits that hold, and programs that are judged by what they do, not by the machine's settings."""

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap

import pytest

from tests.rungs import why_not
from tramontane.config import VerifierConfig
from tramontane.types import Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.grade import judge
from tramontane.verifier.code.inside import execution, records

CONFIG = VerifierConfig(code_timeout_s=20.0, allow_unsandboxed=True)
SHORT = VerifierConfig(code_timeout_s=1.0, allow_unsandboxed=True)
ECHO = Problem(
    "echo",
    "code",
    "Print it.",
    tests={"type": "stdio", "cases": [{"input": f"{n}\n", "output": f"{n}\n"} for n in (7, 8)]},
)
RIGHT = "\nprint(input())"
CPP_ECHO = "int n; std::cin >> n; std::cout << n << std::endl;"
CPP_THREADS = (
    "std::vector<std::thread> t; for (int i = 0; i < 8; i++) t.emplace_back([] {});\n"
    "for (auto& x : t) x.join();"
)
MEMORY = ("wrong", "test 1 of 2: needed more than 300 MB")
DISK = "wrote more than 64 MB, or 20,000 files"
needs_gpp = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(
    params=["bubblewrap", "namespaces", pytest.param("landlock", marks=pytest.mark.slow)]
)
def rung(request, monkeypatch):
    if reason := why_not(request.param):
        pytest.skip(f"{request.param} does not work here: {reason}")
    monkeypatch.setattr(sandbox, "probe", lambda: request.param)
    return request.param


def run(program, tag="python", config=CONFIG, problem=ECHO):
    if tag == "cpp" and "#include" not in program:
        program = f"#include <bits/stdc++.h>\n#include <unistd.h>\n{program}"
    return judge(f"```{tag}\n{textwrap.dedent(program)}\n```", problem, config)[:2]


# ------------------------------------------------------------------- not the machine's settings


@needs_gpp
def test_the_stack_has_the_memory_limit_and_threads_have_theirs(rung):
    deep = "int f(int n) { volatile int x = n; return n ? f(n - 1) + (x == n) : 0; }\n"
    deep += f"int main() {{ if (f(1000000) != 1000000) return 1; {CPP_THREADS} {CPP_ECHO} }}"
    assert run(deep, "cpp") == ("right", "")
    python = """
    import sys, threading
    sys.setrecursionlimit(10**7)
    def f(n): return f(n - 1) + 1 if n else 0
    assert f(500_000) == 500_000
    some = [threading.Thread(target=f, args=(10_000,)) for _ in range(8)]
    [x.start() for x in some], [x.join() for x in some]
    print(input())
    """
    assert run(python) == ("right", "")


@needs_gpp
@pytest.mark.parametrize("tag", ["python", "cpp"])
def test_any_umask_will_do(rung, tag):
    program = "print(input())" if tag == "python" else f"int main() {{ {CPP_ECHO} }}"
    before = os.umask(0o077)
    try:
        assert not sandbox.why_not(rung)
        assert run(program, tag) == ("right", "")
    finally:
        os.umask(before)


AS_IT_IS = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for descriptor in (0, 1):
    os.close(descriptor)
sys.path[:0] = {path!r}
from tramontane.config import VerifierConfig
from tramontane.types import Problem
from tramontane.verifier.code.grade import judge
config = VerifierConfig(code_timeout_s=20.0, allow_unsandboxed=True)
echo = {{"type": "stdio", "cases": [{{"input": "7\\n", "output": "7\\n"}}]}}
asserted = {{"type": "python_assert", "code": "assert f(3) == 4", "entry_point": "f"}}
for program, tests in (("print(input())", echo), ("def f(x): return x + 1", asserted)):
    judged = judge(f"```python\\n{{program}}\\n```", Problem("p", "code", "", tests=tests), config)
    os.write(2, repr(judged[:2]).encode())
"""


def test_a_judge_with_closed_streams_and_ignored_signals():
    done = subprocess.run(
        [sys.executable, "-c", AS_IT_IS.format(path=[p for p in sys.path if p])],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.stderr == "('right', '')" * 2


@needs_gpp
def test_programs_run_where_no_file_may_be_executed(rung, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    folder = tempfile.mkdtemp(prefix="tramontane-test-")  # pytest's own are closed to other users
    mount = ["mount", "-t", "tmpfs", "-o", "noexec,mode=1777", "none", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no mounts here")
    try:
        monkeypatch.setattr("tempfile.tempdir", folder)
        assert not sandbox.why_not(rung)
        assert run(f"int main() {{ {CPP_ECHO} }}", "cpp") == ("right", "")
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
        os.rmdir(folder)


def test_the_program_has_its_own_future(rung):
    program = "def f(x: int): pass\nassert f.__annotations__['x'] is int\nprint(input())"
    assert run(program) == ("right", "")


# ------------------------------------------------------------------------------------- limits

SHARED = """
import mmap, os, time
for _ in range(10):
    if os.fork() == 0:
        x = mmap.mmap(-1, 200 << 20)
        for i in range(0, len(x), 4096): x[i] = 1
        time.sleep(60)
os.wait()
"""


def test_shared_maps_count(rung):
    assert run(SHARED) == MEMORY


THREAD = """
import ctypes, mmap, os, threading, time
def work():
    {}
threading.Thread(target=work).start()
{}
"""
TOUCH = "x = mmap.mmap(-1, 200 << 20)\n            for i in range(0, len(x), 4096): x[i] = 1"
FORKED = f"""
    for _ in range(10):
        if os.fork() == 0:
            {TOUCH}
            time.sleep(60)
    time.sleep(60)
"""
FIRST_ENDS = "ctypes.CDLL(None).syscall(60 if os.uname().machine == 'x86_64' else 93, 0)"


def test_children_of_a_thread_count(rung):
    assert run(THREAD.format(FORKED.strip(), "time.sleep(60)")) == MEMORY


def test_a_process_whose_first_thread_has_ended_counts(rung):
    hidden = f"""
import ctypes, mmap, os, threading, time
for _ in range(6):
    if os.fork() == 0:
        def work():
            {TOUCH}
            time.sleep(60)
        threading.Thread(target=work).start()
        {FIRST_ENDS}
time.sleep(60)
"""
    assert run(hidden) == MEMORY


def test_a_child_that_nobody_waits_for_hides_nothing(rung):
    program = "import os, time\nif os.fork() == 0: os._exit(0)\ntime.sleep(0.5)\nprint(input())"
    assert run(program) == ("right", "")
    # It takes a while to give its memory back.
    assert run("x = b'x' * (270 << 20)\nprint(input())") == ("right", "")


def test_attributes_of_files_are_closed(rung):
    program = "import os\nopen('f', 'w').close()\ntry: os.setxattr('f', 'user.x', bytes(1 << 16))\n"
    assert run(f"{program}except PermissionError: print(input())") == ("right", "")


def test_files_without_content_count(rung):
    program = "import time\nfor i in range(30_000): open(str(i), 'x').close()\ntime.sleep(60)"
    outcome, reason = run(program)
    assert outcome == "wrong"
    assert DISK in reason


UNNAMED = {
    "unlinked": "f = open('f', 'wb')\n    os.unlink('f')\n    f.write(x)\n    f.flush()",
    "O_TMPFILE": "f = os.open('.', os.O_TMPFILE | os.O_RDWR)\n    os.write(f, x)",
    "in a socket": "a = getattr(socket, 'kept', None) or socket.socketpair()\n    socket.kept = a\n"
    "    f = os.open('.', os.O_TMPFILE | os.O_RDWR)\n    os.write(f, x)\n    try:\n"
    "        socket.send_fds(a[0], [b'x'], [f])\n        os.close(f)\n"
    "    except PermissionError: pass",
    "mapped": "f = open('f', 'wb+')\n    f.write(x)\n    f.flush()\n    os.unlink('f')\n"
    "    m = mmap.mmap(f.fileno(), len(x))\n    f.close()\n    f = m",
}


@pytest.mark.parametrize("how", UNNAMED)
def test_files_without_a_name_count(rung, how):
    program = (
        "import mmap, os, socket, time\nkept, x = [], bytes(15 << 20)\nfor _ in range(9):\n"
        f"    {UNNAMED[how]}\n    kept.append(f)\ntime.sleep(60)"
    )
    outcome, reason = run(program)
    assert outcome == "wrong"
    assert DISK in reason or "No space left" in reason


def test_a_process_hides_nothing_by_becoming_unreadable(monkeypatch):
    if why_not("landlock"):
        pytest.skip("needs Landlock")
    monkeypatch.setattr(sandbox, "probe", lambda: "landlock")  # elsewhere the box has a size
    program = (
        "import os\nwith open('/bin/cat', 'rb') as f: code = f.read()\n"
        "f = os.open('hidden', os.O_CREAT | os.O_WRONLY, 0o111)\nos.write(f, code)\nos.close(f)\n"
        "r, w = os.pipe()\nos.set_inheritable(w, True)\nos.dup2(r, 0)\n"
        "os.execv('./hidden', ['cat'])"
    )
    outcome, reason = run(program)
    assert outcome == "wrong"
    assert "hid what its processes hold open" in reason


@needs_gpp
def test_a_program_changes_nothing_for_the_next_test(rung):
    tries = """
    #include <cstdio>
    #include <unistd.h>
    int main(int, char** name) {
        const char* paths[] = {name[0], "/proc/self/exe", "../main"};
        for (auto path : paths) {
            if (fopen(path, "r+") || !unlink(path)) return 1;
        }
        int n;
        return scanf("%d", &n) != 1 || printf("%d", n) != 1;
    }
    """
    assert run(tries, "cpp") == ("right", "")


def test_sockets_are_few(rung):
    net = "import socket\ntry: socket.socket()\nexcept PermissionError: print(input())"
    assert run(net) == ("right", "")
    loop = "import asyncio\nasync def f(): print(input())\nasyncio.run(f())"
    assert run(loop) == ("right", "")
    many = """
    import os, socket, time
    for _ in range(20):
        if os.fork() == 0:
            held = [socket.socketpair() for _ in range(25)]
            time.sleep(60)
    time.sleep(60)
    """
    assert run(many) == MEMORY


STORM = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    try:
        if os.fork() == 0: os.setsid()
        elif os.getpid() % 3: os._exit(0)
    except OSError: pass
"""


@pytest.mark.slow
def test_a_storm_that_hops_sessions_is_judged(rung):
    for _ in range(4):
        assert run(STORM, config=SHORT)[0] == "wrong"


@pytest.mark.parametrize(
    ("statuses", "failure", "is_unjudged"),
    [
        ([], "the sandbox did not start", True),
        ([records.READY], "killed the sandbox", False),
        ([records.READY, records.HOST], "the host had no process or memory left to run it", True),
        ([records.READY, records.READY], "", False),
    ],
)
def test_only_what_a_program_can_have_done_is_its_fault(statuses, failure, is_unjudged):
    """On a host without processes right programs were wrong: they "killed the sandbox"."""
    reading, writing = os.pipe()
    for status in statuses:
        records.send_record(writing, (status, b"", b""), (0.0, 0.0, 0.0))
    os.close(writing)
    result = next(sandbox.Results(reading, [sandbox.Limits(1.0, 300)], keep_going=False))
    os.close(reading)
    assert result.failure and not result.is_clock
    if failure:  # else what a broken sandbox sends: a failure, whichever
        assert (result.failure, result.is_unjudged) == (failure, is_unjudged)


def test_a_program_waits_for_the_host_to_have_a_process_again(monkeypatch):
    failures = 2

    def scarce():
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise BlockingIOError
        return 7

    monkeypatch.setattr(execution.os, "fork", scarce)
    assert execution.fork() == 7
    failures = 10**6
    monkeypatch.setattr(execution, "FORK_SECONDS", 0.05)
    assert execution.fork() == -1
