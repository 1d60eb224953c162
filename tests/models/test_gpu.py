"""Builds of torch, drivers and GPUs that fit, and what is said where they do not."""

import pytest
import torch

from tramontane.errors import InputError
from tramontane.models import gpu
from tramontane.models.gpu import Build
from tramontane.models.loading import check_device

PYPI = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
OLDER = "pip install torch==2.13.0+cu126 --index-url https://download.pytorch.org/whl/cu126"


@pytest.mark.parametrize(
    ("version", "cuda", "driver", "said"),
    [
        ("2.13.0", None, None, ["no NVIDIA driver", "580"]),
        ("2.13.0+cu130", "13.0", None, ["no NVIDIA driver", "580"]),
        (
            "2.13.0",
            "13.0",
            "550.54.15",
            ["CUDA 13.0, which needs driver 580", "550.54.15", "update the driver, or", OLDER],
        ),
        ("2.13.0+cu130", "13.0", "579.9", ["needs driver 580", OLDER]),
        ("2.13.0", "13.0", "470.82.01", ["needs driver 580", "update the driver to 580"]),
        ("2.13.0+cu126", "12.6", "470.82.01", ["needs driver 525", "update the driver to 580"]),
        ("2.13.0+cpu", None, "550.54.15", ["2.13.0+cpu is not built for CUDA", OLDER]),
        ("2.13.0+cpu", None, "580.65.06", ["pip install --force-reinstall torch==2.13.0)"]),
        ("2.13.0", "13.0", "580.65.06", ["supports it", "CUDA_VISIBLE_DEVICES"]),
        ("2.13.0+cu126", "12.6", "535.1", ["supports it", "CUDA_VISIBLE_DEVICES"]),
    ],
)
def test_why_torch_sees_no_gpu(version, cuda, driver, said):
    text = Build(version, cuda, driver, PYPI).why_no_gpu()
    assert all(part in text for part in said), text
    assert (OLDER in text) == (OLDER in said)


@pytest.mark.parametrize(
    ("capability", "kernels", "runs"),
    [
        ((9, 0), PYPI, True),
        ((8, 9), PYPI, True),  # as 8.6
        ((10, 3), PYPI, True),
        ((7, 0), PYPI, False),
        ((8, 0), ("sm_86", "sm_90"), False),
        ((9, 0), ("sm_90a",), True),
        ((12, 1), ("sm_90", "compute_90"), True),  # compiled when it is first used
        ((8, 6), ("sm_90", "compute_90"), False),
        ((11, 0), PYPI[:-1], False),
    ],
)
def test_gpus_that_a_build_has_kernels_for(capability, kernels, runs):
    lacks = Build("2.13.0", "13.0", "580.1", kernels).lacks(capability)
    assert (lacks == "") is runs
    if not runs:
        assert ".".join(map(str, capability)) in lacks
        assert " ".join(kernels) in lacks


def test_builds_for_other_gpus_are_not_compared():
    assert Build("2.13.0+rocm7.2", None, None, ("gfx942",)).lacks((9, 4)) == ""


def test_a_device_that_is_not_there_is_refused_with_the_reason():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(InputError, match="generator.device is 'cuda', but torch sees no GPU") as e:
        check_device("cuda", "generator.device")
    assert Build.installed().why_no_gpu() in str(e.value)
    assert "set generator.device to cpu" in str(e.value)


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:18:50 UTC 2025\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
        "580.65.06\n580.65.06\n",
    ],
)
def test_the_driver_is_found_in_what_the_kernel_module_says(text, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "_DRIVER_FILE", tmp_path / "version")
    (tmp_path / "version").write_text(text)
    assert Build.installed().driver == "580.65.06"
