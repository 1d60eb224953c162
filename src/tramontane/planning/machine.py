"""Costs of a model's work on GPUs, from a data sheet or measured rates and stated assumptions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tramontane.config import Config, TrainerConfig
from tramontane.generator.decoders import TOKEN_STATE
from tramontane.models.shape import DTYPE_BYTES, ModelShape, load_shape
from tramontane.planning.config import PlanConfig
from tramontane.planning.fit import CPU_GAPS, CUDA_CONTEXT, LIBRARIES, NCCL, memory_gaps
from tramontane.planning.gpus import GPUS, Gpu, is_report, measured_gpu
from tramontane.planning.memory import Lengths, Memory, generator_memory
from tramontane.planning.simulate import Array
from tramontane.planning.trainer_memory import MASTER, MOMENTS, Completions, trainer_memory

MAX_TRAINER = 1 << 14  # GPUs of a trainer
# Traffic of sharded weights in a microbatch, as multiples of them: gathered for the forward and the
# backward pass, and gradients scattered once.
TRAFFIC = 3
# Passes that exchange tokens for heads when ranks share a sequence: forward, the blocks' forward
# again, backward.
EXCHANGES = 3
SHARES = (0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4)  # tried as generator.gpu_memory_utilization
DOUBLING = 0.9  # share of a generator's speed per GPU that is left when its number of GPUs doubles
BUS = 50e9  # bandwidth from host memory to each GPU, in bytes/s

Keys = dict[str, Any]  # of a section of a config


class Engine(NamedTuple):
    """An engine on some GPUs.

    Args:
        keys: the section `generator` of a config, without `workers`.
        tokens: tokens whose keys and values fit.
    """

    keys: Keys
    tokens: int

    @property
    def kind(self) -> str:
        """The engine: `slots` or `vllm`."""
        return str(self.keys.get("kind", "slots"))


@dataclass(frozen=True)
class Machine:
    """Times in seconds and sizes in bytes of one model's work on GPUs of one kind.

    Raises:
        InputError: an unknown model.
    """

    config: PlanConfig

    @cached_property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return _shape(self.config.model)

    @cached_property
    def gpu(self) -> Gpu:
        """Rates of one GPU; on a CPU, of one core."""
        name = self.config.gpu
        return measured_gpu(name) if is_report(name) else GPUS[name]

    @property
    def on_gpu(self) -> bool:
        """False if the devices are the cores of a CPU."""
        return self.gpu.device == "cuda"

    @property
    def unit(self) -> str:
        """The word for one device."""
        return "GPU" if self.on_gpu else "core"

    @property
    def parameters(self) -> int:
        return self.shape.parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in the generators' number type."""
        return DTYPE_BYTES[self.gpu.dtype] * self.parameters

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return self.shape.kv_bytes_per_token(self.gpu.dtype)

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.config.prompt_max, self.config.length_max)

    @property
    def cached(self) -> float:
        """Mean tokens cached by a live sequence over time. Long sequences are live for longer, so
        this comes from the second moment of the lognormal, with the longest length as a bound."""
        c = self.config
        mean_remaining = min(c.length_max, c.length_mean * math.exp(c.sigma**2)) / 2
        return c.prompt_mean + mean_remaining

    def trainer_keys(self, size: int) -> Keys | None:
        """The section `trainer` of a config for `size` GPUs, or threads of a CPU; None if it does
        not fit their memory (`trainer_memory.trainer_memory`)."""
        keys: Keys = {
            "device": self.gpu.device,
            "dtype": self.gpu.dtype,
            "microbatch_tokens": self.config.longest,
        }
        if not self.on_gpu:
            needed = self._trainer(keys | {"threads": size}).total
            return keys | {"threads": size} if needed <= size * self.gpu.memory else None
        keys |= {"gradient_checkpointing": True, "ranks": size}
        if self.config.context_parallel > 1:
            keys |= {"context_parallel": self.config.context_parallel}
        if size > 1:  # a rank that sums microbatches by itself has the whole model's gradients
            keys |= {"reduce_gradients": "microbatch"}
        full = keys | {"gradient_checkpointing": "full"}
        for changed in (keys, full, keys | {"activation_offload": True}):
            memory = self._trainer(changed)
            needed = memory.total + memory_gaps(memory, on_gpu=True) + CUDA_CONTEXT + NCCL
            if needed <= self.gpu.memory:
                return changed
        return None

    def _trainer(self, keys: Keys) -> Memory:
        trainer = TrainerConfig.model_validate(keys)
        batch = Completions(self.config.n_batch, self.config.group_size)
        return trainer_memory(trainer, self.shape, self.lengths, batch)

    @property
    def sharing(self) -> int:
        """GPUs that compute a sequence together."""
        return self.config.context_parallel if self.on_gpu else 1

    @cached_property
    def train_group(self) -> int | None:
        """Smallest number of GPUs that holds the trainer, `context_parallel` times a power of 2;
        None if no number does."""
        size = self.sharing
        while size <= MAX_TRAINER:
            if self.trainer_keys(size):
                return size
            size *= 2
        return None

    @property
    def train_cost(self) -> float:
        """GPU-seconds to train on one completion (η_t m_t)."""
        c = self.config
        return self._train_compute(c.prompt_mean / c.group_size + c.length_mean)

    def train_seconds(self, tokens: float, size: int) -> float:
        """Time to train on `tokens` tokens with `size` GPUs: the longest of their arithmetic, the
        traffic of sharded weights, and one longest sequence, which `context_parallel` of them
        share. Their exchange is not overlapped with arithmetic."""
        c = self.config
        slowest = max(
            self._train_compute(tokens) / size
            + self._exchange_seconds(tokens * self.sharing / size),
            self.sequence_seconds(min(tokens, c.prompt_mean + c.length_max)),
        )
        if size == 1 or not self.on_gpu:
            return slowest
        microbatches = math.ceil(tokens * self.sharing / (size * c.longest))
        speed = self.gpu.link if size <= c.node else self.gpu.network
        return max(slowest, microbatches * TRAFFIC * self.weight_bytes / speed)

    def sequence_seconds(self, tokens: float) -> float:
        """Time to train on one sequence, which `context_parallel` GPUs share: no update is shorter
        than that of its longest, however many GPUs there are."""
        return self._train_compute(tokens) / self.sharing + self._exchange_seconds(tokens)

    def _exchange_seconds(self, tokens: float) -> float:
        """Time in which the GPUs that share rows of `tokens` tokens exchange them: each sends all
        but its own heads of its tokens' queries, keys, values and outputs, in each layer."""
        ranks, shape = self.sharing, self.shape
        if ranks == 1:
            return 0.0
        heads = 2 * (shape.heads + math.lcm(shape.kv_heads, ranks))
        numbers = tokens / ranks * (1 - 1 / ranks) * heads * shape.head_dim * shape.layers
        return EXCHANGES * numbers * DTYPE_BYTES[self.gpu.dtype] / self.gpu.link

    def _train_compute(self, tokens: float) -> float:
        """GPU-seconds of the arithmetic of training: train_flops · P · tokens / (MFU · FLOP/s)."""
        c = self.config
        return c.train_flops * self.parameters * tokens / (self.gpu.flops * c.train_mfu)

    def speed(self, group: int) -> float:
        """Speed of a generator on `group` GPUs relative to one GPU."""
        return float((2 * DOUBLING) ** math.log2(group))

    @property
    def shared(self) -> float:
        """Bytes of the trainer's weights, gradients and moments on each GPU if they are spread over
        all GPUs."""
        return (2 * MASTER + MOMENTS) * self.parameters / self.config.gpus

    def generator_groups(self, reserved: float = 0.0) -> list[int]:
        """Numbers of GPUs that a generator may have: powers of 2 within a node that hold the
        sequences of a group. The embedded engine has one GPU. `reserved` is as in `slots`."""
        c = self.config
        return [
            size
            for size in self.engines
            if size <= c.gpus and self.slots(size, reserved) >= c.group_size
        ]

    def slots(self, group: int, reserved: float = 0.0) -> int:
        """Sequences that a generator on `group` GPUs decodes at once, with `reserved` bytes of each
        GPU taken; 0 if its weights or a longest sequence do not fit. The cache is paged: a sequence
        takes the room of the tokens that it has."""
        if (engine := self.engines.get(group)) is None:
            return 0
        tokens = engine.tokens - reserved * group / self.kv_bytes
        if tokens < self.config.longest:
            return 0
        return min(self.config.slots, int(tokens / self.cached))

    @cached_property
    def engines(self) -> dict[int, Engine]:
        """The engine with the largest cache on 1, 2, 4, … GPUs of a node, if any fits."""
        largest = 1 if self.config.engine == "slots" or not self.on_gpu else self.config.node
        sizes = [2**n for n in range(largest.bit_length())]
        found = {
            size: max(self._engines(size), key=lambda engine: engine.tokens, default=None)
            for size in sizes
        }
        return {size: engine for size, engine in found.items() if engine}

    def _engines(self, group: int) -> Iterator[Engine]:
        gpu, slots = self.gpu, self.config.slots
        keys: Keys = {"device": gpu.device, "dtype": gpu.dtype, "slots": slots}
        if not self.on_gpu:
            memory = self._generator(keys)
            room = (gpu.memory - LIBRARIES) / (1 + CPU_GAPS) - (memory.total - memory.cache)
            yield Engine(keys, int(room / (self.kv_bytes + TOKEN_STATE)))
            return
        if group > 1 or self.config.engine == "vllm":
            kinds: list[Keys] = [{"kind": "vllm", "vllm": {"tensor_parallel": group}}]
            token = self.kv_bytes / min(group, self.shape.cached.kept_heads)
            state = 0
        else:
            kinds, token = [{"staging": "device"}, {"staging": "host"}], float(self.kv_bytes)
            state = slots * self.config.longest * TOKEN_STATE
        for kind, share in product(kinds, SHARES):
            tried = keys | kind | {"gpu_memory_utilization": share}
            memory = self._generator(tried)
            needed = memory.total + memory_gaps(memory, on_gpu=True) + CUDA_CONTEXT
            if needed <= gpu.memory:
                yield Engine(tried, int((memory.cache - state) / token))

    def _generator(self, keys: Keys) -> Memory:
        size = {"group_size": self.config.group_size, "l_max": self.config.length_max, "l_cache": 0}
        in_flight = self.config.group_size * math.ceil(self.config.slots / self.config.group_size)
        sizes = size | {"n_async": in_flight, "n_batch": in_flight}
        stage = Config.model_validate(
            {"pipeline": sizes, "generator": keys, "data": {"train": "playground:"}}
        )
        return generator_memory(
            stage, self.shape, self.lengths, self.gpu.memory if self.on_gpu else None
        )

    def decode(self, group: int, live: Array, cached: Array) -> Array:
        """Seconds of decode steps, float array [steps]: the longer of reading weights and caches,
        and multiplying. `live` and `cached` are as in `costs.Costs.decode`."""
        c = self.config
        together = self.speed(group)
        read = self.weight_bytes + cached * self.kv_bytes
        read = read / (self.gpu.bandwidth * c.decode_bandwidth * together)
        multiply = 2 * self.parameters * live / (self.gpu.flops * c.prefill_mfu * together)
        return np.maximum(read, multiply) + c.step_seconds

    def prefill_seconds(self, tokens: float, group: int) -> float:
        c = self.config
        return 2 * self.parameters * tokens / (self.gpu.flops * c.prefill_mfu * self.speed(group))

    def generate_cost(self, group: int, live: float) -> float:
        """GPU-seconds to generate one completion (η_g m_g), `live` at a time on `group` GPUs."""
        c = self.config
        step = float(self.decode(group, np.array(live), np.array(live * self.cached)))
        prompt = self.prefill_seconds(c.prompt_mean, group) / c.group_size
        return group * (c.length_mean * step / live + prompt)

    def fetch_seconds(self, group: int) -> float:
        """Seconds for new weights to reach a generator over the network: each of its GPUs fetches
        its part."""
        return self.weight_bytes / (self.gpu.network * group)

    def swap_seconds(self, group: int) -> float:
        """Seconds for a generator to copy new weights to where those in use are, from the memory of
        its GPUs, read and written once, or from the host's."""
        if self.engines[group].keys.get("staging") == "host":
            return self.weight_bytes / (BUS * group)
        return 2 * self.weight_bytes / (self.gpu.bandwidth * group)


@cache
def _shape(model: str) -> ModelShape:
    return load_shape(model)
