"""Packed rows: prompts and completions as the input of one forward pass, and its output."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tramontane.batches import TrainSequence
from tramontane.errors import InputError
from tramontane.models.packing import pack, recurring, upload
from tramontane.models.routing import NO_CHOICE
from tramontane.models.vision import Pictured, Vision
from tramontane.tokens import given_ids

# On a GPU, rows are rounded up to a multiple of this number of tokens: matrix products of other
# sizes leave a part of their last tile, or take slower kernels.
ROW_MULTIPLE = 256


@dataclass(frozen=True)
class PackedRow:
    """Completions with their prompts in one packed row; N of its tokens were generated."""

    # Arguments of the model's forward. The row may end with filler tokens, and so may
    # `logits_to_keep`, [N or more] int64, the positions whose logits predict the generated tokens.
    inputs: dict[str, Any]
    targets: torch.Tensor  # [N] int64, the generated tokens
    lengths: list[int]  # generated tokens of each completion
    places: NDArray[np.int64]  # [N] the positions in the row whose logits predict them
    # [N, k] int64, tokens whose log-probs are predicted besides the targets'; [N, 0]: the whole
    # vocabulary; None without any.
    candidates: torch.Tensor | None = None
    # [tokens of the row, layers · k] int16, the experts that the generator chose, or −1; None if it
    # recorded none.
    experts: torch.Tensor | None = None
    # [N, k] int64, the tokens that the sampler allowed, as in `allowed.allowed_of`; None: all.
    allowed: torch.Tensor | None = None
    pictured: Sequence[Pictured] = ()  # its sequences with images

    def kept(self, outputs: torch.Tensor) -> torch.Tensor:
        """[1, N or more, ...] of a model's outputs [1, positions, ...], at the positions to keep:
        not every model leaves out the others (Whisper does not)."""
        keep = self.inputs["logits_to_keep"]
        return outputs if outputs.shape[1] == len(keep) else outputs[:, keep]


@dataclass(frozen=True)
class Predictions:
    """A model's predictions of the N generated tokens of a row."""

    logprobs: torch.Tensor  # [N] float32
    entropy: torch.Tensor  # [N] float32, of each token's distribution
    # [N] float32, 1 for a token that is the most likely one; None if not requested.
    top1: torch.Tensor | None = None
    values: torch.Tensor | None = None  # [N] float32, of a value network; None if not requested
    # [N, k] float32, log-probs of the row's candidates; None without any.
    policy_top: torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Predictions:
        """The predictions with each tensor changed."""
        return replace(self, **{n: change(x) for n, x in vars(self).items() if x is not None})


def pack_row(
    sequences: Sequence[TrainSequence], device: torch.device, pieces: int = 1
) -> PackedRow:
    """Pack prompts and completions; neighbors with the same prompt share its tokens. The row can be
    cut into `pieces` equal parts.

    The logits at position i − 1 predict the token at i. So a prompt's last token predicts the first
    token of each completion, and a completion's last token, which predicts nothing, is omitted.
    """
    parts: list[Sequence[int]] = []
    continues: list[int | None] = []
    keep: list[int] = []
    end = 0
    pictured: list[Pictured] = []

    def picture(sequence: TrainSequence, start: int, known: int = 0) -> None:
        """Note the images that a completion has behind its prompt; it begins at `start`, without
        its first `known` tokens."""
        if sequence.put_images:
            ids = given_ids(sequence.prompt_ids, sequence.token_ids, sequence.versions)[:-1]
            shown = *sequence.images, *sequence.put_images
            pictured.append(Pictured(start, ids, shown, start + len(ids) - known, known))

    for (prompt, images), group in groupby(sequences, key=lambda s: (s.prompt_ids, s.images)):
        siblings = list(group)
        if images and (len(siblings) > 1 or not siblings[0].put_images):
            rest = sum(len(s.token_ids[:-1]) for s in siblings)
            pictured.append(Pictured(end, prompt, images, end + len(prompt) + rest))
        if len(siblings) == 1:
            picture(siblings[0], end)
            # Nothing is shared: as a single part, it forms one attention block with its neighbors.
            ids = siblings[0].token_ids
            parts.append(prompt + ids[:-1])
            continues.append(None)
            last = end + len(prompt) - 1
            keep += range(last, last + len(ids))
            end += len(parts[-1])
            continue
        prompt_part = len(parts)
        parts.append(prompt)
        continues.append(None)
        end += len(prompt)
        last = end - 1
        for sequence in siblings:
            keep += [last] * bool(sequence.token_ids)
            if inputs := sequence.token_ids[:-1]:
                picture(sequence, end, len(prompt))
                parts.append(inputs)
                continues.append(prompt_part)
                keep += range(end, end + len(inputs))
                end += len(inputs)
    if filler := pieces * padded(-(-end // pieces), device) - end:
        parts.append([0] * filler)
        continues.append(None)
    keep += [0] * (padded(len(keep), device) - len(keep))
    targets = joined([s.token_ids for s in sequences]).astype(np.int64)
    packed = pack(parts, device, continues)
    chosen = _experts(sequences, keep[: len(targets)], packed["input_ids"].shape[1])
    return PackedRow(
        inputs=packed | {"logits_to_keep": upload(torch.tensor(keep), device)},
        experts=None if chosen is None else upload(torch.from_numpy(chosen), device),
        targets=upload(torch.from_numpy(targets), device),
        lengths=[len(s.token_ids) for s in sequences],
        places=np.asarray(keep[: len(targets)], np.int64),
        pictured=pictured,
    )


def _experts(
    sequences: Sequence[TrainSequence], places: Sequence[int], length: int
) -> NDArray[np.int16] | None:
    """The recorded experts of a row's tokens, as in `PackedRow`.

    The step that drew a token read the token before it, whose place in the row predicts it. Only
    tokens that this run sampled have experts of their own: others may have replaced sampled ones.

    Args:
        sequences: those of the row.
        places: [N] of each generated token, the place that predicts it.
        length: tokens of the row.
    """
    like = next((s.experts for s in sequences if s.experts is not None), None)
    if like is None:
        return None
    chosen = np.full((length, like.shape[1]), NO_CHOICE, np.int16)
    start = 0
    for sequence in sequences:
        if (own := sequence.experts) is not None:
            known = np.flatnonzero(np.asarray(sequence.versions)[: len(own)] >= 0)
            chosen[np.asarray(places)[start + known]] = own[known]
        start += len(sequence.token_ids)
    return chosen


def seeing(
    model: PreTrainedModel, row: PackedRow, vision: Vision | None
) -> AbstractContextManager[dict[str, Any]]:
    """Within the context, a forward of the row takes the features of its images; the row's inputs,
    with what its images change.

    Raises:
        InputError: the row has images, but there is no tower.
    """
    if not row.pictured:
        return nullcontext(row.inputs)
    if vision is None:
        raise InputError("a prompt has images, and the worker was made without a tower")
    return vision.entering(model, row.pictured, row.inputs)


def padded(tokens: int, device: torch.device) -> int:
    """Tokens of a row with filler."""
    return recurring(tokens) if device.type == "cpu" else -(-tokens // ROW_MULTIPLE) * ROW_MULTIPLE


def joined(arrays: Sequence[array[Any]]) -> NDArray[Any]:
    """Concatenated arrays, in their dtype: [Σ lengths]."""
    return np.concatenate([np.asarray(values) for values in arrays])
