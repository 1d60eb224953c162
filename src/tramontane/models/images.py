"""Image files: read within limits, and decoded to what every processor takes.

An image is carried as text, a data URI of its file's bytes, so rows and records of runs stay text.
Pillow is imported where an image is decoded, and only there.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from tramontane.errors import InputError, install

if TYPE_CHECKING:
    from PIL.Image import Image

DATA_URI = "data:image/"
THUMBNAIL = 384
_URL_SAFE = str.maketrans("-_", "+/")


class Limits(NamedTuple):
    """What is decoded of a row's images (`data.images`)."""

    max_pixels: int
    max_bytes: int
    formats: tuple[str, ...]


def pillow() -> tuple[Any, Any, Any]:
    """Pillow's modules `Image`, `ImageDraw` and `ImageFont`.

    Raises:
        InputError: it is not installed.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ModuleNotFoundError:
        raise InputError(f"images need Pillow; install: {install('images')}") from None
    return Image, ImageDraw, ImageFont


def data_uri(content: bytes) -> str:
    """An image file's bytes as text; the kind of image is not named, since its bytes tell."""
    return f"{DATA_URI}*;base64,{base64.b64encode(content).decode()}"


def named_uri(image: str) -> str:
    """The data URI of a checked image with the name of its kind, which other servers ask for."""
    Image, _, _ = pillow()
    content = content_of(image)
    kind = Image.MIME[Image.open(io.BytesIO(content)).format]
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def content_of(image: str) -> bytes:
    """The bytes of an image file given as a data URI.

    Raises:
        ValueError: not in base64, or damaged.
    """
    head, comma, body = image.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ValueError("a data URI must hold base64: data:image/png;base64,…")
    try:
        text = "".join(unquote(body).split())  # lines, as mail breaks them
        text += "=" * (-len(text) % 4)  # some encoders leave the padding out
        return base64.b64decode(text.translate(_URL_SAFE), validate=True)
    except binascii.Error as error:
        raise ValueError(f"a data URI whose base64 is damaged ({error})") from None


def decode(image: str, limits: Limits | None = None) -> Image:
    """An image in red, green and blue, 8 bits each: turned as its camera says (EXIF), on white
    where it is transparent, and with 16 bits of gray scaled to 8.

    Args:
        image: a data URI.
        limits: None: it was checked when its row was read.

    Raises:
        ValueError: no image of the formats, a broken file, several frames, or one above a limit;
            nothing of it has then been unpacked.
        InputError: Pillow is not installed.
    """
    pillow()
    from PIL import Image, UnidentifiedImageError

    content = content_of(image)
    if limits and len(content) > limits.max_bytes:
        raise ValueError(
            f"a file of {len(content):,} bytes, and data.images.max_bytes allows "
            f"{limits.max_bytes:,}"
        )
    try:
        found = Image.open(io.BytesIO(content), formats=limits and limits.formats)
        pixels = found.width * found.height
        if limits and pixels > limits.max_pixels:
            raise ValueError(
                f"{found.width} x {found.height} pixels ({pixels:,}), and data.images.max_pixels "
                f"allows {limits.max_pixels:,}"
            )
        # A camera's JPEG may hold more: a preview, brightness, another eye. The first is the photo.
        if getattr(found, "is_animated", False) and found.format != "MPO":
            raise ValueError("it has several frames; give one of them")
        found.load()
    except UnidentifiedImageError:
        raise ValueError(
            f"not an image of the formats {', '.join(limits.formats if limits else ())} "
            f"(data.images.formats), or broken"
        ) from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"too many pixels for Pillow ({error})") from None
    except (OSError, SyntaxError) as error:  # Pillow's for damage
        raise ValueError(f"a broken image file ({error})") from None
    return _in_color(upright(found))


@lru_cache(maxsize=256)
def thumbnail(image: str, limits: Limits, side: int = THUMBNAIL) -> str:
    """An image as a page shows it, at most `side` pixels a side, as a data URI.

    Raises:
        ValueError, InputError: as `decode`.
    """
    small, file = decode(image, limits), io.BytesIO()
    small.thumbnail((side, side))
    small.save(file, "WEBP", quality=80)
    return f"{DATA_URI}webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def upright(image: Any) -> Any:
    """An image turned as its camera says, in colors that a PNG can hold. One whose Exif block is
    damaged stays as it is stored, as other programs show it.

    Raises:
        ValueError: pixels of real numbers or 32 bits, from 0 to 1, 255, or anything else.
    """
    from PIL import ImageOps

    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        kind = "real numbers" if image.mode == "F" else "integers of 32 bits"
        raise ValueError(f"its pixels are {kind} of unknown scale; give 8 or 16 bits")
    with contextlib.suppress(SyntaxError, OSError, ValueError, struct.error):
        image = ImageOps.exif_transpose(image)
    if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA") or image.mode.startswith("I"):
        return image
    return image.convert("RGBA" if image.mode in ("PA", "La", "RGBa") else "RGB")


def _in_color(image: Any) -> Image:
    import numpy as np
    from PIL import Image

    clear = image.info.pop("transparency", None)  # a color, a number or bytes
    if image.mode.startswith("I"):  # Pillow would cut brighter pixels than 255 off
        deep = image.convert("I")
        image = deep.point(lambda value: value / 256).convert("L")
        if clear is not None:
            image.putalpha(Image.fromarray((np.asarray(deep) != clear).astype(np.uint8) * 255))
    elif clear is not None:
        is_deep = isinstance(clear, tuple) and max(clear) > 255  # Pillow cuts the pixels to 8 bits
        image.info["transparency"] = tuple(part >> 8 for part in clear) if is_deep else clear
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        colors = image.convert("RGBA")
        white = Image.new("RGBA", colors.size, "white")
        return Image.alpha_composite(white, colors).convert("RGB")
    return image.convert("RGB")


def checked(image: str, limits: Limits, what: str) -> str:
    """The image unchanged.

    Raises:
        InputError: `decode` refuses it; the message begins with `what`, its row and path.
    """
    try:
        decode(image, limits)
    except ValueError as error:
        raise InputError(f"{what}: {error}; mend or remove it") from None
    return image
