"""Environments and tools that come with the package, by the names that a config may use."""

from __future__ import annotations

BUILT_IN: dict[str, str] = {}
