r"""Graders, the kinds of reasons, and the server, with real workers."""

import asyncio
import json
import os
import pickle
import re
import subprocess
import sys
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.paths import ROOT
from tramontane.errors import InputError
from tramontane.types import Verdict
from tramontane.verdicts import Grader, Reason, Sample, reason_of, verify, verify_async

SECONDS = 60.0
TESTS = {"type": "python_assert", "entry_point": "f", "code": "assert f(3) == 9"}


def test_an_answer_alone_or_a_response_is_verified():
    assert verify(r"\frac12", "0.5").verdict == "right"
    assert verify(r"<think>2/4</think>So \boxed{2/4}.", "0.5").verdict == "right"
    assert verify("0.4", "0.5").verdict == "wrong"
    assert asyncio.run(verify_async("0.50", "0.5")).verdict == "right"
    assert verify("0.333", "1/3", math={"rounded_places": 3}).verdict == "right"


def test_samples_keep_their_order_whatever_they_are_graded_by():
    samples = [Sample(rf"\boxed{{{i % 3}}}", str(i // 2 % 3)) for i in range(12)]
    found = [v.verdict == "right" for v in Grader("math").grade(samples)]
    assert found == [i % 3 == i // 2 % 3 for i in range(12)]
    assert Grader().grade([]) == []


def test_one_sample_that_cannot_be_read_is_alone_unscorable():
    good = Sample("```python\ndef f(x): return x * x\n```", tests=TESTS)
    bad = Sample(good.text, tests="{")
    missing = Sample(good.text)
    found = Grader("code").grade([good, bad, missing, good])
    assert [v.verdict for v in found] == ["right", "unscorable", "unscorable", "right"]
    assert "not JSON" in found[1].reason and "no tests" in found[2].reason


def test_the_paper_s_reward_is_the_sum_of_its_axes():
    said = "<think>Three and four make seven.</think>The sum is \\boxed{7}."
    problem = "What is the sum of three and four?"
    grader = Grader("magistral", l_max=100, l_cache=50)
    assert grader.grade([Sample(said, "7", None, problem)])[0].reward == pytest.approx(1.1)
    late = Sample(said, "7", None, problem, n_tokens=75)
    assert grader.grade([late])[0].reward == pytest.approx(1.05)
    assert grader.grade([Sample("7", "7", None, problem)])[0].verdict == "malformed"


def test_a_mistake_is_named_before_anything_is_graded():
    for call, message in (
        (lambda: Grader("maths"), "kind 'maths': choose from math, plain"),
        (lambda: Grader("length"), "give l_max"),
        (lambda: Grader("math", settings={"timeout": 3}), r"timeout.*timeout_s"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_a_grader_works_in_a_forked_and_in_another_process():
    grader = Grader("math")
    assert grader.grade([Sample(r"\boxed{1}", "1")])[0].reward == 1.0
    again = pickle.loads(pickle.dumps(grader))
    assert again == grader
    if not (child := os.fork()):
        reward = again.grade([Sample(r"\boxed{1}", "1")])[0].reward
        from tramontane.verdicts.grader import close

        close()
        os._exit(int(reward != 1.0))
    assert os.waitpid(child, 0)[1] == 0
    assert grader.grade([Sample(r"\boxed{2}", "1")])[0].reward == 0.0


@pytest.mark.parametrize(
    ("verdict", "reason", "kind"),
    [
        ("right", "", "right"),
        ("wrong", "not the reference", "different"),
        ("wrong", "wrong output", "different"),
        ("wrong", "test 3 of 20: wrong output", "different"),
        ("wrong", "test 3 of 20: exit code 1", "failed"),
        ("wrong", "AssertionError: assert f(3) == 9", "failed"),
        ("wrong", "does not compile: expected ';'", "failed"),
        ("wrong", "ended before its tests", "failed"),
        ("wrong", "killed by signal 9", "failed"),
        ("wrong", "needed more than 300 MB", "failed"),
        ("wrong", "printed more than 16 MB", "failed"),
        ("wrong", "started more than 256 processes", "failed"),
        ("wrong", "wrote more than 64 MB, or 20,000 files", "failed"),
        ("wrong", "timed out after 3 s", "late"),
        ("wrong", "test 1 of 2: timed out after 4 s", "late"),
        ("wrong", "the box is empty", "refused"),
        ("wrong", "the answer is longer than 10,000 characters", "refused"),
        ("malformed", "does not start with <think>", "malformed"),
        ("unscorable", "the problem has no reference answer", "reference"),
        ("unscorable", "the tests never called the program", "reference"),
        ("unscorable", "verifier 'x': KeyError: 'a'", "function"),
        ("unscorable", "the worker died (signal 9 (Killed))", "machine"),
    ],
)
def test_the_kind_of_a_reason(verdict, reason, kind):
    assert reason_of(Verdict(0.0, {}, verdict, reason)) is Reason(kind)


def test_verdicts_of_real_answers_have_the_kind_of_their_reason():
    program = "```python\ndef f(x): return {}\n```"
    cases = {
        "x * x": Reason.RIGHT, "x": Reason.FAILED, "1 / 0": Reason.FAILED, "x +": Reason.FAILED,
    }  # fmt: skip
    found = Grader("code").grade([Sample(program.format(body), tests=TESTS) for body in cases])
    assert [reason_of(v) for v in found] == [*cases.values()], found
    texts = {r"\boxed{5}": "5", r"\boxed{6}": "5", r"\boxed{}": "5", r"\boxed{5 = 6}": "5"}
    found = Grader("math").grade([Sample(text, answer) for text, answer in texts.items()])
    kinds = [Reason.RIGHT, Reason.DIFFERENT, Reason.REFUSED, Reason.REFUSED]
    assert [reason_of(v) for v in found] == kinds, found


def command(*words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "tramontane", *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def post(address, body):
    request = Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=SECONDS) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
def test_the_server_answers_trainers_and_refuses_what_it_cannot_read():
    pytest.importorskip("fastapi", reason="not installed: pip install 'tramontane-rl[view]'")
    server = command("verify", "--serve", "verifier.workers=1")
    try:
        address = server.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}", address)
        rows = [{"text": r"\boxed{1/2}", "answer": "0.5"}, {"text": "0.5", "answer": "0.5"}]
        status, found = post(f"{address}/verify", {"rows": rows})
        assert status == 200 and [v["reward"] for v in found["verdicts"]] == [1.0, 0.0]
        assert [v["kind"] for v in found["verdicts"]] == ["right", "malformed"]
        asked = {"query": [r"1+1?\boxed{2}"], "prompts": ["1+1?"], "labels": ["2"]}
        status, found = post(f"{address}/openrlhf", asked)
        assert status == 200 and found["rewards"] == found["scores"] == [1.0]
        for body, code in (
            ({"rows": [{"txt": "1"}]}, 422),
            ({"rows": rows, "kind": "maths"}, 422),
            ({"rows": rows, "kind": "length"}, 400),
            ({"rows": [{"text": "1", "answer": "1"}] * 5000}, 422),
        ):
            assert post(f"{address}/verify", body)[0] == code, body
        assert post(f"{address}/openrlhf", {**asked, "labels": []})[0] == 400
        assert post(f"{address[:-1]}/verify", {"rows": rows})[0] == 401
    finally:
        server.terminate()
        server.communicate(timeout=SECONDS)


@pytest.mark.slow
def test_rows_from_a_pipe_become_verdicts_in_a_pipe():
    row = {
        "domain": "math",
        "problem": "?",
        "answer": "4",
        "response": r"<think>x</think>\boxed{4}",
    }
    lines = "".join(json.dumps({"id": str(i), **row}) + "\n" for i in range(300))
    scoring = command("score", "-", "--out", "-", "verifier.workers=1", stdin=subprocess.PIPE)
    said, complained = scoring.communicate(lines + "no row\n", timeout=SECONDS)
    found = [json.loads(line) for line in said.splitlines()]
    assert [v["id"] for v in found] == [str(i) for i in range(300)]
    assert {v["verdict"] for v in found} == {"right"}
    assert scoring.returncode == 1 and complained.startswith("-:301: not JSON")
    nothing = command("score", "-", stdin=subprocess.PIPE)
    assert "standard input: there are no rows" in nothing.communicate("", timeout=SECONDS)[1]
    assert nothing.returncode == 2


@pytest.mark.slow
def test_the_command_grades_one_answer():
    one = command("verify", r"\frac{1}{2}", "0.5", "verifier.workers=1")
    assert json.loads(one.communicate(timeout=SECONDS)[0])["verdict"] == "right"
    short = command("verify", "1")
    assert "an ANSWER and a REFERENCE" in short.communicate(timeout=SECONDS)[1]
