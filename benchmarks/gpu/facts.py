"""Part A: the machine, its ceilings, the attention kernel against float32, and all tests marked
`gpu`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch
import transformers

from benchmarks.gpu.bench import Bench
from benchmarks.measure import bandwidth, gemm_peak
from tramontane.models.attention import packed_attention
from tramontane.models.packing import Packing

ROOT = Path(__file__).parents[2]
TEST_SECONDS = 560
# Fields of nvidia-smi; the clocks and the power explain a figure that differs on the next day.
SMI = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.max.mem", "power.limit")


class Layer(NamedTuple):
    """An attention layer: query heads, key-value heads, channels of a head, sliding window."""

    heads: int
    kv_heads: int
    channels: int
    window: int | None = None

    @property
    def label(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return f"attention {self.heads}/{self.kv_heads} × {self.channels}{window}"


LAYERS = (
    Layer(12, 2, 128),
    Layer(28, 4, 128),
    Layer(8, 8, 64),
    Layer(12, 2, 128, window=100),
    Layer(4, 1, 256),
)
LENGTHS = 1, 17, 256, 3000
ERROR_LIMIT = 1e-2  # relative, of bfloat16's 8 bits of precision


def facts(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    if bench.tiny:
        return found
    gpu = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    found |= {
        "gpu": gpu.name,
        "capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "memory_gib": round(total / 2**30, 1),
        "free_gib": round(free / 2**30, 1),
        "built_for": torch.cuda.get_arch_list(),
    }
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader", "--id=0"]
        line = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        found |= zip(SMI, line.stdout.strip().split(", "), strict=True)
    return found


def ceilings(bench: Bench) -> dict[str, Any]:
    """Rates in FLOP/s and bytes/s; a copy on the device reads and writes its bytes."""
    size = bench.pick(2**30, 2**24)
    found = {
        "flops": gemm_peak(torch.bfloat16, bench.device, bench.pick(8192, 256)),
        "bandwidth": bandwidth(bench.device, bench.pick(2**32, 2**24)),
    }
    here = torch.ones(size, dtype=torch.uint8, device=bench.device)
    for name, there in (
        ("to_pinned", torch.empty(size, dtype=torch.uint8, pin_memory=not bench.tiny)),
        ("to_pageable", torch.empty(size, dtype=torch.uint8)),
    ):
        there.copy_(here)
        copy = partial(there.copy_, here, non_blocking=True)
        found[name] = size / min(bench.seconds(copy) for _ in range(3))
    return found


def attention(bench: Bench, layer: Layer) -> dict[str, Any]:
    """Relative errors of packed attention in bfloat16, forward and backward, with float32 as the
    reference, over sequences of different lengths."""
    lengths = bench.pick(LENGTHS, (1, 17, 40))
    generator = torch.Generator().manual_seed(0)
    heads = layer.heads, layer.kv_heads, layer.kv_heads, layer.heads
    tensors = [torch.randn(1, h, sum(lengths), layer.channels, generator=generator) for h in heads]
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        # Both start from the same rounded numbers.
        q, k, v, gradient = (x.bfloat16().to(bench.device, dtype) for x in tensors)
        for x in (q, k, v):
            x.requires_grad_()
        packing = Packing(list(lengths), [None] * len(lengths), q.device)
        out, _ = packed_attention(
            torch.nn.Module(), q, k, v, None, packing=packing, sliding_window=layer.window
        )
        out.backward(gradient.transpose(1, 2))
        outputs.append([x.detach().float() for x in (out, q.grad, k.grad, v.grad)])
    errors = [float((b - a).norm() / a.norm()) for a, b in zip(*outputs, strict=True)]
    return {"forward": errors[0], "backward": max(errors[1:])}


def tests(bench: Bench) -> dict[str, Any]:
    """Runs `pytest -m gpu` on the files that name the mark: collecting all others would take most
    of a minute, and packages that have nothing to do with a GPU."""
    files = [ROOT / "tests/test_doctor.py"]  # which imports the least
    if not bench.tiny:
        texts = {file: file.read_text(encoding="utf-8") for file in ROOT.glob("tests/**/test_*.py")}
        files = [file for file, text in texts.items() if "mark.gpu" in text]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}"]
        done = subprocess.run([*command, *map(str, files)], cwd=ROOT, timeout=TEST_SECONDS)
        if not report.is_file():
            raise RuntimeError(f"pytest ended with {done.returncode}, without a report")
        suite = ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failing = [
        f"{case.attrib['classname']}::{case.attrib['name']}"
        for case in suite
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {**counts, "failing": failing}


ITEMS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "facts": facts,
    "ceilings": ceilings,
    **{layer.label: partial(attention, layer=layer) for layer in LAYERS},
    "tests": tests,
}
