"""Whole runs with vLLM as the generator: its process is killed, or its output head is stale. That
runs learn is tested in test_learning.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.controller.test_pipeline import (
    WatchedPipeline,
    check_completions,
    check_ledger,
    rollouts,
)
from tests.runs import small_config
from tramontane.generator import VllmGenerator
from tramontane.generator.vllm.shared import SharedTensors
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.trainer.parity import ParityError

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("vllm_environment")]


def test_a_run_outlives_its_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray too: vLLM's process is killed, and its sequences go on in a new one."""
    pids: list[int] = []
    killed: list[int] = []
    start = VllmGenerator._start

    def noted(self: VllmGenerator, slots: int, max_len: int) -> None:
        start(self, slots, max_len)
        pids.append(self.pid)

    class Harmed(WatchedPipeline):
        def _notify(self) -> None:
            if self.ledger.trained_version == 1 and not killed:
                killed.append(pids[0])
                os.kill(pids[0], signal.SIGKILL)
            super()._notify()

    monkeypatch.setattr(VllmGenerator, "_start", noted)
    monkeypatch.setattr("tramontane.run.train.Pipeline", Harmed)
    config = small_config(
        tmp_path,
        pipeline={"updates": 4, "n_async": 64, "max_staleness": 2},
        generator={"kind": "vllm"},
    )
    train(config, QuietScreen())
    assert len(pids) == 2
    events = (tmp_path / "events.log").read_text()
    assert f"replaced: vLLM's process {pids[0]} died" in events
    check_completions(rollouts(tmp_path), config)
    check_ledger(tmp_path, config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gate_names_a_stale_output_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """vLLM's CPU build packs the output head for its matrix product when it starts, and again only
    when an update has the head's name. Here vLLM ties the head, and the updates lack its name, as a
    checkpoint of a tied model does: so vLLM computes with the random head of its start."""
    load = SharedTensors.__init__

    def without_head(self: SharedTensors, model: PreTrainedModel) -> None:
        load(self, model)
        self.table = [row for row in self.table if row[0] != "lm_head.weight"]

    monkeypatch.setattr(SharedTensors, "__init__", without_head)
    tied = {"hf_overrides": {"tie_word_embeddings": True}}
    config = small_config(
        tmp_path, generator={"kind": "vllm", "dtype": dtype, "vllm": {"engine_args": tied}}
    )
    with pytest.raises(
        ParityError, match=r"weights differ in lm_head\.weight \(1 of .*tied output"
    ):
        train(config, QuietScreen())
