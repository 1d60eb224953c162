"""Inputs that a model proposes for tests: how its answers are read, and how it can fail."""

import json
import time
from collections import Counter

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.asking.server import DIE, STALL, Server, body, status
from tests.curation.killing import kill_once_written, start
from tests.curation.test_code_stage import DOUBLE, NAMES, doubles, lines, row, write
from tests.forked import end
from tramontane import InputError
from tramontane.asking import Answer
from tramontane.config import parse_settings
from tramontane.curation.config import CurateConfig
from tramontane.curation.inputs import PER_ANSWER, questions, read_inputs
from tramontane.curation.pipeline import curate
from tramontane.types import Problem

PROBLEM = Problem("p", "code", "Double it.", tests={"type": "stdio", "cases": doubles(3, 5)})


def settings(server, source, out, **code):
    endpoint = {"url": server.url, "model": "m", "retries": 1, "backoff_s": 0.01, "timeout_s": 60}
    section = {
        "model": {"endpoint": endpoint | code.pop("endpoint", {}), "max_tokens": 100},
        "inputs": ["model"],
        "want_tests": 5,
        "languages": [],
        "verifier": {"workers": 2, "code_timeout_s": 60},
    }
    return CurateConfig.model_validate(
        {"inputs": [source], "out": str(out), "stages": ["code"], "code": section | code}
    )


def run(tmp_path, rows, server, **code):
    curate(settings(server, write(tmp_path / "raw.jsonl", rows), tmp_path / "out", **code))
    decisions = {d["id"]: d for d in lines(tmp_path / "out/decisions.jsonl")}
    kept = {k["id"]: k["tests"]["cases"] for k in lines(tmp_path / "out/kept.jsonl")}
    return decisions, kept


def proposing(*inputs):
    return "Sure:\n" + "\n".join(f"<input>\n{text}\n</input>" for text in inputs)


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        (proposing("7", "8 9\n10"), ["7\n", "8 9\n10\n"]),
        ("<input>7</input>", ["7\n"]),
        ("<input>\n```\n7\n8\n```\n</input>", ["7\n8\n"]),
        ("<input>7\r\n8\r\n</input>", ["7\n8\n"]),
        ("<think><input>6</input></think><input>7</input>", ["7\n"]),
        (proposing("7", " 7", "7\n\n"), ["7\n"]),  # all the same
        (proposing("3", "5 "), []),  # given inputs
        (proposing("", " \n"), []),
        (proposing("1" * 10_001), []),
        ("7", []),
        ("<input>7", []),
        ("", []),
    ],
)
def test_inputs_are_read_from_an_answer(text, inputs):
    proposal = read_inputs(PROBLEM, [Answer(text, 1)])
    assert proposal.inputs == inputs
    assert bool(proposal.fault) == (not inputs)


@hypothesis.settings(deadline=None)
@given(st.lists(st.text("<input>/x 1\n`", max_size=60), max_size=4))
def test_any_answer_gives_valid_inputs_or_a_fault(texts):
    proposal = read_inputs(PROBLEM, [Answer(text, 1) for text in ["", *texts]])
    assert len(set(proposal.inputs)) == len(proposal.inputs)
    assert all(text.strip() and text.endswith("\n") for text in proposal.inputs)
    assert bool(proposal.inputs) != bool(proposal.fault)


def test_a_failed_answer_counts_only_without_other_inputs():
    down, good = Answer("", 0, "HTTP 500: down"), Answer(proposing("7"), 1)
    assert read_inputs(PROBLEM, [down, good]) == (["7\n"], "")
    assert read_inputs(PROBLEM, [down]) == ([], "HTTP 500: down")


def test_a_question_shows_the_problem_and_short_inputs():
    cases = [{"input": text, "output": ""} for text in ("1\n", "x" * 2000, "2\n", "3\n", "4\n")]
    problem = Problem("p", "code", "Double it.", tests={"type": "stdio", "cases": cases})
    asked = questions(problem, 2 * PER_ANSWER + 1)
    assert len({prompt.key for prompt in asked}) == len(asked) == 3
    assert "Double it." in asked[0].text
    shown = [f"<input>\n{n}\n</input>" in asked[0].text for n in (1, 2, 3, 4)]
    assert shown == [True, True, True, False] and "xxx" not in asked[0].text


@pytest.mark.slow
def test_proposed_inputs_are_labeled_by_the_solutions(tmp_path):
    """Inputs that no program can read are dropped."""
    answers = Counter()

    def mind(asked, before):
        answers[asked["messages"][0]["content"]] += 1
        return proposing("20", "no number", "3", "40", "20")

    odd = [f"n=int(input());print({i} if n==40 else 2*n)" for i in range(3)]
    rows = [
        row("few", doubles(3, 5), DOUBLE),
        row("they_differ", doubles(3, 5), odd),
        row("enough", doubles(3, 5, 7, 8, 9), DOUBLE),
        row("few_solutions", doubles(3, 5), DOUBLE[:2]),
        row("mixed", doubles(3, 5, wrong=[5]), DOUBLE),
    ]
    with Server(mind) as server:
        decisions, kept = run(tmp_path, rows, server)
    assert kept["few"] == doubles(3, 5, 20, 40)
    assert decisions["few"]["reason"] == "tests_added"
    assert kept["they_differ"] == doubles(3, 5, 20)
    assert kept["enough"] == rows[2]["tests"]["cases"]
    assert kept["few_solutions"] == doubles(3, 5)
    assert kept["mixed"] == doubles(3, 5, 20, 40)
    # The model is not asked about problems with enough tests or too few solutions.
    asked = " ".join(answers)
    assert [f"{name}?" in asked for name in ("few", "enough", "few_solutions")] == [
        True, False, False,
    ]  # fmt: skip


@pytest.mark.slow
def test_mutations_supply_the_inputs_that_the_model_lacks(tmp_path):
    with Server(lambda asked, before: proposing("30")) as server:
        _, kept = run(
            tmp_path, [row("p", doubles(3, 40), DOUBLE)], server, inputs=["model", "mutation"]
        )
    assert kept["p"][:3] == doubles(3, 40, 30) and len(kept["p"]) == 5
    assert kept["p"] == doubles(*(int(case["input"]) for case in kept["p"]))


FAILURES = {
    "rubbish": (body(b"<html>"), "not a chat completion"),
    "no inputs": ("I cannot do that.", "nothing new between <input> and </input>"),
    "down": (status(500, "out of memory"), "HTTP 500: out of memory (tried 2 times)"),
    "refused": (status(400, "too long"), "HTTP 400: too long"),
    "stalls": (STALL, "no answer within 2 s (tried 2 times)"),
    "breaks off": (DIE, "(tried 2 times)"),
}


@pytest.mark.slow
def test_failures_of_the_model_are_recorded_and_stop_nothing(tmp_path):
    def mind(asked, before):
        text = asked["messages"][0]["content"]
        failing = (reply for name, (reply, _) in FAILURES.items() if f"{name}?" in text)
        return next(failing, proposing("20", "30", "40"))

    rows = [row(name, doubles(3, 5), DOUBLE) for name in (*FAILURES, "good")]
    rows.append(row("wrong label, down", doubles(3, 5, wrong=[3]), DOUBLE))
    with Server(mind) as server:
        decisions, kept = run(tmp_path, rows, server, endpoint={"concurrency": 8, "timeout_s": 2})
    for name, (_, said) in FAILURES.items():
        found = decisions[name]
        assert (found["decision"], found["reason"]) == ("kept", "no_inputs")
        assert "no inputs from the model: " in found["detail"] and said in found["detail"]
        assert kept[name] == doubles(3, 5)
    assert kept["good"] == doubles(3, 5, 20, 30, 40)


def test_inputs_from_a_model_need_a_model():
    for text, said in [
        ("code.inputs=[model]", "name model in it"),
        ("code.model.endpoint.url=http://x", "endpoint.model: not given"),
        ("code.model.checkpoint.path=tiny", "name model in it"),
        ("name=curated", "name: unknown key; valid keys: "),  # no key of another trainer
    ]:
        with pytest.raises(InputError, match=said):
            parse_settings(CurateConfig, {"stages": ["code"]}, [text], "test")
    raw = {"stages": ["code"], "code": {"inputs": ["model"], "model": {}}}
    with pytest.raises(InputError, match="code: give it one model: code.model.checkpoint"):
        parse_settings(CurateConfig, raw, [], "test")


@pytest.mark.slow
def test_killed_while_asking_and_while_programs_run(tmp_path):
    def mind(asked, before):
        time.sleep(0.05)
        if asked["seed"] % 5 == 0:  # depends on the seed only, so that the result is repeatable
            return status(400, "no")
        return proposing(*(asked["seed"] % 97 + i for i in range(3)))

    rows = [row(f"p{i}", doubles(3, 4 + i), DOUBLE) for i in range(3)]
    source = write(tmp_path / "raw.jsonl", rows)
    with Server(mind) as server:
        curate(settings(server, source, tmp_path / "whole", endpoint={"concurrency": 2}))
        once = Counter(dict(server.seen))
        server.seen.clear()
        out = tmp_path / "killed"
        config = settings(server, source, out, endpoint={"concurrency": 2})
        for file in ("asked-000000000-answers.jsonl", "asked-000000000-finished.jsonl"):
            kill_once_written(start(config), out / "work/1-code" / file)
        assert end(start(config)) == 0
    for name in NAMES:
        whole = (tmp_path / "whole" / name).read_text(encoding="utf-8")
        assert (out / name).read_text(encoding="utf-8") == whole.replace(
            str(tmp_path / "whole"), str(out)
        )
    assert server.seen.keys() == once.keys()
    # Repeated are only requests under way, and failed ones, when the first process was killed.
    failed = sum(json.loads(raw)["seed"] % 5 == 0 for raw in once)
    assert server.seen.total() - once.total() <= 2 + failed
