"""What `device: auto` stands for, on machines with GPUs and without: a driver's library of our own
making, and a torch that only says what it is built for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.paths import ROOT
from tests.runs import small_config
from tramontane.config import GeneratorConfig, TrainerConfig, device
from tramontane.config.sft import SFTConfig
from tramontane.run.prepare import prepare, resolved

DRIVER = """
#include <stdio.h>
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = CUDA; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return index; }
int nvmlDeviceGetName(void *device, char *name, unsigned size) {
  return snprintf(name, size, "NVIDIA H100") >= (int)size;
}
"""
# The devices of a default config, what a run on CPUs alone would say in its first line, and the
# machine as results name it. An import of torch would end it.
SAY = """
from tramontane.config import Config
from tramontane.config.device import idle_gpus, machine
config = Config()
print(config.trainer.device, config.generator.device, config.generator.dtype)
print(idle_gpus("cpu"))
print(machine(config.trainer.device))
"""


def on_machine(
    folder: Path, gpus: int, cuda: int, built_for: str | None, **variables: str
) -> list[str]:
    """The lines of `SAY` on a machine with these GPUs and this version of torch."""
    library = folder / "libnvidia-ml.so.1"
    (folder / "driver.c").write_text(DRIVER)
    sizes = [f"-DGPUS={gpus}", f"-DCUDA={cuda}"]
    subprocess.run(
        ["gcc", "-shared", "-fPIC", *sizes, "-o", library, folder / "driver.c"], check=True
    )
    fake = folder / "torch"
    fake.mkdir()
    (fake / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (fake / "version.py").write_text(f"cuda = {built_for!r}")
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("TRAMONTANE_DEVICE", "CUDA_VISIBLE_DEVICES")
    }
    env |= {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": f"{folder}:{ROOT / 'src'}", **variables}
    done = subprocess.run(
        [sys.executable, "-c", SAY], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("gpus", "cuda", "built_for", "variables", "chosen", "said"),
    [
        (8, 13010, "12.8", {"CUDA_VISIBLE_DEVICES": "5,6"}, "cuda cuda bfloat16", "2 GPUs are not"),
        (1, 12080, "13.0", {}, "cpu cpu float32", "needs a driver for CUDA 13, not 12"),
        (1, 13000, "13.0", {"CUDA_VISIBLE_DEVICES": ""}, "cpu cpu float32", ""),
    ],
)  # fmt: skip
def test_auto_is_a_gpu_that_torch_can_use_and_one_that_lies_idle_is_said(
    tmp_path: Path,
    gpus: int,
    cuda: int,
    built_for: str | None,
    variables: dict[str, str],
    chosen: str,
    said: str,
) -> None:
    first, second, machine = on_machine(tmp_path, gpus, cuda, built_for, **variables)
    assert first == chosen
    assert said in second
    assert bool(said) == bool(second)
    assert machine.endswith("cores, NVIDIA H100" if chosen.startswith("cuda") else "cores")


@pytest.mark.parametrize(
    ("found", "built_for", "obstacle"),
    [
        ((0, 13), 13, "no NVIDIA GPU"),
        ((1, 13), None, "this build of torch is for CPUs"),
        ((1, 12), 13, "this build of torch needs a driver for CUDA 13, not 12"),
        ((1, 13), 13, ""),
        ((1, 13), 12, ""),
    ],
)
def test_torch_uses_a_gpu_whose_driver_knows_its_cuda(
    found: tuple[int, int], built_for: int | None, obstacle: str
) -> None:
    assert device._obstacle(device.Nvidia(*found), built_for) == obstacle


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (["cpu", "cpu"], "this machine's 4 GPUs are not used (take device: auto)"),
        (["cuda:0", "cpu"], "3 of this machine's 4 GPUs not used"),
        (["cuda:0", "cuda:0", "cuda:2"], "2 of this machine's 4 GPUs not used"),
        ([f"cuda:{number}" for number in range(4)], ""),
        (["cuda"], ""),
    ],
)
def test_gpus_that_no_worker_has_are_counted(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], said: str
) -> None:
    monkeypatch.setattr(device, "_nvidia", lambda: device.Nvidia(4, 13))
    monkeypatch.setattr(device, "_torch_cuda", lambda: 13)
    assert device.idle_gpus(*devices) == said


def test_the_installed_torch_is_read_without_its_import() -> None:
    built_for = torch.version.cuda and int(torch.version.cuda.partition(".")[0])
    assert device._torch_cuda() == built_for


def test_every_worker_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.DEVICE, "cuda:3")
    sft = SFTConfig(output="x", model="tiny")
    for config in (GeneratorConfig(), TrainerConfig(), sft, sft.trainer):
        assert (config.device, config.dtype) == ("cuda:3", "bfloat16")
        assert type(config).model_fields["device"].default == "auto"
    assert TrainerConfig(device="cpu").device == "cpu"
    monkeypatch.setenv(device.DEVICE, "auto")
    assert TrainerConfig().device in ("cpu", "cuda")
    monkeypatch.setenv(device.DEVICE, "gpu")
    with pytest.raises(ValueError, match="'gpu' is not a device"):
        TrainerConfig()


def test_the_first_line_of_a_run_names_the_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepared = prepare(small_config(tmp_path, trainer={"ranks": 2}))
    name, line = next(iter(resolved(prepared).items()))
    assert (name, line) == ("devices", "trainer on cpu; generator on cpu")
    assert prepared.config.model_dump()["trainer"]["device"] == "cpu"  # as it is recorded
    monkeypatch.setattr(device, "_nvidia", lambda: device.Nvidia(1, 13))
    monkeypatch.setattr(device, "_torch_cuda", lambda: 13)
    line = resolved(prepared)["devices"]
    assert line.endswith("generator on cpu; this machine's GPU is not used (take device: auto)")
