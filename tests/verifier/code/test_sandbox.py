"""Hostile programs, on every rung that works here: the true verdict, and nothing left behind."""

import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

import pytest

from tramontane.config import VerifierConfig
from tramontane.types import Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.grade import NO_SANDBOX, judge
from tramontane.verifier.code.sandbox import ladder

CONFIG = VerifierConfig(code_timeout_s=1.0, allow_unsandboxed=True)
CASES = [{"input": "7\n", "output": "7\n"}, {"input": "8\n", "output": "8\n"}]
ECHO = Problem("echo", "code", "Print it.", tests={"type": "stdio", "cases": CASES})
RIGHT = "\nprint(input())"
needs_gpp = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(params=sandbox.RUNGS)
def rung(request, monkeypatch):
    if request.param != "rlimits" and (reason := sandbox.why_not(request.param)):
        pytest.skip(f"{request.param} does not work here: {reason}")
    monkeypatch.setattr(sandbox, "probe", lambda: request.param)
    return request.param


@pytest.fixture
def sealed(rung):
    if rung == "rlimits":
        pytest.skip("rlimits alone do not promise this")
    return rung


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch, tmp_path_factory):
    tmp_path_factory.getbasetemp()  # made on first use, and not in this folder
    folder = Path(tempfile.mkdtemp(prefix="tramontane-test-"))
    folder.chmod(0o711)  # a program may be another user
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    mounts = Path("/proc/self/mounts").read_text() if os.path.exists("/proc") else ""
    before = processes()
    yield
    left = processes() - before
    for _ in range(250):  # others on this machine may run programs too: theirs end as well
        left &= processes()
        if not left:
            break
        time.sleep(0.02)
    assert not left
    folder.rmdir()  # which fails unless it is empty
    assert not mounts or Path("/proc/self/mounts").read_text() == mounts


def processes():
    """Processes of sandboxes, by what their command lines name."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
        if b"inside.runner" in line or b"hostile-mark" in line:
            found.add(pid)
    return found


def run(program, tag="python", problem=ECHO):
    return judge(f"```{tag}\n{program}\n```", problem, CONFIG)[:2]


def test_honest(rung):
    assert run("print(input())") == ("right", "")
    assert run("import sys\nprint(sys.stdin.read())\nexit()") == ("right", "")
    assert run("print(open(0).read())\nquit(0)") == ("right", "")
    assert run("import threading\nthreading.Thread(target=lambda: print(input())).start()") == (
        "right",
        "",
    )
    assert run("import atexit\natexit.register(lambda: print(input()))") == ("right", "")
    assert run("if __name__ == '__main__':\n    print(input())") == ("right", "")
    assert run("import os\nif os.fork() == 0: os._exit(0)\nos.wait()" + RIGHT) == ("right", "")
    # A program that never reads what it is given is judged by what it prints.
    assert run("print(7)") == ("wrong", "test 2 of 2: wrong output")


def test_forks_without_end(rung):
    if rung == "rlimits":
        pytest.skip("would take the machine's processes along")
    assert run("import os\nwhile True: os.fork()")[0] == "wrong"
    quiet = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert run(quiet) == ("wrong", "test 1 of 2: timed out after 1 s")


def test_leaves_a_child_behind(rung):
    daemon = (
        "import os, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', 'hostile-mark'],\n"
        "    start_new_session=True)"
    )
    assert run(daemon + RIGHT) == ("right", "")


def test_prints_without_end(rung):
    endless = "import os\nwhile True: os.write(1, b'x' * 65536)"
    assert run(endless) == ("wrong", "test 1 of 2: printed more than 16 MB")
    assert run("import os\nwhile True: os.write(2, b'x' * 65536)")[0] == "wrong"


def test_exits_early_sleeps_and_spins(rung):
    assert run("import os; os._exit(0)") == ("wrong", "test 1 of 2: wrong output")
    assert run("import os; os.kill(os.getpid(), 9)") == ("wrong", "test 1 of 2: killed by signal 9")
    started = time.perf_counter()
    assert run("import time; time.sleep(60)") == ("wrong", "test 1 of 2: timed out after 1 s")
    assert run("while True: pass") == ("wrong", "test 1 of 2: timed out after 1 s")
    assert time.perf_counter() - started < 5


def test_kills_everyone(sealed):
    parent = "import os\ntry: os.kill(os.getppid(), 9)\nexcept PermissionError: pass"
    assert run(parent + RIGHT) == ("right", "")
    everyone = "import os\ntry: os.kill(-1, 9)\nexcept OSError: pass"
    assert run(everyone + RIGHT) == ("right", "")


def test_takes_memory(rung):
    too_much = ("wrong", "test 1 of 2: needed more than 300 MB")
    assert run("x = bytearray(10**9)") == too_much
    # Each below its limit, all of them together above it.
    many = "import os, time\nfor i in range(6): os.fork() and 0\nx = b'x' * 10**7\ntime.sleep(9)"
    assert run(many) == too_much


def test_reads_other_files(sealed, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("expected")
    tmp_path.chmod(0o755)
    for path in (
        secret,
        "/etc/shadow",
        "/etc/passwd",
        Path(__file__),
        "/proc/1/mem",
        "/proc/1/environ",
    ):
        outcome, reason = run(f"open({str(path)!r}, 'rb').read()" + RIGHT)
        assert outcome == "wrong", path
        assert "No such file" in reason or "Permission denied" in reason
    assert run("import os\nassert os.listdir('/home/') == []" + RIGHT)[0] == "wrong"


def test_sees_no_other_process(sealed):
    see = (
        "import os\n"
        "try: seen = sum(x.isdigit() for x in os.listdir('/proc'))\n"
        "except PermissionError: seen = 2\n"
        "assert seen == 2  # it and the runner"
    )
    assert run(see + RIGHT) == ("right", "")


def test_opens_the_network(sealed):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome, reason = run(
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 0.5)" + RIGHT
        )
    assert outcome == "wrong"
    assert any(word in reason for word in ("refused", "unreachable", "not permitted"))


def test_writes_outside(sealed, tmp_path):
    tmp_path.chmod(0o777)
    for path in (
        tmp_path / "mark",
        "/mark",
        "/usr/mark",
        "/program/mark",
        "/dev/mark",
        "/dev/shm/mark",
    ):
        outcome, _ = run(f"open({str(path)!r}, 'w').write('x')" + RIGHT)
        assert outcome == "wrong", path
    assert list(tmp_path.iterdir()) == []
    fill = "for i in range(9): open(f'f{i}', 'wb').write(bytes(10 * 2**20))"
    # Where it is no file system of its own, what is there is looked at now and then.
    fill += "\nimport time\ntime.sleep(0.5)"
    full = "wrote more than 64 MB" if sealed == "landlock" else "No space left"
    assert full in run(fill + RIGHT)[1]
    # What one test leaves is gone when the next starts.
    leave = (
        "import os\nassert os.listdir() == []\nopen('f', 'w').write('x')\n"
        "try: open('../seen', 'x')\nexcept PermissionError: pass"
    )
    assert run(leave + RIGHT) == ("right", "")


def test_folders_that_cannot_be_walked(rung):
    nested = "import os\nhere = os.getcwd()\nfor _ in range(1100): os.mkdir('a'); os.chdir('a')\n"
    closed = "os.chdir(here)\nos.makedirs('b/c')\nos.mkdir('b/c/d', 0)\nos.mkdir('e', 0)"
    outcome, reason = run(nested + closed + RIGHT)
    assert outcome == "right" or "timed out" in reason  # on a slow disk


def test_writes_where_nobody_can_look(sealed):
    hidden = "import os\nos.mkdir('d', 0o300)\n"
    fill = "for i in range(9): open(f'd/{i}', 'wb').write(bytes(10 << 20))"
    assert run(hidden + fill + RIGHT)[0] == "wrong"


def test_gains_no_power(sealed):
    for call in ("os.setuid(0)", "os.chroot('.')", "os.mknod('n', 0o60600, 1)"):
        program = f"import os\nuid = os.getuid()\n{call}\nassert os.getuid() == uid == 0"
        assert run(program + RIGHT)[0] == (
            "right" if "setuid" in call and zero(sealed) else "wrong"
        )


def test_system_calls_that_reach_around(sealed):
    """New namespaces (with every capability in them), and what outlives a process."""
    libc = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nEPERM = 1\n"
    calls = {
        "unshare": "libc.unshare(0x10000000)",
        "clone": "libc.syscall(56, 0x10000011, 0, 0, 0, 0)",
        "ptrace": "libc.ptrace(0, 0, 0, 0)",
        "shmget": "libc.shmget(0, 4096, 0o1600)",
        "msgget": "libc.msgget(0, 0o1600)",
        "memfd_create": "libc.memfd_create(b'x', 0)",
    }
    if os.uname().machine != "x86_64":
        del calls["clone"]  # that number is another call there
    for name, call in calls.items():
        program = f"{libc}assert {call} == -1 and ctypes.get_errno() == EPERM"
        assert run(program + RIGHT) == ("right", ""), name


def zero(rung):
    """Whether programs are called root in their namespace, with nothing of root's power."""
    return rung == "namespaces" and os.geteuid() != 0


@needs_gpp
def test_cpp(rung):
    echo = "#include <bits/stdc++.h>\nint main() { int a; std::cin >> a; std::cout << a; }"
    assert run(echo, "cpp") == ("right", "")
    loop = "int main() { while (true); }"
    assert run(loop, "cpp") == ("wrong", "test 1 of 2: timed out after 1 s")
    big = "#include <vector>\nint main() { std::vector<char> v(1000000000); return v[5]; }"
    assert run(big, "cpp") == ("wrong", "test 1 of 2: needed more than 300 MB")
    assert run("int main() { return x; }", "cpp")[1].startswith("does not compile: exit code 1: ")


@needs_gpp
def test_the_compiler_reads_no_other_file(sealed, tmp_path):
    (tmp_path / "secret.h").write_text("int x;")
    outcome, reason = run(f'#include "{tmp_path}/secret.h"\nint main() {{}}', "cpp")
    assert outcome == "wrong"
    assert "No such file" in reason or "Permission denied" in reason


def test_without_a_sandbox_consent_is_needed(monkeypatch):
    monkeypatch.setattr(sandbox, "probe", lambda: "rlimits")
    refused = judge("```python\nprint(input())\n```", ECHO, VerifierConfig())
    assert refused[:2] == ("unscorable", NO_SANDBOX)
    assert "verifier.allow_unsandboxed" in refused.reason
    assert run("print(input())") == ("right", "")


def test_the_warning_is_loud(monkeypatch):
    monkeypatch.setattr(ladder, "why_not", lambda rung: "no")
    sandbox.probe.cache_clear()
    with pytest.warns(RuntimeWarning, match="NO SANDBOX"):
        assert sandbox.probe() == "rlimits"
    sandbox.probe.cache_clear()
