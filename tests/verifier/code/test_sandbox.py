"""Hostile programs on every rung that works here: the verdict is true, and nothing is left."""

import ast
import contextlib
import ctypes
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fuzz.hostile import SUBREAPER, descendants
from tests.rungs import why_not
from tramontane.config import VerifierConfig
from tramontane.temporary import PREFIX
from tramontane.types import Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.grade import NO_SANDBOX, judge
from tramontane.verifier.code.sandbox import running
from tramontane.verifier.code.sandbox.rungs import ENVIRONMENT, INSIDE

# Long enough on a loaded machine; what is expected to be late has little time.
CONFIG = VerifierConfig(code_timeout_s=20.0, allow_unsandboxed=True)
SHORT = VerifierConfig(code_timeout_s=0.2, allow_unsandboxed=True)
LATE = ("wrong", "test 1 of 2: timed out after 0.2 s")
ASLEEP = ("wrong", "test 1 of 2: timed out after 0.4 s, most of it asleep")
GONE_SECONDS = 30.0  # limit for killed processes to be gone
CASES = [{"input": "7\n", "output": "7\n"}, {"input": "8\n", "output": "8\n"}]
ECHO = Problem("echo", "code", "Print it.", tests={"type": "stdio", "cases": CASES})
RIGHT = "\nprint(input())"
needs_gpp = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(params=sandbox.RUNGS)
def rung(request, monkeypatch):
    if request.param != "rlimits" and (reason := why_not(request.param)):
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
    mounts = Path("/proc/self/mounts").read_text()
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)  # orphans stay below this process
    yield
    deadline = time.monotonic() + GONE_SECONDS
    while (rest := processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    ctypes.CDLL(None).prctl(SUBREAPER, 0, 0, 0, 0)
    assert not rest
    for own in folder.glob(f"{PREFIX}*"):
        own.rmdir()  # fails unless it is empty
    folder.rmdir()
    assert Path("/proc/self/mounts").read_text() == mounts


def processes():
    """Running processes of sandboxes below this one, by their names and command lines."""
    found = set()
    for pid, name in [line.split(maxsplit=1) for line in descendants()]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if not line:  # an orphan that has ended
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(int(pid), os.WNOHANG)
            elif name == "sandbox" or b"inside.runner" in line or b"hostile-mark" in line:
                found.add(pid)
    return found


def run(program, tag="python", problem=ECHO, config=CONFIG):
    return judge(f"```{tag}\n{program}\n```", problem, config)[:2]


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
    # A program that never reads its input is judged by its output.
    assert run("print(7)") == ("wrong", "test 2 of 2: wrong output")


def test_forks_without_end(rung):
    if rung == "rlimits":
        pytest.skip("would take the machine's processes along")
    assert run("import os\nwhile True: os.fork()")[0] == "wrong"
    quiet = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert run(quiet, config=SHORT) == LATE


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
    assert run("import time; time.sleep(60)", config=SHORT) == ASLEEP
    assert run("while True: pass", config=SHORT) == LATE


def test_kills_everyone(sealed):
    parent = "import os\ntry: os.kill(os.getppid(), 9)\nexcept PermissionError: pass"
    assert run(parent + RIGHT) == ("right", "")
    everyone = "import os\ntry: os.kill(-1, 9)\nexcept OSError: pass"
    assert run(everyone + RIGHT) == ("right", "")


def test_takes_memory(rung):
    too_much = ("wrong", "test 1 of 2: needed more than 300 MB")
    assert run("x = bytearray(10**9)") == too_much
    # Each process is below the limit, all of them together are above it.
    many = "import os, time\nfor i in range(5): os.fork()\nx = b'x' * 2 * 10**7\ntime.sleep(60)"
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
    fill += "\nimport time\ntime.sleep(60)"  # behind Landlock the files are measured meanwhile
    full = "wrote more than 64 MB" if sealed == "landlock" else "No space left"
    assert full in run(fill + RIGHT)[1]
    # The files of one test are gone when the next starts.
    leave = (
        "import os\nassert os.listdir() == []\nopen('f', 'w').write('x')\n"
        "try: open('../seen', 'x')\nexcept PermissionError: pass"
    )
    assert run(leave + RIGHT) == ("right", "")


def test_folders_that_cannot_be_walked(rung):
    nested = "import os\nhere = os.getcwd()\nfor _ in range(1100): os.mkdir('a'); os.chdir('a')\n"
    closed = "os.chdir(here)\nos.makedirs('b/c')\nos.mkdir('b/c/d', 0)\nos.mkdir('e', 0)"
    assert run(nested + closed + RIGHT) == ("right", "")


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
    """New namespaces (with every capability in them), and memory that outlives a process."""
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
    """True if programs are called root in their namespace, without root's power."""
    return rung == "namespaces" and os.geteuid() != 0


@needs_gpp
def test_cpp(rung):
    echo = "#include <bits/stdc++.h>\nint main() { int a; std::cin >> a; std::cout << a; }"
    assert run(echo, "cpp") == ("right", "")
    assert run("int main() { while (true); }", "cpp", config=SHORT) == LATE
    big = "int main() { volatile char* v = new char[1000000000](); return v[5]; }"
    assert run(big, "cpp") == ("wrong", "test 1 of 2: needed more than 300 MB")
    assert run("int main() { return x; }", "cpp")[1].startswith("does not compile: exit code 1: ")


@needs_gpp
def test_the_compiler_reads_no_other_file(sealed, tmp_path):
    (tmp_path / "secret.h").write_text("int x;")
    outcome, reason = run(f'#include "{tmp_path}/secret.h"\nint main() {{}}', "cpp")
    assert outcome == "wrong"
    assert "fatal error" in reason  # what follows it may be cut off


def test_without_a_sandbox_consent_is_needed(monkeypatch):
    monkeypatch.setattr(sandbox, "probe", lambda: "rlimits")
    refused = judge("```python\nprint(input())\n```", ECHO, VerifierConfig())
    assert refused[:2] == ("unscorable", NO_SANDBOX)
    assert "verifier.allow_unsandboxed" in refused.reason
    assert run("print(input())") == ("right", "")


def test_the_warning_is_loud(monkeypatch):
    monkeypatch.setattr(running, "why_not", lambda rung: "no")
    sandbox.probe.cache_clear()
    with pytest.warns(RuntimeWarning, match="NO SANDBOX"):
        assert sandbox.probe() == "rlimits"
    sandbox.probe.cache_clear()


def test_a_rung_that_does_not_work_says_what_its_tool_printed(monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho first >&2\necho no permission >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{tmp_path}:{ENVIRONMENT['PATH']}")
    assert sandbox.why_not("bubblewrap") == "the sandbox did not start no permission"
    monkeypatch.setitem(ENVIRONMENT, "PATH", "/nowhere")
    assert sandbox.why_not("bubblewrap") == "bwrap not found"


def test_code_inside_a_sandbox_imports_itself_and_the_standard_library_in_a_tree():
    imports = {path.stem: imported(path) for path in INSIDE.glob("*.py")}
    for name, (siblings, others) in imports.items():
        assert siblings <= imports.keys(), name
        assert others <= sys.stdlib_module_names, name
    while leaves := {
        name for name, (siblings, _) in imports.items() if not siblings & imports.keys()
    }:
        for name in leaves:
            del imports[name]
    assert not imports, "these import each other"


def imported(path):
    """Modules of the same folder, and top-level packages, that a file imports anywhere."""
    siblings, others = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            others |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1
            siblings |= {node.module} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            others.add(node.module.partition(".")[0])
    return siblings, others
