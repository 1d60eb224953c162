"""The controller's folders as arguments of workers' calls, on machines with or without its disk.

A worker gets a path on its own machine. On a machine that sees the controller's folder (the same
machine, or a shared file system) this is the folder itself. On any other machine it is a copy: a
folder to read is sent there before the call (`send`), and a folder to write is retrieved afterwards
(`retrieve`). Neither torch nor Ray is imported here: the caller provides the function that calls
the other machine (`Ask`). A message holds at most `CHUNK_BYTES`, and one is in transfer at a time,
so neither side holds more.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from tramontane.models.names import cache_dir
from tramontane.temporary import PREFIX, process_folder

if TYPE_CHECKING:
    import numpy as np

CHUNK_BYTES = 32 << 20  # of a file, in one message
COPIES = "copies"
MARK = ".controller-"  # begins the name of a file in a folder that is being written

Ask = Callable[..., Any]  # calls a method of the actor's `Copies`, and waits for its result

_locks: dict[tuple[str, str], threading.Lock] = {}  # one per machine and folder

Kind = Literal["model", "read", "written"]


@dataclass(frozen=True)
class Folder:
    """A folder of the controller.

    Args:
        path: absolute path on the controller's machine.
        kind: `model`: a checkpoint to load, whose copies are kept for later workers; passed as a
            string. `read`: copies last until `release`. `written`: see `written`.
        files: names, with parts separated by `/`, and sizes in bytes of its files.
        key: names its copies on other machines; different content has a different key.
        part: a folder within it to pass instead.
    """

    path: Path
    kind: Kind
    files: tuple[tuple[str, int], ...]
    key: str
    part: str = ""

    @classmethod
    def of(cls, path: Path, kind: Kind) -> Folder:
        """A folder with its current files."""
        path = path.absolute()
        paths = sorted(p for p in path.rglob("*") if p.is_file())
        files = tuple((p.relative_to(path).as_posix(), p.stat().st_size) for p in paths)
        content = repr((str(path), files, [p.stat().st_mtime_ns for p in paths]))
        return cls(path, kind, files, hashlib.sha256(content.encode()).hexdigest()[:24])

    def within(self, part: str) -> Folder:
        """The argument for a call on a folder within this one."""
        return replace(self, part=part)

    @property
    def is_here(self) -> bool:
        """True on a machine that sees the controller's folder."""
        return all(_size(self.path / name) == size for name, size in self.files)


@contextmanager
def written(path: Path) -> Iterator[Folder]:
    """A folder that workers write within this block. Meanwhile it holds a file with a unique name,
    that workers use to recognize the controller's disk.
    """
    mark = path / f"{MARK}{uuid4().hex}"
    mark.touch()
    try:
        yield Folder.of(path, "written")
    finally:
        mark.unlink(missing_ok=True)


def on_this_machine(value: Any) -> Any:
    """An argument of a call on the controller's machine: a folder becomes its path, and so does
    each folder among the arguments of a `partial`."""
    return _located(value, lambda folder: folder.path)


def folders_in(value: Any) -> list[Folder]:
    """The folders in an argument."""
    values = value.args if isinstance(value, partial) else (value,)
    return [v for v in values if isinstance(v, Folder)]


def _located(value: Any, locate: Callable[[Folder], Path]) -> Any:
    if isinstance(value, Folder):
        path = locate(value) / value.part
        return str(path) if value.kind == "model" else path
    if isinstance(value, partial) and folders_in(value):
        args = [_located(argument, locate) for argument in value.args]
        return partial(value.func, *args, **value.keywords)
    return value


class Copies:
    """The controller's folders on the machine of a worker: the folders themselves, or copies.

    Copies of models are in the user's cache folder, all others in the temporary folder of the
    process that made them (`temporary`).
    """

    def __init__(self) -> None:
        self._receiving: dict[str, Path] = {}  # copies that are not complete, by key

    def located(self, value: Any) -> Any:
        """An argument of a call, with folders replaced by paths on this machine."""
        return _located(value, self._path)

    def lacks(self, folder: Folder) -> bool:
        """True if a folder must be sent to this machine before it can be read."""
        return not folder.is_here and self._copy(folder) is None

    def begin(self, folder: Folder) -> None:
        """Start a copy; `commit` completes it."""
        parent = self._home(folder).parent
        parent.mkdir(parents=True, exist_ok=True)
        self._receiving[folder.key] = Path(tempfile.mkdtemp(prefix=f"{folder.key}.", dir=parent))

    def receive(self, folder: Folder, name: str, data: np.ndarray[Any, Any]) -> None:
        """Append bytes, uint8 [bytes], to a file of a copy."""
        path = self._receiving[folder.key] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data.data)

    def commit(self, folder: Folder) -> None:
        """Give a completed copy its final name."""
        made, home = self._receiving.pop(folder.key), self._home(folder)
        if home.is_dir():  # another machine that shares the cache folder may have been faster
            shutil.rmtree(made)
        else:
            made.rename(home)

    def written(self, folder: Folder) -> list[tuple[str, int]]:
        """Names and sizes of the files that this worker wrote and that the controller lacks."""
        copy = self._copy(folder)
        return [] if folder.is_here or copy is None else list(Folder.of(copy, "read").files)

    def read(self, folder: Folder, name: str, offset: int) -> np.ndarray[Any, Any]:
        """Up to `CHUNK_BYTES` of a file that this worker wrote, as uint8 [bytes]."""
        import numpy as np  # a verifier's workers do without

        path = self._home(folder) / name
        return np.fromfile(path, dtype=np.uint8, count=CHUNK_BYTES, offset=offset)

    def drop(self, folder: Folder) -> None:
        """Delete the copy that this process made, if any."""
        shutil.rmtree(self._home(folder), ignore_errors=True)

    def _path(self, folder: Folder) -> Path:
        path = folder.path if folder.is_here else self._copy(folder)
        if path is None:
            assert folder.kind == "written", f"{folder.path} was not sent to this machine"
            path = self._home(folder)
        if folder.kind == "written":
            (path / folder.part).mkdir(parents=True, exist_ok=True)
        return path

    def _copy(self, folder: Folder) -> Path | None:
        """The complete copy on this machine, possibly received by another process."""
        home = self._home(folder)
        if folder.kind == "read":
            folders = Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{COPIES}/{folder.key}")
            return next(folders, None)
        return home if home.is_dir() else None

    def _home(self, folder: Folder) -> Path:
        """The path of a copy made by this process."""
        if folder.kind == "model":
            return cache_dir() / "models" / folder.key
        return process_folder() / COPIES / folder.key


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def send(folder: Folder, node: str, ask: Ask) -> int:
    """Send a folder to a machine unless it has it; returns the number of bytes sent.

    Actors on one machine share a copy: while it is sent to one of them, the others wait here.
    """
    import numpy as np

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


def retrieve(folder: Folder, ask: Ask) -> None:
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
