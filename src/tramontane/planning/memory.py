"""Memory of generators, controller and verifiers, from the config and the model's sizes, without
loading anything. `trainer_memory.py` has the trainer's.

Every figure is a closed formula, explained in docs/memory.md. Figures are a worker's peak in a
run as configured: every slot with the longest sequence, every microbatch full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tramontane.config import Config, GeneratorConfig, VerifierConfig
from tramontane.config.device import number_type
from tramontane.config.generator import GPU_MEMORY_SHARE
from tramontane.config.judge import JudgeConfig
from tramontane.controller.generators import slots
from tramontane.generator.arena import arena_size
from tramontane.generator.cache import BLOCK_MEMBERS, SHARING_SLOTS, lane_capacities, lane_size
from tramontane.generator.decoders import TOKEN_STATE
from tramontane.generator.graphs import recorded_rows
from tramontane.generator.lanes import CacheSize
from tramontane.generator.memory import allowance
from tramontane.generator.sampling import DRAWN_BYTES, DRAWN_ENTRIES, SORTED_BYTES
from tramontane.models import fp8_layers, int8
from tramontane.models.packing import SHORT
from tramontane.models.shape import DTYPE_BYTES, ModelShape, load_shape

VLLM_SAMPLING = 12  # bytes of an entry of the logits in vLLM: three float32 tensors at once
PLANS = 2  # recordings for each number of rows: with top-k and top-p, and without
RECORDING = 8 << 20  # bytes of a recorded step beside its tensors, an assumption
TOKEN_RECORD = 12  # bytes of a generated token in the controller: id, log-prob, version


@dataclass(frozen=True)
class Memory:
    """Memory of one worker in one of its devices, in bytes.

    Args:
        weights: all copies of the weights, including parts gathered from other ranks.
        optimizer: AdamW's moments.
        gradients: sums over microbatches, and the gradient being added.
        activations: kept by a forward for the backward, and temporaries of both.
        logits: temporaries of the output head and of sampling.
        cache: keys and values of the decoding sequences.
        records: of controller and verifiers: tokens, texts, programs under test.
        reused: bytes used by two parts at different times, which count once.
    """

    weights: float = 0.0
    optimizer: float = 0.0
    gradients: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    cache: float = 0.0
    records: float = 0.0
    reused: float = 0.0

    @property
    def total(self) -> float:
        """The peak."""
        return float(sum(vars(self).values()) - 2 * self.reused)


class Lengths(NamedTuple):
    """Lengths of a run in tokens: of the longest prompt, and of the longest completion."""

    prompt: int
    completion: int

    @property
    def longest(self) -> int:
        return self.prompt + self.completion


def cache_size(
    stage: Config, token_bytes: float, longest: int, kv_bytes: float | None = None
) -> CacheSize:
    """Slots of each generator in a stage, and the maximum number of positions in its cache.

    Args:
        stage: the config of the stage.
        token_bytes: keys and values of a token on one device, in bytes.
        longest: tokens of the longest sequence.
        kv_bytes: limit of keys and values if the config has none, in bytes.
    """
    config, limit = stage.generator, None
    if config.kv_cache_mib is not None:
        kv_bytes = config.kv_cache_mib * 2**20 / config.workers
    if kv_bytes is not None:
        limit = int(kv_bytes / token_bytes)
    count = slots(stage)
    if config.kind == "vllm":  # its cache is paged: sequences that do not fit wait
        if limit is None or limit >= count * longest:
            return CacheSize(count, count * longest)
        return CacheSize(count if limit >= longest else 0, limit)
    size = arena_size if config.device.startswith("cuda") else lane_size
    return size(count, longest, limit)


def generator_memory(
    stage: Config, shape: ModelShape, lengths: Lengths, device_memory: float | None = None
) -> Memory:
    """Memory of a generator, on each of its GPUs.

    The slot engine holds the weights twice: in use, and the next version as it arrives (with
    `staging: host` in the host's memory). Its longest prefill is that of a sequence that is
    continued at its full length: after an interruption, or with `kv_cache: recompute`. vLLM splits
    weights, keys and values over its GPUs, prefills in chunks, and replaces its weights in place.

    Args:
        stage: the config of the stage.
        shape: the model's sizes.
        lengths: lengths of the stage.
        device_memory: total bytes of the generator's GPU; None: unknown, or a CPU.
    """
    config, longest = stage.generator, lengths.longest
    if config.kind == "vllm":
        return _vllm_memory(stage, shape, longest, device_memory)
    on_gpu = config.device.startswith("cuda")
    token = shape.kv_bytes_per_token(config.dtype)
    staged = config.staging == "device" or config.device == "cpu"
    weights = (2 if staged else 1) * generator_weights(config, shape)
    activations = _prefill(stage, shape, longest)

    def beside_cache(rows: int) -> Memory:
        step = _step(stage, shape, rows)
        sizes = len(recorded_rows(rows)) if on_gpu and config.cuda_graphs else 0
        # Recordings share the memory of one step, which is taken for good.
        recorded = step + PLANS * sizes * RECORDING if sizes else 0
        return Memory(
            weights=weights,
            activations=activations,
            logits=step + recorded,
            cache=rows * (longest * TOKEN_STATE + shape.state_bytes(config.dtype)),
            reused=min(activations, step),
        )

    budget = None
    if on_gpu and device_memory is not None:
        limit = int((config.gpu_memory_utilization or GPU_MEMORY_SHARE) * device_memory)
        taken = beside_cache(slots(stage)).total - weights
        budget = max(0, allowance(limit, limit, weights, weights) - taken)
    rows, positions = cache_size(stage, token, longest, budget)
    if not rows:  # at least one sequence is needed
        rows, positions = 1, longest
    elif not on_gpu:
        positions = min(positions, _lane_positions(stage, rows, lengths))
    if not on_gpu and len(lanes := _lanes(rows, lengths)) > 1:
        # All sequences at once move to the longest lane, each by a copy.
        activations = max(activations, token * rows * lanes[-2])
    memory = beside_cache(rows)
    return replace(memory, cache=memory.cache + positions * token)


def generator_weights(config: GeneratorConfig, shape: ModelShape) -> int:
    """Bytes of one version of a generator's weights."""
    size = DTYPE_BYTES[config.dtype]
    if config.weights == "full":
        return size * shape.parameters
    kind = {"int8": int8, "fp8": fp8_layers}[config.weights]
    in_full = config.weights == "fp8"  # the head
    layers = [x for x in shape.linear_layers if x.eight_bits and not (x.head and in_full)]
    eight = [(x, n) for x in layers if (n := kind.layer_bytes(x.inputs, x.outputs))]
    full = shape.parameters - sum(x.inputs * x.outputs for x, _ in eight)
    return size * full + sum(n for _, n in eight)


def _step(stage: Config, shape: ModelShape, rows: int) -> float:
    """Bytes of a decode step of `rows` rows: the logits, partly in float32, on a GPU sorted for
    top-k and top-p."""
    config = stage.generator
    drawn = SORTED_BYTES if config.device.startswith("cuda") else DRAWN_BYTES
    entries = rows * shape.vocabulary
    return DTYPE_BYTES[config.dtype] * entries + drawn * min(entries, DRAWN_ENTRIES)


def _prefill(stage: Config, shape: ModelShape, longest: int) -> float:
    """Bytes of the longest prefill: the keys and values of all layers, and the tensors of one
    layer; on a GPU also the keys and values of prompts that are prefilled ahead."""
    config = stage.generator
    scores = longest if config.device == "cpu" and longest <= SHORT else 0
    layer, token = _layer(shape, config.dtype, scores), shape.kv_bytes_per_token(config.dtype)
    kept = config.prefill_tokens * token if config.device.startswith("cuda") else 0
    return kept + max(config.prefill_tokens, longest) * (token + layer)


def _layer(shape: ModelShape, dtype: str, scores: int = 0) -> float:
    """Bytes of a token in the tensors of one layer, including its attention scores of `scores`
    tokens and their softmax."""
    size = DTYPE_BYTES[dtype]
    attention = 2 * size * ((shape.heads + shape.kv_heads) * shape.head_dim + shape.heads * scores)
    return 3 * size * shape.hidden + max(attention, 3 * size * shape.intermediate)


def judge_memory(judge: JudgeConfig, stage: Config, device_memory: float | None = None) -> Memory:
    """Memory of a judge's process that holds its model: a generator that gets no new weights, or a
    reward model with a batch of its longest answers.

    Args:
        judge: with a `checkpoint` or a `reward_model`.
        stage: the config of a stage.
        device_memory: as in `generator_memory`.
    """
    if reward := judge.reward_model:
        shape, dtype = load_shape(reward.path, classifier=True), number_type(reward.device).dtype
        tokens = reward.batch_size * reward.max_tokens
        return Memory(
            DTYPE_BYTES[dtype] * shape.parameters, activations=tokens * _layer(shape, dtype)
        )
    model = judge.checkpoint
    assert model
    shape, slots = load_shape(model.path), model.slots
    generator = GeneratorConfig(device=model.device, dtype=model.dtype, slots=slots)
    pipeline = stage.pipeline.model_copy(update={"n_async": slots, "n_batch": slots})
    stage = stage.model_copy(update={"generator": generator, "pipeline": pipeline})
    lengths = Lengths(model.max_prompt_tokens, judge.max_tokens)
    found = generator_memory(stage, shape, lengths, device_memory)
    return replace(found, weights=DTYPE_BYTES[generator.dtype] * shape.parameters)


def staged_memory(config: GeneratorConfig, shape: ModelShape) -> Memory:
    """Host memory of a generator on a GPU with `staging: host`: the next version of the weights."""
    staged = config.kind == "slots" and config.staging == "host" and config.device != "cpu"
    return Memory(weights=generator_weights(config, shape) if staged else 0.0)


def _vllm_memory(
    stage: Config, shape: ModelShape, longest: int, device_memory: float | None
) -> Memory:
    """`generator_memory` of vLLM."""
    config = stage.generator
    gpus, size = config.vllm.tensor_parallel, DTYPE_BYTES[config.dtype]
    token = shape.kv_bytes_per_token(config.dtype) / min(gpus, shape.cached.kept_heads)
    rows = slots(stage)
    tokens = max(config.prefill_tokens, rows)  # of a step
    if config.device == "cpu":  # there, a prompt is read in one step
        tokens = max(tokens, longest)
    weights = size * shape.parameters / gpus
    activations = tokens * size * 3 * (shape.intermediate + shape.hidden)
    logits = rows * shape.vocabulary * VLLM_SAMPLING
    budget = None
    if device_memory is not None and config.device.startswith("cuda"):
        share = config.gpu_memory_utilization or GPU_MEMORY_SHARE
        budget = max(0.0, share * device_memory - weights - activations - logits)
    held, positions = cache_size(stage, token, longest, budget)
    cache = token * (positions if held else longest)  # at least one sequence is needed
    return Memory(weights=weights, activations=activations, logits=logits, cache=cache)


def _lanes(rows: int, lengths: Lengths) -> list[int]:
    """Capacities of the lanes that sequences pass through, from the shortest. Where prompts are
    shared prefixes, lanes hold completions alone."""
    reach = lengths.completion if rows >= SHARING_SLOTS else lengths.longest
    capacities = lane_capacities(rows, lengths.longest)
    return [c for i, c in enumerate(capacities) if i == 0 or capacities[i - 1] < reach]


def _lane_positions(stage: Config, rows: int, lengths: Lengths) -> int:
    """Positions of these lanes, and of the prefixes that members of a group share. This is less
    than the lanes' bound, where any sequence may be continued from any length."""
    shared = 0
    if rows >= SHARING_SLOTS:
        readers = min(BLOCK_MEMBERS, stage.pipeline.group_size)
        capacities = lane_capacities(rows, lengths.longest)
        prefix = next(capacity for capacity in capacities if capacity >= lengths.prompt - 1)
        shared = -(-rows // readers) * prefix
    return rows * sum(_lanes(rows, lengths)) + shared


def controller_memory(stages: Sequence[Config], shape: ModelShape, lengths: Lengths) -> Memory:
    """Memory of the controller: all tokens in flight, queued and being trained on at full length,
    and the versions of the weights on their way to generators in other processes."""
    config = stages[0]
    size = DTYPE_BYTES[config.generator.dtype] if config.trainer_is_apart else 0
    if config.placement.kind != "ray" and config.trainer.device.startswith("cuda"):
        size *= 2  # two versions take turns in pinned memory
    completions = max(s.pipeline.n_async + 2 * s.pipeline.n_batch for s in stages)
    return Memory(
        weights=size * shape.parameters, records=completions * lengths.longest * TOKEN_RECORD
    )


READY_MB = 80  # data of a grading process that is ready, as measured


def verifier_memory(config: VerifierConfig) -> Memory:
    """Memory of a grading process and of the program that it runs, by their limits."""
    return Memory(records=(READY_MB + config.memory_mb + config.code_memory_mb) * 10**6)
