"""The rows of docs/graders.md."""

import json

import pytest

from benchmarks.graders import PAGE, rows, tramontane


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["about"])
def test_each_row_of_the_table_of_graders(row):
    assert tramontane(row["reference"], row["answer"]) == row["right"], json.dumps(row)


def test_the_page_has_every_row():
    page = PAGE.read_text(encoding="utf-8")
    for row in rows():
        assert f"| {row['about']} | `{row['reference']}` | `{row['answer']}` |" in page
