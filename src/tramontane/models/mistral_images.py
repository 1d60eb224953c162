"""Images as Mistral's own library makes them (`mistral-common`, an extra), for checkpoints that
describe them in its file alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tramontane.errors import InputError, install
from tramontane.models.tokenizers import TEKKEN


def knows_images(folder: Path) -> bool:
    """True if a checkpoint's `tekken.json` says how images become tokens."""
    if not (file := folder / TEKKEN).is_file():
        return False
    given = json.loads(file.read_text(encoding="utf-8"))
    return bool(given.get("image") or given.get("multimodal"))  # the older name


class MistralImages:
    """The library's encoder of images, called as a processor of transformers is.

    Args:
        folder: of the checkpoint, with a `tekken.json`.

    Raises:
        InputError: the library is not installed, or not OpenCV, with which it resizes.
    """

    image_token = "[IMG]"

    def __init__(self, folder: Path) -> None:
        try:
            from mistral_common.imports import is_opencv_installed
            from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

            is_complete = bool(is_opencv_installed())
        except ImportError:
            is_complete = False
        if not is_complete:
            raise InputError(
                f"{folder}: its images are described in {TEKKEN} alone, which needs packages that "
                f"are not installed: {install('mistral')}"
            )
        made: Any = MistralTokenizer.from_file(str(folder / TEKKEN)).instruct_tokenizer
        ids = made.image_encoder.special_ids
        self._encode = made.image_encoder
        self._names = {ids.img: self.image_token, ids.img_break: "[IMG_BREAK]"}
        self._names[ids.img_end] = "[IMG_END]"

    def __call__(self, *, images: list[Any], **_: Any) -> dict[str, Any]:
        """The tokens of an image, as text, and its pixels: [1, 3, height, width] float32."""
        from mistral_common.protocol.instruct.chunk import ImageChunk

        made = self._encode(ImageChunk(image=images[0]))
        pixels = torch.from_numpy(made.image)[None]
        written = "".join(map(self._names.__getitem__, made.tokens))
        return {
            "text_replacement_offsets": [[{"replacement": written}]],
            "pixel_values": pixels,
            "image_sizes": torch.tensor([pixels.shape[2:]]),
        }
