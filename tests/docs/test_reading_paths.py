"""The table of what to read before a change, in docs/architecture.md, is as short as it says."""

import pytest

from benchmarks.reading_paths import ReadingPath, reading_paths

PATHS = reading_paths()


@pytest.mark.parametrize("path", PATHS, ids=[path.change for path in PATHS])
def test_no_change_needs_more_lines_than_the_page_says(path: ReadingPath) -> None:
    assert path.total <= path.most, path.lines


def test_the_table_has_its_rows() -> None:
    assert len(PATHS) >= 10
