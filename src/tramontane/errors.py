"""The exception for errors that a user can fix: in a config, a file, a model, an environment."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InputError(Exception):
    """An input is wrong; the message names the input and the remedy."""


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Name the file of whatever goes wrong in this block, which reads one that may be damaged, or
    come from elsewhere.

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
            f"or try again if a run is writing it"
        ) from None


def install(extra: str) -> str:
    """The command that adds the packages of an extra to this interpreter's environment.

    It names the interpreter: another environment's pip would install a second torch, with CUDA. And
    it names no version, so that pip leaves the packages that are there alone.
    """
    return f"{sys.executable} -m pip install 'tramontane[{extra}]'"
