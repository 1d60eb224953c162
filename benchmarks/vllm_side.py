"""vLLM in its own environment and process, measured by the CPU time of both processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tramontane.config import GeneratorConfig
from tramontane.generator import VllmGenerator
from tramontane.generator.vllm import environment
from tramontane.models.loading import load_tokenizer
from tramontane.types import Completion

ALL = 1_000_000  # steps: until no request is left


def available() -> bool:
    """True if vLLM's environment was set up."""
    return environment.expected()


class Vllm:
    """A generator that runs requests to their `max_tokens`.

    Args:
        model: any causal LM.
        folder: where its checkpoint is written.
        slots: completions decoded at once.
        max_len: longest prompt plus completion, in tokens.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, slots: int, max_len: int) -> None:
        model.save_pretrained(folder)
        tokenizer = load_tokenizer("tiny")
        tokenizer.add_special_tokens({"eos_token": "<never>"})  # beyond the model's vocabulary
        tokenizer.save_pretrained(folder)
        dtype: Any = str(model.dtype).removeprefix("torch.")
        config = GeneratorConfig(kind="vllm", dtype=dtype, device=str(model.device))
        self.generator = VllmGenerator(str(folder), config, slots, max_len)
        self._on_cpu = model.device.type == "cpu"

    def __call__(self, requests: list[Completion]) -> None:
        self.generator.submit(requests)
        done = self.generator.step(ALL)
        tokens = sum(len(c.token_ids) for c in done)
        assert tokens == sum(r.sampling.max_tokens for r in requests)

    def clock(self) -> float:
        """Seconds: on a CPU, the CPU time of this process and of vLLM's; else wall time."""
        if not self._on_cpu:
            return time.perf_counter()
        fields = Path(f"/proc/{self.generator.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])  # user and system time
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def describe() -> str:
    """The versions of vLLM and torch."""
    found = environment.find(None)
    return f"vLLM {found.vllm}, torch {found.versions.get('torch', torch.__version__)}"
