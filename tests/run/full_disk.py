"""A run on a disk that is full after its first checkpoint; started by test_faults in a mount
namespace of its own."""

import subprocess
import sys
from pathlib import Path

import yaml

from tests.controller.test_pipeline import check_ledger
from tests.runs import small_config
from tramontane.run.folder import RunFolder

MIB = 1 << 20


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tramontane.cli", "train", *args],
        capture_output=True,
        text=True,
        timeout=240,
    )


def main(disk: Path, kind: str) -> None:
    disk.mkdir()
    folder = RunFolder(disk / "run")
    config = small_config(
        folder.path,
        pipeline={"updates": 4, "n_batch": 16},
        checkpoint={"every": 1, "keep": 3},
        placement={"kind": kind},
    )
    file = disk.with_name("config.yaml")
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(disk)], check=True)
    full = command(str(file))
    assert full.returncode == 2, full.stdout + full.stderr
    partial = folder.checkpoints / "step_2.partial"
    assert f"error: {partial}: No space left on device; make room" in full.stderr, full.stderr
    assert f"tramontane train --resume {folder.path}" in full.stderr
    assert "Traceback" not in full.stderr
    # Finished work stays, and half a checkpoint does not count.
    assert [m["update"] for m in folder.metrics()] == [1, 2]
    kept = folder.whole_checkpoint(print)
    assert kept is not None
    assert kept.name == "step_1"

    still_full = command("--resume", str(folder.path))
    assert still_full.returncode == 2, still_full.stdout + still_full.stderr
    assert folder.whole_checkpoint(print) == kept

    subprocess.run(["mount", "-o", f"remount,size={512 * MIB}", str(disk)], check=True)
    resumed = command("--resume", str(folder.path))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    check_ledger(folder.path, config)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
