"""Adds the page configuration.md to the site: every key, as `tramontane config --markdown` prints
them."""

import io
from contextlib import redirect_stdout

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from tramontane.cli import app


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs with the files of docs/."""
    page = io.StringIO()
    with redirect_stdout(page):
        app(["config", "--markdown"], standalone_mode=False)
    files.append(File.generated(config, "configuration.md", content=page.getvalue()))
    return files
