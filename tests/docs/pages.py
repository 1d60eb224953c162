"""README and docs as data: their commands, code blocks and links."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.paths import ROOT

_BESIDE = ("README.md", "CONTRIBUTING.md", "examples/README.md")
PAGES = [*(ROOT / name for name in _BESIDE), *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


class Command(NamedTuple):
    """A command line, and the page and line where it stands."""

    where: str
    words: list[str]


def blocks(page: Path, language: str) -> list[str]:
    """The page's fenced blocks in `language`; the empty string for blocks without one."""
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]


def commands(*programs: str) -> Iterator[Command]:
    """Every command of README and docs that starts with one of `programs`.

    Lines of fenced blocks without a language, continued by a backslash, and inline code; a comment
    after `#` is dropped. Inline mentions of a bare program, or with `…` or capitals for what the
    reader fills in (`tramontane eval MODEL DATA`), are not commands.
    """
    for page in PAGES:
        text = page.read_text()
        found: list[tuple[int, str]] = []
        for match in FENCE.finditer(text):
            if match.group(1) in ("", "bash", "console"):
                body = match.group(2).replace("\\\n", " ")
                found += [(match.start(), line) for line in body.splitlines()]
        plain = FENCE.sub(lambda m: " " * len(m.group(0)), text)
        found += [
            (match.start(), " ".join(match.group(1).split()))
            for match in INLINE.finditer(plain)
            if not re.search(r"…|\b[A-Z]{2,}\b(?!=)|[A-Z]+\.", match.group(1))
        ]
        for position, line in found:
            if line.split(" ")[0] in programs and " " in line.strip():
                number = text.count("\n", 0, position) + 1
                words = shlex.split(line, comments=True)
                if len(words) > 1 and re.match(r"[a-z./-]", words[1]):
                    yield Command(f"{page.relative_to(ROOT)}:{number}", words)
