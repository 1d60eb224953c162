"""Layers that carry state from token to token: linear attention, state-space models, convolutions.

In a packed row such a layer would carry the state of one sequence into the next. Here each of these
layers, and it alone, takes one sequence a row, padded in the blocks of `packing.py`; all other
layers see the packed row. This is exact for every layer that keeps its state in transformers'
cache, and needs no kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from tramontane.models.attention import RowReader, note_rows
from tramontane.models.packing import Packing, PaddingIndex
from tramontane.models.steps import with_steps

_NO_LIMIT = (0.0, float("inf"))  # of time steps, which are positive
_UPDATES = {"update_conv_state", "update_recurrent_state"}  # methods of transformers' caches


class StateKey(NamedTuple):
    """Which state: a layer's last inputs of its convolution, or what its recurrence has summed."""

    layer: int
    kind: str  # conv or recurrent
    number: int  # among the layer's states of that kind


States = dict[StateKey, torch.Tensor]


class StateCache(Cache):
    """A cache for transformers that holds the states of one batch.

    Attributes:
        states: [B, ...] each, after the batch's last token; none before its first.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: States = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(StateKey(layer_idx, "conv", state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Append inputs [B, channels, N] of a convolution; returns all that it is to see, with
        zeros before a sequence's first."""
        key = StateKey(layer_idx, "conv", state_idx)
        width = conv_kernel_size or conv_states.shape[-1]
        if (before := self.states.get(key)) is None:
            before = conv_states.new_zeros((*conv_states.shape[:-1], width))
        seen = torch.cat([before, conv_states], -1)
        self.states[key] = seen[..., -width:].clone()
        return seen

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(StateKey(layer_idx, "recurrent", state_idx))

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Replace the state of a recurrence, [B, ...]."""
        self.states[StateKey(layer_idx, "recurrent", state_idx)] = recurrent_states
        return recurrent_states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return any(layer_idx in (None, key.layer) for key in self.states)

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        """For transformers: returns a layer's new keys and values as they are."""
        return key_states, value_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class PackedStates:
    """The states of a packed row's sequences, for the layers of one forward.

    Args:
        before: states of each sequence before its first token in the row, [1, ...] each; none for a
            sequence that starts in the row.

    Attributes:
        after: the same after each sequence's last token.
    """

    def __init__(self, before: Sequence[States]) -> None:
        self.after = [dict(states) for states in before]

    def batches(self, lengths: list[int], layer: int) -> list[list[int]]:
        """Indices of sequences that a layer may take together: of equal length, since padding
        would enter the state, and all with a state or all without."""
        found: dict[tuple[int, bool], list[int]] = {}
        for i, n in enumerate(lengths):
            known = any(key.layer == layer for key in self.after[i])
            found.setdefault((n, known), []).append(i)
        return list(found.values())

    def gather(self, batch: list[int], layer: int) -> States:
        """A layer's states of some sequences, [B, ...] each."""
        keys = [key for key in self.after[batch[0]] if key.layer == layer]
        return {key: torch.cat([self.after[i][key] for i in batch]) for key in keys}

    def scatter(self, batch: list[int], states: States) -> None:
        """Store states [B, ...] of some sequences."""
        for key, values in states.items():
            for i, value in zip(batch, values.split(1), strict=True):
                self.after[i][key] = value


class _ByRows(torch.nn.Module):
    """A layer that carries state, for packed rows; mixed into the layer's own class."""

    signature: inspect.Signature  # of the layer's own forward
    row_reader: RowReader
    layer_idx: int
    continues: bool  # False if its scan of several tokens starts from no state: Mamba 1

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        packing = self.row_reader.packing
        if packing is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        given = self.signature.bind(self, hidden_states, *args, **kwargs)
        caches = {name: x for name, x in given.arguments.items() if isinstance(x, Cache)}
        return self._packed(hidden_states, packing, caches)

    @torch.compiler.disable
    def _packed(self, row: torch.Tensor, packing: Packing, caches: dict[str, Any]) -> Any:
        """[1, N, d] → [1, N, ...], or several of these."""
        parts = self._by_lengths(row, packing, caches) if caches else self._by_blocks(row, packing)
        if isinstance(parts[0], torch.Tensor):
            return torch.cat(parts, 1)
        return tuple(torch.cat(column, 1) for column in zip(*parts, strict=True))

    def _by_blocks(self, row: torch.Tensor, packing: Packing) -> list[Any]:
        """Outputs of each block. Padding follows a sequence's last token. A sequence that continues
        another is computed with the other's tokens before its own."""
        rows, parts = row[0, :, None].split(packing.sizes), []
        cache = dict.fromkeys(_required(self.signature))
        for own, block in zip(rows, packing.blocks, strict=True):
            seen = own if block.context is None else torch.cat([rows[block.context], own])
            places = block.key_places(1)
            out = super().forward(places.pad(seen)[:, 0], **cache)  # type: ignore[misc]
            parts.append(_each(partial(_unpad, places), out))
        return parts

    def _by_lengths(self, row: torch.Tensor, packing: Packing, caches: dict[str, Any]) -> list[Any]:
        """Outputs of each sequence; its states are read from and written to the cache."""
        ((name, cache),) = caches.items()
        packed: PackedStates = cache.packed_states
        lengths = list(packing.lengths)
        rows, parts = row.split(lengths, 1), dict[int, Any]()
        for batch in packed.batches(lengths, self.layer_idx):
            cache.states = packed.gather(batch, self.layer_idx)
            tokens = torch.cat([rows[i] for i in batch])
            if tokens.shape[1] > 1 and not self.continues and _has_recurrence(cache.states):
                steps = [
                    super(_ByRows, self).forward(x, **{name: cache}) for x in tokens.split(1, 1)
                ]  # type: ignore[misc]
                out = torch.cat(steps, 1)
            else:
                out = super().forward(tokens, **{name: cache})  # type: ignore[misc]
            packed.scatter(batch, cache.states)
            for place, i in enumerate(batch):
                parts[i] = _each(itemgetter(slice(place, place + 1)), out)
        return [parts[i] for i in range(len(rows))]


def _required(signature: inspect.Signature) -> list[str]:
    """The arguments without a default of a layer's forward, after the hidden states."""
    _, _, *others = signature.parameters.values()
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [p.name for p in others if p.default is p.empty and p.kind is plain]


def _has_recurrence(states: States) -> bool:
    return any(key.kind == "recurrent" for key in states)


def _each(function: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """Apply a function to a layer's output, or to each of its outputs."""
    single = isinstance(output, torch.Tensor)
    return function(output) if single else tuple(function(x) for x in output)


def _unpad(places: PaddingIndex, x: torch.Tensor) -> torch.Tensor:
    """[B, L, ...] → [1, n, ...]."""
    return places.unpad(x.flatten(2)[:, None]).view(1, -1, *x.shape[2:])


def _by_rows(cls: Any) -> Any:
    signature = inspect.signature(inspect.unwrap(cls.forward))
    return type(cls.__name__, (_ByRows, with_steps(cls)), {"signature": signature})


def stateful_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers whose own code keeps a state in transformers' cache."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _ByRows) or _UPDATES & {*_names_used(type(module))}
    ]


def _names_used(cls: Any) -> tuple[str, ...]:
    """Names of attributes and functions in the code of a module's forward."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code.co_names if code else ()


def _takes_initial_state(cls: Any) -> bool:
    """True if a layer's forward passes an initial state on to its recurrence."""
    constants = inspect.unwrap(cls.forward).__code__.co_consts
    keywords = {name for names in constants if isinstance(names, tuple) for name in names}
    return bool({"initial_state", "initial_states"} & keywords)


def separate_states(model: PreTrainedModel) -> None:
    """Keep the sequences of a packed row apart in every layer: attention knows the row, and a layer
    that carries state takes its sequences one by one."""
    note_rows(model)
    for layer in [x for x in stateful_layers(model) if not isinstance(x, _ByRows)]:
        layer.continues = _takes_initial_state(type(layer))  # type: ignore[assignment]
        layer.__class__ = _by_rows(type(layer))
        if getattr(layer, "time_step_limit", _NO_LIMIT) != _NO_LIMIT:
            in_proj: Any = layer.in_proj
            in_proj.register_forward_hook(partial(_limit_time_steps, layer))


def _limit_time_steps(layer: Any, in_proj: Any, args: Any, projected: torch.Tensor) -> Any:
    """A hook of a Mamba 2 layer's input projection, whose last columns are softplus⁻¹(Δt) − bias.
    Transformers 5.23 limits Δt in its forward of many tokens, but not in that of a single token."""
    if layer.row_reader.packing is not None:
        return projected
    rest, step = projected.split([projected.shape[-1] - layer.num_heads, layer.num_heads], -1)
    limits = torch.tensor(layer.time_step_limit, device=step.device)
    low, high = limits + torch.log(-torch.expm1(-limits))  # softplus⁻¹
    bias = layer.dt_bias.float()
    limited = torch.minimum(torch.maximum(step.float(), low - bias), high - bias)
    return torch.cat([rest, limited.to(step.dtype)], -1)
