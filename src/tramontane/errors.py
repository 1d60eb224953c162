"""The exception for errors that a user can fix: in a config, a file, a model, an environment."""

import sys


class InputError(Exception):
    """An input is wrong; the message names the input and the remedy."""


def install(extra: str) -> str:
    """The command that adds the packages of an extra to this interpreter's environment.

    It names the interpreter: another environment's pip would install a second torch, with CUDA. And
    it names no version, so that pip leaves the packages that are there alone.
    """
    return f"{sys.executable} -m pip install 'tramontane[{extra}]'"
