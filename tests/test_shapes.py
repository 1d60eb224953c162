"""The shapes that public tensor functions state are those that they get and return."""

import multiprocessing
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest
import torch

from tests.paths import ROOT

CALLING = [
    "tests/trainer/test_advantages.py",
    "tests/trainer/test_averages.py",
    "tests/trainer/test_masks.py",
    "tests/trainer/test_ratios.py",
    "tests/trainer/test_spo.py",
    "tests/generator/test_token_sampling.py",
    "tests/models/test_flash.py",
    "tests/models/test_packing.py",
    "tests/models/test_families.py::"
    "test_positions_count_from_the_start_of_a_sequence_beyond_the_check_s",
    "tests/generator/test_attention_kinds.py::test_kept_latents_are_those_of_earlier_weights",
]


def call_with_a_wrong_shape(answer: Connection) -> None:
    """In a process that may have imported the function without checks."""
    from tests.shape_checks import MODULES  # which switches them on

    for module in MODULES:
        sys.modules.pop(f"tramontane.{module}", None)
    from tramontane.trainer.advantages import group_advantages

    rewards, groups = torch.zeros(3, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    try:
        group_advantages(rewards, groups, torch.ones(4, dtype=torch.bool), "group")
        answer.send(("nothing", ""))
    except Exception as error:
        answer.send((type(error).__name__, str(error)))


def test_a_wrong_shape_is_named() -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=call_with_a_wrong_shape, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.poll(120)
    name, message = ours.recv()
    process.join(120)
    assert process.exitcode == 0
    assert name == "TypeCheckError"
    assert "groups" in message


@pytest.mark.slow(40)
def test_calls_have_the_stated_shapes() -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "tests.shape_checks"]
    options = ["-m", "not slow and not gpu", "-o", "addopts=--import-mode=importlib"]
    done = subprocess.run(
        [*command, *options, *CALLING], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:]
