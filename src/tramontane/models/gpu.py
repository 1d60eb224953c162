"""Whether torch can use this machine's NVIDIA GPUs, and how to fix it if not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

# The oldest driver for each major version of CUDA (https://docs.nvidia.com/deploy/cuda-compatibility).
# PyPI has torch for CUDA 13 only; pytorch.org also has builds for CUDA 12.
OLDEST_DRIVER = {12: 525, 13: 580}
_OLDER_BUILDS = "https://download.pytorch.org/whl/cu126"
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_SMI_SECONDS = 20.0


@dataclass(frozen=True)
class Build:
    """A build of torch, and the machine's driver."""

    torch: str  # version of torch
    cuda: str | None  # version of CUDA that it is built for; None for other builds
    driver: str | None  # version of NVIDIA's driver; None if there is none
    # The GPUs that it has kernels for, such as `sm_90`, or `compute_90` for those from 9.0 on.
    kernels: tuple[str, ...]

    @classmethod
    def installed(cls) -> Build:
        """This process's torch and this machine's driver."""
        kernels = tuple(torch.cuda.get_arch_list())
        return cls(torch.__version__, torch.version.cuda, _driver(), kernels)

    def why_no_gpu(self) -> str:
        """Why torch sees no GPU, and what to do."""
        if self.driver is None:
            return (
                f"this machine has no NVIDIA driver; PyPI's torch needs driver "
                f"{OLDEST_DRIVER[13]} or newer"
            )
        driver = _major(self.driver)
        if self.cuda is None:
            trouble = f"torch {self.torch} is not built for CUDA"
            remedy = "install another build"
        elif driver < (oldest := OLDEST_DRIVER.get(_major(self.cuda), 0)):
            trouble = (
                f"torch {self.torch} is built for CUDA {self.cuda}, which needs driver {oldest} or "
                f"newer, and this machine's is {self.driver}"
            )
            remedy = "update the driver, or install an older build"
        else:
            return (
                f"torch {self.torch} is built for CUDA {self.cuda}, and driver {self.driver} "
                f"supports it: look at nvidia-smi, CUDA_VISIBLE_DEVICES and the container's options"
            )
        if driver < OLDEST_DRIVER[12]:
            return f"{trouble}: update the driver to {OLDEST_DRIVER[13]} or newer"
        return f"{trouble}: {remedy} ({self._install(driver)})"

    def lacks(self, capability: tuple[int, int]) -> str:
        """Why a GPU of this compute capability cannot run this build's kernels; empty if it can."""
        major, minor = capability
        if self.cuda is None:  # AMD's GPUs have other names
            return ""
        for kernel in self.kernels:
            kind, _, digits = kernel.partition("_")
            version = int(re.sub(r"\D", "", digits))  # sm_90a and sm_120f have letters
            same = kind == "sm" and version // 10 == major and version % 10 <= minor
            if same or (kind == "compute" and version <= 10 * major + minor):
                return ""
        return (
            f"torch {self.torch} has no kernels for capability {major}.{minor}, only for "
            f"{' '.join(self.kernels)}; the build for CUDA 12 has those of older GPUs "
            f"({self._install(OLDEST_DRIVER[12])})"
        )

    def _install(self, driver: int) -> str:
        """The command that installs this release of torch for a driver."""
        release = self.torch.partition("+")[0]
        if driver >= OLDEST_DRIVER[13]:
            return f"{sys.executable} -m pip install --force-reinstall torch=={release}"
        return f"{sys.executable} -m pip install torch=={release}+cu126 --index-url {_OLDER_BUILDS}"


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _driver() -> str | None:
    """Version of NVIDIA's driver, from the kernel module, or from nvidia-smi if that is hidden."""
    if _DRIVER_FILE.is_file():
        text = _DRIVER_FILE.read_text()
    elif shutil.which("nvidia-smi"):  # Windows' subsystem for Linux
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS).stdout
    else:
        return None
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found[0] if found else None
