"""Images in rows.

Rows are text: an image in one is a path beside the data's file, or a data URI, as which those of
tables and Python objects are carried.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tramontane.data.values import Row
from tramontane.errors import InputError
from tramontane.models.images import DATA_URI, Limits, checked, content_of, data_uri, upright
from tramontane.types import IMAGE, Completion, Message, Problem
from tramontane.workplace import CONTINUE, Remedy, disk_faults, whole_file

logger = logging.getLogger(__name__)

FIELDS = ("images", "image")  # of a row, with one image or a list
SHOWN = 80  # characters of a value in a message
PART_TYPES = ("image", "image_url", "input_image")  # of content parts of a chat's messages
# Where a part or a record has the image itself; a path beside bytes is its name.
_VALUES = ("bytes", "image", "url", "path", "image_url", "base64")
_ENCODED = ("bytes", "base64")  # those of them that are base64 in JSON
_BEGINNINGS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"II*\0", b"MM\0*")  # of files
_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")  # of file names
TokensOf: TypeAlias = Callable[[str], int]  # tokens that an image takes in a prompt
_BESIDE = ("type", "text", "index", "detail")  # what a part may have besides


class Album(NamedTuple):
    """Where a source's images are, and what is decoded of them."""

    folder: Path  # that paths are relative to
    limits: Limits

    def read(self, value: Any, where: str) -> str:
        """An image of a row as a data URI.

        Raises:
            InputError: an address, no such file, or an image that `models.images.decode` refuses.
        """
        if isinstance(value, dict):  # a record of `datasets` or a part of a chat, as JSON
            value = _held(value) or value
        if not isinstance(value, str) or not value:
            kind = "an empty text" if value == "" else f"a {type(value).__name__}"
            raise InputError(
                f"{where}: an image is {kind}: give a path or a data URI, or, in Python, a PIL "
                f"image (such as Image.fromarray(array))"
            )
        if value[:5].lower() == "data:":
            return checked(value, self.limits, f"{where}: an image given as a data URI")
        if "://" in value:
            raise InputError(
                f"{where}: image {value!r} is an address, and nothing is fetched while data is "
                f"read; download it, and name its path"
            )
        shown = value if len(value) <= SHOWN else f"{value[:SHOWN]}…"
        try:
            path = self.folder / Path(value).expanduser()
            is_file = path.is_file()
        except (OSError, RuntimeError, ValueError):  # raw base64, a user that does not exist
            raise InputError(
                f"{where}: image {shown!r} is neither a path nor a data URI "
                f"(data:image/png;base64,…)"
            ) from None
        if not is_file:
            raise InputError(
                f"{where}: image {shown!r}: no such file, from {self.folder}; base64 is given as a "
                f"data URI (data:image/png;base64,…)"
            )
        if (size := path.stat().st_size) > self.limits.max_bytes:
            raise InputError(
                f"{where}: image {path}: a file of {size:,} bytes, and data.images.max_bytes "
                f"allows {self.limits.max_bytes:,}"
            )
        return checked(data_uri(path.read_bytes()), self.limits, f"{where}: image {path}")


def is_file(value: Any) -> bool:
    """True for the bytes of an image file, by how they begin."""
    return isinstance(value, bytes | bytearray | memoryview) and bytes(value[:4]).startswith(
        _BEGINNINGS
    )


def as_text(value: Any) -> Any:
    """A value of a table or a Python object with each image in it as text: a PIL image, an image
    file's bytes or the record of `datasets` (`{"bytes", "path"}`) as a data URI, or a path. Other
    values unchanged.

    Raises:
        ValueError: a PIL image of unknown scale (`models.images.upright`).
    """
    if isinstance(value, list | tuple):
        return [as_text(part) for part in value]
    if isinstance(value, Mapping):
        if "bytes" in value and value.keys() <= {"bytes", "path"}:
            content = value["bytes"]
            return _bytes_as_text(
                _held(value) if isinstance(content, str) else content
            ) or value.get("path")
        return {name: as_text(part) for name, part in value.items()}
    if is_file(value):
        return _bytes_as_text(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "save") and type(value).__module__.startswith("PIL."):
        file = io.BytesIO()
        upright(value).save(file, "PNG")
        return data_uri(file.getvalue())
    return value


def fields_as_text(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row with its images as text (`as_text`); in the fields `FIELDS` all bytes are images.

    Raises:
        InputError: a PIL image of unknown scale; the message names the row and the field.
    """
    found = {}
    for name, value in row.items():
        try:
            found[name] = as_text(value)
        except ValueError as error:
            raise InputError(f"{where}: field {name!r}: an image: {error}") from None
        if name in FIELDS:
            found[name] = _bytes_as_text(found[name])
    return found


def flattened(value: Any, where: str) -> tuple[Any, list[Any]]:
    """A chat whose content parts became texts with `IMAGE` for each image, and the images that
    parts have themselves, None for one that is in the row's field. Other values unchanged.

    Raises:
        InputError: a content part that is neither text nor an image, or an image part whose image
            cannot be told.
    """
    if not isinstance(value, list | tuple):
        return value, []
    found: list[Any] = []
    chat = []
    for message in value:
        if isinstance(message, dict) and isinstance(parts := message.get("content"), list):
            texts = [_part_text(part, found, where) for part in parts]
            message = {**message, "content": "".join(texts)}
        chat.append(message)
    return chat, found


def _part_text(part: Any, found: list[Any], where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in PART_TYPES:
        found.append(own_image(part, found.count(None), where))
        return IMAGE
    if kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
        raise InputError(f"{where}: a content part of type {kind!r}: give text and image parts")
    return str(part["text"])


def own_image(part: Mapping[str, Any], earlier: int, where: str) -> Any:
    """The image in a content part, OpenAI's `image_url` included; None for one of the row's field,
    which `earlier` parts have taken images of.

    Raises:
        InputError: it has an image in another form, or names one of the field out of order.
    """
    if value := _held(part):
        return value
    if other := [name for name, value in part.items() if value and name not in _BESIDE]:
        raise InputError(
            f"{where}: an image part with {other[0]!r}: give the image as 'image', a path "
            f"or a data URI"
        )
    if part.get("index") not in (None, earlier):
        raise InputError(
            f"{where}: an image part with index {part['index']}, and image {earlier} of the row is "
            f"next: list images in the order of their parts"
        )
    return None


def _held(part: Mapping[str, Any]) -> Any:
    """The image that a part of a chat or a record has itself; None: it has none."""
    for name in _VALUES:
        if value := part.get(name):
            value = value.get("url") if isinstance(value, dict) and "url" in value else value
            is_encoded = name in _ENCODED and isinstance(value, str)
            return f"{DATA_URI}*;base64,{value}" if is_encoded else value
    return None


def placed(
    texts: str | Sequence[Message], given: Sequence[Any], own: Sequence[Any], where: str
) -> list[Any]:
    """A row's images in the order of their places.

    Args:
        texts: the statement or the chat.
        given: those of the row's field.
        own: those of content parts, None for one of the field's.
        where: the row.

    Raises:
        InputError: not as many images as places.
    """
    contents = [texts] if isinstance(texts, str) else [m["content"] for m in texts]
    marks, rest = sum(text.count(IMAGE) for text in contents), iter(given)
    if not given and not own:
        return []
    merged = [next(rest, None) if image is None else image for image in own]
    merged += rest
    if None in given:
        raise InputError(f"{where}: an image of the list is null; remove it")
    if None in merged or (marks and marks != len(merged)):
        count = sum(image is not None for image in merged)
        raise InputError(
            f"{where}: {count} image{'s' * (count != 1)} for {marks} places ({IMAGE} in the text, "
            f"or image parts); give one for each"
        )
    return merged


def warn_of_text(places: Sequence[str]) -> None:
    """Warn of rows without an image whose text has the mark of one: it stays text.

    Args:
        places: those rows.
    """
    if places:
        logger.warning(
            "%s: %s and no image, which is read as text (rows like it: %s); if an image belongs "
            "there, name its column in data.fields.images",
            places[0], IMAGE, f"{len(places):,}",
        )  # fmt: skip


def names_file(value: Any, folder: Path) -> bool:
    """True for the path of an image file from a folder, and a list that begins with one."""
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str) or not value.lower().endswith(_ENDINGS):
        return False
    return os.path.isfile(folder / value)


def warn_of_files(fields: Mapping[str, str]) -> None:
    """Warn of image files that a field of rows without images names: they are not shown.

    Args:
        fields: the first such row, by field.
    """
    for name, where in fields.items():
        logger.warning(
            "%s: field %r names an image file, which the model is not shown; if it should be, name "
            "the field: data.fields={images: %s}",
            where, name, name,
        )  # fmt: skip


def refuse(row: Row, where: str) -> None:
    """Raise an error for a row with an image, which would be trained on as if it had none.

    Raises:
        InputError: a field `image` or `images` with a value, or a data URI or an image among a
            chat's content parts in another field.
    """
    for name, value in row.items():
        if (name in FIELDS and value) or _holds_image(value):
            is_chat = isinstance(value, list) and isinstance(value[0], dict) and "role" in value[0]
            raise InputError(
                f"{where}: field {name!r} holds an image, and is read as text alone, without it; "
                f"remove the field, or, in problems of a run, name it in data.fields: "
                f"{{{'problem' if is_chat else 'images'}: {name}}}"
            )


def _holds_image(value: Any) -> bool:
    """True for a data URI, a chat with an image among its content parts, and a list or an object
    with one."""
    if isinstance(value, list):
        return any(map(_holds_image, value))
    if isinstance(value, dict):
        parts = value.get("content")
        has_part = isinstance(parts, list) and any(map(_is_image_part, parts))
        return has_part or any(map(_holds_image, value.values()))
    return isinstance(value, str) and value.startswith(DATA_URI)


def _is_image_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in PART_TYPES


def _bytes_as_text(value: Any) -> Any:
    if isinstance(value, list):
        return [_bytes_as_text(part) for part in value]
    return data_uri(bytes(value)) if isinstance(value, bytes | bytearray | memoryview) else value


def listed(value: Any) -> Iterator[Any]:
    """The images of a row's field: one, or a list."""
    yield from value if isinstance(value, list) else [value]


def image_name(image: str) -> str:
    """The name of a recorded image, given as a data URI: the SHA-256 of its file."""
    return sha256(content_of(image)).hexdigest()


def named(images: Sequence[str], tokens_of: TokensOf | None) -> dict[str, Any]:
    """What a record says of images: `image_files`, their names, and `image_tokens`, the number of
    tokens that each takes in a prompt; None if that is not known."""
    return {
        "image_files": [*map(image_name, images)],
        "image_tokens": [*map(tokens_of, images)] if tokens_of else None,
    }


def first_images(problem: Problem, completion: Completion) -> Sequence[str]:
    """The images of a completion's first prompt, which an environment may have written."""
    return completion.sequences[0].images if completion.ending else problem.images


def images_of(problem: Problem, completion: Completion) -> list[str]:
    """The images of a completion, as data URIs: of its prompt, of the answers to its turns, and
    those that a harness began anew with and had not shown."""
    found = [*first_images(problem, completion)]
    for turn in completion.turns:
        found += turn.images
        found += [image for image in turn.anew or () if image not in found]
    return found


def keep(images: Iterable[str], folder: Path, then: Remedy = CONTINUE) -> None:
    """Write images that are not there yet into a folder, each once, by its content.

    Raises:
        InputError: as `workplace.disk_faults`.
    """
    for name, image in {image_name(image): image for image in {*images}}.items():
        if not (folder / name).is_file():
            with disk_faults(folder, then):
                folder.mkdir(exist_ok=True)
            with whole_file(folder / name, then) as file:
                file.write(content_of(image))
