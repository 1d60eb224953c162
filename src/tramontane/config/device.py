"""Names of models and devices: what `device: auto` and `dtype: auto` stand for.

Nothing here imports torch, which takes seconds, except to measure an unknown processor: a wrong key
should be refused immediately.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import runpy
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel

from tramontane.errors import InputError
from tramontane.models.names import find_weights

DEVICE = "TRAMONTANE_DEVICE"
CPU_DTYPE = "TRAMONTANE_CPU_DTYPE"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # they limit oneDNN's instructions
_CPUINFO = Path("/proc/cpuinfo")
_PROBE_SECONDS = 0.25  # for each number type
_FASTER = 1.2  # speed-up that makes bfloat16 worth its rounding


def _device(name: str) -> str:
    """`name`, with `auto` replaced by a device."""
    if name == "auto":
        if (named := os.environ.get(DEVICE, "auto")) != "auto":
            return _device(named)
        return "cpu" if _obstacle(_nvidia(), _torch_cuda()) else "cuda"
    if not re.fullmatch(r"cpu|cuda(:\d+)?|mps", name):
        raise ValueError(f"{name!r} is not a device; write auto, cpu, cuda, cuda:N or mps")
    return name


class Nvidia(NamedTuple):
    """NVIDIA's GPUs that this process may use, the newest CUDA that their driver supports, and the
    name of the machine's first."""

    gpus: int
    cuda: int
    name: str = ""


def _obstacle(found: Nvidia, built_for: int | None) -> str:
    """Why torch cannot use this machine's GPUs; empty if it can."""
    if not found.gpus:
        return "no NVIDIA GPU"
    if built_for is None:
        return "this build of torch is for CPUs"
    if found.cuda < built_for:
        return f"this build of torch needs a driver for CUDA {built_for}, not {found.cuda}"
    return ""


@cache
def _nvidia() -> Nvidia:
    visible = os.environ.get(VISIBLE)
    if visible is not None and (not visible.strip() or visible.startswith("-")):
        return Nvidia(0, 0)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")  # comes with the driver; does not start CUDA
    except OSError:
        return Nvidia(0, 0)
    gpus, cuda = ctypes.c_uint(), ctypes.c_int()
    first, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)  # NVML's longest name
    failed = (
        nvml.nvmlInit_v2()
        or nvml.nvmlDeviceGetCount_v2(ctypes.byref(gpus))
        or nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
        or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(first))
        or nvml.nvmlDeviceGetName(first, name, len(name))
    )
    if failed:
        return Nvidia(0, 0)
    seen = gpus.value if visible is None else min(gpus.value, len(visible.split(",")))
    return Nvidia(seen, cuda.value // 1000, name.value.decode())


@cache
def _torch_cuda() -> int | None:
    """The CUDA (major version) that the installed torch is built for; None: for CPUs, or there is
    no torch."""
    if (spec := importlib.util.find_spec("torch")) is None:
        return None
    built_for = runpy.run_path(str(Path(spec.origin or "").with_name("version.py")))["cuda"]
    return int(built_for.partition(".")[0]) if built_for else None


def visible_gpus() -> str:
    """NVIDIA's GPUs that this process may use, as in `CUDA_VISIBLE_DEVICES`; empty: none."""
    gpus = _nvidia().gpus
    return os.environ.get(VISIBLE) or ",".join(map(str, range(gpus))) if gpus else ""


def idle_gpus(*devices: str) -> str:
    """A notice about this machine's GPUs that are not among a run's `devices`, or an empty text.
    `cuda`, without a number, may be all of them."""
    found, used = _nvidia(), {device for device in devices if device.startswith("cuda")}
    idle = found.gpus - len(used)
    if idle <= 0 or "cuda" in used:
        return ""
    if used:
        return f"{idle} of this machine's {found.gpus} GPUs not used"
    gpus = "this machine's GPU is" if found.gpus == 1 else f"this machine's {found.gpus} GPUs are"
    if obstacle := _obstacle(found, _torch_cuda()):
        return f"{gpus} not used ({obstacle}; see tramontane doctor)"
    return f"{gpus} not used (take device: auto)"


def _model(name: str) -> str:
    try:
        return find_weights(name)
    except InputError as error:
        raise ValueError(str(error)) from None


# A run's folder is replaced by that of its newest weights, so that a resumed run starts from the
# same weights.
Model = Annotated[str, AfterValidator(_model)]

Device = Annotated[str, AfterValidator(_device)]

Dtype = Literal["auto", "float32", "bfloat16"]


class NumberType(NamedTuple):
    """The number type that suits a device, and why."""

    dtype: Literal["float32", "bfloat16"]
    reason: str


def resolve_dtype(dtype: Dtype, device: str) -> Dtype:
    """`dtype`, with `auto` replaced by the device's number type."""
    return dtype if dtype != "auto" else number_type(device).dtype


def number_type(device: str) -> NumberType:
    """The number type that `auto` stands for on a device.

    Raises:
        ValueError: the environment variable TRAMONTANE_CPU_DTYPE is neither type.
    """
    if device.startswith("cuda"):
        return NumberType("bfloat16", "a CUDA device")
    if device == "mps":
        return NumberType("float32", "Apple's GPU")
    given = os.environ.get(CPU_DTYPE)
    if given is None:
        return _cpu_number_type()
    if given not in ("float32", "bfloat16"):
        raise ValueError(f"{CPU_DTYPE}={given!r} in the environment: write float32 or bfloat16")
    return NumberType(given, f"{CPU_DTYPE} in the environment")  # type: ignore[arg-type]


def number_types(config: Any) -> dict[str, str]:
    """The number type of each worker in a config, by the path of its section, and why `auto` would
    choose it or a different one."""
    found = {}
    for key, dtype, device in _computing(config):
        fast, used = number_type(device), resolve_dtype(dtype, device)
        found[key.removesuffix(".dtype")] = f"{used} (auto: {fast.dtype}, {fast.reason})"
    return found


def dtype_warnings(config: Any, prefix: str = "") -> list[str]:
    """Warnings about every number type in a config, or a mapping of configs, that is slow on its
    section's device.

    Args:
        config: the section or sections.
        prefix: what precedes its keys in the user's file, such as `generator.`.
    """
    found = list(_computing(config, prefix))
    slow = [_slow_dtype(key, dtype, device) for key, dtype, device in found]
    on_gpu = [k for k, dtype, device in found if device.startswith("cuda") and dtype == "float32"]
    if on_gpu:
        slow.append(
            f"{' and '.join(on_gpu)}: float32 on a GPU. Flash attention takes bfloat16 only, so "
            f"attention to L tokens makes masks and scores of [L, L]; take bfloat16"
        )
    return [warning for warning in slow if warning]


def _computing(config: Any, prefix: str = "") -> Iterator[tuple[str, Dtype, str]]:
    """(key, number type, device) of each section with both, at any depth."""
    parts: Mapping[str, Any] = dict(config) if isinstance(config, BaseModel | Mapping) else {}
    if isinstance(config, BaseModel) and {"dtype", "device"} <= parts.keys():
        yield f"{prefix}dtype", parts["dtype"], parts["device"]
    for name, part in parts.items():
        yield from _computing(part, f"{prefix}{name}.")


def _slow_dtype(key: str, dtype: Dtype, device: str) -> str:
    fast = number_type(device)
    if device != "cpu" or dtype in ("auto", fast.dtype) or CPU_DTYPE in os.environ:
        return ""
    rates = matrix_rates()
    return (
        f"{key}: {dtype} is slow here, {rates[fast.dtype] / rates[dtype]:.1f} times as slow as "
        f"{fast.dtype} in matrix products ({fast.reason}); leave the key out, or write auto"
    )


@cache
def _cpu_number_type() -> NumberType:
    """Decided from the processor's flags where they are conclusive, else by a probe. Torch is
    imported only for the probe, so that a wrong key is refused quickly.
    """
    flags = _flags() if platform.machine() in ("x86_64", "aarch64") else set()
    if not flags or any(name in os.environ for name in _ISA_LIMITS):
        return _probe("a processor whose instructions are not known")
    if native := flags & {"amx_bf16", "avx512_bf16", "bf16"}:
        return NumberType("bfloat16", f"the processor has {' and '.join(sorted(native))}")
    if "avx512f" in flags:
        return _probe("AVX-512 without bfloat16")
    # The Arm kernels and AVX2 convert every number back and forth.
    return NumberType("float32", "this processor has no bfloat16 instructions, which are emulated")


def multiplies_int8() -> bool:
    """True if this processor has instructions for products of 8-bit numbers."""
    return bool(_flags() & {"avx512_vnni", "avx_vnni", "amx_int8"})


def machine(device: str = "auto") -> str:
    """The first processor's name and the number of cores, e.g. `AMD EPYC, 2 cores`; and the GPU's
    name if `device` is one."""
    gpu = f", {_nvidia().name}" if _device(device).startswith("cuda") else ""
    return f"{processor()}, {os.cpu_count()} cores{gpu}"


def processor() -> str:
    """The name of the first processor."""
    names = [x.partition(":")[2].strip() for x in _cpuinfo() if x.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cpuinfo() -> list[str]:
    """The lines of the system's list of processors; empty where there is none."""
    if not _CPUINFO.is_file():
        return []
    return _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()


def _flags() -> set[str]:
    """Instructions of the first processor; empty where the system does not list them."""
    return {
        flag
        for line in _cpuinfo()
        if line.lower().startswith(("flags", "features"))
        for flag in line.partition(":")[2].split()
    }


def _probe(why: str) -> NumberType:
    import torch

    if platform.machine() == "x86_64" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return NumberType("float32", "oneDNN has no bfloat16 kernels for this processor")
    rates = matrix_rates()
    ratio = rates["bfloat16"] / rates["float32"]
    measured = f"{why}: bfloat16 {ratio:.1f} times as fast as float32 in matrix products"
    return NumberType("bfloat16" if ratio >= _FASTER else "float32", measured)


@cache
def matrix_rates() -> dict[str, float]:
    """Matrix products a second of this thread, in each number type; measured for half a second."""
    import torch

    found = {}
    for dtype in ("float32", "bfloat16"):
        a, b = (torch.ones(256, 256, dtype=getattr(torch, dtype)) for _ in range(2))
        a @ b  # the first product builds the kernel
        count, began = 0, time.perf_counter()
        while not count or time.perf_counter() - began < _PROBE_SECONDS:
            a @ b
            count += 1
        found[dtype] = count / (time.perf_counter() - began)
    return found
