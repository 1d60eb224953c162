"""The trainer's weights, bucket by bucket: gathered, by rank, and as files in the Hugging Face
layout."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tramontane.errors import InputError
from tramontane.models.loading import converts_weights, read_back
from tramontane.models.weight_files import Entry, write_files
from tramontane.models.weights import BUCKET_BYTES, Bucket, Part, tied_names
from tramontane.trainer import lora, sharding

logger = logging.getLogger("tramontane")


def named_tensors(model: PreTrainedModel) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Iterate over the (sharded) tensors of a model's state dict, each with its names: several if
    it is tied. Adapters are merged into the weights of their layers."""
    tensors = lora.base_tensors(model)
    adapted = {f"{n}.weight": x for n, x in lora.adapted_layers(model).items()}
    for first, *others in tied_names(tensors):
        layer = adapted.get(first)
        tensor = lora.merged(layer) if layer else tensors[first].detach()
        yield (first, *others), tensor


def held(model: PreTrainedModel) -> Iterator[Bucket]:
    """This rank's rows of all weights, in buckets of at most `BUCKET_BYTES`; a larger tensor has
    its own bucket."""
    bucket: Bucket = []
    filled = 0
    for names, tensor in named_tensors(model):
        if (own := sharding.rows(tensor)) is None:
            continue
        start, rows = own
        if bucket and filled + rows.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append(Part(names, tensor.shape, start, rows))
        filled += rows.nbytes
    yield bucket


def buckets(
    model: PreTrainedModel, size: int, dtype: torch.dtype = torch.float32
) -> Iterator[dict[str, torch.Tensor]]:
    """Iterate over a model's weights by the names of its `state_dict`, gathered from all ranks.

    A bucket has at most `size` bytes; a larger tensor has its own bucket. It is gathered when
    requested and emptied when the next one is, so only one is held at a time; its tensors may be
    the model's own. Collective: every rank must iterate to the end.

    Weights are converted to `dtype` before they are gathered.
    """
    bucket: dict[str, torch.Tensor] = {}
    filled = 0
    for tied, tensor in named_tensors(model):
        if tensor.is_floating_point():
            tensor = tensor.to(dtype)
        nbytes = tensor.numel() * tensor.element_size()  # whole tensor, even if sharded
        if bucket and filled + nbytes > size:
            yield bucket
            bucket.clear()
            filled = 0
        bucket |= dict.fromkeys(tied, sharding.whole(tensor))
        filled += nbytes
    yield bucket


class CheckpointWriter:
    """Names, shapes and types of a model's weights in checkpoint files.

    Args:
        model: the model before it is sharded and its dropout is switched off; its parameters may be
            on the meta device.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._config = copy.deepcopy(model.config)
        self._architecture = type(model).__name__
        self._checked = False
        self._converted = converts_weights(model)
        tensors = model.state_dict(keep_vars=True)
        copies = set(getattr(model, "all_tied_weights_keys", None) or ())
        # A tied weight is written once, under the name that transformers ties the others to.
        self._names = [
            next((name for name in tied if name not in copies), tied[0])
            for tied in tied_names(tensors)
        ]
        self._entries = {name: (tensors[name].shape, tensors[name].dtype) for name in self._names}

    def save(
        self,
        folder: Path,
        buckets: Callable[[], Iterable[dict[str, torch.Tensor]]],
        dtype: torch.dtype,
    ) -> None:
        """Write config and weights, and read the first ones back. Collective: every rank must call
        it; rank 0 writes and reads.

        Args:
            folder: created if missing.
            buckets: gives all weights, in the order of the model's `state_dict`.
            dtype: type of the weights in the files.

        Raises:
            InputError: transformers reads other weights from the files.
            OSError: a file cannot be written.
        """
        self._write(folder, buckets(), dtype)
        if not self._checked:
            check_reloaded(folder, buckets(), dtype)
            self._checked = True

    def _write(
        self, folder: Path, buckets: Iterable[dict[str, torch.Tensor]], dtype: torch.dtype
    ) -> None:
        if sharding.rank() > 0:
            for _ in buckets:
                pass
            return
        model, config = self._model, self._config
        config.dtype, config.architectures = dtype, [self._architecture]
        if self._converted:
            logger.warning(
                "%s: rank 0 holds the whole model while it is saved, since transformers converts "
                "the weights of %s",
                folder,
                self._architecture,
            )
            model.save_pretrained(folder, state_dict=copied(buckets, dtype))
            config.save_pretrained(folder)
            return
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        entries = {
            name: Entry(shape, dtype if kind.is_floating_point else kind)
            for name, (shape, kind) in self._entries.items()
        }
        write_files(folder, entries, self._tensors(buckets))

    def _tensors(
        self, buckets: Iterable[dict[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        names = set(self._names)
        for bucket in buckets:
            for name, tensor in bucket.items():
                if name in names:
                    yield name, tensor


def check_reloaded(
    folder: Path, buckets: Iterable[dict[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    """Check that transformers reads from written files the weights that were written. Collective;
    rank 0 reads the files.

    Args:
        folder: what `CheckpointWriter.save` wrote.
        buckets: all weights, in `dtype`.
        dtype: type of the weights in the files.

    Raises:
        InputError: a weight is missing there, or has other values.
    """
    read: dict[str, torch.Tensor] = {}
    if sharding.rank() == 0:
        read = read_back(folder, dtype).state_dict()
    other = [
        name
        for bucket in buckets
        for name, tensor in bucket.items()
        if sharding.rank() == 0 and not torch.equal(read[name].to(dtype), tensor.cpu())
    ]
    if other:
        raise InputError(
            f"{folder}: {other[0]} is read back with other values ({len(other)} weights differ), "
            f"so what was trained would be lost; train a model whose weights transformers saves "
            f"as they are"
        )


def copied(
    buckets: Iterable[dict[str, torch.Tensor]], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Copies of all weights on the CPU; tied weights are one tensor under several names."""
    weights: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        copies = {id(t): t.to("cpu", dtype, copy=True) for t in bucket.values()}
        weights |= {name: copies[id(t)] for name, t in bucket.items()}
    return weights
