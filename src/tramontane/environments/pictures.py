"""Images in what environments and tools return: they become texts, with a `PLACE` for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tramontane.data.images import PART_TYPES, as_text, is_file, own_image
from tramontane.models.images import Limits, checked
from tramontane.types import PLACE


def is_image(value: Any) -> bool:
    """True for a PIL image, an image file's bytes and a content part with an image; a text is none,
    a data URI neither."""
    if isinstance(value, Mapping):
        return value.get("type") in PART_TYPES
    is_picture = hasattr(value, "save") and type(value).__module__.startswith("PIL.")
    return is_picture or is_file(value)


def holds_images(value: Any) -> bool:
    """True for an image, and a list with one."""
    return is_image(value) or (isinstance(value, list | tuple) and any(map(is_image, value)))


def joined(
    parts: Any, limits: Limits, text_of: Callable[[Any], str] | None = None
) -> tuple[str, list[str]]:
    """(text with a `PLACE` for each image, the images as data URIs) of an image, or of a list of
    images, texts and content parts.

    Args:
        parts: what was returned.
        limits: what is decoded of an image.
        text_of: makes the text of any other part; None: there may be none.

    Raises:
        ValueError: a part is neither text nor an image, or its image is not a data URI.
        InputError: an image that `models.images.decode` refuses.
    """
    texts, images = [], []
    for part in parts if isinstance(parts, list | tuple) else [parts]:
        if is_image(part):
            found = as_text(part)
            found = own_image(found, 0, "content") if isinstance(part, Mapping) else found
            if not isinstance(found, str) or found[:5].lower() != "data:":
                raise ValueError(
                    "an image part needs a PIL image, bytes or a data URI "
                    "(data:image/png;base64,…): nothing is fetched, and no file is read"
                )
            images.append(checked(found, limits, "an image"))
            texts.append(PLACE)
            continue
        if isinstance(part, Mapping) and part.get("type") == "text":
            part = part.get("text")
        if isinstance(part, str):
            text = part
        elif text_of is not None:
            text = text_of(part)
        else:
            raise ValueError(f"a content part is a {type(part).__name__}: give text and images")
        texts.append(text.replace(PLACE, "\ufffd"))
    return "".join(texts), images
