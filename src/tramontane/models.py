"""Hugging Face causal language models as both generator and trainer use them.

Loading with clear errors, and *packed* forwards: several sequences of different lengths lie one
after the other in a single row, so that linear layers, which are nearly all of the cost, see no
padding; only attention is padded, inside `packed_attention`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
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

# In bfloat16 on a CPU, torch keeps the kernels of the last 1,024 shapes, over a megabyte each, and
# rows of whole completions hardly ever have the same length twice: a trainer grew by 1.5 GiB. With
# 64 it grows by 0.15 GiB and is as fast. Read when the first kernel is made.
for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(cache, "64")

# transformers patches torch globally while it loads: two threads that load at once leave tied
# output heads untied, with random weights (seen with 5.23).
_LOADING = threading.Lock()

SHORT = 512
# One more block of attention costs about as much as this many scores of a head.
SPLIT_COST = 128 * 128


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
        position_ids: [1, N], starting at 0 in every sequence.
        lengths: of the sequences, summing to N.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    lengths: tuple[int, ...]

    @property
    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for the model's forward."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "packing": Packing(self.lengths, self.input_ids.device),
            "use_cache": False,
        }


class Packing:
    """Where packed tokens go for attention: in blocks of neighbours of like length, each padded to
    its longest; made once a forward. `sizes` are the blocks' tokens, summing to N."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        runs: list[list[int]] = []
        longest = 0
        for n in lengths:
            run = runs[-1] if runs else []
            grown = max(longest, n)
            # What it costs more, in attention scores, to pad this one together with the run.
            extra = (len(run) + 1) * grown**2 - len(run) * longest**2 - n**2
            if run and extra <= SPLIT_COST + len(run) * longest**2 // 8:
                run.append(n)
                longest = grown
            else:
                runs.append([n])
                longest = n
        self.blocks = [Block(run, device) for run in runs]
        self.sizes = [sum(run) for run in runs]


class Block:
    """A padded [B, L] rectangle; without padding where all sequences have one length."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.batch, self.longest = len(lengths), max(lengths)
        self.flat: torch.Tensor | None = None
        if min(lengths) != self.longest:
            n = torch.tensor(lengths, device=device)
            rows = torch.repeat_interleave(torch.arange(len(n), device=device), n)
            starts = torch.repeat_interleave(n.cumsum(0) - n, n)
            columns = torch.arange(int(n.sum()), device=device) - starts
            self.flat = rows * self.longest + columns

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """[1, heads, N, d] → [B, heads, L, d]; padding is zeros at the end of each row."""
        _, heads, _, d = x.shape
        rows = x[0].transpose(0, 1)
        if self.flat is not None:
            full = rows.new_zeros(self.batch * self.longest, heads, d)
            rows = full.index_copy(0, self.flat, rows)
        return rows.view(self.batch, self.longest, heads, d).transpose(1, 2)

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """[B, heads, L, d] → [1, N, heads, d]."""
        rows = x.transpose(1, 2).reshape(self.batch * self.longest, x.shape[1], x.shape[3])
        if self.flat is not None:
            rows = rows.index_select(0, self.flat)
        return rows.unsqueeze(0)


def pack(sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Packed:
    """Lay token sequences one after the other."""
    lengths = tuple(len(s) for s in sequences)
    ids = torch.tensor([t for s in sequences for t in s], device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    return Packed(ids[None], positions[None], lengths)


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

    Padding sits behind a row's last token, where causal attention never looks, so no mask is
    needed. Takes query [1, Hq, N, d], key and value [1, Hkv, N, d]; returns [1, N, Hq, d]. Without
    `packing`, the batch is an ordinary rectangle without padding.

    Raises:
        InputError: as `refuse_unsupported`.
    """
    refuse_unsupported(module, kwargs)
    if packing is None:
        out = _causal_attention(query, key, value, scaling, dropout, sliding_window)
        return out.transpose(1, 2), None
    # One split a tensor, whose backward is one concatenation; slices would cost a zero-filled
    # gradient of the whole row each.
    parts = zip(
        packing.blocks,
        query.split(packing.sizes, dim=2),
        key.split(packing.sizes, dim=2),
        value.split(packing.sizes, dim=2),
        strict=True,
    )
    outs = [
        block.unpad(
            _causal_attention(
                block.pad(q), block.pad(k), block.pad(v), scaling, dropout, sliding_window
            )
        )
        for block, q, k, v in parts
    ]
    return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)), None


def _causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Of a rectangle: query [B, Hq, L, d], key and value [B, Hkv, L, d] → [B, Hq, L, d]."""
    length = q.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    if q.device.type == "cpu" and length <= SHORT and dropout == 0.0:
        return _short_attention(q, k, v, scaling, window)
    mask = _causal(length, window, q.device) if window else None
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _short_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Plain matrix products: on a CPU, sequences of up to SHORT tokens pass through these several
    times as fast as through the fused kernel, in training above all."""
    batch, heads, length, d = q.shape
    scale = d**-0.5 if scaling is None else scaling
    grouped = (q * scale).reshape(batch, k.shape[1], heads // k.shape[1], length, d)
    scores = grouped @ k.unsqueeze(2).transpose(-1, -2)
    bias = torch.zeros(length, length, dtype=scores.dtype, device=q.device)
    scores += bias.masked_fill_(~_causal(length, window, q.device), float("-inf"))
    # On bfloat16 the kernel itself sums in float32.
    return (torch.softmax(scores, dim=-1) @ v.unsqueeze(2)).flatten(1, 2)


def _causal(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    offset = torch.arange(length, device=device)
    distance = offset[:, None] - offset[None, :]
    return (distance >= 0) & (distance < (window or length))


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", _no_mask)
