"""The exception for errors that the user can fix: in a config, file, model or environment."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION = "0.2.0"  # as in pyproject.toml, which names the package tramontane-rl
# What runs a model, and stands in pyproject.toml as the extra `train`.
TRAIN = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "datasets",
)  # fmt: skip


# Packages of other extras that files or studies may ask for: the extra, and what it is for.
EXTRAS = {
    "pyarrow": ("parquet", "read and write Parquet files"),
    "scipy": ("studies", "run studies and the papers' analyses"),
}


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
    """Name the cause of an import error in this block, if it is how this package was installed.

    Garbage is not collected meanwhile: with torch, it is a quarter of an import's time, since each
    collection visits all that has been imported so far. Nor is it afterwards, in three steps that
    each visit all of it: what was imported counts as old at once. Where nothing new was imported,
    nothing does, and the caller's frozen objects are not counted, which takes a visit of each.

    Raises:
        InputError: a package of `TRAIN` or `EXTRAS` is not installed.
        ImportError: another project's files stand among this package's.
    """
    collects, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    except ImportError as error:
        if missing := missing_extra(error):
            raise InputError(missing) from None
        if mixed := other_project():
            raise ImportError(f"{mixed}\n{error}") from error
        raise
    finally:
        if collects:
            # The caller's frozen objects stay so.
            if len(sys.modules) > known and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def missing_extra(error: ImportError) -> str:
    """What to install, if the import of a package of `TRAIN` or `EXTRAS` failed; else empty."""
    package = (error.name or "").partition(".")[0]
    known = isinstance(error, ModuleNotFoundError) and package in {*TRAIN, *EXTRAS}
    return not_installed(package) if known else ""


def not_installed(package: str) -> str:
    """That a package of `TRAIN` or `EXTRAS` is not installed, and what to install."""
    extra, use = EXTRAS.get(package, ("train", "run models"))
    return f"{package} is not installed; to {use}, install: {install(extra)}"


def install(extra: str) -> str:
    """The command that adds the packages of an extra to this interpreter's environment.

    It names the interpreter, since another environment's pip would install a second torch, with
    CUDA. It names no version, so that pip leaves installed packages unchanged.
    """
    return f"{sys.executable} -m pip install 'tramontane-rl[{extra}]'"
