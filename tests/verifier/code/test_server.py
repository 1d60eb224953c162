"""The processes that fork sandboxes: what one program does reaches no other, and servers end."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.rungs import why_not
from tramontane.config import VerifierConfig
from tramontane.types import Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.grade import _run_tests, judge
from tramontane.verifier.code.sandbox import server
from tramontane.verifier.code.shown import try_program

LIMITS = sandbox.Limits(20.0, 300)
GONE_SECONDS = 30.0


@pytest.fixture(params=[*sandbox.RUNGS[:2], pytest.param("landlock", marks=pytest.mark.slow)])
def rung(request):
    if reason := why_not(request.param):
        pytest.skip(f"{request.param} does not work here: {reason}")
    return request.param


def job(program, inputs=(b"",)):
    made = sandbox.Job(list(inputs), LIMITS)
    made.set_program(program, "python")
    return made


def output(program, rung):
    with sandbox.Sandbox(job(program), rung) as running:
        result = next(running.results)
        assert not result.failure, result
        return result.output.decode().split()


def test_nothing_passes_from_a_program_to_the_next(rung):
    change = (
        "import builtins, math, os, random, sys, re\n"
        "old = [hasattr(math, 'mark'), os.environ.get('MARK'), hasattr(builtins, 'mark'),\n"
        "    os.listdir('.'), os.path.exists('/tmp/mark'), random.random(), re.compile]\n"
        "math.mark = builtins.mark = re.compile = 1\nos.environ['MARK'] = 'x'\n"
        "random.seed(1)\n"
        "for place in ('mark', '/tmp/mark', '../mark'):\n"
        "    try: open(place, 'w').close()\n"
        "    except OSError: pass\n"
        "print(*old[:5], callable(old[6]), old[5])"
    )
    first, second = output(change, rung), output(change, rung)
    assert first[:6] == second[:6] == ["False", "None", "False", "[]", "False", "True"]
    assert first[6] != second[6]  # the generator of random numbers is seeded in each


def test_the_order_of_a_set_depends_on_the_seed_alone(rung):
    program = "print(*{'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'})"

    def order(hash_seed):
        made = job(program)
        made.hash_seed = hash_seed
        with sandbox.Sandbox(made, rung) as running:
            return next(running.results).output

    first = order(0)
    server.close()  # as another worker would
    assert order(0) == first
    assert order(1) != first


def test_a_file_beside_the_program_shadows_no_library(rung):
    made = job("import bisect, statistics\nprint(bisect.bisect([1], 2), statistics.mean([3]))")
    made.write("bisect.py", "raise SystemExit(3)")
    with sandbox.Sandbox(made, rung) as running:
        assert next(running.results).output.split() == [b"1", b"3"]


def test_programs_that_run_at_once_reach_neither_each_other_nor_the_server(rung):
    wait = "import os, time\nopen('f', 'w').close()\nprint(input())"
    look = (
        "import os\nfound = [n for n in range(2, 5000) if n != os.getpid() and reaches(n)]\n"
        "print(found, os.listdir('.'))"
    )
    reaches = (
        "import os\ndef reaches(n):\n    try: os.kill(n, 0)\n"
        "    except OSError: return False\n    return True\n"
    )
    with sandbox.Sandbox(job(wait, [b"7"]), rung) as one:
        assert output(reaches + look, rung) == ["[]", "[]"]
        assert next(one.results).output == b"7\n"


def test_a_sandbox_has_nothing_of_the_server_open(rung):
    look = (
        "import os\nopened = set(range(100))\n"
        "for n in range(100):\n    try: os.fstat(n)\n    except OSError: opened.remove(n)\n"
        "print(*sorted(opened))"
    )
    assert output(look, rung) == ["0", "1", "2"]


def test_capabilities_are_gone_for_good(rung):
    if rung == "landlock":  # no process is shown there
        return
    look = "print(*[x.split()[1] for x in open('/proc/self/status') if x.startswith('Cap')])"
    inherited, permitted, effective, bounding, ambient = output(look, rung)
    assert {inherited, permitted, effective, ambient} == {"0" * 16}
    assert rung == "bubblewrap" or bounding == "0" * 16


def test_sandboxes_of_several_threads(rung):
    found = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(output(f"print({n})", rung)))
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GONE_SECONDS)
    assert sorted(found) == [[str(n)] for n in range(6)]


def test_a_server_that_was_killed_is_replaced(rung):
    assert output("print(1)", rung) == ["1"]
    old = server._servers[rung, 0]._process
    old.kill()
    old.wait(GONE_SECONDS)
    assert output("print(2)", rung) == ["2"]
    assert server._servers[rung, 0]._process.pid != old.pid


def test_everything_ends_with_the_judge(rung, tmp_path):
    code = (
        "import sys, time\nsys.path[:0] = {path!r}\n"
        "from tramontane.verifier.code import sandbox\n"
        "from tramontane.verifier.code.sandbox import server\n"
        "job = sandbox.Job([b''], sandbox.Limits(60.0, 300))\n"
        "job.set_program('import time; time.sleep(60)', 'python')\n"
        "running = sandbox.Sandbox(job, {rung!r})\n"
        "print(server._servers[{rung!r}, 0]._process.pid, flush=True)\ntime.sleep(60)"
    )
    paths = [path for path in sys.path if path]
    judge = subprocess.Popen(
        [sys.executable, "-c", code.format(path=paths, rung=rung)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert judge.stdout
    first = int(judge.stdout.readline())
    deadline = time.monotonic() + GONE_SECONDS
    while len(family(first)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    everyone = family(first)
    assert len(everyone) > 1
    judge.send_signal(signal.SIGKILL)
    judge.communicate(timeout=GONE_SECONDS)
    while any(map(runs, everyone)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(runs, everyone))


def family(pid):
    """A process and all below it."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_fork_of_the_judge_has_a_server_of_its_own(rung):
    assert output("print(1)", rung) == ["1"]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = server._servers != {} or output("print(2)", rung) != ["2"]
            server.close()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert output("print(3)", rung) == ["3"]


def test_a_program_is_not_blamed_for_the_death_of_its_server(rung):
    made = job("import time\nprint(1, flush=True)\ntime.sleep(30)")
    with sandbox.Sandbox(made, rung) as running:
        time.sleep(0.5)
        os.killpg(server._servers[rung, 0]._process.pid, signal.SIGKILL)
        result = next(running.results)
    assert result.is_unjudged, result
    assert output("print(2)", rung) == ["2"]


CASES = [{"input": f"{n}", "output": f"{n}"} for n in range(3)]
# Are seen from outside while they run, by being nice or by the compiler's name.
SEEN = "    import os, time\n    os.nice(7)\n    time.sleep(30)\n"
ENDLESS = f"if True:\n{SEEN}"
# Takes a second to compile.
LONG = """constexpr int sum() {
    int n = 0;
    for (int i = 0; i < 20; i++) for (int j = 0; j < 99999; j++) n += j & 1;
    return n;
}
static_assert(sum() > 0);
int main() {}"""
needs_gpp = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
needs_sandbox = pytest.mark.skipif(sandbox.probe() == "rlimits", reason="needs root and a sandbox")


def is_seen(pid):
    try:
        name, rest = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)
    except OSError:
        return False
    return rest.split()[16] == "7" or "cc1plus" in name


def when_seen(then):
    """A thread that calls `then` once a program is seen, with the process of the best rung's server
    and the first process of the sandbox."""
    rung = sandbox.probe()
    assert output("print(1)", rung) == ["1"]
    first = server._servers[rung, 0]._process.pid
    before = set(family(first))

    def watch():
        deadline = time.monotonic() + GONE_SECONDS
        while time.monotonic() < deadline:
            new = [pid for pid in family(first) if pid not in before]
            if any(map(is_seen, new)):
                return then(first, new[0])
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@needs_sandbox
@pytest.mark.parametrize("judged_by", [judge, try_program])
@pytest.mark.parametrize(
    ("tag", "program", "tests", "blamed"),
    [
        ("python", ENDLESS, {"type": "stdio", "cases": CASES}, "test 1 of 3: "),
        ("python", ENDLESS, {"type": "python_assert", "code": "assert f(1) == 2"}, ""),
        pytest.param("cpp", LONG, {"type": "stdio", "cases": CASES}, "does not compile: ",
                     marks=needs_gpp),
    ],
)  # fmt: skip
def test_no_verdict_blames_a_program_for_the_death_of_its_server(
    judged_by, tag, program, tests, blamed
):
    killer = when_seen(lambda first, _: os.killpg(first, signal.SIGKILL))
    config = VerifierConfig(code_timeout_s=20.0)
    judged = judged_by(f"```{tag}\n{program}\n```", Problem("p", "code", "f", tests=tests), config)
    killer.join()
    assert (judged.outcome, judged.answer) == ("unscorable", program + "\n")
    told = blamed if judged_by is judge else ""
    assert judged.reason in (told + server.ENDED, f"{told}the sandbox did not start")
    if judged_by is judge:
        assert _run_tests.cache_info().currsize == 0  # an equal program is tried again


FRACTION = VerifierConfig(code_timeout_s=20.0, reward={"code": "fraction"})


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "checker", "outcome", "reason", "share"),
    [
        (f"n = int(input())\nif n == 1:\n{SEEN}print(n)", {}, "wrong",
         "1 of 3 tests; test 2 of 3: killed the sandbox", 1 / 3),
        ("print(int(input()) + 1)",
         {"checker": "program",
          "checker_code": f"import sys\nif open(sys.argv[2]).read() == '2\\n':\n{SEEN}"},
         "unscorable", "the checker ended its sandbox", 0.0),
    ],
)  # fmt: skip
def test_a_program_that_ends_its_sandbox_has_failed_the_rest(
    program, checker, outcome, reason, share
):
    """Something kills the first process of the sandbox while the second test runs."""
    killer = when_seen(lambda _, own: os.kill(own, signal.SIGKILL))
    problem = Problem("p", "code", "", tests={"type": "stdio", "cases": CASES, **checker})
    judged = judge(f"```python\n{program}\n```", problem, FRACTION)
    killer.join()
    assert (judged.outcome, judged.reason, judged.share) == (outcome, reason, share)
