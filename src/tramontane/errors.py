"""The exception for errors that the user can fix: in a config, file, model or environment."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InputError(Exception):
    """Invalid input; the message names the input and the remedy."""


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Name the file in any error of this block, which reads a possibly damaged or foreign file.

    Raises:
        InputError: the file is damaged or gone.
    """
    try:
        yield
    except InputError:  # already names it
        raise
    except Exception as error:  # of any library, or from an unexpected value
        raise InputError(
            f"{file}: damaged or gone ({type(error).__name__}: {error}); restore it from a copy, "
            f"or try again if a run is writing it"
        ) from None


def install(extra: str) -> str:
    """The command that adds the packages of an extra to this interpreter's environment.

    It names the interpreter, since another environment's pip would install a second torch, with
    CUDA. It names no version, so that pip leaves installed packages unchanged.
    """
    return f"{sys.executable} -m pip install 'tramontane[{extra}]'"
