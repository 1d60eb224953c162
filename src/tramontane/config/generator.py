"""`generator`: sampling of completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tramontane.config.device import Device, Dtype, resolve_dtype
from tramontane.config.resume import Fixed
from tramontane.config.section import Section, key_error

Stop = Annotated[str, Field(min_length=1)] | Annotated[int, Field(ge=0)]  # a text, or a token id

MOST_ALLOWED = 1024  # tokens that `top_k` may allow, which are recorded for the trainer
GPU_MEMORY_SHARE = 0.9  # of a GPU, for the generators on it


class VllmConfig(Section):
    """vLLM, which `generator.kind: vllm` runs in its own environment and process."""

    python: str | None = None
    """Interpreter of an environment with vLLM. null: the environment variable
    TRAMONTANE_VLLM_PYTHON, or `.venv-vllm/bin/python`, which `tramontane vllm` sets up."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of GPUs that each generator's model is split over."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of vLLM's engine, e.g. `gpu_memory_utilization: 0.6`."""

    @field_validator("engine_args")
    @classmethod
    def _no_code(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments.get("trust_remote_code"):
            raise ValueError("trust_remote_code: code of a checkpoint is never run; leave it out")
        return arguments


class InterruptionConfig(Section):
    """Interruption of long thoughts in training (ScaleRL, arXiv 2510.13786); see
    docs/generation.md."""

    after: tuple[Annotated[int, Field(ge=1)], int]
    """Minimum and maximum number of tokens after which the thoughts of a completion are
    interrupted; drawn from its seed. ScaleRL: 10k to 12k."""
    answer_tokens: int = Field(2048, ge=1)
    """Maximum number of tokens after an interruption. The default is ScaleRL's."""
    text: str = "\nTime is up. I stop thinking here and give my final answer.\n"
    """Sentence that ends the thoughts; the closing thinking tag follows. Ours."""

    @model_validator(mode="after")
    def _in_order(self) -> InterruptionConfig:
        if self.after[0] > self.after[1]:
            raise key_error(f"after {list(self.after)}: give the lower number first", "after")
        return self


class ServeConfig(Section):
    """The endpoint of a run; see docs/endpoint.md."""

    host: str = "127.0.0.1"
    """Address to listen on. The key in the endpoint's address is all that protects the model."""
    port: int = Field(0, ge=0, le=65535)
    """Port to listen on. 0: any free one."""
    completions: int = Field(8, ge=1)
    """Maximum number of completions sampled for clients at once, and of one request; further
    requests wait. The generators have slots for them in addition to those of `pipeline.n_async`, so
    that training never waits for them."""


class GeneratorConfig(Section):
    """Sampling of completions; see docs/generation.md."""

    kind: Literal["slots", "vllm"] = "slots"
    """Engine: the embedded slot engine, or vLLM."""

    temperature: Annotated[float, Fixed("completions under way were sampled at it")] = Field(
        1.0, gt=0
    )
    """Sampling temperature in training. The paper: 0.7 (Medium), 1.0 (Small)."""
    top_p: Annotated[float, Fixed("completions under way were sampled at it")] = Field(
        1.0, gt=0, le=1
    )
    """Sample in training only from the likeliest tokens whose probabilities add up to this. The
    trainer computes its log-probs over the same tokens; see docs/off-policy.md."""
    top_k: Annotated[int, Fixed("completions under way were sampled at it")] = Field(
        0, ge=0, le=MOST_ALLOWED
    )
    """Sample in training only from this number of the likeliest tokens. 0: no limit, or 1,024 if
    `top_p` is below 1, so that the record of the allowed tokens is bounded."""
    dtype: Dtype = "auto"
    """Number type of weights, keys and values. auto: as in `trainer.dtype`."""
    weights: Literal["full", "int8", "fp8"] = "full"
    """Weights of linear layers: in full, or in eight bits, on processors that multiply such numbers
    fast: int8 on CPUs (with embeddings that are tied to the output head), fp8 on GPUs. Completions
    are then sampled from the quantized policy; see docs/off-policy.md."""
    stop: tuple[Stop, ...] = ()
    """Texts and token ids that end a completion, in addition to the model's EOS tokens; e.g.
    `["<|im_end|>"]`, or `["\\n\\nTask:"]` for a base model. The stop's tokens were sampled, so they
    are trained on; the graded text ends before the stop. A text that is one of the tokenizer's
    added tokens means that token."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """What to do with the keys and values of sequences in flight after a weight update: `keep` them
    (the paper's choice), or `recompute` them under the new weights."""
    steps_per_call: int = Field(8, ge=1)
    """Maximum number of decode steps between checks for messages, and so the longest delay of a
    weight update."""
    prefill_tokens: int = Field(4096, ge=1)
    """Prompt tokens per prefill forward. A longer prompt gets its own forward."""
    workers: int = Field(1, ge=0)
    """Number of generators, which share `pipeline.n_async`. 0: for a run on recorded trajectories
    alone (`data.trajectories.share: 1`) without evaluations."""
    device: Device = "auto"
    """Device of the first generator: auto, cpu, cuda, cuda:N or mps; see docs/placement.md. auto:
    as in `trainer.device`."""
    slots: int | None = Field(None, ge=1)
    """Maximum number of completions that each generator decodes at once; the rest of
    `pipeline.n_async` wait in its queue. Memory may allow fewer. null: a generator's share of
    n_async."""
    kv_cache_mib: int | None = Field(None, ge=1)
    """Memory limit of keys and values of all generators, in MiB, which limits how many completions
    are decoded at once. A stage whose longest sequence does not fit is refused before the run
    starts. null: on a CUDA device, `gpu_memory_utilization` is the limit (for vLLM next to a
    trainer, what it leaves for keys and values); elsewhere there is none."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of a CUDA device's memory for the weights, keys and values of one generator, if
    `kv_cache_mib` is null. null: 0.9, less what the trainer is computed to take if it is on the
    same GPU; on Ray, 0.9 of the generator's fraction of a GPU."""
    staging: Literal["device", "host"] = "device"
    """Memory that receives the next version of the weights: the generator's `device`, which then
    holds the weights twice, or the `host`'s, which makes a swap as slow as the bus. No effect on a
    CPU."""
    cuda_graphs: bool = True
    """Record decode steps at the start and replay them, on CUDA devices. No effect on a CPU."""
    return_routed_experts: bool = False
    """Record the experts that a mixture of experts chooses for each token, for
    `trainer.router_replay`, which switches it on. On a GPU, blocks are then not compiled."""
    float32_vision: bool = False
    """Compute the features of images in float32 on a GPU too, as `trainer.vision` does."""
    float32_router: bool = False
    """Compute the routers of a mixture of experts in float32; `trainer.float32_router` is the
    trainer's."""
    compile: bool = True
    """Merge products of the same input and compile the model's blocks with torch.compile, on CUDA
    devices. No effect on a CPU."""
    interruption: Annotated[
        InterruptionConfig | None, Fixed("completions under way were handed out with it")
    ] = None
    """Interruption of long thoughts in training. null: completions end at `pipeline.l_max`."""
    serve: ServeConfig | None = None
    """Serve the model in training to clients of OpenAI's API, e.g. `{}` or `{port: 8000}`. null: no
    endpoint."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """vLLM's environment and arguments."""

    @property
    def devices(self) -> int:
        """Number of GPUs of each generator on GPUs."""
        return self.vllm.tensor_parallel if self.kind == "vllm" else 1

    @property
    def quantized(self) -> str:
        """The key that quantizes the weights that training samples with, and its value: `weights`,
        or an argument of vLLM, which quantizes each version as it arrives. Empty: in full."""
        if self.weights != "full":
            return f"generator.weights {self.weights}"
        name = self.vllm.engine_args.get("quantization") if self.kind == "vllm" else None
        return f"generator.vllm.engine_args quantization {name}" if name else ""

    @property
    def truncates(self) -> bool:
        """True if training samples from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of `types.SamplingParams` that training samples with, except the length."""
        top_k = self.top_k or (MOST_ALLOWED if self.truncates else 0)
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": top_k,
            "record_allowed": self.truncates,
        }

    @model_validator(mode="after")
    def _resolve_dtype(self) -> GeneratorConfig:
        self.dtype = resolve_dtype(self.dtype, self.device)
        if self.weights == "int8" and (self.kind == "vllm" or self.device not in ("auto", "cpu")):
            raise key_error(
                "int8 is of the embedded engine (kind slots) on a CPU; leave it out",
                "weights",
                "device" if self.kind == "slots" else "kind",
            )
        return self

    @model_validator(mode="after")
    def _fp8_where_it_is(self) -> GeneratorConfig:
        on_gpu = self.device.startswith("cuda")
        if self.weights != "fp8":
            return self
        if self.kind == "vllm":
            raise key_error(
                "fp8 is of the embedded engine (kind slots); for vLLM, write vllm: {engine_args: "
                "{quantization: fp8}}",
                "weights",
                "kind",
            )
        if not on_gpu and self.device != "cpu":
            raise key_error("fp8 is for NVIDIA's GPUs; leave it out", "weights", "device")
        if on_gpu and self.dtype != "bfloat16":
            raise key_error(
                "on a GPU, products of fp8 give bfloat16; take dtype: bfloat16", "weights", "dtype"
            )
        return self
