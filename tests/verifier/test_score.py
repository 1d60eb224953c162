"""`score_file`: rows in, verdicts out, bad rows named by line."""

import gzip
import json

import pytest

from tramontane.errors import InputError
from tramontane.verifier import score_file

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
    summary = score_file(
        source, out, l_max=100, l_cache=20, progress=lambda *done: seen.append(done)
    )
    rows = [json.loads(line) for line in out.open()]
    assert [(r["id"], r["verdict"]) for r in rows] == [
        ("a", "right"), ("7", "malformed"), ("c", "right"), ("b", "wrong")
    ]  # fmt: skip
    assert set(rows[0]) == {"id", "reward", "parts", "verdict", "reason", "seconds"}
    assert rows[0]["reward"] == pytest.approx(1.05)
    assert rows[2]["reward"] == pytest.approx(1.1)
    assert summary.outcomes == {"right": 2, "wrong": 1, "malformed": 1}
    assert summary.scored == 4
    where = [row.partition(": ")[0].rpartition(":")[2] for row in summary.bad_rows]
    assert where == ["2", "5", "6", "7"]
    assert 'domain must be "math" or "code", not "physics"' in summary.bad_rows[1]
    assert "answer is missing" in summary.bad_rows[2]
    assert seen[-1] == (8, 8)


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        score_file(tmp_path / "nothing.jsonl")
    (tmp_path / "in.jsonl").write_text("")
    with pytest.raises(InputError, match="no folder"):
        score_file(tmp_path / "in.jsonl", tmp_path / "no" / "out.jsonl")


def test_a_damaged_file_is_refused_with_the_reason(tmp_path):
    whole = gzip.compress("".join(json.dumps(GOOD | {"id": i}) + "\n" for i in range(999)).encode())
    source, out = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    source.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"in\.jsonl\.gz: the gzip file is cut off after line \d"):
        score_file(source, out)
    assert not out.exists()


def test_the_rows_are_not_overwritten(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(GOOD))
    with pytest.raises(InputError, match="would overwrite the rows"):
        score_file(source, source)
    assert json.loads(source.read_text()) == GOOD
