"""Adds to the site what the code knows: the page configuration.md, every key as `tramontane config
--markdown` prints them, and the keys of other projects."""

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import groupby

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from tramontane.cli import app
from tramontane.config.peers import peer_keys

PEERS = "<!-- keys -->"  # where the tables of other projects' keys go


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by MkDocs with the text of each page."""
    return markdown.replace(PEERS, "\n".join(_tables())) if PEERS in markdown else markdown


def _tables() -> Iterator[str]:
    for peer, entries in groupby(peer_keys(), lambda entry: entry.peer):
        yield f"\n### {peer}\n\n| there | here | |\n|---|---|---|"
        for entry in entries:
            here = f"`{entry.key or entry.sft}`" if entry.key or entry.sft else "–"
            note = entry.note or ("" if entry.key else "in `tramontane sft`")
            yield f"| `{entry.name}` | {here} | {note} |"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs with the files of docs/."""
    page = io.StringIO()
    with redirect_stdout(page):
        app(["config", "--markdown"], standalone_mode=False)
    files.append(File.generated(config, "configuration.md", content=page.getvalue()))
    return files
