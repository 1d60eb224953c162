"""Images as a model sees them.

A wrapper's processor writes the tokens of an image into the prompt, and makes its pixels; vision
tower and projector turn the pixels into features, which take the place of the embeddings of the
prompt's image tokens. Everything after that is the text half's.

Every image is processed alone, so that what else is in a batch changes nothing, by Pillow, whatever
else is installed. The tower is not trained: its features are cached by the image's content.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from tramontane.errors import InputError
from tramontane.models import images, wrapped
from tramontane.models.loading import load_own_config, load_tower
from tramontane.models.transplant import parent_of

# Families whose image tokens are as text to all layers of the text half: causal attention,
# positions that count tokens, and features at the embeddings only.
FAMILIES = ("mistral3", "llava", "idefics3")
CACHED_BYTES = 2**28  # of features kept


class Pictured(NamedTuple):
    """A prompt with images in a packed row."""

    start: int  # place of the prompt's first token in the row
    prompt_ids: Sequence[int]
    images: Sequence[str]


class ImageProcessor:
    """A model's own processor, for one image at a time. Nothing is loaded before the first.

    Args:
        model: as for `loading.load_model`: a wrapper, or a text half that says where it comes from.
    """

    def __init__(self, model: str) -> None:
        self.model = model

    @cached_property
    def parent(self) -> str:
        """The wrapper.

        Raises:
            InputError: the model has no vision tower, or is of a family that is not in `FAMILIES`.
        """
        own, name = load_own_config(self.model), self.model
        if wrapped.PARENT in own.to_dict():
            name = parent_of(name)
            own = load_own_config(name)
        if not hasattr(own, "vision_config"):
            raise InputError(f"model {name!r}: it takes no images, and the data has some")
        if own.model_type not in FAMILIES:
            raise InputError(
                f"model {name!r}: images are not supported for the family {own.model_type!r}, only "
                f"for {', '.join(FAMILIES)} (docs/images.md says why); remove the images from the "
                f"rows to train on the text"
            )
        return name

    @cached_property
    def token_id(self) -> int:
        """The token at whose places features are."""
        return int(load_own_config(self.parent).image_token_id)

    @property
    def token(self) -> str:
        """The text that stands for an image in a rendered chat."""
        return str(self._processor.image_token)

    def expansion(self, image: str) -> str:
        """What the processor writes in place of `token`: image tokens, and others around them.

        Raises:
            InputError: the processor refuses the image.
        """
        return self._processed(image)[0]

    def inputs(self, image: str) -> dict[str, torch.Tensor]:
        """Arguments of the tower for one image."""
        return self._processed(image)[1]

    @cached_property
    def _processor(self) -> Any:
        from tramontane.models.processors import load_processor

        return load_processor(self.parent)

    @cached_property
    def _processed(self) -> Any:
        @lru_cache(maxsize=64)
        def processed(image: str) -> tuple[str, dict[str, torch.Tensor]]:
            try:
                made = self._processor(
                    text=[self.token],
                    images=[images.decode(image)],
                    return_tensors="pt",
                    return_text_replacement_offsets=True,
                    add_special_tokens=False,
                )
            except Exception as error:  # a processor may raise anything
                raise InputError(
                    f"the model's processor refuses an image ({type(error).__name__}: {error})"
                ) from error
            [replaced] = made.pop("text_replacement_offsets")[0]
            return replaced["replacement"], dict(made)

        return processed


class Vision:
    """The vision tower and projector of a model, frozen, in float32 on a CPU and in bfloat16 on a
    GPU. Nothing is loaded before the first image.

    Args:
        model: as for `ImageProcessor`.
        device: where features are computed.
    """

    def __init__(self, model: str, device: torch.device | str = "cpu") -> None:
        self.processor, self.device = ImageProcessor(model), torch.device(device)
        self._cache: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()  # a trainer's threads share it

    @torch.no_grad()
    def features(self, image: str) -> torch.Tensor:
        """[n, hidden]: the features of an image, for its n image tokens, in order."""
        with self._lock:
            if (found := self._cache.get(image)) is None:
                found = self._cache[image] = self._computed(image)
                while len(self._cache) > 1 and self._bytes > CACHED_BYTES:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(image)
            return found

    @property
    def _bytes(self) -> int:
        return sum(x.nbytes for x in self._cache.values())

    @contextmanager
    def entering(self, model: PreTrainedModel, prompts: Sequence[Pictured]) -> Iterator[None]:
        """Within the context, a forward of `model` takes features in place of the embeddings of
        the image tokens of these prompts.

        Raises:
            InputError: a prompt has other image tokens than its images have features.
        """
        parts = [self.features(image) for prompt in prompts for image in prompt.images]
        places = [place for prompt in prompts for place in self._places(prompt)]
        at, features = torch.tensor(places, device=self.device), torch.cat(parts)[None]
        table = model.get_input_embeddings()

        def put(_: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
            return embedded.index_copy(1, at, features.to(embedded.dtype))

        handle = table.register_forward_hook(put)  # type: ignore[union-attr]
        try:
            yield
        finally:
            handle.remove()

    def _places(self, prompt: Pictured) -> list[int]:
        token = self.processor.token_id
        places = [prompt.start + i for i, t in enumerate(prompt.prompt_ids) if t == token]
        count = sum(len(self.features(image)) for image in prompt.images)
        if len(places) != count:
            raise InputError(
                f"a prompt has {len(places)} image tokens, and its {len(prompt.images)} images "
                f"have {count} features: the model's processor does not fit its vision tower"
            )
        return places

    @cached_property
    def _tower(self) -> Any:
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        return load_tower(self.processor.parent, dtype).to(self.device)

    def _computed(self, image: str) -> torch.Tensor:
        taken = inspect.signature(self._tower.get_image_features).parameters
        inputs = {k: v.to(self.device) for k, v in self.processor.inputs(image).items()}
        found = self._tower.get_image_features(**{k: inputs[k] for k in inputs if k in taken})
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in found.pooler_output])
