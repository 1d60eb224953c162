"""Planted faults: rows have the faults that the truth names, and scores of curations."""

import json
import re
from collections import Counter
from itertools import islice

import pytest

from benchmarks.faults import (
    PROGRAMS,
    RAW,
    REASONS,
    SHARES,
    TRUTH,
    Truth,
    compare,
    planted,
    read_truth,
    write,
)
from tramontane.curation.config import CurateConfig
from tramontane.curation.pipeline import curate

ROWS = list(planted(1000, 3))


def having(fault):
    return [(row, truth) for row, truth in ROWS if truth.fault == fault]


def test_shares_and_seed():
    counts = Counter(truth.fault for _, truth in ROWS)
    assert {fault: counts[fault] / 1000 for fault in SHARES} == SHARES
    assert list(planted(1000, 3)) == ROWS != list(planted(1000, 4))
    assert sum("tests" in row for row, _ in having("")) == PROGRAMS * 1000
    # In random order: every tenth of the rows has both sound and faulty rows.
    for i in range(0, 1000, 100):
        assert 30 < sum(truth.fault == "" for _, truth in ROWS[i : i + 100]) < 90


def test_rows_do_not_contain_the_truth():
    sound = {frozenset(row) for row, truth in ROWS if truth.fault == "" and "tests" not in row}
    assert len(sound) == 1
    for row, truth in ROWS:
        if "tests" not in row:
            assert frozenset(row) in sound
        else:
            assert ("solutions" in row) == (truth.fault != "no_solutions")


def test_maths_faults_are_in_the_rows_that_the_truth_names():
    statements = Counter(row["problem"] for row, _ in ROWS)
    for row, truth in ROWS:
        if "tests" in row:
            continue
        spoilt = truth.fault in ("wrong_label", "multi_part")
        assert (row["answer"] != truth.right) == spoilt
        found = [int(n) for n in re.findall(r"\d+", row["problem"])]
        if truth.fault == "trivial":
            assert max(found) < 10 > int(row["answer"])
        elif truth.fault == "impossible":
            assert re.search(r"\bx\b", row["problem"])
        if truth.fault != "duplicate":
            assert statements[row["problem"]] == 1
    for fault in ("duplicate", "near_duplicate"):
        for row, _ in having(fault):
            spelt = " ".join(row["problem"].lower().split())
            earlier = [
                other
                for other, truth in ROWS[: ROWS.index((row, Truth(fault, row["answer"])))]
                if truth.fault == "" and spelt.startswith(other["problem"].lower())
            ]
            assert earlier[0]["answer"] == row["answer"]


def test_programs_have_wrong_labels_if_the_truth_says_so():
    for row, truth in ROWS:
        if "tests" in row:
            labels = [case["output"] for case in row["tests"]["cases"]]
            assert (labels != truth.right) == (truth.fault == "broken_tests")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shares": {"wrong_lable": 0.1}}, "unknown faults"),
        ({"shares": {"proof": 0.99}}, "shares add up to 1.04"),
        ({"shares": {"duplicate": 0.95}}, "too few sound rows"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        list(islice(planted(100, 0, **arguments), 100))


def test_scores():
    truth = {"a": Truth("proof", 1), "b": Truth("proof", 1), "c": Truth("", 1), "d": Truth("", 1)}
    kept = {"decision": "kept", "reason": ""}
    proof = {"decision": "dropped", "reason": "proof"}
    decisions = [
        {"id": "a", **proof}, {"id": "b", **kept}, {"id": "c", **proof}, {"id": "d", **kept},
        {"id": "d-cpp", **kept},
    ]  # fmt: skip
    scores = compare(truth, decisions)
    assert scores["proof"] == (2, 2, 1, 1)
    assert (scores["proof"].precision, scores["proof"].recall) == (0.5, 0.5)
    assert (scores[""].precision, scores[""].recall) == (0.5, 0.5)
    # Two curations, the second of the rows that the first kept: the findings of both count.
    second = [{"id": "b", **proof}, {"id": "d", "decision": "dropped", "reason": "unsolved"}]
    scores = compare(truth, decisions, second)
    assert scores["proof"] == (2, 3, 2, 0)
    assert scores[""] == (2, 0, 0, 0)


def test_the_rule_stages_find_all_their_faults(tmp_path):
    shares = {
        fault: SHARES[fault] for fault in ("duplicate", "near_duplicate", "proof", "multi_part")
    }
    write(tmp_path, 600, 1, shares=shares)
    stages = ("deduplicate", "filter")
    curate(CurateConfig(inputs=(str(tmp_path / RAW),), out=str(tmp_path / "out"), stages=stages))
    with (tmp_path / "out/decisions.jsonl").open() as lines:
        scores = compare(read_truth(tmp_path / TRUTH), map(json.loads, lines))
    assert set(scores) == {"", *shares} and set(shares) < set(REASONS)
    for fault in shares:
        assert scores[fault].recall == 1
        assert scores[fault].precision >= 0.9
    assert scores[""].recall >= 0.99
