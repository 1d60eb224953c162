"""Stages that ask models in a killed process: nothing is lost, and nothing is asked twice."""

import json
import time
from collections import Counter

import pytest

from tests.asking.server import Server
from tests.curation.killing import kill_once_written, start
from tests.curation.test_curation import lines, results
from tests.curation.test_translate import translator
from tests.forked import end
from tramontane.curation.config import CurateConfig

CONCURRENCY = 2
pytestmark = pytest.mark.slow
# The process is killed when each of these files first has content.
MOMENTS = (
    "work/1-review/asked-000000008-answers.jsonl",
    "work/2-translate/asked-000000000-answers-0.jsonl",
    "work/3-difficulty/asked-000000000-answers.flight.json",
    "work/3-difficulty/asked-000000008-verdicts.jsonl",
)


def mind(asked, before):
    time.sleep(0.02)  # so that a kill falls between two answers
    text = asked["messages"][0]["content"]
    if "<translation>" in text:
        if "miles" not in text or asked["seed"] % 3 == 0:
            return "<translation>Je ne sais pas.</translation>"
        return translator(asked, before)
    # The answer depends on prompt and seed only, like that of a server that honors seeds.
    return f"Verdict: {'proof' if asked['seed'] % 4 == 0 else 'ok'}"


def settings(server, source):
    endpoint = {"url": server.url, "model": "m", "concurrency": CONCURRENCY}
    model = {"endpoint": endpoint}
    tiny = {"checkpoint": {"path": "tiny", "slots": 4}, "max_tokens": 40}
    return {
        "inputs": [str(source)],
        "chunk_rows": 8,
        "stages": ["review", "translate", "difficulty"],
        "review": {"model": model},
        "difficulty": {
            "model": tiny,
            "samples": 3,
            "max_pass_rate": 1,
            "verifier": {"timeout_s": 60},  # no verdict may be late because the machine is busy
        },
        "translate": {"model": model, "share": 1, "attempts": 2},
    }


def committed(path):
    """The valid part of a record."""
    flight = path.with_suffix(".flight.json")
    if flight.is_file():
        return path.read_bytes()[: json.loads(flight.read_text())["end"]]
    return path.read_bytes().rpartition(b"\n")[0]


def test_a_curation_killed_while_asking_ends_with_the_same_results(tmp_path):
    source = tmp_path / "raw.jsonl"
    train = "A train travels {} miles in $t = 1$ hours. How many miles does it travel in one hour?"
    sums = "What is ${} + 2$?"  # the tiny model solves some of these
    rows = [
        {
            "id": f"r{n}",
            "problem": (sums if n % 2 else train).format(n + 1),
            "answer": n + 1 + n % 2 * 2,
        }
        for n in range(20)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Server(mind) as server:

        def into(out):
            return CurateConfig.model_validate(settings(server, source) | {"out": str(out)})

        assert end(start(into(tmp_path / "whole"))) == 0
        whole = results(tmp_path / "whole")
        once = Counter(dict(server.seen))
        server.seen.clear()
        out, recorded = tmp_path / "killed", {}
        for moment in (*MOMENTS, None):
            process = start(into(out))
            if moment:
                kill_once_written(process, out / moment)
            else:
                assert end(process) == 0
            for path, before in recorded.items():
                assert not path.exists() or path.read_bytes().startswith(before)
            recorded = {p: committed(p) for p in (out / "work").rglob("asked-*.jsonl")}
    assert results(out) == whole
    assert server.seen.keys() == once.keys()
    # Repeated are only requests that were not recorded yet when a process was killed.
    assert server.seen.total() - once.total() <= 2 * CONCURRENCY * len(MOMENTS)
    summary = json.loads(whole["summary.json"])
    drops = {reason for stage in summary["stages"] for reason in stage["dropped"]}
    assert drops == {"proof", "unsolved"}
    assert len(lines(out / "kept.jsonl")) >= 2
    assert b"HTTP" not in whole["decisions.jsonl"]
    assert not (out / "work").exists()
