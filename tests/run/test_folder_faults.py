"""Full disks and truncated files, under real runs."""

import asyncio
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

import tramontane
from tests import forked
from tests.controller.test_pipeline import check_ledger
from tests.forked import Command
from tests.run import full_disk
from tests.runs import small_config
from tramontane.audit.audit import audit
from tramontane.config import Config
from tramontane.controller.waits import in_background
from tramontane.errors import InputError
from tramontane.run.changes import open_run
from tramontane.run.folder import RunFolder
from tramontane.run.manifest import damage, seal
from tramontane.run.rollouts import read_rollouts, read_run
from tramontane.run.screen import LiveDisplay, QuietScreen
from tramontane.run.train import train
from tramontane.view.report import write_report

SIZES = {"updates": 3, "n_batch": 16}
SLOW = "tests.run.rewards.slow"  # a run that lives on at leisure, while other processes work


class Warned(QuietScreen):
    """Remembers its warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, one_layer: str) -> Path:
    """A run with three checkpoints, to be copied; what it printed is in `screen` beside it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with (folder.parent / "screen").open("w") as file:
        train(config_of(folder, one_layer), LiveDisplay(Console(file=file)), report=write_report)
    return folder


def config_of(folder: Path, model: str) -> Config:
    short = SIZES | {"l_max": 32, "l_cache": 8, "diversity": "none"}
    return small_config(folder, model=model, pipeline=short, checkpoint={"every": 1, "keep": 3})


@pytest.fixture
def run(finished: Path, tmp_path: Path, one_layer: str) -> RunFolder:
    """A copy of the finished run without its summary, as if it had died just before."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "summary.json").unlink()
    copied = RunFolder(folder)
    copied.write_config(config_of(folder, one_layer))
    return copied


def test_a_run_ends_with_its_files_and_its_number_type(finished: Path) -> None:
    lines = (finished.parent / "screen").read_text().splitlines()[-2:]
    files = dict(part.split(": ") for line in lines for part in line.split(" · "))
    names = ("report.html", "checkpoints/update_3/weights", "rollouts", "metrics.jsonl")
    assert [*files.values()] == [str(finished / name) for name in names]
    assert all(Path(file).exists() for file in files.values())
    summary = json.loads((finished / "summary.json").read_text())
    reason = "float32 (auto: float32, TRAMONTANE_CPU_DTYPE in the environment)"
    assert summary["number_types"] == {"generator": reason, "trainer": reason}


def halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
def test_every_truncated_changed_or_missing_file_of_a_checkpoint_is_found(run: RunFolder) -> None:
    whole = run.checkpoints / "update_3"
    assert damage(whole) is None
    # The model card is written last, and nothing is resumed from it.
    files = [
        p.relative_to(whole) for p in whole.rglob("*") if p.is_file() and p.name != "README.md"
    ]
    names = {str(f) for f in files}
    assert {
        "manifest.json",
        "pipeline.json",
        "completions.parquet",
        "weights/model.safetensors",
    } < names
    assert {"trainer/.metadata", "trainer/checksums_0"} < names
    harms: list[Callable[[Path], None]] = [halve, flip, os.unlink]
    for file in files:
        for harm in harms:
            harmed = whole.with_name("harmed")
            shutil.copytree(whole, harmed)
            harm(harmed / file)
            found = damage(harmed)
            assert found is not None, (file, harm)
            # A flipped bit may leave the manifest readable: then a file does not fit it.
            assert str(file) in found or str(file) == "manifest.json"
            shutil.rmtree(harmed)


@pytest.mark.parametrize(
    "file",
    ["pipeline.json", "completions.parquet", "weights/model.safetensors", "trainer/__0_0.distcp"],
)
@pytest.mark.slow
def test_a_checkpoint_cut_in_half_is_set_aside_for_the_one_before(
    run: RunFolder, file: str
) -> None:
    halve(run.checkpoints / "update_3" / file)
    folder, config = open_run(run.path)
    screen = Warned()
    train(config, screen, folder)
    check_ledger(run.path, config)
    assert [m["update"] for m in folder.metrics()] == [1, 2, 3]
    assert damage(run.checkpoints / "update_3") is None
    [warning] = screen.warnings
    assert f"damaged checkpoint, set aside: {run.checkpoints / 'update_3'}: {file} has" in warning
    assert warning in (run.path / "events.log").read_text()
    assert (run.checkpoints / "update_3.damaged").is_dir()


@pytest.mark.slow
def test_a_changed_bit_of_the_state_is_found_as_it_is_loaded(run: RunFolder) -> None:
    flip(run.checkpoints / "update_3/trainer/__0_0.distcp")
    folder, config = open_run(run.path)
    screen = Warned()
    train(config, screen, folder)
    check_ledger(run.path, config)
    assert [m["update"] for m in folder.metrics()] == [1, 2, 3]
    [warning] = screen.warnings
    assert f"damaged checkpoint, set aside: {run.checkpoints / 'update_3'}: " in warning
    assert "__0_0.distcp: the trainer state is damaged" in warning
    assert (run.checkpoints / "update_3.damaged").is_dir()


@pytest.mark.slow
def test_if_no_state_can_be_loaded_nothing_is_trained_anew(run: RunFolder) -> None:
    for number in (1, 2):
        shutil.rmtree(run.checkpoints / f"update_{number}")
    flip(run.checkpoints / "update_3/trainer/__0_0.distcp")
    folder, config = open_run(run.path)
    before = folder.metrics()
    for _ in range(2):
        with pytest.raises(InputError, match=r"no checkpoint is whole: update_3; they are kept"):
            train(config, QuietScreen(), folder)
    assert folder.metrics() == before


@pytest.mark.parametrize("kept", [True, False])
def test_a_run_whose_checkpoints_are_missing_does_not_begin_again(
    run: RunFolder, kept: bool
) -> None:
    shutil.rmtree(run.checkpoints)
    if kept:
        run.checkpoints.mkdir()
    folder, config = open_run(run.path)
    before = folder.metrics()
    for _ in range(2):
        with pytest.raises(InputError, match=r"checkpoints are missing .*of 3 updates: put them"):
            train(config, QuietScreen(), folder)
    assert folder.metrics() == before


@pytest.mark.slow
def test_a_resume_reads_the_trainers_state_once(run: RunFolder) -> None:
    opened: Counter[str] = Counter()

    def count(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).endswith(".distcp"):
            opened[str(args[0])] += 1

    sys.addaudithook(count)  # which cannot be removed
    folder, config = open_run(run.path)
    assert train(config, QuietScreen(), folder).finished
    assert opened == {str(run.checkpoints / "update_3/trainer/__0_0.distcp"): 1}


def test_if_no_checkpoint_is_whole_the_error_names_each(run: RunFolder) -> None:
    for number in (1, 2, 3):
        (run.checkpoints / f"update_{number}" / "pipeline.json").unlink()
    folder, config = open_run(run.path)
    before = folder.metrics()
    with pytest.raises(
        InputError, match=r"no checkpoint is whole: update_3 \(pipeline.json is miss"
    ):
        train(config, QuietScreen(), folder)
    assert folder.metrics() == before


@pytest.mark.parametrize("manifest", ["[]", "[" * 100_000, "{}", '{"pipeline.json": 1}', "null"])
def test_a_manifest_that_lists_no_files_is_damage(run: RunFolder, manifest: str) -> None:
    whole = run.checkpoints / "update_3"
    (whole / "manifest.json").write_text(manifest)
    assert "manifest.json" in str(damage(whole))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pipeline.json", "[]"),
        ("pipeline.json", "[" * 100_000),
        ("pipeline.json", "{}"),
        ("completions.parquet", "x"),
    ],
)
def test_a_checkpoint_that_no_run_wrote_is_an_error(run: RunFolder, name: str, text: str) -> None:
    (run.checkpoints / "update_3" / name).write_text(text)
    seal(run.checkpoints / "update_3")
    folder, config = open_run(run.path)
    with pytest.raises(InputError, match=rf"pipeline.json: damaged|{name}: not a whole"):
        train(config, QuietScreen(), folder)


def test_a_trainers_state_of_another_update_ends_the_run(run: RunFolder) -> None:
    newest = run.checkpoints / "update_3"
    shutil.rmtree(newest / "trainer")
    shutil.copytree(run.checkpoints / "update_2/trainer", newest / "trainer")
    seal(newest)
    folder, config = open_run(run.path)
    with pytest.raises(RuntimeError, match="trainer has made 2 updates, the controller 3"):
        train(config, QuietScreen(), folder)


def test_folders_with_other_names_are_no_checkpoints(run: RunFolder) -> None:
    for name in ("update_x", "update_", "update_1e3", "update_4.copy", "update_-1"):
        (run.checkpoints / name).mkdir()
    (run.checkpoints / "update_9").write_text("a file")
    assert run.newest_version == 3
    assert run.whole_checkpoint(pytest.fail) == run.checkpoints / "update_3"


def test_lost_metrics_are_said_and_the_run_is_finished_without(run: RunFolder) -> None:
    run.metrics_file.unlink()
    assert "lacks 3 of the updates" in write_report(run.path).read_text()
    folder, config = open_run(run.path)
    screen = Warned()
    result = train(config, screen, folder)
    assert "metrics of 3 of 3 updates are lost" in screen.warnings[0]
    assert result.finished and result.summary["updates"] == 3


@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.99])
def test_a_cut_config_of_a_run_is_refused(run: RunFolder, kept: float) -> None:
    run.write_config(run.config())
    file = run.path / "config.yaml"
    os.truncate(file, int(kept if kept >= 1 else kept * file.stat().st_size))
    with pytest.raises(InputError, match=r"config.yaml: .*(cut short|not valid)"):
        open_run(run.path)


def test_a_crash_while_a_checkpoint_is_replaced_leaves_the_old_one(run: RunFolder) -> None:
    (run.checkpoints / "update_3").rename(run.checkpoints / "update_3.old")
    assert run.whole_checkpoint(pytest.fail) == run.checkpoints / "update_3"


def test_a_run_whose_checkpoints_have_their_old_names_is_resumed(
    run: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    for checkpoint in [*run.checkpoints.iterdir()]:
        checkpoint.rename(checkpoint.with_name(checkpoint.name.replace("update", "step")))
    folder, config = open_run(run.path, ["pipeline.updates=4"])
    train(config, QuietScreen(), folder)
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step_2", "step_3", "update_4"]
    assert [m["update"] for m in folder.metrics()] == [1, 2, 3, 4]
    assert caplog.text.count("step_N is now called update_N") == 1


@pytest.mark.parametrize("cut", [1, 40])
@pytest.mark.slow
def test_a_last_line_of_metrics_that_was_cut_short_does_not_count(run: RunFolder, cut: int) -> None:
    whole = run.metrics()
    os.truncate(run.metrics_file, run.metrics_file.stat().st_size - cut)
    # Without the line's end, what stands there is still whole.
    assert run.metrics() == (whole if cut == 1 else whole[:-1])
    assert f"{len(run.metrics())} updates" in write_report(run.path).read_text()
    shutil.rmtree(run.checkpoints / "update_3")
    folder, config = open_run(run.path)
    train(config, QuietScreen(), folder)
    assert [m["update"] for m in folder.metrics()] == [1, 2, 3]


@pytest.mark.parametrize("line", [b'{"update": 2, "rew\n', b"\xff\xfe\n", b"[1]\n"])
def test_a_broken_line_in_the_middle_of_metrics_is_named(run: RunFolder, line: bytes) -> None:
    lines = run.metrics_file.read_bytes().splitlines(keepends=True)
    lines[1] = line
    run.metrics_file.write_bytes(b"".join(lines))
    folder, config = open_run(run.path)
    readers: list[Callable[[], Any]] = [
        folder.metrics,
        lambda: write_report(run.path),
        lambda: train(config, QuietScreen(), folder),
    ]
    for read in readers:
        with pytest.raises(InputError, match=r"metrics\.jsonl:2: .*; every line must .*: fix this"):
            read()
    assert run.metrics_file.read_bytes() == b"".join(lines)


@pytest.mark.slow
def test_a_cut_rollouts_file_is_named_and_the_others_are_audited(run: RunFolder) -> None:
    file = run.rollouts / "update_000003.parquet"
    rows, lost = len(list(read_run(run.path))), len(list(read_rollouts(file)))
    halve(file)
    found = audit(run.path)
    assert found.completions == rows - lost
    assert len(found.broken) == 1
    assert found.broken[0].startswith(f"{file}: not a whole Parquet file (")
    write_report(run.path)


def test_a_changed_bit_of_the_rollouts_is_noticed_by_its_checksum(run: RunFolder) -> None:
    file = run.rollouts / "update_000003.parquet"
    row_group = pq.ParquetFile(file).metadata.row_group(0)
    columns = [row_group.column(i) for i in range(row_group.num_columns)]
    largest = max(columns, key=lambda column: column.total_compressed_size)
    content = bytearray(file.read_bytes())
    content[largest.data_page_offset + largest.total_compressed_size // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match="not a whole Parquet file"):
        list(read_rollouts(file))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "data", "file"),
    [
        (9_000, {}, "rollouts/update_000001.parquet"),
        (1_000_000, {}, "checkpoints/update_1.partial"),
        (9_000, {"eval": "playground:"}, "evaluation_before.partial"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_with_the_remedy(
    tmp_path: Path, size: int, data: dict[str, Any], file: str, one_layer: str
) -> None:
    config = small_config(
        tmp_path / "run",
        model=one_layer,
        data=data,
        pipeline=SIZES | {"updates": 1},
        checkpoint={"every": 1},
        evaluation={"problems": 8},
    )
    config_file = tmp_path / "config.yaml"
    config_file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    done = Command("train", str(config_file), file_size=size)
    printed = done.communicate()
    assert done.wait() == 2, printed
    assert f"{tmp_path / 'run' / file}: File too large; make room, then" in printed, printed
    assert "Traceback" not in printed
    folder, resumed = open_run(tmp_path / "run")
    if data:
        resumed = resumed.model_copy(update={"data": config_of(tmp_path, one_layer).data})
    train(resumed, QuietScreen(), folder)
    check_ledger(tmp_path / "run", resumed)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_what_was_done_and_it_can_be_resumed(
    tmp_path: Path, one_layer: str
) -> None:
    """The errors of other placements are checked in `placement/test_placement.py`."""
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    disk = tmp_path / "disk"
    try:
        probe = ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
        subprocess.run([*inside, *probe], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    done = Command(full_disk.__file__, str(disk), one_layer)
    printed = done.communicate()
    assert done.wait() == 0, printed


def train_moved(config: str, moved: Path) -> None:
    """A run, by its config as JSON, whose folder moves at its second update."""
    folder = Path(Config.model_validate_json(config).run_dir)

    def move(metrics: Mapping[str, Any]) -> None:
        if metrics["update"] == 2:
            folder.rename(moved)

    message = rf"^{folder}: no longer there \(moved or deleted\?\); put it back, then continue with"
    with pytest.raises(InputError, match=message):
        tramontane.train(Config.model_validate_json(config), quiet=True, on_update=move)


@pytest.mark.slow
def test_a_folder_that_moves_under_a_run_is_named_and_the_run_can_be_resumed(
    tmp_path: Path, one_layer: str
) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    # In a process of its own: the lease that moves with the folder ends with the process.
    config = config_of(folder, one_layer).model_dump_json()
    assert forked.end(forked.start(train_moved, config, moved)) == 0
    assert not folder.exists()
    assert [m["update"] for m in RunFolder(moved).metrics()] == [1, 2]
    assert tramontane.train(resume=moved, quiet=True, report=False).finished
    check_ledger(moved, config_of(moved, one_layer))


# Once DISK/broken exists, no process can write or sync a file under DISK.
BROKEN_DISK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int broken(int file) {
    char link[64], path[4096], mark[4096];
    const char *disk = getenv("DISK");
    snprintf(mark, sizeof mark, "%s/broken", disk);
    if (access(mark, F_OK)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strncmp(path, disk, strlen(disk)) == 0;
}

ssize_t write(int file, const void *bytes, size_t count) {
    if (broken(file)) { errno = EIO; return -1; }
    return ((ssize_t (*)(int, const void *, size_t)) dlsym(RTLD_NEXT, "write"))(file, bytes, count);
}

int fsync(int file) {
    if (broken(file)) { errno = EIO; return -1; }
    return ((int (*)(int)) dlsym(RTLD_NEXT, "fsync"))(file);
}
"""


def test_the_error_that_ends_a_run_is_the_only_one_printed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A broken disk fails a checkpoint in the background, too."""

    async def commit() -> None:
        raise OSError("checkpoint")

    async def run() -> None:
        _task = in_background(commit(), "commit 3")
        await asyncio.sleep(0.01)
        raise InputError("metrics")

    with pytest.raises(InputError, match="metrics"):
        asyncio.run(run())
    gc.collect()
    assert not caplog.records


@pytest.mark.slow
def test_a_disk_that_breaks_under_a_run_is_named_and_the_run_can_be_resumed(
    tmp_path: Path, one_layer: str
) -> None:
    disk, config_file = tmp_path / "disk", tmp_path / "config.yaml"
    disk.mkdir()
    folder = RunFolder(disk / "run")
    sizes = SIZES | {"updates": 100}
    config = small_config(folder.path, model=one_layer, pipeline=sizes, checkpoint={"every": 1})
    config_file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    (tmp_path / "broken.c").write_text(BROKEN_DISK)
    command = ["gcc", "-shared", "-fPIC", "-o", "broken.so", "broken.c", "-ldl"]
    if shutil.which("gcc") is None:
        pytest.skip("needs g++")
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "tramontane", "train", str(config_file)],
            env=os.environ | {"LD_PRELOAD": str(tmp_path / "broken.so"), "DISK": str(disk)},
            stdout=log,
            stderr=log,
        )
    while not (folder.checkpoints / "update_2").is_dir():
        assert run.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    (disk / "broken").touch()
    assert run.wait(120) == 2, (tmp_path / "log").read_text()
    printed = (tmp_path / "log").read_text()
    assert f"error: {folder.path}/" in printed
    remedy = f"continue with: tramontane train --resume {folder.path}"
    assert f"Input/output error; repair its disk, or make it writable, then {remedy}" in printed
    assert "Traceback" not in printed
    (disk / "broken").unlink()
    more = [f"pipeline.updates={len(folder.metrics()) + 1}"]
    assert tramontane.train(resume=folder.path, overrides=more, quiet=True, report=False).finished
    check_ledger(folder.path, folder.config())


@pytest.mark.slow
def test_a_second_process_leaves_a_living_run_alone(tmp_path: Path, one_layer: str) -> None:
    folder, config_file = tmp_path / "run", tmp_path / "config.yaml"
    sizes, reward = SIZES | {"updates": 200}, {"custom": [{"function": SLOW, "name": "slow"}]}
    config = small_config(
        folder,
        model=one_layer,
        pipeline=sizes,
        checkpoint={"every": 1},
        verifier={"reward": reward},
    )
    config_file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    owner = Command("train", str(config_file))
    while not (folder / "checkpoints/update_1").is_dir():
        assert owner.poll() is None, owner.communicate()
        time.sleep(0.1)
    recorded = (folder / "metrics.jsonl").read_bytes()
    for args in (["--resume", str(folder)], [str(config_file)]):
        second = Command("train", *args)
        printed = second.communicate()
        assert second.wait() == 2
        assert f"error: {folder}: being trained by process {owner.pid} on " in printed
    assert owner.poll() is None
    assert (folder / "metrics.jsonl").read_bytes().startswith(recorded)
    assert audit(folder).completions > 0  # who reads is not kept waiting
    owner.process.kill()
    owner.process.join()
    more = len(RunFolder(folder).metrics()) + 1
    third = Command("train", "--resume", str(folder), f"pipeline.updates={more}")
    printed = third.communicate()
    assert third.wait() == 0, printed
    taken = f"taken over; was being trained by process {owner.pid} on"
    assert taken in printed
    assert taken in (folder / "events.log").read_text()
    check_ledger(folder, RunFolder(folder).config())


def test_logs_say_which_process_is_which_worker(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "workers.jsonl").read_text().splitlines()]
    assert [r["process"] for r in rows if r["worker"] == "controller"] == [os.getpid()]
    versions = [r["version"] for r in rows if r["worker"] == "generator 0"]
    assert versions == sorted(set(versions))
    assert versions[0] == 0


def test_a_path_that_is_no_run_leads_to_the_run_that_is_meant(tmp_path: Path) -> None:
    run = tmp_path / "sweep" / "seed=0"
    (run / "checkpoints" / "update_4").mkdir(parents=True)
    (run / "config.yaml").write_text("name: a\n")
    (run / "report.html").write_text("")
    for within in ("checkpoints/update_4", "report.html"):
        with pytest.raises(InputError, match=f"it is within one, {run}: name that"):
            RunFolder.open(run / within)
    with pytest.raises(InputError, match="it holds 1, such as seed=0: name one of them"):
        RunFolder.open(tmp_path / "sweep")
