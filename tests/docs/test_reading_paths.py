"""The table of what to read before a change, in docs/architecture.md, is as short as it says."""

import re

import pytest

from tests.paths import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
SECTION = PAGE.split("## What to read before a change")[1].split("\n## ")[0]
ROWS = [line.split("|")[1:4] for line in SECTION.splitlines() if re.search(r"\.py.*\d \|$", line)]


@pytest.mark.parametrize(("change", "files", "most"), ROWS, ids=[row[0].strip() for row in ROWS])
def test_no_change_needs_more_lines_than_the_page_says(change: str, files: str, most: str) -> None:
    names = [name for name in re.findall(r"`([^`]+)`", files) if name.endswith(".py")]
    lines = {n: len((ROOT / "src/tramontane" / n).read_text().splitlines()) for n in names}
    assert sum(lines.values()) <= int(most.replace(",", "")), f"{change}: {lines}"


def test_the_table_has_its_rows() -> None:
    assert len(ROWS) >= 10
