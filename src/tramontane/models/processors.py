"""The processors of wrappers, which write the tokens of images and make their pixels.

Imported only where a prompt has an image.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoImageProcessor, AutoProcessor
from transformers.processing_utils import ProcessorMixin

from tramontane.errors import InputError
from tramontane.models.loading import load_tokenizer
from tramontane.models.names import folder_of

FILES = ["*.json", "*.jinja", "*.model"]


def load_processor(model: str) -> Any:
    """The processor of a wrapper, whose pixels are made by Pillow: with torchvision, transformers
    would resize by that where it is installed, to other pixels.

    Raises:
        InputError: the checkpoint has none.
    """
    folder = folder_of(model, FILES)
    given = _given(folder)
    if "image_processor_type" not in {**given, **given.get("image_processor", {})}:
        raise InputError(
            f"model {model!r}: its folder holds no image processor (preprocessor_config.json), and "
            f"the data has images; copy the files of its processor from where the model comes from"
        )
    pixels = AutoImageProcessor.from_pretrained(folder, backend="pil")
    if given.get("processor_class") == "PixtralProcessor":
        return PixtralTokens(pixels, load_tokenizer(model), **given)
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


class PixtralTokens(ProcessorMixin):
    """The tokens of Mistral's images. transformers has the same (`PixtralProcessor`), which cannot
    be imported without torchvision, though nothing of it needs that.

    Rows of patches, each of `patch_size` · `spatial_merge_size` pixels a side, end with
    `image_break_token`, and the last with `image_end_token`.
    """

    text_kwargs: ClassVar[Any] = {"return_tensors": "pt"}  # type: ignore[misc]
    images_kwargs: ClassVar[Any] = {"return_tensors": "pt"}  # type: ignore[misc]

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **given: Any) -> None:
        super().__init__(image_processor, tokenizer)
        self.side = given.get("patch_size", 16) * given.get("spatial_merge_size", 1)
        self.image_token = given.get("image_token", "[IMG]")
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.line_end = given.get("image_break_token", "[IMG_BREAK]")
        self.end = given.get("image_end_token", "[IMG_END]")

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
        return self.line_end.join([self.image_token * width] * height) + self.end
