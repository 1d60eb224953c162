"""Limits of the images in rows; see docs/images.md."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tramontane.config.section import Section
from tramontane.models.images import Limits

ImageFormat = Literal["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"]


class ImagesConfig(Section):
    """Limits of the images in rows. Images above them are refused before they are unpacked."""

    max_pixels: int = Field(2**24, ge=1)
    """Most pixels of an image, width times height."""
    max_bytes: int = Field(20 * 2**20, ge=1)
    """Largest file of an image, in bytes."""
    formats: tuple[ImageFormat, ...] = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
    """Formats that are decoded. Others are not tried."""

    @property
    def limits(self) -> Limits:
        """The same, for the decoder."""
        return Limits(self.max_pixels, self.max_bytes, self.formats)
