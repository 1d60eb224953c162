"""The tokens and pixels of images, by a wrapper's own processor.

Prompts are made with it, also in processes of environments, so nothing here imports torch before
the first image.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tramontane.errors import InputError
from tramontane.models import images

if TYPE_CHECKING:
    import torch


class Family(NamedTuple):
    """What a family's images change beyond the embeddings of their tokens.

    Attributes:
        mutual: where neighboring image tokens see each other in both directions: in all layers, or
            in those with a sliding window, if the config says so. None: nowhere.
        positions: how channels of the rotary embeddings share the three parts of a position: time,
            height and width. `sections`: one block of channels after another; `interleaved`: in
            turn. None: positions count tokens.
        deep: features are also added to the outputs of the first layers.
    """

    mutual: Literal["all", "windows"] | None = None
    positions: Literal["sections", "interleaved"] | None = None
    deep: bool = False

    @property
    def plain(self) -> bool:
        """True if its images change nothing else."""
        return self == Family()


FAMILIES = {
    "mistral3": Family(),
    "llava": Family(),
    "llava_next": Family(),
    "idefics3": Family(),
    "smolvlm": Family(),
    "gemma3": Family(mutual="all"),
    "gemma4": Family(mutual="windows"),
    "qwen2_vl": Family(positions="sections"),
    "qwen2_5_vl": Family(positions="sections"),
    "qwen3_vl": Family(positions="interleaved", deep=True),
    "qwen3_vl_moe": Family(positions="interleaved", deep=True),
    "qwen3_5": Family(positions="interleaved"),
    "qwen3_5_moe": Family(positions="interleaved"),
}


class ImageProcessor:
    """A model's own processor, for one image at a time. Nothing is loaded before the first.

    Args:
        model: as for `loading.load_model`: a wrapper, or a text half that says where it comes from.
    """

    def __init__(self, model: str) -> None:
        self.model = model

    def __reduce__(self) -> tuple[type[ImageProcessor], tuple[str]]:
        return ImageProcessor, (self.model,)  # to other processes without what is loaded

    @cached_property
    def parent(self) -> str:
        """The wrapper.

        Raises:
            InputError: the model has no vision tower, or is of a family that is not in `FAMILIES`.
        """
        from tramontane.models import wrapped
        from tramontane.models.transplant import parent_of

        own, name = _own_config(self.model), self.model
        if wrapped.PARENT in own.to_dict():
            name = parent_of(name)
            own = _own_config(name)
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
    def family(self) -> Family:
        """What the model's images change."""
        own = _own_config(self.parent)
        family = FAMILIES[own.model_type]
        if family.mutual == "windows" and (
            own.get_text_config().use_bidirectional_attention != "vision"
        ):
            return family._replace(mutual=None)
        return family

    @cached_property
    def token_id(self) -> int:
        """The token at whose places features are."""
        return int(_own_config(self.parent).image_token_id)

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


def _own_config(model: str) -> Any:
    from tramontane.models.loading import load_own_config

    return load_own_config(model)
