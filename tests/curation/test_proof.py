"""The curation proof at a small size, with a kill in the middle: its report adds up."""

import json
import signal

import pytest

from tests.curation.killing import start_script
from tests.forked import end
from tests.paths import ROOT
from tramontane.run.rollouts import read_run

SCRIPT = ROOT / "benchmarks/curation_proof.py"
SIZES = [
    "--rows=60", "--samples=2", "--seeds=1", "pipeline.updates=2", "pipeline.n_batch=16",
    "pipeline.n_async=32", "pipeline.group_size=4", "pipeline.l_max=96", "evaluation.problems=8",
    "evaluation.samples=1", "verifier.workers=1",
]  # fmt: skip
SETS = {"raw", "one pass", "two passes"}
pytestmark = pytest.mark.slow


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    """(folder, report) of a command that is killed in the first pass, and started again."""
    folder = tmp_path_factory.mktemp("proof")
    arguments = [*SIZES, f"--work={folder}", f"--out={folder}/report.json"]
    assert end(start_script(SCRIPT, arguments, "first/summary.json")) == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in folder.glob("clean/*")}
    assert before
    assert end(start_script(SCRIPT, arguments)) == 0
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("clean/*")}
    return folder, json.loads((folder / "report.json").read_text(encoding="utf-8"))


def test_every_row_is_in_the_report_and_rules_find_all_their_faults(proof):
    folder, report = proof
    truth = json.loads((folder / "truth.json").read_text(encoding="utf-8"))["rows"]
    funnel = report["funnel"]
    assert funnel["raw"] == len(truth) == 60
    assert funnel["raw"] > funnel["clean"] >= max(funnel["one pass"], funnel["two passes"]) > 0
    for scores in report["scores"].values():
        assert sum(s["planted"] for s in scores.values()) == 60
        assert sum(s["kept"] for s in scores.values()) in funnel.values()
        for fault in ("duplicate", "near_duplicate", "proof", "multi_part", "broken_tests"):
            planted = sum(t["fault"] == fault for t in truth.values())
            assert scores[fault]["planted"] == scores[fault]["found"] == planted > 0
    labels = report["labels"]
    assert labels["right before"] < labels["labels before"]
    assert labels["right after"] == labels["labels after"]


def test_the_argument_counts_each_sound_problem_once(proof):
    folder, report = proof
    found = report["argument"]
    assert sum(found["fates"].values()) == found["sound"]
    assert sum(found["sound_by_level"].values()) == found["sound"]
    assert sum(found["kept_by_two_by_level"].values()) == found["of_these_kept_by_two"]
    first, second = (
        {d["id"]: d["reason"] for d in lines(folder / name / "decisions.jsonl")}
        for name in ("first", "second")
    )
    assert first.keys() == second.keys()  # both passes read the same rows
    truth = json.loads((folder / "truth.json").read_text(encoding="utf-8"))["rows"]
    saved = {n for n in first if first[n] == "unsolved" and second[n] == ""}
    saved -= {n for n in saved if truth[n]["fault"]}
    assert found["of_these_kept_by_two"] == len(saved) > 0
    assert found["thrown_away"] >= found["of_these_solvable"] >= len(saved)


def test_all_sets_are_trained_on_alike(proof):
    folder, report = proof
    training = report["training"]
    assert training.keys() == SETS
    assert len({str(row["runs"][0]["pass_at_1"]["before"]) for row in training.values()}) == 1
    for name, row in training.items():
        (run,) = row["runs"]
        assert run["updates"] == 2
        rows = list(read_run(folder / "runs" / f"{name.replace(' ', '_')}_0"))
        assert run["completions_per_update"] * 2 == len(rows)
        assert sum(row["filtered"] is None for row in rows) == 2 * 16
        source = folder / {"raw": "raw.jsonl", "one pass": "first/kept.jsonl"}.get(
            name, "second/kept.jsonl"
        )
        assert {row["problem_id"] for row in rows} <= {row["id"] for row in lines(source)}
    raw, two = (training[name]["pass_at_1"]["mean"] for name in ("raw", "two passes"))
    assert training["two passes"]["more_than_raw"]["mean"] == pytest.approx(two - raw)


def test_a_step_that_was_killed_has_no_time(proof):
    _, report = proof
    steps = report["steps"]
    assert all(step["finished"] for step in steps.values())
    stopped = {name for name, step in steps.items() if "seconds" not in step}
    assert stopped == {"first pass"}
    assert report["two_passes_seconds"] is None
