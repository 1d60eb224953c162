"""What the four parts share: models of known shapes, and the project's workers on them, which only
`make_generator` and `make_trainer` make.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

import tramontane.models.attention  # noqa: F401 (registers `packed`)
from tramontane.config import GeneratorConfig, TrainerConfig
from tramontane.generator import Generator
from tramontane.models.loading import load_tokenizer
from tramontane.models.shape import ModelShape, load_shape, shape_of
from tramontane.trainer import Trainer
from tramontane.types import Completion, SamplingParams

T = TypeVar("T")

# The class of the config; hidden size, intermediate size, layers, heads, key-value heads, channels
# of a head, vocabulary, and whether the output head is the input embeddings.
SHAPES: dict[str, tuple[type[PretrainedConfig], int, int, int, int, int, int, int, bool]] = {
    "Qwen2.5-0.5B": (Qwen2Config, 896, 4864, 24, 14, 2, 64, 151936, True),
    "Qwen2.5-1.5B": (Qwen2Config, 1536, 8960, 28, 12, 2, 128, 151936, True),
    "Qwen2.5-7B": (Qwen2Config, 3584, 18944, 28, 28, 4, 128, 152064, False),
    "Qwen3-0.6B": (Qwen3Config, 1024, 3072, 28, 16, 8, 128, 151936, True),
    "Qwen3-4B": (Qwen3Config, 2560, 9728, 36, 32, 8, 128, 151936, True),
    "SmolLM2-135M": (LlamaConfig, 576, 1536, 30, 9, 3, 64, 49152, True),
}
CONTEXT = 1 << 17  # positions
GROUP = 16  # requests with the same prompt

# Ways to run a decode step, by name: keys of the generator's config.
MODES: dict[str, dict[str, Any]] = {
    "eager": {"cuda_graphs": False, "compile": False},
    "graphs": {"cuda_graphs": True, "compile": False},
    "fused": {"cuda_graphs": True, "compile": True},
}
APART = "process"  # the placement with a separate process for the trainer


class Bench(NamedTuple):
    """How to measure: on a GPU, or `tiny`, as a rehearsal on a CPU."""

    tiny: bool

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    def pick(self, full: T, tiny: T) -> T:
        return tiny if self.tiny else full

    def config(self, name: str) -> PretrainedConfig:
        kind, *sizes = SHAPES[name]
        if self.tiny:
            sizes = [64, 128, 2, 4, 2, 16, 2048, sizes[-1]]
        hidden, intermediate, layers, heads, kv_heads, channels, vocabulary, tied = sizes
        return kind(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=channels,
            vocab_size=vocabulary,
            tie_word_embeddings=tied,
            max_position_embeddings=CONTEXT,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )

    def shape(self, name: str) -> ModelShape:
        return _shape(self, name)

    def make_model(self, name: str, dtype: torch.dtype) -> PreTrainedModel:
        """A model with random weights."""
        torch.manual_seed(0)
        with torch.device(self.device):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                self.config(name), dtype=dtype, attn_implementation="packed"
            )
        return model

    def make_generator(
        self, name: str, slots: int, max_len: int, mode: str, **keys: Any
    ) -> Generator:
        """The embedded generator; `mode` is one of `MODES`, `keys` are of its config."""
        config = GeneratorConfig(device=self.device, **MODES[mode], **keys)
        model = self.make_model(name, getattr(torch, config.dtype))
        return Generator(model, load_tokenizer("tiny"), config, slots, max_len)

    def make_trainer(self, name: str, **keys: Any) -> Trainer:
        """The trainer; `keys` are of its config."""
        config = TrainerConfig.model_validate(
            {"device": self.device, "learning_rate": 1e-6, **keys}
        )
        frozen = getattr(torch, config.dtype) if config.lora else torch.float32
        return Trainer(self.make_model(name, frozen), config, updates=1000)

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of a call, with the kernels that it started on this thread's stream."""
        began = time.perf_counter()
        work()
        if not self.tiny:
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - began


@cache
def _shape(bench: Bench, name: str) -> ModelShape:
    return load_shape(name) if name == "tiny" else shape_of(bench.config(name), name)


def requests(first: int, count: int, prompt: int, tokens: int) -> list[Completion]:
    """Requests numbered from `first`, in groups that share a prompt of `prompt` tokens."""
    made = []
    for number in range(first, first + count):
        group = number // GROUP
        ids = [2 + (7 * group + place) % 199 for place in range(prompt)]
        made.append(
            Completion.requested(group, number % GROUP, ids, number, SamplingParams(tokens))
        )
    return made
