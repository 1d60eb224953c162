"""A run on a disk that is full after its first checkpoint, and later turns read-only; started by
test_folder_faults in a process whose mounts are its own."""

import ctypes
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.controller.test_pipeline import check_ledger
from tests.runs import small_config
from tramontane import InputError, train
from tramontane.config import Config
from tramontane.run.folder import RunFolder

MIB = 1 << 20
NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000  # CLONE_NEWUSER and CLONE_NEWNS of linux/sched.h


def main(disk: Path, model: str) -> None:
    own_mounts()
    disk.mkdir()
    folder = RunFolder(disk / "run")
    config = small_config(
        folder.path,
        model=model,
        pipeline={"updates": 3, "n_batch": 16},
        checkpoint={"every": 1, "keep": 3},
    )
    # In a process of its own: the lease that no process can remove ends with it.
    faults = multiprocessing.get_context("fork").Process(target=meet_faults, args=(folder, config))
    faults.start()
    faults.join()
    assert faults.exitcode == 0
    assert train(resume=folder.path, quiet=True, report=False).finished
    check_ledger(folder.path, config)


def meet_faults(folder: RunFolder, config: Config) -> None:
    """A disk that has too little room and, once it has enough, turns read-only."""
    disk = folder.path.parent
    mount("-t", "tmpfs", "-o", "size=16m", "tmpfs", disk)
    with pytest.raises(InputError) as full:
        train(config, quiet=True, report=False)
    partial = folder.checkpoints / "update_2.partial"
    assert str(full.value).startswith(f"{partial}: No space left on device; make room")
    assert f"tramontane train --resume {folder.path}" in str(full.value)
    # Finished work stays, and half a checkpoint does not count.
    assert [m["update"] for m in folder.metrics()] == [1, 2]
    kept = folder.whole_checkpoint(print)
    assert kept is not None
    assert kept.name == "update_1"

    with pytest.raises(InputError, match="No space left on device"):
        train(resume=folder.path, quiet=True, report=False)
    assert folder.whole_checkpoint(print) == kept

    mount("-o", f"remount,size={512 * MIB}", disk)
    recorded = folder.metrics_file.read_bytes()
    turn_read_only(disk)
    with pytest.raises(InputError, match=r"run/\.lock: Read-only file system; .* --resume"):
        train(resume=folder.path, quiet=True, report=False)
    subprocess.run(["umount", str(disk)], check=True)
    assert folder.metrics_file.read_bytes() == recorded

    def fail(metrics: Mapping[str, Any]) -> None:
        if metrics["update"] == 2:
            turn_read_only(disk)

    with pytest.raises(InputError, match=r"disk/run/.*: Read-only file system; .* --resume"):
        train(resume=folder.path, quiet=True, report=False, on_update=fail)
    subprocess.run(["umount", str(disk)], check=True)
    assert [m["update"] for m in folder.metrics()] == [1, 2]


def own_mounts() -> None:
    """Let this process mount, unseen by others, as `unshare --user --map-root-user --mount` does a
    fresh one."""
    maps = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(NEW_USER | NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in maps.items():
        Path(f"/proc/self/{name}").write_text(text)
    mount("--make-rprivate", "/")


def turn_read_only(disk: Path) -> None:
    """By a second mount above the first, which files that are open do not keep busy."""
    mount("--bind", disk, disk)
    mount("-o", "remount,bind,ro", disk)


def mount(*args: str | Path) -> None:
    subprocess.run(["mount", *map(str, args)], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
