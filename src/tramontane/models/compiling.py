"""What torch.compile needs of a machine, and functions and modules that are compiled once for all
shapes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Workers in threads of one process share a block's code, and each compiles it for its prefills,
# steps, forwards with and without gradients. After eight versions torch would run it uncompiled.
_VERSIONS = 64


def compile_module(module: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile a module when it first runs, in this thread, for tensors of any size."""
    torch._dynamo.config.recompile_limit = _VERSIONS  # a thread's own
    module.compile(dynamic=True, backend=backend)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled for tensors of any size when it first runs."""
    found: Callable[..., Any] = torch.compile(function, dynamic=True)
    return found


def missing_for_compiling(device: str) -> str:
    """What torch.compile lacks on this machine, and how to get it; empty if nothing. Its kernels
    are C++ on a CPU, and on a GPU Triton, which compiles a C program that starts them."""
    on_gpu = device.startswith("cuda")
    if on_gpu and importlib.util.find_spec("triton") is None:
        return "no Triton: install it with `pip install triton`"
    variable, default = ("CC", "gcc") if on_gpu else ("CXX", "g++")
    compiler = os.environ.get(variable, default)
    if shutil.which(compiler) is None:
        return f"no compiler ({compiler!r}, as {variable} says or by default): install {default}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "no Python.h, the headers of this Python: install them (python3-dev)"
    return ""
