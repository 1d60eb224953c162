"""Checksums of files."""

from __future__ import annotations

import zlib
from pathlib import Path

BLOCK = 1 << 22  # bytes read at once


def crc32(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            value = zlib.crc32(block, value)
    return value
