"""Hugging Face causal language models as both generator and trainer use them.

Loading with clear errors, and *packed* forwards: several sequences of different lengths lie one
after the other in a single row, so that linear layers, which are nearly all of the cost, see no
padding; only attention is padded, inside `packed_attention`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import chain
from operator import add
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from tramontane.errors import InputError

# Its bars would run through the display of a run.
disable_progress_bar()

# transformers patches torch globally while it loads: two threads that load at once leave tied
# output heads untied, with random weights (seen with 5.23).
_LOADING = threading.Lock()

SHORT = 512
# One more block of attention costs about as much as this many scores of a head.
SPLIT_COST = 128 * 128
# A softmax on a CPU takes half the time over rows of a multiple of this many numbers.
LANES = 32


def resolve(model: str) -> str:
    """`tiny` is the base model inside this package; anything else is left as it is."""
    if model == "tiny":
        return str(resources.files("tramontane") / "tiny_base")
    return model


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder or Hugging Face name.

    Raises:
        InputError: nothing there, or a tokenizer without an EOS token (a completion could never
            end by itself).
    """
    tokenizer = _from_pretrained(AutoTokenizer, model)
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"{model}: the tokenizer has no EOS token, so no completion could ever stop; "
            f"set `eos_token` in its tokenizer_config.json"
        )
    return tokenizer


def load_model(
    model: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> PreTrainedModel:
    """Load a causal LM whose attention takes packed rows.

    Raises:
        InputError: nothing there, or damaged weights.
    """
    loaded, info = _from_pretrained(
        AutoModelForCausalLM,
        model,
        dtype=dtype,
        attn_implementation="packed",
        output_loading_info=True,
    )
    if missing := sorted(info["missing_keys"]):
        # transformers would go on with random numbers in their place.
        raise InputError(
            f"model {model!r}: damaged, its weights lack {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            + "; fetch or save it again"
        )
    # Weights may lie unaligned in a mapped file, where matrix products round differently (seen in
    # the seventh digit): copied, equal weights give equal bits wherever they were loaded from.
    for parameter in loaded.parameters():
        parameter.data = parameter.data.clone()
    return loaded.to(device)


def load_config(model: str) -> Any:
    """The architecture of a checkpoint, without its weights."""
    return _from_pretrained(AutoConfig, model)


def check_device(device: str, key: str = "device") -> None:
    """See that torch has the device; `key` names it in the error.

    Raises:
        InputError: it has none such.
    """
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not has.get(torch.device(device).type, True):
        raise InputError(
            f"{key} is {device!r}, but torch sees no GPU of that kind; take cpu, or install the "
            f"build of torch that fits this machine"
        )


def context_length(model_config: Any) -> int | None:
    """Positions that the model was made for, or None where its config does not say."""
    return getattr(model_config, "max_position_embeddings", None)


def _from_pretrained(auto: Any, model: str, **options: Any) -> Any:
    path = resolve(model)
    looks_local = model.startswith((".", "/", "~")) or model == "tiny" or model.count("/") > 1
    if looks_local and not (Path(path).expanduser() / "config.json").is_file():
        raise InputError(f"model {model!r}: no checkpoint (config.json) in folder {path}")
    if looks_local:
        path = str(Path(path).expanduser())
    try:
        with _LOADING:
            return auto.from_pretrained(path, **options)
    except Exception as error:
        # transformers raises many kinds here (OSError, ValueError, SafetensorError, …); all of
        # them mean that what the user named cannot be loaded.
        raise InputError(
            f"model {model!r}: cannot be loaded ({type(error).__name__}: {error}). Give a "
            f"checkpoint folder in the Hugging Face layout, a model name, or `tiny`."
        ) from error


@dataclass(frozen=True)
class Packed:
    """Sequences laid one after the other in one row.

    Args:
        input_ids: [1, N].
        position_ids: [1, N], starting at 0 in every sequence that continues none.
        lengths: of the sequences, summing to N.
        continues: for each sequence, which other one its tokens come after; None: they are its
            first.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    lengths: tuple[int, ...]
    continues: tuple[int | None, ...]

    @property
    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for the model's forward."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "packing": Packing(self.lengths, self.continues, self.input_ids.device),
            "use_cache": False,
        }


class Packing:
    """Where packed tokens go for attention: in blocks of neighbours that continue the same
    sequence and are of like length, each padded to its longest; made once a forward. `sizes` are
    the blocks' tokens, summing to N."""

    def __init__(
        self,
        lengths: Sequence[int],
        continues: Sequence[int | None],
        device: torch.device | str = "cpu",
    ) -> None:
        device = torch.device(device)
        self.blocks: list[Block] = []
        self.sizes: list[int] = []
        # A sequence that others continue is a block of its own: where, and how long.
        block_of: dict[int | None, tuple[int | None, int]] = {None: (None, 0)}
        shared = set(continues)
        for context, start, stop in _runs(lengths, continues, shared):
            if start in shared:
                block_of[start] = (len(self.blocks), lengths[start])
            self.blocks.append(Block(lengths[start:stop], *block_of[context], device))
            self.sizes.append(sum(lengths[start:stop]))


def _runs(
    lengths: Sequence[int], continues: Sequence[int | None], shared: set[int | None]
) -> Iterator[tuple[int | None, int, int]]:
    """Neighbours that one block takes: what they continue, the first, and the one after the
    last."""
    start = longest = 0
    for index, n in enumerate([*lengths, 0]):
        context = continues[start]
        before = 0 if context is None else lengths[context]

        def scores(length: int, before: int = before) -> int:
            return length * (before + length)

        size, grown = index - start, max(longest, n)
        alike = index < len(lengths) and continues[index] == context
        # What it costs more, in attention scores, to pad this one together with the run.
        extra = (size + 1) * scores(grown) - size * scores(longest) - scores(n)
        cheap = extra <= SPLIT_COST + size * scores(longest) // 8
        if size and not (alike and cheap and index not in shared and start not in shared):
            yield context, start, index
            start, longest = index, n
        else:
            longest = grown


class Block:
    """A padded [B, L] rectangle of sequences; all may continue one other sequence, whose keys they
    then see before their own.

    Args:
        lengths: of the B sequences; L is the longest.
        context: the block of the sequence that they continue.
        before: that sequence's length.
        device: where the tokens are.
    """

    def __init__(
        self, lengths: Sequence[int], context: int | None, before: int, device: torch.device
    ) -> None:
        self.batch, self.longest = len(lengths), max(lengths)
        self.context, self.before = context, before
        self.short = device.type == "cpu" and before + self.longest <= SHORT
        keys = before + self.longest
        self.keys = -(-keys // LANES) * LANES if self.short else keys
        self._lengths, self._device = lengths, device
        self._places = {n: self._flat(n) for n in (self.longest, self.keys - before)}
        self._biases: dict[int | None, torch.Tensor] = {}

    def _flat(self, length: int) -> torch.Tensor | None:
        """Of each token, its place in the rectangle padded to `length`; None: as they are."""
        if min(self._lengths) == length:
            return None
        n = torch.tensor(self._lengths)
        shift = (length - n).cumsum(0) - (length - n)
        places = torch.arange(int(n.sum())) + shift.repeat_interleave(n)
        return places.to(self._device)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """[1, heads, n, d] → [B, heads, L, d]; padding is zeros at the end of each row."""
        return self._pad(x, self.longest)

    def with_context(self, x: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
        """Keys or values, [1, heads, n, d] → [B, heads, keys, d]: those of the context, [1, heads,
        before, d], the sequence's own, and zeros."""
        own = self._pad(x, self.keys - self.before)
        if context is None:
            return own
        return torch.cat([context.expand(self.batch, -1, -1, -1), own], dim=2)

    def _pad(self, x: torch.Tensor, length: int) -> torch.Tensor:
        _, heads, _, d = x.shape
        rows = x[0].transpose(0, 1)
        if (places := self._places[length]) is not None:
            full = rows.new_zeros(self.batch * length, heads, d)
            rows = full.index_copy(0, places, rows)
        return rows.view(self.batch, length, heads, d).transpose(1, 2)

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """[B, heads, L, d] → [1, n, heads, d]."""
        rows = x.transpose(1, 2).reshape(self.batch * self.longest, x.shape[1], x.shape[3])
        if (places := self._places[self.longest]) is not None:
            rows = rows.index_select(0, places)
        return rows.unsqueeze(0)

    def mask(self, window: int | None) -> torch.Tensor:
        """[L, keys] bool, True where a query sees a key. Padding sits behind a row's last token,
        where causal attention never looks."""
        query = torch.arange(self.longest, device=self._device) + self.before
        distance = query[:, None] - torch.arange(self.keys, device=self._device)
        return (distance >= 0) & (distance < (window or self.keys))

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[L, keys], 0 where `mask` is True, else −∞; made once for all layers."""
        if window not in self._biases:
            zeros = torch.zeros(self.longest, self.keys, dtype=dtype, device=self._device)
            self._biases[window] = zeros.masked_fill_(~self.mask(window), float("-inf"))
        return self._biases[window]


def pack(
    sequences: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
    continues: Sequence[int | None] | None = None,
) -> Packed:
    """Lay token sequences one after the other.

    A sequence may continue an earlier one (which itself continues none): it sees that one's tokens
    as if they stood before its own, so that what several sequences begin with is computed once.
    """
    continues = (None,) * len(sequences) if continues is None else tuple(continues)
    lengths = tuple(len(s) for s in sequences)
    starts = [0 if c is None else lengths[c] for c in continues]
    ids = list(chain.from_iterable(sequences))
    positions = list(chain.from_iterable(map(range, starts, map(add, starts, lengths))))
    row = torch.tensor([ids, positions], device=device)
    return Packed(row[:1], row[1:], lengths, continues)


def refuse_unsupported(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Attention that is not computed here must not be computed wrongly.

    Raises:
        InputError: soft-capped scores, or attention sinks.
    """
    for unsupported in ("softcap", "s_aux"):
        if options.get(unsupported) is not None:
            raise InputError(
                f"{type(module).__name__} uses {unsupported!r} in its attention, which is not "
                f"computed here; choose another model"
            )


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence of a packed row, as transformers' interface wants it.

    Takes query [1, Hq, N, d], key and value [1, Hkv, N, d]; returns [1, N, Hq, d]. Without
    `packing`, the batch is an ordinary rectangle without padding.

    Raises:
        InputError: as `refuse_unsupported`.
    """
    refuse_unsupported(module, kwargs)
    if packing is None:
        batch, _, length, _ = query.shape
        block = Block([length] * batch, None, 0, query.device)
        pad = (0, 0, 0, block.keys - length)
        key, value = F.pad(key, pad), F.pad(value, pad)
        out = _attention(block, query, key, value, scaling, dropout, sliding_window)
        return out.transpose(1, 2), None
    # One split a tensor, whose backward is one concatenation; slices would cost a zero-filled
    # gradient of the whole row each.
    queries, keys, values = (x.split(packing.sizes, dim=2) for x in (query, key, value))
    outs = []
    for block, q, k, v in zip(packing.blocks, queries, keys, values, strict=True):
        before = (None, None) if block.context is None else (keys[block.context], values[block.context])
        out = _attention(
            block,
            block.queries(q),
            block.with_context(k, before[0]),
            block.with_context(v, before[1]),
            scaling,
            dropout,
            sliding_window,
        )
        outs.append(block.unpad(out))
    return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)), None


def _attention(
    block: Block,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Of one block: query [B, Hq, L, d], key and value [B, Hkv, keys, d] → [B, Hq, L, d]."""
    window = sliding_window if sliding_window is not None and sliding_window < block.keys else None
    if block.short and dropout == 0.0:
        return _short_attention(block, q, k, v, scaling, window)
    plain = window is None and block.context is None
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if plain else block.mask(window),
        is_causal=plain,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _short_attention(
    block: Block,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Plain matrix products: on a CPU, sequences of up to SHORT tokens pass through these several
    times as fast as through the fused kernel, in training above all."""
    batch, heads, length, d = q.shape
    scale = d**-0.5 if scaling is None else scaling
    grouped = (q * scale).reshape(batch, k.shape[1], heads // k.shape[1], length, d)
    scores = grouped @ k.unsqueeze(2).transpose(-1, -2)
    scores += block.bias(window, scores.dtype)
    # On bfloat16 the kernel itself sums in float32.
    return (torch.softmax(scores, dim=-1) @ v.unsqueeze(2)).flatten(1, 2)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", _no_mask)
