"""Damaged files of runs, in words for the page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tramontane.errors import InputError


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Name the file of whatever goes wrong in this block, which reads it. Requests that need the
    file are refused with that message, and everything else goes on.

    Raises:
        InputError: the file is damaged or gone.
    """
    try:
        yield
    except InputError:  # which names it
        raise
    except Exception as error:  # of whichever library, and of whatever a value turned into
        raise InputError(
            f"{file}: damaged or gone ({type(error).__name__}: {error}); restore it from a copy, "
            f"or look again if the run goes on"
        ) from None
