"""The input of `tramontane plan`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tramontane.config import Section, key_error
from tramontane.planning.gpus import GPUS, is_report, measured_keys


class PlanConfig(Section):
    """The input of `tramontane plan`: the model to train, the GPUs, and assumptions about costs.
    See docs/planning.md."""

    model: str
    """The model to train: the name of a known shape (llama-3.1-8b, llama-3.1-70b, llama-3.1-405b,
    mistral-small-24b, mistral-large-123b), a folder or a `config.json`, `tiny`, or a Hugging Face
    name. Only its sizes are read."""
    gpus: int = Field(ge=2)
    """Total number of GPUs for generators and trainer. With a CPU's report, its cores."""
    gpu: str = "h100"
    """Kind of GPU: a100, b200, h100, h200 or l40s, with the memory, bandwidths and FLOP/s of its
    data sheet in `planning/gpus.yaml`. Or the path of the report that `python -m benchmarks.bounds`
    wrote on the machine to plan for, `benchmarks/bounds.json`; then these are measured."""
    engine: Literal["auto", "slots", "vllm"] = "auto"
    """Engine of the generators: the embedded engine, `slots`, on one GPU each, or `vllm`, which
    splits a model over GPUs of a node. auto: slots on one GPU, vllm on several."""
    n_batch: int = Field(2048, ge=1)
    """Completions between two weight updates, in whole groups. The paper: 8k, 4k, 2k by stage
    (Medium); 2,048 (Small)."""
    group_size: int = Field(16, ge=2)
    """Completions per problem. The paper does not give it."""
    prompt_mean: int = Field(300, ge=1)
    """Mean length of a prompt, in tokens."""
    prompt_max: int = Field(2048, ge=1)
    """Length of the longest prompt, in tokens."""
    length_mean: int = Field(6000, ge=2)
    """Mean length of a completion, in tokens; below length_max."""
    length_max: int = Field(32000, ge=3)
    """Maximum length of a completion, in tokens."""
    sigma: float = Field(0.8, gt=0, le=3)
    """Standard deviation of the logarithm of lengths."""
    train_mfu: float = Field(0.35, gt=0, le=1)
    """Share of a GPU's FLOP/s reached in training."""
    train_flops: float = Field(8.0, ge=6)
    """Floating-point operations per parameter and trained token: 6, and 2 more for gradient
    checkpointing. Attention is not counted."""
    decode_bandwidth: float = Field(0.6, gt=0, le=1)
    """Share of a GPU's memory bandwidth reached in decoding."""
    prefill_mfu: float = Field(0.4, gt=0, le=1)
    """Share of a GPU's FLOP/s reached by a generator's matrix products over many sequences or
    tokens."""
    step_seconds: float = Field(0.003, ge=0)
    """Fixed cost of a decode step, in seconds."""
    context_parallel: int = Field(1, ge=1)
    """GPUs of the trainer that compute each sequence together (`trainer.context_parallel`). Divides
    node; no effect on a CPU."""
    slots: int = Field(1024, ge=1)
    """Maximum number of sequences that one generator decodes at once. Memory may allow fewer."""
    node: int = Field(8, ge=1)
    """GPUs of a node: a generator is not split over more."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, and of a microbatch."""
        return self.prompt_max + self.length_max

    @model_validator(mode="before")
    @classmethod
    def _measured(cls, values: Any) -> Any:
        """The shares in a report are the defaults."""
        if isinstance(values, dict) and is_report(gpu := str(values.get("gpu", ""))):
            return measured_keys(gpu) | values
        return values

    @field_validator("gpu")
    @classmethod
    def _known(cls, gpu: str) -> str:
        if is_report(gpu):
            return gpu
        if gpu.lower() not in GPUS:
            raise ValueError(f"no data sheet for the GPU {gpu!r}; choose from {', '.join(GPUS)}")
        return gpu.lower()

    @model_validator(mode="after")
    def _between(self) -> PlanConfig:
        if self.length_mean >= self.length_max:
            raise key_error(
                f"length_mean {self.length_mean} is not below length_max {self.length_max}; "
                f"lower length_mean, or raise length_max",
                "length_mean",
                "length_max",
            )
        if self.node % self.context_parallel:
            raise key_error(
                f"{self.context_parallel} GPUs of a node of {self.node} share a sequence; choose a "
                f"divisor of node",
                "context_parallel",
                "node",
            )
        if self.n_batch % self.group_size:
            raise key_error(
                f"group_size {self.group_size} does not divide n_batch {self.n_batch}: a batch "
                f"holds whole groups",
                "n_batch",
                "group_size",
            )
        return self
