"""The exception for errors that the user can fix: in a config, file, model or environment."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION = "0.1.0"  # as in pyproject.toml, which names the package tramontane-rl


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


def other_project(package: Path = Path(__file__).parent) -> str:
    """What is wrong, and how to fix it, if the package index's unrelated project `tramontane` has
    files in this package's folder; empty if it has none."""
    import importlib.metadata  # 0.03 s

    for found in importlib.metadata.distributions(name="tramontane", path=[str(package.parent)]):
        if any(file.parts[0] == package.name for file in found.files or ()):
            pip = f"{sys.executable} -m pip"
            return (
                f"{package} also has files of {found.name} {found.version}, an unrelated project "
                f"of the package index; this one is tramontane-rl: {pip} uninstall tramontane, "
                f"then {pip} install --force-reinstall --no-deps tramontane-rl"
            )
    return ""


@contextmanager
def importing() -> Iterator[None]:
    """Let an import error of this block begin with `other_project()`, if that is the cause.

    Raises:
        ImportError: another project's files stand among this package's.
    """
    try:
        yield
    except ImportError as error:
        if mixed := other_project():
            raise ImportError(f"{mixed}\n{error}") from error
        raise


def install(extra: str) -> str:
    """The command that adds the packages of an extra to this interpreter's environment.

    It names the interpreter, since another environment's pip would install a second torch, with
    CUDA. It names no version, so that pip leaves installed packages unchanged.
    """
    return f"{sys.executable} -m pip install 'tramontane-rl[{extra}]'"
