"""Peaks of memory, for `tests.forked`."""

from pathlib import Path

from tramontane.models.loading import load_model


def peak() -> int:
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) << 10


def of_loading(folder: Path, file: Path) -> None:
    """Write how far loading a model raises the peak of this process."""
    before = peak()
    load_model(str(folder))
    file.write_text(str(peak() - before))
