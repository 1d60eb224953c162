"""The processors of wrappers, which write the tokens of images and make their pixels.

Imported only where a prompt has an image.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoImageProcessor, AutoProcessor, Idefics3Processor
from transformers.processing_utils import ProcessorMixin

from tramontane.errors import InputError
from tramontane.models.loading import load_tokenizer
from tramontane.models.mistral_images import MistralImages, knows_images
from tramontane.models.names import folder_of

FILES = ["*.json", "*.jinja", "*.model"]


def load_processor(model: str) -> Any:
    """The processor of a wrapper, whose pixels are made by Pillow: with torchvision, transformers
    would resize by that where it is installed, to other pixels. Mistral's own library makes them
    where a checkpoint has only its file.

    Raises:
        InputError: the checkpoint has none.
    """
    folder = folder_of(model, FILES)
    given = _given(folder)
    if "image_processor_type" not in {**given, **given.get("image_processor", {})}:
        if knows_images(folder):
            return MistralImages(folder)
        raise InputError(
            f"model {model!r}: its folder holds no image processor (preprocessor_config.json), and "
            f"the data has images; copy the files of its processor from where the model comes from"
        )
    pixels = AutoImageProcessor.from_pretrained(folder, backend="pil")
    if own := OWN.get(str(given.get("processor_class"))):
        return own(pixels, load_tokenizer(model), **given)
    processor = AutoProcessor.from_pretrained(folder)
    processor.image_processor = pixels
    return processor


def _given(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of its processor, in the older file and the newer one."""
    given: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (file := folder / name).is_file():
            given |= json.loads(file.read_text(encoding="utf-8"))
    return given


class ImageTokens(ProcessorMixin):
    """The tokens of images, for families whose class in transformers cannot be used without
    torchvision, though nothing of it needs that: most of these also read videos.

    Args:
        image_processor: makes the pixels.
        tokenizer: of the model.
        **given: what the checkpoint says of its processor.
    """

    text_kwargs: ClassVar[Any] = {"return_tensors": "pt"}  # type: ignore[misc]
    images_kwargs: ClassVar[Any] = {"return_tensors": "pt"}  # type: ignore[misc]
    default = ""  # the text that stands for an image

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **given: Any) -> None:
        super().__init__(image_processor, tokenizer)
        self.given = given
        self.image_token = given.get("image_token", self.default)
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)


class PixtralTokens(ImageTokens):
    """Mistral's: rows of patches, each of `patch_size` · `spatial_merge_size` pixels a side, end
    with `image_break_token`, and the last with `image_end_token`."""

    default = "[IMG]"

    @property
    def side(self) -> int:
        """Pixels of a side of what becomes a token."""
        return int(self.given.get("patch_size", 16) * self.given.get("spatial_merge_size", 1))

    @property
    def model_input_names(self) -> list[str]:
        """Names of what the model takes."""
        own = self.image_processor.model_input_names
        return [*self.tokenizer.model_input_names, *own, "image_sizes"]

    def _process_images(self, images: Any, **options: Any) -> Any:
        return super()._process_images(images, **{**options, "patch_size": self.side})

    def replace_image_token(self, image_inputs: dict, image_idx: int, **_: Any) -> str:
        """The tokens of an image, whose sides are multiples of a patch's once it is resized."""
        height, width = (int(size) // self.side for size in image_inputs["image_sizes"][image_idx])
        line_end = self.given.get("image_break_token", "[IMG_BREAK]")
        end = self.given.get("image_end_token", "[IMG_END]")
        return str(line_end.join([self.image_token * width] * height) + end)


class QwenTokens(ImageTokens):
    """Qwen's: a token for each square of `merge_size` patches a side. The chat template writes what
    is around them."""

    default = "<|image_pad|>"

    def replace_image_token(self, image_inputs: dict, image_idx: int, **_: Any) -> str:
        """The tokens of an image."""
        patches = int(image_inputs["image_grid_thw"][image_idx].prod())
        return str(self.image_token * (patches // self.image_processor.merge_size**2))


class GemmaTokens(ImageTokens):
    """Gemma 4's: as many tokens as patches were merged, between `boi_token` and `eoi_token`. All of
    them are named by the tokenizer."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **given: Any) -> None:
        super().__init__(image_processor, tokenizer, image_token=tokenizer.image_token)

    def replace_image_token(self, image_inputs: dict, image_idx: int, **_: Any) -> str:
        """The tokens of an image."""
        count = int(image_inputs["num_soft_tokens_per_image"][image_idx])
        names = self.tokenizer
        return str(names.boi_token + names.image_token * count + names.eoi_token)


def smolvlm(pixels: Any, tokenizer: Any, **given: Any) -> Idefics3Processor:
    """The processor of SmolVLM, whose image tokens are those of Idefics 3."""
    return Idefics3Processor(pixels, tokenizer, image_seq_len=given.get("image_seq_len", 169))


OWN: dict[str, Callable[..., Any]] = {
    "PixtralProcessor": PixtralTokens,
    "Gemma4Processor": GemmaTokens,
    "Qwen2VLProcessor": QwenTokens,
    "Qwen2_5_VLProcessor": QwenTokens,
    "Qwen3VLProcessor": QwenTokens,
    "SmolVLMProcessor": smolvlm,
}
