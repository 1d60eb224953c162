"""Pictures for tests. Imports no torch, so that processes whose functions show them start fast."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """Noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise)


def png(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def uri(image: Image.Image | None = None, **sizes: int) -> str:
    content = png(image or picture(**sizes))
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
