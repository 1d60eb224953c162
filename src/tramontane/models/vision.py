"""Images as a model sees them.

A wrapper's processor writes the tokens of an image into the prompt, and makes its pixels
(`image_tokens`); vision tower and projector turn the pixels into features, which take the place of
the embeddings of the prompt's image tokens. Everything after that is the text half's.

Families differ in what else an image changes: what its tokens see, at which positions they stand,
and which layers take features too (`image_tokens.Family`).

Every image is processed alone, so that what else is in a batch changes nothing, by Pillow, whatever
else is installed. Features are cached by the image's content, until the tower's weights change.
"""

from __future__ import annotations

import copy
import inspect
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedModel

from tramontane.errors import InputError
from tramontane.models.image_tokens import ImageProcessor
from tramontane.models.loading import load_own_config, load_tower
from tramontane.models.names import resolve
from tramontane.models.transplant import TOWER
from tramontane.models.weight_files import WeightFiles

CACHED_BYTES = 2**28  # of features kept
PUBLISHED = "vision:"  # precedes their names on the way to generators
_PROJECTOR = re.compile(
    r"(?:^|\.)(?:multi_modal_projector|connector|merger|deepstack_merger_list|embed_vision)\."
)


class Pictured(NamedTuple):
    """A sequence with images in a packed row, or the end of one."""

    start: int  # place in the row of its first token there
    given_ids: Sequence[int]  # its tokens, as `tokens.given_ids` returns them
    images: Sequence[str]
    end: int  # place after the last token that continues it
    known: int = 0  # number of its first tokens that are not there


class Features(NamedTuple):
    """What tower and projector make of an image with n tokens: [n, hidden] for the embeddings, and
    [n, hidden] to add to the outputs of each of the first layers, if any."""

    embedded: torch.Tensor
    deep: Sequence[torch.Tensor] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(part.nbytes for part in (self.embedded, *self.deep))


class Vision:
    """The vision tower and projector of a model. Nothing is loaded before the first image.

    Args:
        model: as for `ImageProcessor`.
        device: where features are computed.
        dtype: of weights and features; None: float32 on a CPU, bfloat16 on a GPU.
    """

    def __init__(
        self, model: str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        self.processor, self.device = ImageProcessor(model), torch.device(device)
        self._dtype = dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        self._cache: OrderedDict[str, Features] = OrderedDict()
        self._lock = threading.Lock()  # a trainer's threads share it
        self._is_trained = False

    def train(self, what: Literal["projector", "all"]) -> dict[str, torch.nn.Parameter]:
        """Compute features with gradients, where gradients are computed; the weights to train, by
        their names in the tower.

        Raises:
            InputError: the model takes no images, or has no projector.
        """
        found = {
            name: parameter
            for name, parameter in self._tower.named_parameters()
            if what == "all" or _PROJECTOR.search(name)
        }
        if not found:
            raise InputError(
                f"model {self.processor.parent!r}: its tower has no projector to train"
            )
        for parameter in found.values():
            parameter.requires_grad_(True)
        self._is_trained = True
        return found

    def tensors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Weights of the tower by the names under which they are published."""
        with self._lock:
            known = dict(self._tower.named_parameters())
        return {name: known[name.removeprefix(PUBLISHED)] for name in names}

    def forget(self) -> None:
        """Drop the features of weights that have changed."""
        with self._lock:
            self._cache.clear()

    def features(self, image: str) -> Features:
        """The features of an image, for its image tokens, in order; with gradients if the tower is
        trained and gradients are computed."""
        if self._is_trained and torch.is_grad_enabled():
            return self._computed(image)
        with self._lock, torch.no_grad():
            if (found := self._cache.get(image)) is None:
                found = self._cache[image] = self._computed(image)
                while len(self._cache) > 1 and self._bytes > CACHED_BYTES:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(image)
            return found

    @property
    def _bytes(self) -> int:
        return sum(x.nbytes for x in self._cache.values())

    def shift(self, given_ids: Sequence[int], images: Sequence[str]) -> int:
        """By how much the positions of what follows some tokens differ from their count.

        Raises:
            InputError: as `entering` does.
        """
        if not images or self.processor.family.positions is None:
            return 0
        made = {image: self.features(image) for image in images}
        self._places(Pictured(0, given_ids, images, len(given_ids)), made)
        return self._positions(given_ids, images)[1]

    def placed(
        self, given_ids: Sequence[int], images: Sequence[str]
    ) -> tuple[list[int], torch.Tensor]:
        """The places of the image tokens of a sequence, and the features [n, hidden] there.

        Raises:
            InputError: as `entering` does.
        """
        made = {image: self.features(image) for image in images}
        places = self._places(Pictured(0, given_ids, images, len(given_ids)), made)
        return places, torch.cat([made[image].embedded for image in images])

    @contextmanager
    def entering(
        self, model: PreTrainedModel, pictured: Sequence[Pictured], inputs: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Within the context, a forward of `model` on the row `inputs` takes features in place of
        the embeddings of the image tokens of these sequences.

        Args:
            model: a text half whose attention takes packed rows.
            pictured: those of the row that have images.
            inputs: as `packing.pack` returns them.

        Yields:
            The row with what else the family's images change.

        Raises:
            InputError: a sequence has other image tokens than its images have features.
        """
        made = {image: self.features(image) for each in pictured for image in each.images}
        places: list[int] = []  # in the row
        new: list[bool] = []  # of each feature of these sequences: it is in the row
        for each in pictured:
            own = self._places(each, made)
            new += [place >= each.known for place in own]
            places += [each.start + p - each.known for p in own if p >= each.known]
        parts, taken = [made[i] for each in pictured for i in each.images], torch.tensor(new)
        at, taken = torch.tensor(places, device=self.device), taken.to(self.device)
        features = torch.cat([part.embedded for part in parts])[taken][None]

        def put(_: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
            return embedded.index_copy(1, at, features.to(embedded.dtype))

        def pad(_: Any, given: Any) -> Any:
            return given[0].index_fill(1, at, model.config.pad_token_id)

        family, table = self.processor.family, model.get_input_embeddings()
        with ExitStack() as hooks:
            hooks.callback(table.register_forward_hook(put).remove)
            if family.mutual:
                packing = inputs["packing"].seeing([*runs(places)], family.mutual == "windows")
                inputs = {**inputs, "packing": packing}
            if of_layers := getattr(model.base_model, "embed_tokens_per_layer", None):
                hooks.callback(of_layers.register_forward_pre_hook(pad).remove)
            if family.positions:
                triples = self._triples(pictured, inputs["position_ids"])
                modules = model.named_modules()
                rotary: Any = next(m for name, m in modules if name.endswith("rotary_emb"))
                turned = self._turned(triples)
                hooks.callback(rotary.register_forward_hook(turned, with_kwargs=True).remove)
                inputs = {**inputs, "position_ids": triples[:1]}
            if parts[0].deep:
                layers = zip(*(part.deep for part in parts), strict=True)
                inputs = {**inputs, "packing": copy.copy(inputs["packing"])}
                inputs["packing"].added = [(at, torch.cat(layer)[taken]) for layer in layers]
                _let_layers_add(model)
            yield inputs

    def _places(self, pictured: Pictured, made: Mapping[str, Features]) -> list[int]:
        """The places of its image tokens in a sequence."""
        token = self.processor.token_id
        places = [i for i, t in enumerate(pictured.given_ids) if t == token]
        count = sum(len(made[image].embedded) for image in pictured.images)
        if len(places) != count:
            raise InputError(
                f"a prompt has {len(places)} image tokens, and its {len(pictured.images)} images "
                f"have {count} features: the model's processor does not fit its vision tower"
            )
        return places

    def _positions(
        self, given_ids: Sequence[int], images: Sequence[str]
    ) -> tuple[torch.Tensor, int]:
        """[3, n] int64, the positions of n tokens as the model itself defines them, and the shift
        of those that follow."""
        grids = torch.cat([self.processor.inputs(image)["image_grid_thw"] for image in images])
        ids = torch.tensor([list(given_ids)])
        kinds = (ids == self.processor.token_id).int()
        with self._lock:
            found, shift = self._tower.get_rope_index(ids, kinds, image_grid_thw=grids)
        return found[:, 0], int(shift)

    def _triples(self, pictured: Sequence[Pictured], counted: torch.Tensor) -> torch.Tensor:
        """[3, N] int64: the positions of a row's tokens, which are `counted` [1, N] without
        images. Later sequences replace what earlier ones say of the same places."""
        triples = counted.repeat(3, 1)
        for each in pictured:
            own, shift = self._positions(each.given_ids, each.images)
            own = own[:, each.known : each.known + each.end - each.start].to(triples.device)
            end = each.start + own.shape[1]
            triples[:, each.start : end] = own
            triples[:, end : each.end] += shift
        return triples

    def _turned(self, triples: torch.Tensor) -> Callable[..., Any]:
        """A forward hook for rotary embeddings that know one position, after which each channel is
        turned by its part of three.

        Args:
            triples: [3, N] int64, the row's positions.
        """
        text = load_own_config(self.processor.parent).get_text_config()
        sizes = text.rope_parameters["mrope_section"]
        if self.processor.family.positions == "sections":
            part = torch.arange(3).repeat_interleave(torch.tensor(sizes))
        else:
            part = torch.zeros(sum(sizes), dtype=torch.int64)
            for number in (1, 2):
                part[number : 3 * sizes[number] : 3] = number
        part = part.repeat(2).to(triples.device)

        def turned(module: Any, args: Any, kwargs: Any, _: Any) -> Any:
            hidden = args[0] if args else kwargs["x"]
            each = [module.forward(hidden, triple[None]) for triple in triples]
            return tuple(
                torch.where(part == 1, height, torch.where(part == 2, width, time))
                for time, height, width in zip(*each, strict=True)
            )

        return turned

    @cached_property
    def _tower(self) -> Any:
        tower = load_tower(self.processor.parent, self._dtype).to(self.device)
        if tower.config.model_type == "mistral3":
            tower.multi_modal_projector.register_forward_hook(_squeezable)
        trained = Path(resolve(self.processor.model)).expanduser() / TOWER
        if trained.is_dir():
            files, known = WeightFiles(trained), dict(tower.named_parameters())
            with torch.no_grad():
                for name in files.names:
                    known[name].copy_(files.read(name))
        return tower

    def _computed(self, image: str) -> Features:
        taken = inspect.signature(self._tower.get_image_features).parameters
        inputs = {k: v.to(self.device) for k, v in self.processor.inputs(image).items()}
        found = self._tower.get_image_features(**{k: inputs[k] for k in inputs if k in taken})
        return Features(
            joined(found.pooler_output),
            [joined(parts) for parts in getattr(found, "deepstack_features", None) or ()],
        )


def _squeezable(module: torch.nn.Module, args: Any, features: torch.Tensor) -> torch.Tensor:
    """A forward hook for the projector of Mistral 3, whose model squeezes the first axis of what it
    returns, [n, d]: of an image of one token, that is the only row."""
    return features[None] if len(features) == 1 else features


def _let_layers_add(model: PreTrainedModel) -> None:
    """Let the first layers of a model add what a row's packing says to their outputs. The row's
    arguments carry it, so a layer that the backward pass computes again adds it again.

    Raises:
        InputError: the layers are compiled, and may not do so.
    """
    layers: Any = model.base_model.layers
    if any(layer._compiled_call_impl for layer in layers):
        raise InputError(
            f"{type(model).__name__}: this family's images enter several layers, which compiled "
            f"layers do not take; set compile to false (in a run, generator.compile and "
            f"trainer.compile)"
        )
    if getattr(layers, "add_features", False):
        return
    layers.add_features = True
    for number, layer in enumerate(layers):
        layer.register_forward_hook(partial(_add, number), with_kwargs=True)


def _add(number: int, _: Any, __: Any, kwargs: dict[str, Any], output: torch.Tensor) -> Any:
    packing = kwargs.get("packing")
    if packing is None or number >= len(packing.added):
        return output
    at, features = packing.added[number]
    return output.index_add(1, at, features[None].to(output.dtype))


def joined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """[n, hidden] of features by tile or image."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The spans (start, end) of neighboring places, which are in order."""
    start = 0
    for i, place in enumerate(places):
        if i + 1 == len(places) or places[i + 1] != place + 1:
            yield places[start], place + 1
            start = i + 1
