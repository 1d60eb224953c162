"""Memory that malloc holds returns to the system; that of keys and values, against formulas and
against the tensors of a real prefill."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

HOLES = """
import re
from tramontane.models.memory import release_free_memory

def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

before = resident()
blocks = [bytes(16_000) for _ in range(20_000)]
kept = blocks[::50]
del blocks
full = resident()
release_free_memory()
print(full - before, resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_free_memory_between_used_blocks_is_released():
    """300 MiB of blocks, of which every fiftieth stays: malloc holds the memory between them."""
    done = subprocess.run(
        [sys.executable, "-c", HOLES], capture_output=True, text=True, check=True, timeout=120
    )
    full, after = map(float, done.stdout.split())
    assert full > 250
    assert after < 60
