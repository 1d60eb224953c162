"""The pages of docs/ as a reader meets them: short, and each in the navigation."""

import yaml

from tests.paths import ROOT

DOCS = ROOT / "docs"
# Each made by a command, or one list: see the first lines of the page.
LONG = {"reproduction.md"}


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
