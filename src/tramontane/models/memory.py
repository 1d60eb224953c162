"""Memory: of this machine, of this process, and of keys and values (from a model's config, before
the model is loaded)."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def machine_memory() -> int:
    """Bytes of memory available to processes on this machine or in this container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    texts = [path.read_text(encoding="ascii").strip() for path in _CGROUP_LIMITS if path.is_file()]
    return min([total, *(int(text) for text in texts if text.isdigit())])


def release_free_memory() -> None:
    """Return free memory held by malloc to the system; does nothing without glibc.

    Tensors of varying sizes fragment malloc's heaps, which keep growing: after half an hour,
    workers in threads held more free memory than they used.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def kv_bytes_per_token(model_config: Any, dtype: str) -> int:
    """Bytes of the keys and values of one token, over all layers.

    2 · layers · key-value heads · head size · bytes of a number. Layers with a sliding window count
    like the others: the embedded generator caches all positions.

    Args:
        model_config: a Hugging Face config, e.g. of `loading.load_config`.
        dtype: torch's name of the number type, e.g. `bfloat16`.
    """
    heads = getattr(model_config, "num_key_value_heads", None) or model_config.num_attention_heads
    width = (
        getattr(model_config, "head_dim", None)
        or model_config.hidden_size // model_config.num_attention_heads
    )
    import torch  # takes a second, which callers of `machine_memory` need not wait for

    itemsize: int = getattr(torch, dtype).itemsize
    return int(2 * model_config.num_hidden_layers * heads * width * itemsize)
