"""The user's cache folder. torch is not imported here."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The user's folder for downloads: `$XDG_CACHE_HOME/tramontane`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tramontane"
