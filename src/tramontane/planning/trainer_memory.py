"""Memory of a trainer rank, from the config and the model's sizes; see docs/memory.md.

An update holds weights, moments, sums of gradients and what the forward pass keeps. In addition,
each *moment* of the backward pass takes memory that the next moment uses again, so that only the
largest moment counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from tramontane.config import Config, TrainerConfig
from tramontane.models.packing import SHORT
from tramontane.models.shape import DTYPE_BYTES, ModelShape
from tramontane.planning.memory import Lengths, Memory
from tramontane.trainer import lora
from tramontane.trainer.allowed import columns
from tramontane.trainer.head import KEPT_BYTES, part_size

MASTER = 4  # bytes of a float32 weight or gradient
MOMENTS = 8  # bytes of AdamW's two float32 moments of a weight
# Bytes of an entry of the logits in the part of the vocabulary that is computed, next to the logit:
# three float32 tensors, and another one for the gradient of the entropy.
SOFTMAX, ENTROPY = 12, 4
COMPARED = 64  # bytes of a log-prob compared with a teacher's, over all parts and their sums
ALLOWED = 116  # bytes of a token of a sampling mask, with the log-probs over it


class Completions(NamedTuple):
    """Completions that are computed for one optimizer step.

    Args:
        number: how many.
        together: how many of them share each prompt.
        allowed: the most tokens that top-p and top-k allow at a place; 0: all are.
    """

    number: int
    together: int = 1
    allowed: int = 0

    @classmethod
    def of(cls, stage: Config) -> Completions:
        """A minibatch of a stage. Conversations share no prompt."""
        pipeline = stage.pipeline
        together = 1 if stage.converses else pipeline.group_size
        return cls(pipeline.minibatch, together, stage.generator.sampling["top_k"])

    def tokens(self, lengths: Lengths) -> int:
        """Tokens of all of them, if all are the longest."""
        prompts = math.ceil(self.number / self.together)
        return self.number * lengths.completion + prompts * lengths.prompt

    def of_rank(self, ranks: int, lengths: Lengths) -> int:
        """Tokens of a rank's share, if all are the longest (`trainer.collate.balance`)."""
        return min(self.tokens(lengths), math.ceil(self.number / ranks) * lengths.longest)


def trainer_memory(
    config: TrainerConfig, shape: ModelShape, lengths: Lengths, minibatch: Completions
) -> Memory:
    """Memory of a trainer rank on its device, without the reference model (`reference_memory`).

    Args:
        config: the trainer's keys.
        shape: the model's sizes.
        lengths: lengths of the stage.
        minibatch: completions of an optimizer step.

    Raises:
        InputError: adapters for layers that the model does not have.
    """
    size, ranks = DTYPE_BYTES[config.dtype], config.ranks
    row, trained = _Row.full(config, lengths, minibatch), _Trained.of(config, shape)
    # Heads of keys and values are repeated until the ranks can share them.
    shape = replace(shape, kv_heads=math.lcm(shape.kv_heads, config.context_parallel))
    frozen = size * shape.parameters / ranks if config.lora else 0.0
    copy = size if ranks == 1 and config.dtype != "float32" else 0
    # Without reductions before the last microbatch, a rank sums the gradients of the whole model.
    microbatches = row.microbatches(_of_rank(config, lengths, minibatch))
    threads = min(config.threads, microbatches)  # that have work
    whole = config.reduce_gradients == "step" and microbatches > 1
    moments = list(_moments(config, shape, row))
    most = _Moment(*(max(values) for values in zip(*moments, strict=True)))
    return Memory(
        weights=frozen + (MASTER / ranks + copy) * trained.parameters + most.weights,
        optimizer=MOMENTS * trained.parameters / ranks,
        gradients=threads
        * (MASTER * trained.parameters / (1 if whole else ranks) + most.gradients),
        activations=threads * (_kept(config, shape, row) + most.activations),
        logits=threads * most.logits,
        reused=threads * (sum(most) - max(map(sum, moments))),
    )


def _of_rank(config: TrainerConfig, lengths: Lengths, minibatch: Completions) -> int:
    """Tokens of a rank's share of a minibatch, if all are the longest."""
    return math.ceil(minibatch.of_rank(config.data_ranks, lengths) / config.context_parallel)


class _Trained(NamedTuple):
    """Numbers of trained parameters: of all, of the output head, of a block, and of the largest
    tensor in a block."""

    parameters: int
    head: int
    block: float
    matrix: int

    @classmethod
    def of(cls, config: TrainerConfig, shape: ModelShape) -> _Trained:
        if config.lora is None:
            return cls(shape.parameters, shape.head, shape.block, shape.matrix)
        adapters = lora.parameters(shape.linear_layers, config.lora)
        layers = lora.targets(shape.linear_layers, config.lora)
        widest = max(max(layer.inputs, layer.outputs) for layer in layers)
        return cls(adapters, 0, adapters / shape.layers, config.lora.rank * widest)


def reference_memory(config: TrainerConfig, shape: ModelShape) -> Memory:
    """Memory of the frozen reference model in a trainer rank. It computes before the trainer does,
    so what it gathers takes no memory in addition. With `lora` it is the trainer's own frozen
    model."""
    if config.lora:
        return Memory()
    return Memory(weights=DTYPE_BYTES[config.dtype] * shape.parameters / config.ranks)


def value_memory(
    config: TrainerConfig, shape: ModelShape, lengths: Lengths, minibatch: Completions
) -> Memory:
    """Memory of a value network in a trainer rank, an upper bound: that of the trained model, from
    which it differs by a head of one output, so that it has no logits."""
    return replace(trainer_memory(config, shape, lengths, minibatch), logits=0.0, reused=0.0)


def teacher_memory(config: Config, teacher: ModelShape, lengths: Lengths) -> Memory:
    """Memory of a rank of a teacher. It keeps nothing for a backward pass, but holds all logits of
    a row; their softmax is computed in small parts. With several ranks, each gathers the head, a
    block, and the next block ahead."""
    assert config.teacher is not None
    size, ranks = DTYPE_BYTES[config.teacher.dtype], config.teacher.ranks
    # It scores a whole batch at once, divided among its own ranks.
    batch = Completions(config.pipeline.n_batch, Completions.of(config).together)
    trainer = config.trainer.model_copy(update={"ranks": ranks, "context_parallel": 1})
    row = _Row.full(trainer, lengths, batch)
    gathered = 0 if ranks == 1 else teacher.head + 2 * teacher.block
    return Memory(
        weights=size * (teacher.parameters / ranks + gathered),
        activations=row.tokens * block_activations(teacher, config.teacher.dtype),
        logits=row.predicted * teacher.vocabulary * size,
    )


def offloaded_memory(
    config: TrainerConfig, shape: ModelShape, lengths: Lengths, minibatch: Completions
) -> Memory:
    """Host memory of a rank on a GPU with `activation_offload`: the input of each block."""
    if not config.activation_offload or config.device == "cpu":
        return Memory()
    inputs = _Row.full(config, lengths, minibatch).tokens * DTYPE_BYTES[config.dtype] * shape.hidden
    return Memory(activations=shape.layers * inputs)


def block_activations(shape: ModelShape, dtype: str) -> int:
    """Bytes per token that the forward of a block keeps for the backward, without attention scores:
    of RMS norms (computed in float32) the input in float32, the normalized values and the output;
    of attention the queries, keys, values and output, with one float32 sum for each head; of the
    gated MLP both projections, the activation and their product."""
    size = DTYPE_BYTES[dtype]
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * size * (queries + keys) + 4 * shape.heads
    return 2 * _norm(shape, size) + attention + 4 * size * shape.intermediate


class _Row(NamedTuple):
    """A rank's part of the largest microbatch: a prompt and all of its completions that fit.

    Args:
        tokens: tokens of the part.
        longest: tokens of the longest sequence.
        predicted: positions whose logits are computed; at most all of the part.
        copied: keys of the prompt that are copied, since several completions share it, by the
            ranks that share the row.
        allowed: columns of the sampling masks (`trainer.allowed.allowed_of`), 0 without.
    """

    tokens: int
    longest: int
    predicted: int
    copied: int
    allowed: int

    @classmethod
    def full(cls, config: TrainerConfig, lengths: Lengths, minibatch: Completions) -> _Row:
        """A full one; or, if a rank's share of the minibatch has fewer tokens, that share."""
        budget = max(config.microbatch_tokens, lengths.longest)
        tokens, parts = minibatch.of_rank(config.data_ranks, lengths), config.context_parallel
        tokens = min(budget, tokens)
        completions = min((tokens - lengths.prompt) // lengths.completion, minibatch.number)
        shared = completions > 1 and minibatch.together > 1
        copied = math.ceil(completions * lengths.prompt / parts) if shared else 0
        part = math.ceil(tokens / parts)
        predicted = min(completions * lengths.completion, part)
        return cls(part, lengths.longest, predicted, copied, columns(minibatch.allowed))

    def microbatches(self, tokens: int) -> int:
        """Microbatches of that many tokens at most: any two of them exceed the budget."""
        return 1 if tokens <= self.tokens else 2 * math.ceil(tokens / self.tokens)


class _Moment(NamedTuple):
    """Bytes that one moment of the backward pass takes next to what the whole update holds."""

    weights: float = 0.0
    gradients: float = 0.0
    activations: float = 0.0
    logits: float = 0.0


def _kept(config: TrainerConfig, shape: ModelShape, row: _Row) -> float:
    """Bytes of activations that all blocks keep for the backward pass."""
    if not config.gradient_checkpointing:
        return shape.layers * _block(config, shape, row)
    size = DTYPE_BYTES[config.dtype]
    inputs = row.tokens * size * shape.hidden
    # Of inputs on the host, the one that is copied and the one that is computed with are here. On a
    # CPU they stay where they are.
    if config.activation_offload and config.device != "cpu":
        return 2 * inputs
    attention = row.tokens * shape.heads * (size * shape.head_dim + 4)
    return shape.layers * (inputs + attention * (config.keeps_attention and _uses_flash(config)))


def _block(config: TrainerConfig, shape: ModelShape, row: _Row) -> float:
    size = DTYPE_BYTES[config.dtype]
    tokens = row.tokens * block_activations(shape, config.dtype)
    copied = 2 * size * row.copied * shape.kv_heads * shape.head_dim
    return tokens + copied + _scores(config, shape, row) + _padding(config, shape, row)


def _scores(config: TrainerConfig, shape: ModelShape, row: _Row) -> int:
    """Bytes of a block's attention scores, which only attention of short sequences on a CPU
    keeps."""
    if config.device != "cpu" or row.longest > SHORT:
        return 0
    return DTYPE_BYTES[config.dtype] * shape.heads * row.longest * row.tokens


def _padding(config: TrainerConfig, shape: ModelShape, row: _Row) -> int:
    """Bytes that fused attention in padded blocks keeps: its output once more, and for completions
    that share a prompt a mask of their length by the sequence's. Flash attention of packed rows and
    short sequences on a CPU do without."""
    if _uses_flash(config) or (config.device == "cpu" and row.longest <= SHORT):
        return 0
    masks = config.context_parallel * row.predicted * row.longest if row.copied else 0
    return DTYPE_BYTES[config.dtype] * (row.tokens * shape.heads * shape.head_dim + masks)


def _uses_flash(config: TrainerConfig) -> bool:
    return config.device.startswith("cuda") and config.dtype == "bfloat16"


def _norm(shape: ModelShape, size: int) -> int:
    return (4 + 2 * size) * shape.hidden


def _moments(config: TrainerConfig, shape: ModelShape, row: _Row) -> Iterator[_Moment]:
    """The moments of a backward pass that may take most: the output head, its gradient, the last
    block, and the embeddings, by which time all activations are freed."""
    size, tokens = DTYPE_BYTES[config.dtype], row.tokens
    final = tokens * _norm(shape, size) + row.predicted * size * shape.hidden
    scores, mlp = _scores(config, shape, row), tokens * size * shape.intermediate
    # Gradients on their way through the MLP, or through attention, after those of the MLP.
    inside = 2.0 * max(mlp + tokens * size * shape.hidden, scores - 2 * mlp)
    if config.gradient_checkpointing:
        inside += _block(config, shape, row)  # computed again
    logits, kept = _logits(config, shape, row), _kept(config, shape, row)
    found = _alone if config.ranks == 1 else _sharded
    head, reduced, block, embeddings = found(config, shape)
    yield head._replace(activations=final, logits=logits)
    yield reduced
    yield block._replace(activations=inside)
    yield embeddings._replace(activations=-kept)


def _alone(config: TrainerConfig, shape: ModelShape) -> tuple[_Moment, ...]:
    """Gradients that are not yet added to their sums, of one rank, at the four moments. In bfloat16
    each is converted first. The gradient of a tied head waits for that of the embeddings."""
    size, trained = DTYPE_BYTES[config.dtype], _Trained.of(config, shape)
    arriving = size if size == MASTER else size + MASTER
    waiting = size * trained.head if shape.tied else 0
    return (
        _Moment(gradients=size * trained.head),
        _Moment(gradients=waiting or arriving * trained.head),
        _Moment(gradients=waiting + arriving * trained.matrix),
        _Moment(gradients=max(2 * waiting, arriving * trained.head)),
    )


def _sharded(config: TrainerConfig, shape: ModelShape) -> tuple[_Moment, ...]:
    """Gathered weights and gradients of one of several ranks at the four moments.

    A gradient is reduced in float32, and the buffer of a reduction is held until the next unit has
    been computed. A GPU gathers the next unit while it computes one. Tied embeddings, and their
    gradient, stay in memory during the whole pass; gloo reduces a copy.
    """
    size, trained = DTYPE_BYTES[config.dtype], _Trained.of(config, shape)
    head, block = size * shape.head, size * shape.block  # gathered
    ahead = 0 if config.device == "cpu" else block
    reduction = max(size + MASTER, 2 * MASTER if config.device == "cpu" else 0)
    reduced = reduction * trained.head
    tied_head, waiting = (head, size * trained.head) if shape.tied else (0, 0)
    buffer = MASTER * (trained.block if shape.tied else max(trained.head, trained.block))
    return (
        _Moment(head + ahead, size * trained.head),
        _Moment(tied_head + ahead, waiting or reduced),
        _Moment(tied_head + block + ahead, waiting + size * trained.block + buffer),
        _Moment(head, max(2 * waiting, reduced)),
    )


def _logits(config: TrainerConfig, shape: ModelShape, row: _Row) -> float:
    """Bytes of the output head's log-probs: the logits kept for the backward, the part of the
    vocabulary that is computed, and the gradient of the head's input in float32."""
    size, tokens = DTYPE_BYTES[config.dtype], row.predicted
    compared = config.objective.distill.top_k if "teacher_top" in config.objective.needs else None
    at_tokens = tokens * (COMPARED * (compared or 0) + ALLOWED * row.allowed)
    if shape.soft_capped or compared == 0:
        # Next to a teacher's scores: the log-probs in float32, and the gradients of both.
        every = 2 * size + (8 if compared is None else 16)
        return tokens * shape.vocabulary * every + at_tokens
    part = tokens * min(part_size(tokens, torch.device(config.device)), shape.vocabulary)
    kept = min(KEPT_BYTES, tokens * shape.vocabulary * size)
    softmax = SOFTMAX + (ENTROPY if "entropy" in config.objective.needs else 0)
    return kept + part * (size + softmax) + at_tokens + (4 + size) * tokens * shape.hidden
