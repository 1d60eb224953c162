"""Evaluations over any placement and generator: the same requests, the same problems, one file."""

import json
from pathlib import Path

import pytest

import tramontane

OPTIONS = {"problems": 6, "samples": 2, "max_tokens": 64, "slots": 4, "temperature": 0.0}


def measured(file: Path, *overrides: str):
    result = tramontane.evaluate(
        "tiny", "playground", None, [*overrides], write_to=file, **OPTIONS, device="cpu"
    )
    return result, [json.loads(line) for line in file.open()]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Greedy completions of one generator on a thread."""
    return measured(tmp_path_factory.mktemp("here") / "rows.jsonl")


def same(rows, other):
    keys = ("group", "index", "problem_id", "text", "verdict", "reward")
    return [[row[k] for k in keys] for row in rows] == [[row[k] for k in keys] for row in other]


def test_several_generators_on_threads(here, tmp_path):
    result, rows = measured(tmp_path / "rows.jsonl", "generator.workers=2", "verifier.workers=2")
    assert same(rows, here[1])
    assert result == here[0]


@pytest.mark.slow
def test_generators_and_verifiers_on_ray(here, tmp_path, ray_cluster):
    overrides = ["placement.kind=ray", "generator.workers=2", "verifier.workers=1"]
    result, rows = measured(tmp_path / "rows.jsonl", *overrides)
    assert same(rows, here[1])
    assert result == here[0]
    found = tramontane.compare(
        {"base": "tiny", "same": "tiny"}, ["playground"], tmp_path / "out", None, overrides,
        **OPTIONS,
    )  # fmt: skip
    assert found["playground"]["same"].difference.value == 0


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("vllm_environment")
def test_vllm_in_this_process_and_several(here, tmp_path):
    for name, workers in (("one", 1), ("two", 2)):
        overrides = ["generator.kind=vllm", f"generator.workers={workers}"]
        result, rows = measured(tmp_path / f"{name}.jsonl", *overrides)
        assert result.n_problems == here[0].n_problems
        assert [row["problem_id"] for row in rows] == [row["problem_id"] for row in here[1]]
        # Greedy, but other kernels: a token in a thousand is another.
        equal = sum(row["text"] == other["text"] for row, other in zip(rows, here[1], strict=True))
        assert equal > len(rows) / 2
