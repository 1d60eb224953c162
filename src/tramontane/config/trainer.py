"""`trainer`: objective, optimizer, memory use and adapters."""

from __future__ import annotations

import math
from bisect import bisect
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from tramontane.config.device import Device, Dtype, resolve_dtype
from tramontane.config.objective_choice import ObjectiveConfig
from tramontane.config.resume import Fixed, MayChange
from tramontane.config.section import Section, key_error

# Learning rates of the shipped configs by number of parameters, in ascending order: for
# reinforcement learning (quickstart, real, gsm8k) and for fine-tuning (real, recipe_small, lessons
# for the tiny base). Interpolated by a power law, and constant beyond the ends.
_RATES = {
    "rl": ((1.8e6, 3e-4), (135e6, 2e-5), (500e6, 1e-6)),
    "sft": ((1.8e6, 1e-3), (135e6, 1e-4), (7e9, 1e-5)),
}
LORA_RATE = 10  # a few low-rank weights need larger steps than all weights

_ADAPTERS = Fixed("the optimizer's state belongs to the trained weights")


class LoraConfig(Section):
    """LoRA (arXiv 2106.09685): the model's weights W are frozen, each target layer computes (W + s
    · B A) x, and only A and B are trained. Needs peft: `pip install 'tramontane-rl[lora]'`. The
    paper trains all weights."""

    rank: int = Field(16, ge=1)
    """Rows of A and columns of B (`r` in peft)."""
    alpha: float = Field(32.0, gt=0)
    """The scale s is alpha / rank (`lora_alpha` in peft)."""
    rslora: bool = False
    """Use the scale s = alpha / √rank, for ranks above 64 (arXiv 2312.03732; `use_rslora` in
    peft)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the adapters' inputs, only where gradients are computed. With reinforcement
    learning it makes the trained policy differ from the generator's."""
    target_modules: tuple[str, ...] | None = None
    """Linear layers that get an adapter: full names or their last parts, e.g. `q_proj`. null: all
    except the output head."""


class NumericsConfig(Section):
    """Keys shared by reinforcement learning and supervised fine-tuning."""

    dtype: Dtype = "auto"
    """Number type of forward and backward. `bfloat16` computes in a copy of the weights; weights,
    moments and log-probs are always float32. auto: bfloat16 on CUDA devices and on CPUs with
    bfloat16 instructions, else float32; see docs/generation.md."""
    device: Device = "auto"
    """Device of the first rank: auto, cpu, cuda, cuda:N or mps. Each further rank has the next GPU.
    auto: cuda if torch can use an NVIDIA GPU of this machine, else cpu; the environment variable
    TRAMONTANE_DEVICE overrides it."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of first and second moments."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm above which gradients are scaled down to it."""
    gradient_checkpointing: Literal["full"] | bool = False
    """Keep one activation per block (with flash attention, its output too) and recompute the others
    in the backward pass: less memory, more time. full: recompute attention too."""
    activation_offload: bool = False
    """Keep the activations between blocks in host memory until the backward pass. For long
    sequences on a GPU; `gradient_checkpointing` must be true."""
    compile: Literal["auto"] | bool = "auto"
    """Compile each block and the output head with torch.compile, which needs a compiler and
    Python's headers. auto: on CUDA devices, if both are installed."""
    attention_kernel: Literal["default", "fa3"] = "default"
    """Flash attention on CUDA devices in bfloat16: torch's own, or FlashAttention 3 (the module
    `flash_attn_interface`), for GPUs of capability 9. torch replaces it for a whole process, so
    with `placement.kind: thread` for generators too; see docs/gpu.md."""
    reduce_gradients: Literal["step", "microbatch"] = "step"
    """When gradients are reduced over the ranks: once per optimizer `step`, for which each rank
    keeps the whole model's gradients (4 bytes per parameter) if it has several microbatches, or
    after each `microbatch`, for which it keeps only its share."""
    lora: Annotated[LoraConfig | None, _ADAPTERS] = None
    """Train low-rank adapters. null: train all weights."""

    @property
    def keeps_attention(self) -> bool:
        """True if checkpointed blocks keep the output of flash attention."""
        return self.gradient_checkpointing is True and not self.activation_offload


class TrainerConfig(NumericsConfig):
    """Optimizer, numerics and memory use of training; see docs/training.md. The paper names neither
    optimizer nor learning rate."""

    renamed: ClassVar[Any] = {"warmup_steps": "warmup_updates"}

    learning_rate: float | None = Field(None, gt=0)
    """Learning rate of AdamW after warm-up. null: by the model's size: 3e-4 at 2 million
    parameters, 2e-5 at 135 million, 1e-6 from 500 million on; ten times as much with `lora`. The
    paper does not give it."""
    warmup_updates: int = Field(0, ge=0)
    """Updates of linear warm-up. The paper does not give it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: `constant`, or a `linear` or `cosine` decay to 0 at the end of
    the run. The paper does not give it."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay, on matrices only. The paper does not give it."""
    max_nonfinite_steps: int = Field(5, ge=1)
    """Consecutive optimizer steps with a non-finite gradient (inf or NaN) after which the run ends.
    Each such step is skipped, which leaves weights and moments unchanged."""
    microbatch_tokens: int = Field(8192, ge=1)
    """Token budget of a microbatch (arXiv 2506.10910, section 3.3); a longer sequence gets its own
    microbatch. The paper does not give it. On a CPU, 2,048 to 4,096 are fastest."""
    threads: int = Field(1, ge=1)
    """CPU threads that compute microbatches in parallel, each with its own gradients (4 bytes per
    parameter). On Linux, those after the first use cores only while generators leave them idle;
    elsewhere they share the cores equally. Use small microbatches. Above 1, `ranks` must be 1. No
    effect on a GPU."""
    ranks: int = Field(1, ge=1)
    """Number of trainer processes, at most `pipeline.n_minibatch` times `context_parallel`. Above
    1, FSDP2 shards weights, gradients and moments over them."""
    context_parallel: int = Field(1, ge=1)
    """Neighboring ranks that compute each row together, for sequences too long or too slow for one:
    each has an equal share of a microbatch's tokens, and in attention of its heads (DeepSpeed
    Ulysses, arXiv 2309.14509). Divides `ranks` and the model's query heads; not for layers with
    state."""
    max_restarts: int = Field(3, ge=0)
    """Restarts of a lost trainer from one checkpoint before the run fails. No effect with
    `placement.kind: thread` and one rank, where the trainer shares the controller's process."""
    vision: Annotated[Literal["frozen", "projector", "all"], _ADAPTERS] = "frozen"
    """What is trained of the vision tower of a model that takes images: nothing, its projector, or
    all; see docs/images.md."""
    vision_learning_rate: float | None = Field(None, gt=0)
    """Learning rate of tower and projector after warm-up. null: a tenth of the policy's."""
    router_replay: bool = False
    """Use the experts that the generator chose for each token, with the trainer's own gate weights
    (R3, arXiv 2510.11370), in a mixture of experts. Prompts, inserted tokens and tokens of earlier
    runs have no recorded experts: the routers choose theirs."""
    float32_router: bool = False
    """Compute the routers of a mixture of experts in float32, in generators too."""
    parity_tolerance: float | None = Field(None, gt=0)
    """Largest mean |Δ log-prob| between generator and trainer, in nats, for a run to start. null:
    1e-3, 0.05 if either uses bfloat16, or 0.1 for quantized weights of the generator, which
    `parity_kl` and `parity_sample_size` limit."""
    parity_kl: float = Field(3e-3, gt=0)
    """Largest KL(μ‖π) of a token, in nats, between a generator with quantized weights
    (`generator.weights`, or vLLM's `quantization`) and the trainer, for a run to start."""
    parity_sample_size: float = Field(0.85, ge=0, le=1)
    """Smallest effective sample size, as a share, of completions of up to 60 tokens from such a
    generator, weighted by π/μ, for a run to start."""
    min_effective_sample_size: MayChange[float] = Field(0.1, ge=0, le=1)
    """Effective sample size of an update's completions, (Σ w)²/(B Σ w²) with w = π/μ of each whole
    completion, below which a warning is shown; see docs/off-policy.md. 0: no warning."""
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    """The loss."""

    @property
    def data_ranks(self) -> int:
        """Ranks with rows of their own; those that share rows count as one."""
        return self.ranks // self.context_parallel

    def peak_rate(self, parameters: int) -> float:
        """`learning_rate`, or the usual one for a model with this number of parameters."""
        if self.learning_rate is not None:
            return self.learning_rate
        rate = usual_rate(parameters, "sft" if self.objective.name == "sft" else "rl")
        return float(f"{rate * (LORA_RATE if self.lora else 1):.1e}")

    @model_validator(mode="after")
    def _together(self) -> TrainerConfig:
        self.dtype = resolve_dtype(self.dtype, self.device)
        if self.device != "cpu":
            self.threads = 1
        if self.threads > 1 and self.ranks > 1:
            raise key_error(
                f"{self.threads} threads need ranks 1 (found {self.ranks}); set one of them to 1",
                "threads",
                "ranks",
            )
        if self.ranks % self.context_parallel:
            raise key_error(
                f"rows are shared by groups of {self.context_parallel} ranks, and ranks is "
                f"{self.ranks}; set ranks to {self.context_parallel} or a multiple of it",
                "context_parallel",
                "ranks",
            )
        if "values" in self.objective.needs:
            for key, used in (("lora", self.lora is not None), ("threads", self.threads > 1)):
                if used:
                    raise key_error(
                        f"objective {self.objective.name!r} trains a value network, which does "
                        f"not work with it; leave it out",
                        key,
                        "objective.name",
                    )
        if self.activation_offload and not self.gradient_checkpointing:
            raise ValueError(
                "activation_offload keeps the activations between checkpointed blocks: set "
                "gradient_checkpointing to true"
            )
        return self


def usual_rate(parameters: int, kind: Literal["rl", "sft"]) -> float:
    """The usual learning rate for a pre-trained model of this size, from the shipped configs."""
    known = _RATES[kind]
    place = bisect(known, (parameters, 0.0))
    if place in (0, len(known)):
        return known[max(0, place - 1)][1]
    (small, high), (large, low) = known[place - 1 : place + 1]
    return high * (low / high) ** (math.log(parameters / small) / math.log(large / small))
