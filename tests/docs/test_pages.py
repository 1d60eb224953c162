"""The pages of docs/ as a reader meets them: short, and each in the navigation."""

import re
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import FENCE, PAGES
from tests.paths import ROOT

DOCS = ROOT / "docs"
# Each made by a command, or one list: see the first lines of the page.
LONG = {"reproduction.md"}
# A result with its interval, a rate, a time by the clock; and what gives it.
FIGURE = re.compile(r"\d\.\d+ \[\d\.\d+, \d|\d tokens/s|(?<![\d:`])\d+:\d\d\b(?![:`])")
COMMAND = re.compile(
    r"`[^`]*(?:tramontane|make|python3?|pytest|jupyter) [^`]+`|\b(?:benchmarks|gpu\.md)\b"
)


def test_pages_are_short() -> None:
    lengths = {p.name: len(p.read_text().splitlines()) for p in DOCS.glob("*.md")}
    assert {name: n for name, n in lengths.items() if n > 250}.keys() <= LONG


def _pages(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    assert isinstance(parts, list) or hasattr(parts, "__iter__")
    return [page for part in parts for page in _pages(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = _pages(site["nav"])
    assert len(pages) == len(set(pages))
    assert set(pages) == {p.name for p in DOCS.glob("*.md")} | {"configuration.md", "examples.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_section_with_figures_has_the_command_that_gives_them(page: Path) -> None:
    text = FENCE.sub(lambda block: f"`{' '.join(block.group(2).split())}`\n", page.read_text())
    opening, *sections = re.split(r"^(?=##+ )", text, flags=re.M)
    without = [part.partition("\n")[0] for part in (opening, *sections)
               if FIGURE.search(part) and not COMMAND.search(part)]  # fmt: skip
    assert without == []
