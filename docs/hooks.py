"""Adds to the site what stands elsewhere: configuration.md, every key as `tramontane config
--markdown` prints them; the keys of other projects; and examples/ as examples.md, its index with
the sources below."""

import io
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import groupby
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from tramontane.cli import app
from tramontane.config.peers import peer_keys
from tramontane.errors import VERSION

BOOST = "---\nsearch: {boost: 10}\n---\n"  # a key is found here first
PEERS = "<!-- keys -->"  # where the tables of other projects' keys go
# https://HOST/NAME or ssh://HOST/NAME, perhaps with a user and a port, or USER@HOST:NAME.
REMOTE = re.compile(
    r"(?:(?:https?|ssh)://(?:[^/@]+@)?(?P<web>[\w.-]+)(?::\d+)?/|[\w.-]+@(?P<host>[\w.-]+):)"
    r"(?P<path>.+?)(?:\.git)?/?"
)
EXAMPLES = Path(__file__).parents[1] / "examples"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Called by MkDocs at its start: the header names version and repository."""
    config.site_name = f"{config.site_name} {VERSION}"
    git = shutil.which("git")
    command = [git or "false", "-C", str(EXAMPLES.parent), "remote", "get-url", "origin"]
    remote = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    config.repo_url, config.repo_name = repository(remote)
    return config


def repository(remote: str) -> tuple[str, str]:
    """Address and name of a git remote's page, without a user or a password; both are empty for a
    remote that is a folder, and for none."""
    found = REMOTE.fullmatch(remote)
    if not found:
        return "", ""
    host, name = found["web"] or found["host"], found["path"]
    return f"https://{host}/{name}", name


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by MkDocs with the text of each page."""
    markdown = markdown.replace("](../examples/README.md)", "](examples.md)")
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
    files.append(File.generated(config, "configuration.md", content=BOOST + page.getvalue()))
    files.append(File.generated(config, "examples.md", content=_examples()))
    return files


def _examples() -> str:
    """The index, whose links lead to the sources below it; a notebook's stay in the checkout."""
    index = (EXAMPLES / "README.md").read_text().replace("](../docs/", "](")
    for file in sorted(EXAMPLES.iterdir()):
        if file.suffix in (".py", ".yaml"):
            index = index.replace(f"]({file.name})", f"](#{file.name.replace('.', '')})")
            language = "python" if file.suffix == ".py" else "yaml"
            index += f"\n## {file.name}\n\n```{language}\n{file.read_text()}```\n"
    return re.sub(r"\[([^\]]+)\]\(([^)]+\.ipynb)\)", r"\1 (`\2`)", index)
