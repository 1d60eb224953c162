"""One owner a folder, whole files, and faults of the disk by name."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked
from tramontane import workplace
from tramontane.errors import InputError
from tramontane.journals import Journal, check_same
from tramontane.workplace import (
    Owner,
    commit,
    disk_faults,
    owned_file,
    owned_folder,
    whole_folder,
    write_whole,
)


def hold(folder: str, ready: str, fork: bool = False) -> None:
    """Own a folder until killed; `fork`: with a child that lives on."""
    with owned_folder(folder, "trained"):
        if fork and os.fork() == 0:
            os.setsid()
            Path(ready + ".child").write_text(str(os.getpid()))
            time.sleep(600)
        Path(ready).touch()
        time.sleep(600)


@pytest.fixture
def living(tmp_path: Path) -> Iterator[int]:
    """Another process that owns `tmp_path / "run"`."""
    process = forked.start(hold, str(tmp_path / "run"), str(tmp_path / "ready"))
    wait_for(tmp_path / "ready")
    yield process.pid or 0
    process.kill()
    process.join()


def wait_for(file: Path) -> None:
    limit = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < limit
        time.sleep(0.01)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lease"}


def test_a_second_process_is_refused_at_once_and_changes_nothing(
    tmp_path: Path, living: int
) -> None:
    before, began = contents(tmp_path), time.monotonic()
    with (
        pytest.raises(InputError) as refused,
        owned_folder(tmp_path / "run", "evaluated", wait=0.1),
    ):
        pytest.fail("two owners")
    assert time.monotonic() - began < 3
    assert contents(tmp_path) == before
    owner = Owner.read(tmp_path / "run" / ".lock")
    assert owner is not None
    assert owner.process == living
    assert str(refused.value) == (
        f"{tmp_path / 'run'}: being trained by process {living} on {owner.host} since "
        f"{owner.since}; wait until it ends, or stop it first (kill {living})"
    )


def test_the_owner_is_refused_a_second_time_too(tmp_path: Path) -> None:
    with owned_folder(tmp_path, "trained"):
        for _ in range(2):
            with (
                pytest.raises(InputError, match=f"by process {os.getpid()} "),
                owned_folder(tmp_path, "trained again", wait=0.1),
            ):
                pytest.fail("two owners")
        with owned_folder(tmp_path / "inside", "trained"), owned_file(tmp_path / "file", "trained"):
            pass  # places within are places of their own
    with owned_folder(tmp_path, "trained"):
        pass


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with owned_folder(tmp_path / "a" / "b", "trained"):
        assert {p.name for p in (tmp_path / "a" / "b").iterdir()} == set(workplace.HIDDEN)
    assert not (tmp_path / "a").exists()
    with owned_file(tmp_path / "rows.jsonl", "evaluated"):
        write_whole(tmp_path / "rows.jsonl", "{}\n")
    assert os.listdir(tmp_path) == ["rows.jsonl"]
    kept = tmp_path / "kept"
    kept.mkdir()
    with owned_folder(kept, "trained"):
        pass
    assert kept.is_dir()


def test_a_folder_that_was_never_made_is_not_said_to_be_gone() -> None:
    for work in (owned_folder("/proc/run", "trained"), whole_folder("/proc/run/x", "written")):
        with pytest.raises(InputError, match="/proc/run: cannot be made there; name another"), work:
            pass


def test_a_folder_is_whole_or_absent_and_has_one_owner_meanwhile(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "made"
    (tmp_path / "models" / ".made.partial").mkdir(parents=True)  # of a process that was killed

    def break_off() -> None:
        with whole_folder(folder, "written") as partial:
            (partial / "weights").touch()
            assert not folder.exists()
            with (
                pytest.raises(InputError, match="being written by"),
                whole_folder(folder, "written"),
            ):
                pytest.fail("two owners")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        break_off()
    assert os.listdir(folder.parent) == []
    with whole_folder(folder, "written") as partial:
        (partial / "weights").touch()
    assert os.listdir(folder.parent) == ["made"]
    assert os.listdir(folder) == ["weights"]
    with pytest.raises(InputError, match="not empty"), whole_folder(folder, "written"):
        pytest.fail("began")


@pytest.mark.parametrize("fork", [False, True])
def test_the_folder_of_a_killed_process_is_taken_over_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fork: bool
) -> None:
    """Even if a forked child of the owner, which inherits its open files, lives on."""
    folder, ready = tmp_path / "run", tmp_path / "ready"
    process = forked.start(hold, str(folder), str(ready), fork)
    wait_for(ready)
    process.kill()
    process.join()
    began = time.monotonic()
    with owned_folder(folder, "evaluated") as before:
        assert time.monotonic() - began < 5
        assert before is not None
        assert before.process == process.pid
        owner = Owner.read(folder / ".lock")
        assert owner is not None
        assert owner.process == os.getpid()
    assert f"{folder}: taken over; was being trained by process {process.pid} on" in caplog.text
    if fork:
        os.kill(int(Path(f"{ready}.child").read_text()), signal.SIGKILL)


def test_a_killed_owner_s_number_that_another_process_has_now_is_no_owner(tmp_path: Path) -> None:
    """After a reboot, numbers begin again: the lease says when its process began."""
    folder, ready = tmp_path / "run", tmp_path / "ready"
    process = forked.start(hold, str(folder), str(ready))
    wait_for(ready)
    process.kill()
    process.join()
    lease = folder / ".lease"
    lease.write_text(lease.read_text().replace(f"pid={process.pid}", f"pid={os.getppid()}"))
    began = time.monotonic()
    with owned_folder(folder, "trained"):
        assert time.monotonic() - began < 5


def elsewhere(folder: Path, beats: bool) -> None:
    """Leave the lease of an owner on another machine, whose kernel's lock is not seen here."""
    with owned_folder(folder, "trained"):
        kept = {name: (folder / name).read_text() for name in workplace.HIDDEN}
    folder.mkdir(exist_ok=True)
    note = json.loads(kept[".lock"]) | {"process": 4711, "host": "elsewhere"}
    (folder / ".lock").write_text(json.dumps(note))
    lines = [
        "host=elsewhere" if line.startswith("host=") else line
        for line in kept[".lease"].splitlines()
    ]
    (folder / ".lease").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.slow
def test_where_locks_do_not_reach_another_machine_a_sign_of_life_decides(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    alive: bool,
) -> None:
    monkeypatch.setattr(workplace, "LEASE_SECONDS", 3.0)
    monkeypatch.setattr(workplace, "EXIT_SECONDS", 0.2)
    folder, stop = tmp_path / "run", threading.Event()
    elsewhere(folder, alive)

    def renew() -> None:
        while alive and not stop.wait(0.5):
            os.utime(folder / ".lease")

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        if alive:
            with (
                pytest.raises(InputError, match="by process 4711 on elsewhere since .* first$"),
                owned_folder(folder, "trained"),
            ):
                pytest.fail("two owners")
        else:
            with owned_folder(folder, "trained"):
                pass
            assert "taken over; was being trained by process 4711 on elsewhere" in caplog.text
    finally:
        stop.set()
        thread.join()
    assert "waiting up to 3 s for a sign of life" in caplog.text


WITHOUT_LOCKS = """
#include <errno.h>
int flock(int file, int operation) { errno = ENOLCK; return -1; }
"""


@pytest.mark.slow
def test_on_a_file_system_without_locks_the_lease_alone_refuses(tmp_path: Path) -> None:
    source, library = tmp_path / "locks.c", tmp_path / "locks.so"
    source.write_text(WITHOUT_LOCKS)
    try:
        command = ["gcc", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("needs g++")
    printed = in_a_process(
        """
        logging.basicConfig(format="%(message)s", stream=sys.stdout)
        workplace.LEASE_SECONDS = 3.0
        with owned_folder("run", "trained"):
            print(second('with owned_folder("run", "evaluated"): pass'))
        with owned_folder("run", "trained"):
            pass
        """,
        tmp_path,
        LD_PRELOAD=str(library),
    )
    assert "its file system has no locks (No locks available)" in printed
    assert "InputError: run: being trained by process" in printed


# ------------------------------------------------------------------------------ faults of the disk

PREAMBLE = """
import logging, os, shutil, subprocess, sys
from pathlib import Path
from tramontane import workplace
from tramontane.errors import InputError
from tramontane.workplace import owned_file, owned_folder, write_whole

def second(code):
    code = "from tests.test_workplace import *\\nworkplace.LEASE_SECONDS = 3.0\\n" + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
"""


def in_a_process(code: str, folder: Path, *inside: str, **variables: str) -> str:
    """What some code prints that runs in a folder, in a process of its own."""
    done = subprocess.run(
        [*inside, sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def on_a_disk(code: str, folder: Path, options: str) -> str:
    """Run as by `in_a_process`, with a file system of its own, mounted at `disk` in the folder."""
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    (folder / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder / "disk")]
    try:
        subprocess.run([*inside, *mount], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    mounted = f"subprocess.run({mount!r}, check=True)\n"
    return in_a_process(mounted + textwrap.dedent(code), folder, *inside)


def test_a_read_only_folder_is_named_before_any_work(tmp_path: Path) -> None:
    printed = on_a_disk(
        """
        Path("disk/run").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", "disk"], check=True)
        for place in ("disk/run", "disk/new"):
            try:
                with owned_folder(place, "trained", then="continue"):
                    print("began")
            except InputError as error:
                print(error)
        """,
        tmp_path,
        "size=1m",
    )
    assert printed.splitlines() == [
        f"{name}: Read-only file system; repair its disk, or make it writable, then continue"
        for name in ("disk/run/.lock", "disk/new")
    ]


def test_a_full_disk_is_named_before_any_work_and_later_keeps_the_old_file(tmp_path: Path) -> None:
    printed = on_a_disk(
        """
        def fill():
            with Path("disk/filling").open("wb", 0) as file:
                while True:
                    file.write(bytes(1024))
        for step in ("before", "within"):
            try:
                if step == "before":
                    with workplace.disk_faults(Path("disk/filling")):
                        fill()
                with owned_folder("disk/run", "trained"):
                    print("began")
                    write_whole(Path("disk/run/file"), "old")
                    with workplace.disk_faults(Path("disk/filling")):
                        fill()
            except InputError as error:
                print(error)
                if step == "before":
                    Path("disk/filling").unlink()
        try:
            write_whole(Path("disk/run/file"), "n" * 100_000)
        except InputError as error:
            print(error)
        print(Path("disk/run/file").read_text(), os.listdir("disk/run"))
        """,
        tmp_path,
        "size=64k",
    )
    full = "No space left on device; make room, then run the same command again"
    assert printed.splitlines() == [
        f"disk/filling: {full}",
        "began",
        f"disk/filling: {full}",
        f"disk/run/file: {full}",
        "old ['file']",
    ]


def test_a_full_disk_refuses_before_the_work_begins(tmp_path: Path) -> None:
    printed = on_a_disk(
        """
        Path("disk/run").mkdir()
        try:
            with Path("disk/filling").open("wb", 0) as file:
                while True:
                    file.write(bytes(1024))
        except OSError:
            pass
        try:
            with owned_folder("disk/run", "trained"):
                print("began")
        except InputError as error:
            print(error)
        """,
        tmp_path,
        "size=64k",
    )
    assert "began" not in printed
    assert "No space left on device; make room, then" in printed


def test_a_folder_that_vanishes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workplace, "LEASE_SECONDS", 0.5)  # the lease moves with the folder
    monkeypatch.setattr(workplace, "EXIT_SECONDS", 0.2)
    run = tmp_path / "run"
    gone = rf"^{run}: no longer there \(moved or deleted\?\); put it back, then continue$"
    with (
        pytest.raises(InputError, match=gone),
        owned_folder(run, "trained", then="continue"),
    ):
        (run.rename(tmp_path / "moved"), (run / "metrics.jsonl").open("a"))
    with owned_folder(tmp_path / "moved", "trained"):
        pass


@pytest.mark.parametrize(
    ("device", "fault"),
    [("/dev/full", "No space left on device"), ("/proc/self/mem", "Input/output error")],
)
def test_a_device_that_refuses_writes_is_named(tmp_path: Path, device: str, fault: str) -> None:
    """Writing to a page of memory that is not mapped is an input/output error."""
    (tmp_path / "log").symlink_to(device)

    def write() -> None:
        with (tmp_path / "log").open("r+b", 0) as log:
            log.write(b"line")

    with pytest.raises(InputError, match=f"^{tmp_path / 'log'}: {fault}; .*, then"):  # noqa: SIM117
        with disk_faults(tmp_path / "log"):
            write()
    with pytest.raises(InputError, match=f"^{tmp_path}: {fault}"), owned_folder(tmp_path, "x"):
        write()


def test_other_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), owned_folder(tmp_path, "trained"):
        (tmp_path.parent / "elsewhere" / "file").read_text()
    with pytest.raises(ValueError, match="No space left"), owned_folder(tmp_path, "trained"):
        raise ValueError("No space left on device")  # a reward's own words


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo])
def test_a_file_in_the_way_is_named(tmp_path: Path, make: object) -> None:
    make(tmp_path / "run")  # type: ignore[operator]
    for place in ("run", "run/inside"):
        with (
            pytest.raises(InputError, match=f"{tmp_path / 'run'} is a file; name a folder"),
            owned_folder(tmp_path / place, "trained"),
        ):
            pytest.fail("began")
    (tmp_path / "folder").mkdir()
    with (
        pytest.raises(InputError, match="folder: a folder; name a file"),
        owned_file(tmp_path / "folder", "evaluated"),
    ):
        pytest.fail("began")


def test_a_whole_file_and_its_name_reach_the_disk_in_that_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, fsync, replace = list[str](), os.fsync, Path.replace

    def name(handle: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{handle}")).name.partition(".")[0]

    monkeypatch.setattr(os, "fsync", lambda h: (done.append(f"sync {name(h)}"), fsync(h)))
    monkeypatch.setattr(
        Path, "replace", lambda a, b: (done.append(f"name {b.name}"), replace(a, b))
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    write_whole(folder / "file", "text")
    assert done == ["sync file", "name file", "sync folder"]
    assert os.listdir(folder) == ["file"]
    done.clear()
    (folder / "step").mkdir()
    (folder / "step" / "weights").touch()
    commit(folder / "step", folder / "final")
    assert done == ["sync weights", "sync step", "name final", "sync folder"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_whole(file, "old")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(InputError, match=f"^{file}.*: File too large; make room"):
            write_whole(file, "n" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_damaged_line_is_named_and_may_be_removed(tmp_path: Path) -> None:
    """Also where the length of the valid part is known from before the removal."""
    file = tmp_path / "j.jsonl"
    with Journal(file) as journal:
        end = journal.add([1], [2], [3])
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b"[2\n" + lines[2])
    with Journal(file, end - 1) as journal, pytest.raises(InputError, match=r"j\.jsonl:2: damaged"):
        list(journal)
    file.write_bytes(lines[0] + lines[2])
    with Journal(file, end) as journal:
        assert list(journal) == [[1], [3]]
        journal.add([4])
        assert list(journal) == [[1], [3], [4]]


def test_an_incomplete_last_line_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "j.jsonl"
    file.write_bytes(b'[1]\n["cut')
    with Journal(file) as journal:
        journal.add([2])
        assert list(journal) == [[1], [2]]


def test_items_are_continued_with_the_same_settings_only(tmp_path: Path) -> None:
    items, record = tmp_path / "items.jsonl", tmp_path / "items.json"
    now = {"sizes": {"small": {"n": 1}, "large": {"n": 2}}, "seed": 0}

    def refusal(**made_with: object) -> str:
        with pytest.raises(InputError, match="; remove them") as refused:
            check_same(items, record, now | made_with, "remove them", levels=2)
        return str(refused.value)

    check_same(items, record, now, "remove them")  # nothing is there
    items.write_text("1\n")
    assert "items.jsonl: there is no items.json that says" in refusal()
    record.write_text(json.dumps(now | {"result": 1}))
    check_same(items, record, now, "remove them")
    sizes = {"small": {"n": 3}, "large": {"n": 2}, "huge": {"n": 3}}
    changed = "items.jsonl was made with different sizes.small, sizes.huge, seed; "
    assert changed in refusal(sizes=sizes, seed=1)
    for other in ('{"', "[]", '{"seed": 0}'):
        record.write_text(other)
        assert "items.json: not the record of items.jsonl, or damaged" in refusal()
    items.write_text("")
    record.write_text(json.dumps(now | {"seed": 1}))
    check_same(items, record, now, "remove them")  # nothing was made yet


def test_a_file_in_place_of_a_folder_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(InputError, match=r"rows\.jsonl is a file; name a folder"):
        workplace.check_file(tmp_path / "rows.jsonl" / "audit.md")


def test_a_device_in_place_of_a_file_is_refused() -> None:
    for device in ("/dev/full", "/dev/null"):
        with pytest.raises(InputError, match=f"{device}: a device or a pipe; name a file"):
            workplace.check_file(device)
