"""`score`: rows in, verdicts out, bad rows named by line."""

import gzip
import json
import os
import signal
import time

import pytest

import tramontane
from tests.forked import Command
from tests.run.test_resume import wait_until
from tramontane.errors import InputError
from tramontane.evaluation.score import score

GOOD = {
    "id": "a",
    "domain": "math",
    "problem": "What is the sum of two and three?",
    "answer": 5,
    "response": "<think>I add them.</think>The answer is \\boxed{5}.",
    "response_tokens": 90,
}
CODE = {
    "id": "c",
    "domain": "code",
    "problem": "Print seven.",
    "language": "python",
    "tests": {"type": "stdio", "cases": [{"input": "", "output": "7"}]},
    "response": "<think>That is easy to do.</think>\n```python\nprint(7)\n```",
}


def test_score_file(tmp_path):
    lines = [
        json.dumps(GOOD),
        "{not json",
        "",
        json.dumps(GOOD | {"id": 7, "response": "5"}),
        json.dumps(GOOD | {"domain": "physics"}),
        json.dumps({k: v for k, v in GOOD.items() if k != "answer"}),
        "[]",
        json.dumps(CODE),
        json.dumps(GOOD | {"id": "b", "response": GOOD["response"].replace("{5}", "{6}")}),
    ]
    source, out = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    with gzip.open(source, "wt") as file:
        file.write("\n".join(lines))
    seen = []
    summary = score(
        source,
        out,
        overrides=["pipeline.l_max=100", "pipeline.l_cache=20"],
        progress=lambda *done: seen.append(done),
    )
    rows = [json.loads(line) for line in out.open()]
    assert [(r["id"], r["verdict"]) for r in rows] == [
        ("a", "right"), ("7", "malformed"), ("c", "right"), ("b", "wrong")
    ]  # fmt: skip
    fields = {"id", "reward", "parts", "verdict", "reason", "seconds", "answer", "kind"}
    assert set(rows[0]) == fields
    assert rows[0]["answer"] == "5"
    assert rows[0]["reward"] == pytest.approx(1.05)
    assert rows[2]["reward"] == pytest.approx(1.1)
    assert summary.outcomes == {"right": 2, "wrong": 1, "malformed": 1}
    assert summary.scored == 4
    where = [row.partition(": ")[0].rpartition(":")[2] for row in summary.bad_rows]
    assert where == ["2", "5", "6", "7"]
    assert (
        "domain must be one of math, code, instructions, calls, reasoning_gym, verifiers, not "
        in summary.bad_rows[1]
    )
    assert "answer is missing" in summary.bad_rows[2]
    assert seen[-1] == (8, 8)


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        score(tmp_path / "nothing.jsonl")
    (tmp_path / "in.jsonl").write_text("")
    with pytest.raises(InputError, match="no folder"):
        score(tmp_path / "in.jsonl", tmp_path / "no" / "out.jsonl")


def test_a_damaged_file_is_refused_with_the_reason(tmp_path):
    whole = gzip.compress("".join(json.dumps(GOOD | {"id": i}) + "\n" for i in range(999)).encode())
    source, out = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    source.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"in\.jsonl\.gz: the gzip file is cut off after line \d"):
        score(source, out)
    assert not out.exists()


def test_the_rows_are_not_overwritten(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(GOOD))
    with pytest.raises(InputError, match="would overwrite the rows"):
        score(source, source)
    assert json.loads(source.read_text()) == GOOD


def test_rows_that_cannot_be_read_do_not_stop_the_rest(tmp_path):
    one_case = {"type": "stdio", "cases": [{"input": "1"}]}
    bad = [
        (b"[" * 100_000, "not JSON"),
        (b'{"id": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"id": "\xff"}', "not UTF-8"),
        (GOOD | {"id": True}, "id is of the wrong type"),
        (GOOD | {"response": ["5"]}, "response is of the wrong type"),
        (GOOD | {"response_tokens": -1}, "response_tokens is of the wrong type"),
        (GOOD | {"language": 5}, "language is of the wrong type"),
        (GOOD | {"domain": ["math"]}, "domain must be"),
        (CODE | {"tests": {"type": "stdio", "cases": 7}}, "tests: the tests need cases"),
        (CODE | {"tests": one_case}, "tests: the tests need cases"),
        (CODE | {"tests": {}}, "tests is empty"),
    ]
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line, _ in bad]
    lines.append(json.dumps(GOOD | {"id": "\ud800"}).encode())
    (source := tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    summary = score(source, out := tmp_path / "out.jsonl")
    assert len(summary.bad_rows) == len(bad)
    for number, (said, (_, message)) in enumerate(zip(summary.bad_rows, bad, strict=True), 1):
        assert said.startswith(f"{source}:{number}: {message}")
    assert [json.loads(line)["id"] for line in out.open()] == ["\ud800"]


def test_an_empty_file_is_refused(tmp_path):
    (source := tmp_path / "in.jsonl").write_text("\n")
    with pytest.raises(InputError, match="there are no rows"):
        score(source)


@pytest.mark.slow
def test_config_and_overrides(tmp_path):
    (source := tmp_path / "in.jsonl").write_text(json.dumps(GOOD))
    (config := tmp_path / "run.yaml").write_text(
        "name: x\npipeline: {l_max: 100, l_cache: 20}\nverifier: {reward: {format: 0.5}}\n"
    )
    assert tramontane.score(source).mean_reward == pytest.approx(1.1)
    assert tramontane.score(source, config=config).mean_reward == pytest.approx(1.45)
    overrides = ["verifier.reward.language=0", "pipeline.l_cache=0"]
    assert tramontane.score(source, None, config, overrides).mean_reward == pytest.approx(1.4)
    with pytest.raises(InputError, match="only verifier"):
        tramontane.score(source, overrides=["trainer.ranks=2"])


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_command_stopped_midway_leaves_whole_rows(tmp_path, how, code):
    (source := tmp_path / "in.jsonl").write_text(
        "".join(json.dumps(GOOD | {"id": i}) + "\n" for i in range(20_000))
    )
    out = tmp_path / "out.jsonl"
    command = Command("score", str(source), "--out", str(out))
    while not (out.exists() and out.stat().st_size):
        assert command.poll() is None, command.communicate()
        time.sleep(0.01)
    os.kill(command.pid, how)
    printed = command.communicate()
    assert command.wait() == code, printed
    assert "Traceback" not in printed
    text = out.read_text()
    ids = [json.loads(line)["id"] for line in text.splitlines()]
    assert text.endswith("\n") and ids == [str(i) for i in range(len(ids))]
    assert 0 < len(ids) < 20_000
    assert ("starting again replaces it" in printed) == (how is signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_evaluation_says_that_the_same_command_continues(tmp_path, how, code, one_layer):
    out = tmp_path / "eval.jsonl"
    sizes = ("--problems", "2000", "--slots", "16")
    command = Command("eval", one_layer, "playground:", *sizes, "--out", str(out))
    wait_until(lambda: out.exists() and out.stat().st_size > 0, command)
    os.kill(command.pid, how)
    printed = command.communicate()
    assert command.wait() == code, printed
    assert f"stopped; the same command continues ({out})" in printed


def test_ids_that_occur_twice_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [GOOD | {"id": name} for name in ("a", "b", "a", "c", "a")]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    summary = score(path)
    assert dict(summary.double_ids) == {"a": 3} and summary.scored == 5


def test_conversations_are_judged_by_their_last_turn(tmp_path):
    said = ["<think>I ask the tool.</think>", GOOD["response"]]
    call = {"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    messages = [
        {"role": "user", "content": GOOD["problem"]},
        {"role": "assistant", "content": said[0], "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": said[1]},
    ]
    turns = [{"text": said[0], "calls": [{"name": "add"}]}, {"text": said[1], "calls": []}]
    row = {key: value for key, value in GOOD.items() if key != "response"}
    bare = [messages[0], messages[1] | {"content": "No thoughts."}, *messages[2:]]
    rows = [
        row | {"messages": messages},
        row | {"turns": turns},
        row | {"messages": bare},  # thoughts are missing from its first turn
        row | {"messages": messages[:1]},
        row | {"turns": "none"},
        GOOD | {"messages": messages[:1]},  # of the problem
        row | {"turns": turns, "ending": "environment_failed", "ending_reason": "KeyError: 5"},
        row | {"turns": [], "ending": "step_timeout", "ending_reason": "its start"},
        row | {"turns": [], "ending": "context_full"},
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = score(source, out)
    verdicts = [json.loads(line) for line in out.open()]
    assert [v["verdict"] for v in verdicts] == [
        "right", "right", "malformed", "right", "unscorable", "unscorable", "malformed"
    ]  # fmt: skip
    reasons = {"environment_failed: KeyError: 5": 1, "step_timeout: its start": 1}
    assert summary.unscorable == reasons and summary.mean_reward == pytest.approx(3.3 / 5)
    assert verdicts[0]["answer"] == "5"
    assert [bad.partition(": ")[2] for bad in summary.bad_rows] == [
        "messages has no text of the model's in field 'content'",
        "turns is of the wrong type (needed: list of objects)",
    ]


@pytest.mark.parametrize("answer", ["The answer is \\boxed{2}.", "Answer: 2", "2 (two)"])
def test_a_reference_in_prose_is_read_as_in_training(tmp_path, answer):
    row = {"id": "1", "domain": "math", "problem": "1 + 1?", "answer": answer}
    row["response"] = "<think>a</think>\\boxed{2}"
    (source := tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    command = Command("score", str(source), "--out", str(tmp_path / "out.jsonl"))
    assert command.wait() == 0, command.communicate()
    assert json.loads((tmp_path / "out.jsonl").read_text())["verdict"] == "right"
