"""Folders and files that a command works on: one owner at a time, files that are complete and
flushed to disk, and clear errors for disk faults.

Ownership uses two locks of `filelock`, both in hidden files that are removed at the end:

`.lock`    locked by the kernel (flock), which releases it when the process ends, however it ends.
           Network file systems that support it share the lock between machines. Its text says who
           the owner is. Forked children do not hold it.
`.lease`   renewed every `LEASE_SECONDS / 3`, for file systems that do not share the kernel's lock
           between machines, or have none: another machine's owner counts as gone after
           `LEASE_SECONDS` without a renewal.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias

from tramontane.errors import InputError

if TYPE_CHECKING:
    from filelock import SoftFileLease

logger = logging.getLogger("tramontane")

HIDDEN = (".lock", ".lease")  # in a folder with an owner
LEASE_SECONDS = 30.0
MAX_NAME = 200  # bytes; file systems allow 255, and endings are added
EXIT_SECONDS = 1.0  # the kernel takes a moment to release a killed process's lock
CONTINUE = "run the same command again"
Remedy: TypeAlias = "str | Callable[[], str]"  # what to do after a fault
# flock on a file system without it: not implemented, no lock server, not supported.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DISK_FAULTS = (errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ENXIO)
_PATH_FAULTS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM)


# ------------------------------------------------------------------------------------- ownership


@dataclass(frozen=True)
class Owner:
    """The process that owns a place; `work` is a participle, e.g. `trained`."""

    process: int
    host: str
    since: str
    work: str

    @classmethod
    def read(cls, lock: Path) -> Owner | None:
        """The owner that a lock's file names, if any."""
        try:
            return cls(**json.loads(lock.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # absent, empty, or being written
            return None

    def __str__(self) -> str:
        return f"{self.work} by process {self.process} on {self.host} since {self.since}"


@contextmanager
def owned_folder(
    folder: str | Path,
    work: str,
    *,
    new: bool = False,
    then: Remedy = CONTINUE,
    wait: float = EXIT_SECONDS,
) -> Iterator[Owner | None]:
    """Own a folder, which is created if missing, and removed at the end if nothing was written.

    Args:
        folder: the folder.
        work: what is being done to it, as a participle, for the message to others.
        new: the folder must not exist.
        then: what to do once a disk fault is fixed; a function is called after the fault.
        wait: seconds to wait for another owner to finish.

    Yields:
        The previous owner, if it ended without releasing the folder, e.g. because it was killed.

    Raises:
        InputError: another process owns the folder; a file is in the way; the folder cannot be
            written, or a disk fault ends the work.
        FileExistsError: `new`, and the folder exists.
    """
    folder = Path(folder)
    check_folder(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with disk_faults(folder, then):
        _make(folder, exist_ok=not new)
    try:
        with _owned(folder, folder / ".lock", work, then, wait) as before:
            yield before
    finally:
        with suppress(OSError):  # not empty
            for path in made:
                path.rmdir()


def _make(folder: Path, *, exist_ok: bool) -> None:
    """Make a folder, where its file system has any; `/proc` says that a new one is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except FileNotFoundError:
        raise InputError(f"{folder}: cannot be made there; name another folder") from None


def owner_of(folder: Path) -> Owner | None:
    """The process that owns a folder now, or did until `LEASE_SECONDS` ago on another machine."""
    owner, lease = Owner.read(folder / ".lock"), folder / ".lease"
    try:
        if owner is None or time.time() - lease.stat().st_mtime > LEASE_SECONDS:
            return None
        if owner.host == socket.gethostname():
            os.kill(owner.process, 0)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError:  # another user's process
        pass
    return owner


@contextmanager
def owned_file(file: str | Path, work: str, *, wait: float = EXIT_SECONDS) -> Iterator[None]:
    """Own a file and the files that accompany it; see `owned_folder`.

    Raises:
        InputError: see `check_file` and `owned_folder`.
    """
    file = Path(file)
    check_file(file)
    with _owned(file, file.with_name(f".{file.name}.lock"), work, wait=wait):
        yield


@contextmanager
def whole_folder(folder: str | Path, work: str) -> Iterator[Path]:
    """Own a new folder, which will be complete or absent; see `owned_folder`.

    Yields:
        The folder to write into, which becomes `folder` at the end.

    Raises:
        InputError: the folder is not empty; or see `owned_folder`.
    """
    folder = Path(folder)
    check_folder(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"{folder}: not empty; name another folder")
    with disk_faults(folder):
        _make(folder.parent, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    with _owned(folder, folder.with_name(f".{folder.name}.lock"), work):
        try:
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
            partial.mkdir()
            yield partial
            commit(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _owned(
    place: Path, path: Path, work: str, then: Remedy = CONTINUE, wait: float = EXIT_SECONDS
) -> Iterator[Owner | None]:
    from filelock import FileLock, SoftFileLease, Timeout  # 0.1 s

    lock = FileLock(path, timeout=wait, thread_local=False, fallback_to_soft=False)
    lease = SoftFileLease(
        path.with_name(path.name.removesuffix("lock") + "lease"),
        lease_duration=LEASE_SECONDS,
        thread_local=False,
    )
    with disk_faults(place, then, outside=True):
        try:
            lock.acquire()
        except Timeout:
            raise _refusal(place, path) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning(
                f"{place}: its file system has no locks ({error.strerror}); only "
                f"{lease.lock_file} can reveal a second process"
            )
        try:
            before = Owner.read(path)
            _take(lease, place, path)
            try:
                if before:
                    logger.warning(f"{place}: taken over; was being {before}, which has ended")
                now = Owner(os.getpid(), socket.gethostname(), time.strftime("%F %T"), work)
                path.write_text(json.dumps(asdict(now)) + "\n", encoding="utf-8")
                yield before
            finally:
                with suppress(OSError):  # the folder may be gone, or its disk broken
                    path.unlink()
                with suppress(OSError):
                    lease.release()
        finally:
            with suppress(OSError):
                lock.release()


def _take(lease: SoftFileLease, place: Path, path: Path) -> None:
    """Take the lease. It is free, or its process has ended, unless the kernel's lock is not shared
    with the owner's machine."""
    from filelock import Timeout

    marker, renewed = Path(lease.lock_file), None
    until = time.monotonic() + LEASE_SECONDS + EXIT_SECONDS
    while True:
        try:
            lease.acquire(timeout=EXIT_SECONDS)
            return
        except Timeout:
            with suppress(FileNotFoundError):  # released just now
                seen = marker.stat().st_mtime_ns
                if renewed is None:
                    logger.warning(
                        f"{place}: was being {Owner.read(path)}; waiting up to "
                        f"{LEASE_SECONDS:g} s for a sign of life"
                    )
                elif seen != renewed or time.monotonic() > until:
                    raise _refusal(place, path) from None
                renewed = seen


def _refusal(place: Path, path: Path) -> InputError:
    owner = Owner.read(path)
    if owner is None:
        return InputError(f"{place}: in use by another process, which began just now")
    here = owner.host == socket.gethostname()
    stop = f" (kill {owner.process})" if here and owner.process != os.getpid() else ""
    return InputError(f"{place}: being {owner}; wait until it ends, or stop it first{stop}")


# ------------------------------------------------------------------------------ faults of the disk


@contextmanager
def disk_faults(path: Path, then: Remedy = CONTINUE, *, outside: bool = False) -> Iterator[None]:
    """Report disk faults: errors of this block caused by one become an `InputError`.

    Args:
        path: what the block writes.
        then: what to do once the fault is repaired; a function is called after the fault.
        outside: the block does more than write, so only operating system errors count.

    Raises:
        InputError: no space (a full disk, a quota, a file-size limit), a disk that fails or is
            read-only, or a path that is missing, has vanished or is in the way.
    """
    try:
        yield
    except Exception as error:
        unrelated = outside and not isinstance(error, OSError)
        if unrelated or (found := _fault(error, path)) is None:
            raise
        remedy = then if isinstance(then, str) else then()
        raise InputError(f"{found}, then {remedy}") from error


def _fault(error: Exception, path: Path) -> str | None:
    file = path
    if isinstance(error, OSError) and isinstance(error.filename, str):
        file = Path(error.filename).absolute()
        if inside := file.is_relative_to(path.absolute()):
            file = path / file.relative_to(path.absolute())
        if error.errno in _PATH_FAULTS and (inside or not path.exists()):
            if error.errno in (errno.EACCES, errno.EPERM):
                return f"{file}: {error.strerror}; make it writable"
            if error.errno != errno.ENOENT:
                return f"{file}: {error.strerror}; move aside what is in the way"
            while not file.parent.exists():
                file = file.parent
            return f"{file}: no longer there (moved or deleted?); put it back"
        file = file if inside else path
    # Libraries raise their own error types, so the message must decide.
    text = str(error)
    for code in _NO_ROOM:
        if os.strerror(code) in text:
            return f"{file}: {os.strerror(code)}; make room"
    for code in _DISK_FAULTS:
        if os.strerror(code) in text:
            return f"{file}: {os.strerror(code)}; repair its disk, or make it writable"
    if "unexpected pos" in text:  # torch's message for a short write
        return f"{file}: {os.strerror(errno.ENOSPC)}; make room"
    return None


def path_part(name: str) -> str:
    """The name, which can be that of a file or folder: it leads nowhere else.

    Raises:
        ValueError: it is empty, `.` or `..`, too long, or has a separator or control characters.
    """
    bad = name.strip() in ("", ".", "..") or re.search(r"[/\\]", name) or not name.isprintable()
    if bad or len(name.encode()) > MAX_NAME:
        raise ValueError(
            f"{name!r} cannot be a file's name: give one of letters, digits and . + - _"
        )
    return name


# ------------------------------------------------------------------------------------- whole files


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file that is complete or absent, and flushed to disk; see `whole_file`."""
    with whole_file(file) as out:
        out.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_file(file: Path, then: Remedy = CONTINUE) -> Iterator[IO[bytes]]:
    """A file to write, which will be complete or absent, and flushed to disk.

    Raises:
        InputError: as `disk_faults`.
    """
    # Several readers of a run may write a report at the same time, each into its own file.
    partial = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    with disk_faults(file, then):
        try:
            with partial.open("wb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            partial.replace(file)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        sync(file.parent)


def commit(partial: Path, final: Path) -> None:
    """Rename a finished file or folder, so that a power failure leaves all of it or nothing."""
    sync_all(partial)
    partial.replace(final)
    sync(final.parent)


def sync_all(path: Path) -> None:
    """`sync` a file, or a folder with everything in it."""
    for found in [*path.rglob("*"), path]:
        sync(found)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot sync folders
            raise
    finally:
        os.close(handle)


def check_file(file: str | Path) -> None:
    """Check that a file can be written at a path.

    Raises:
        InputError: the path is a folder or a device, or its folder does not exist.
    """
    file = Path(file)
    if file.parent.is_file():
        raise InputError(f"{file}: {file.parent} is a file; name a folder")
    if not file.parent.is_dir():
        raise InputError(f"{file}: there is no folder {file.parent}; make it first")
    if file.is_dir():
        raise InputError(f"{file}: a folder; name a file")
    if file.exists() and not file.is_file():  # of /dev/full, one would read zeros without end
        raise InputError(f"{file}: a device or a pipe; name a file")


def check_folder(folder: str | Path) -> None:
    """Check that a path is a folder or can become one.

    Raises:
        InputError: a file is in the way.
    """
    folder = Path(folder)
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise InputError(f"{folder}: {nearest} is a file; name a folder")
