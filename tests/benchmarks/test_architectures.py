"""docs/models.md and docs/wrapped-models.md say what the installed transformers does."""

import pytest
import transformers

from benchmarks.architectures.page import pages
from benchmarks.architectures.report import Report, outcome, outcomes
from benchmarks.architectures.rows import every_row, named
from benchmarks.architectures.trial import LIMIT, isolated, trial
from tests import forked

COMMITTED = Report.committed()
# One of each mechanism: windows, tied heads, experts, a text half, latent attention, state.
FAST = ("mistral", "llama, tied head", "qwen3_moe", "mistral3", "deepseek_v3", "qwen3_5_text")
TO_MEASURE = "python -m benchmarks.architectures"


def test_the_pages_are_those_of_the_figures():
    for path, text in pages(COMMITTED).items():
        assert path.read_text(encoding="utf-8") == text, f"write it again: {TO_MEASURE} --page"


def test_each_row_is_on_the_page_that_its_reader_opens():
    assert not named("llama").wrapped
    assert named("mistral3, experts").wrapped
    assert named("qwen2_audio").wrapped, "transformers does not call it a causal LM"


def test_every_architecture_has_a_row():
    missing = sorted({row.name for row in every_row()} - {*COMMITTED.rows, *COMMITTED.newer})
    assert not missing, (
        f"transformers {transformers.__version__} has {', '.join(missing)}, and "
        f"{COMMITTED.versions['transformers']} had not; measure: {TO_MEASURE}"
    )


def test_no_row_is_wrong():
    wrong = {
        name
        for name, row in (COMMITTED.rows | COMMITTED.newer).items()
        if {"no", "failed", "crashed"} & {*outcomes(row).values()}
    }
    assert not wrong


def test_rounding_errors_and_words_are_told_apart():
    assert [outcome(x) for x in (1e-6, 0.3, float("nan"))] == ["yes", "no", "no"]
    assert outcomes({"cells": {"decode": "refused: so", "packed": 0.0}}) == {
        "decode": "refused",
        "packed": "yes",
    }
    assert outcomes({"crashed": "exit code -11"}) == {"crashed": "crashed"}


@pytest.fixture
def processes(monkeypatch):
    """Forks of the server that other tests have, which has imported torch."""
    monkeypatch.setattr("benchmarks.architectures.trial._PROCESSES", forked.context)


def test_a_process_that_ends_by_itself_is_a_row(processes):
    found = isolated("llama", {"hidden_act": "no such function"})
    assert found["transformers"].startswith("KeyError")
    assert found["cells"]["decode"].startswith("refused: cannot be loaded (KeyError")


def settings(name):
    return named(name).kind, named(name).changed


def assert_unchanged(name, found):
    known = COMMITTED.rows[name]
    assert outcomes(found) == outcomes(known), (
        f"{name} with transformers {transformers.__version__}: {found}; the page, of "
        f"{COMMITTED.versions['transformers']}: {known}. If it should be so, write the page again: "
        f'{TO_MEASURE} "{name}"'
    )


@pytest.mark.parametrize("name", FAST)
def test_a_row_that_people_use_is_as_the_page_says(name):
    assert_unchanged(name, trial(*settings(name)))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("name", [*COMMITTED.rows][::8])
def test_a_sample_of_all_rows_is_as_the_page_says(processes, name):
    assert_unchanged(name, isolated(*settings(name)))
