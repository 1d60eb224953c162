"""File transfer between the controller's machine and an actor's, through Ray.

The controller reads and writes its own disk; an actor's `Copies` do so on the other machine. A
message holds at most `CHUNK_BYTES`, and one is in transfer at a time, so neither side holds more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tramontane.placement.files import CHUNK_BYTES, Folder

Ask = Callable[..., Any]  # calls a method of the actor's `Copies`, and waits for its result

_locks: dict[tuple[str, str], threading.Lock] = {}  # one per machine and folder


def send(folder: Folder, node: str, ask: Ask) -> int:
    """Send a folder to a machine unless it has it; returns the number of bytes sent.

    Actors on one machine share a copy: while it is sent to one of them, the others wait here.
    """
    with _locks.setdefault((node, folder.key), threading.Lock()):
        if not ask("lacks", folder):
            return 0
        ask("begin", folder)
        for name, _ in folder.files:
            with (folder.path / name).open("rb") as file:
                while True:
                    data = np.fromfile(file, dtype=np.uint8, count=CHUNK_BYTES)
                    ask("receive", folder, name, data)
                    if len(data) < CHUNK_BYTES:
                        break
        ask("commit", folder)
    return sum(size for _, size in folder.files)


def collect(folder: Folder, ask: Ask) -> None:
    """Write the files that an actor wrote for a folder into the folder, and delete its copy.

    Raises:
        OSError: the controller's disk is full, or a file changed meanwhile.
    """
    for name, size in ask("written", folder) if folder.kind == "written" else ():
        path = folder.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for offset in range(0, size, CHUNK_BYTES):
                file.write(ask("read", folder, name, offset).data)
        if path.stat().st_size != size:
            raise OSError(f"{path}: {path.stat().st_size:,} of {size:,} bytes arrived")
    ask("drop", folder)
