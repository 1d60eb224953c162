"""Files and folders that commands write."""

from __future__ import annotations

from pathlib import Path

from tramontane.errors import InputError


def write_whole(file: Path, text: str) -> None:
    """Write a file that is complete or absent."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def check_file(file: str | Path) -> None:
    """Check that a file can be written at a path.

    Raises:
        InputError: the path is a folder, or its folder does not exist.
    """
    file = Path(file)
    if not file.parent.is_dir():
        raise InputError(f"{file}: there is no folder {file.parent}; make it first")
    if file.is_dir():
        raise InputError(f"{file}: a folder; name a file")


def check_folder(folder: str | Path) -> None:
    """Check that a path is a folder, or that one can be made there.

    Raises:
        InputError: a file is in the way.
    """
    folder = Path(folder)
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise InputError(f"{folder}: {nearest} is a file; name a folder")
