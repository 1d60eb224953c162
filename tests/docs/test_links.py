"""Paths that README and docs name exist; `make check` has the site's builder check the rest."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES
from tests.paths import ROOT

LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(#[^)]*)?\)")
CODE_PATH = re.compile(
    r"`((?:src|configs|tests|benchmarks|chaos|fuzz|examples|training|docs|papers)/[\w./]+\.\w+)`"
)
PICTURE = re.compile(r'<img src="([^"]+)"')
ROOMS = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.py)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    text = page.read_text()
    for target in [*(target for target, _ in LINK.findall(text)), *PICTURE.findall(text)]:
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    text = page.read_text()
    for name in CODE_PATH.findall(text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    for name in ROOMS.findall(text):
        places = (ROOT / name, ROOT / "src/tramontane" / name)
        found = any(place.exists() for place in places) or [
            *(ROOT / "src/tramontane").glob(f"*/{name}"),
            *ROOT.glob(f"papers/*/src/{name}"),
        ]
        assert found, f"{page.name} names {name}"


def test_lines_of_the_docs_can_be_read() -> None:
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            assert len(line) <= 300, f"{page.name}:{number} has {len(line)} characters"
