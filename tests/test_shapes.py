"""The shapes that public tensor functions state are those that they get and return."""

import subprocess
import sys

import pytest

from tests.paths import ROOT

WRONG = """
import torch, tests.shape_checks
from tramontane.trainer.advantages import group_advantages
rewards, groups = torch.zeros(3, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
group_advantages(rewards, groups, torch.ones(4, dtype=torch.bool), "group")
"""

CALLING = [
    "tests/trainer/test_advantages.py",
    "tests/trainer/test_averages.py",
    "tests/trainer/test_masks.py",
    "tests/trainer/test_ratios.py",
    "tests/trainer/test_spo.py",
    "tests/generator/test_token_sampling.py",
    "tests/models/test_flash.py",
    "tests/models/test_families.py",
]


def test_a_wrong_shape_is_named() -> None:
    command = [sys.executable, "-c", WRONG]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode
    assert "groups" in done.stderr.splitlines()[-1] or "groups" in done.stderr
    assert "TypeCheckError" in done.stderr


@pytest.mark.slow
def test_calls_have_the_stated_shapes() -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "tests.shape_checks"]
    options = ["-m", "not slow and not gpu", "-o", "addopts=--import-mode=importlib"]
    done = subprocess.run(
        [*command, *options, *CALLING], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:]
