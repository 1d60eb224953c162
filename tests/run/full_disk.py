"""A run on a disk that is full after its first checkpoint; started by test_faults in a mount
namespace of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.controller.test_pipeline import check_ledger
from tests.runs import small_config
from tramontane import InputError, train
from tramontane.run.folder import RunFolder

MIB = 1 << 20


def main(disk: Path) -> None:
    disk.mkdir()
    folder = RunFolder(disk / "run")
    config = small_config(
        folder.path,
        pipeline={"updates": 4, "n_batch": 16},
        checkpoint={"every": 1, "keep": 3},
    )

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(disk)], check=True)
    with pytest.raises(InputError) as full:
        train(config, quiet=True, report=False)
    partial = folder.checkpoints / "step_2.partial"
    assert str(full.value).startswith(f"{partial}: No space left on device; make room")
    assert f"tramontane train --resume {folder.path}" in str(full.value)
    # Finished work stays, and half a checkpoint does not count.
    assert [m["update"] for m in folder.metrics()] == [1, 2]
    kept = folder.whole_checkpoint(print)
    assert kept is not None
    assert kept.name == "step_1"

    with pytest.raises(InputError, match="No space left on device"):
        train(resume=folder.path, quiet=True, report=False)
    assert folder.whole_checkpoint(print) == kept

    subprocess.run(["mount", "-o", f"remount,size={512 * MIB}", str(disk)], check=True)
    assert train(resume=folder.path, quiet=True, report=False).finished
    check_ledger(folder.path, config)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
