"""Folders of the controller on machines with and without its disk."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tramontane.placement import files
from tramontane.placement.files import Copies, Folder, folders_in, on_this_machine, written
from tramontane.temporary import PREFIX

CONTENT = {"config.json": b"{}", "empty": b"", "shards/one.bin": bytes(range(256)) * 3}


def fill(path: Path) -> Path:
    for name, content in CONTENT.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def content(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def elsewhere(folder: Folder) -> Folder:
    """The folder as a machine sees it that lacks the controller's disk."""
    return replace(folder, path=Path("/no/such/disk"))


class Machine:
    """A process on a machine without the controller's disk, and the messages that it got."""

    def __init__(self) -> None:
        self.copies, self.messages = Copies(), list[str]()

    def ask(self, method: str, folder: Folder, *args: Any) -> Any:
        self.messages.append(method)
        return getattr(self.copies, method)(elsewhere(folder), *args)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(files, "CHUNK_BYTES", 100)
    return Machine()


def load(model: str, seed: int) -> tuple[str, int]:
    return model, seed


def test_a_model_is_sent_to_a_machine_once_and_its_path_becomes_text(
    tmp_path: Path, machine: Machine
) -> None:
    folder = Folder.of(fill(tmp_path / "model"), "model")
    make = partial(load, folder, 7)
    assert folders_in(make) == [folder]
    assert files.send(folder, "node", machine.ask) == sum(map(len, CONTENT.values()))
    path, seed = machine.copies.located(partial(load, elsewhere(folder), 7))()
    assert isinstance(path, str)
    assert (content(Path(path)), seed) == (CONTENT, 7)

    second = Machine()
    assert files.send(folder, "node", second.ask) == 0
    assert second.messages == ["lacks"]
    files.retrieve(folder, machine.ask)
    assert "written" not in machine.messages


def test_on_the_controllers_own_disk_nothing_is_sent(tmp_path: Path, machine: Machine) -> None:
    folder = Folder.of(fill(tmp_path / "model"), "model")
    assert not machine.copies.lacks(folder)
    here = (str(tmp_path / "model"), 7)
    assert machine.copies.located(partial(load, folder, 7))() == here
    assert on_this_machine(partial(load, folder, 7))() == here
    (tmp_path / "model/config.json").write_bytes(b"other")  # a disk with another model
    assert machine.copies.lacks(folder)


def test_an_interrupted_transfer_is_not_taken_for_a_copy(tmp_path: Path, machine: Machine) -> None:
    folder = Folder.of(fill(tmp_path / "model"), "model")

    def cut(method: str, *args: Any) -> Any:
        if method == "commit":
            raise ConnectionError
        return machine.ask(method, *args)

    with pytest.raises(ConnectionError):
        files.send(folder, "node", cut)
    assert machine.copies.lacks(elsewhere(folder))
    assert files.send(folder, "node", machine.ask)
    assert not machine.copies.lacks(elsewhere(folder))


def test_what_a_worker_writes_comes_to_the_controller_and_leaves_nothing_behind(
    tmp_path: Path, machine: Machine
) -> None:
    (tmp_path / "checkpoint").mkdir()
    with written(tmp_path / "checkpoint") as folder:
        for part in ("weights", "trainer"):
            fill(machine.copies.located(elsewhere(folder).within(part)))
        # On the controller's disk, it is the folder itself.
        path = machine.copies.located(folder.within("weights"))
        assert path == tmp_path / "checkpoint/weights"
        files.retrieve(folder, machine.ask)
    expected = {
        f"{part}/{name}": c for part in ("weights", "trainer") for name, c in CONTENT.items()
    }
    assert content(tmp_path / "checkpoint") == expected
    assert not content(tmp_path / "scratch")


def test_processes_of_a_machine_share_a_copy_until_it_is_released(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder.of(fill(tmp_path / "state"), "read")
    files.send(folder, "node", machine.ask)
    with monkeypatch.context() as other_process:
        other_process.setattr("os.getpid", lambda: 1)
        second = Machine()
        assert files.send(folder, "node", second.ask) == 0
        assert content(second.copies.located(elsewhere(folder))) == CONTENT
        files.retrieve(folder, second.ask)
    assert content(machine.copies.located(elsewhere(folder))) == CONTENT
    files.retrieve(folder, machine.ask)
    assert machine.copies.lacks(elsewhere(folder))


def test_copies_of_dead_processes_are_deleted(tmp_path: Path, machine: Machine) -> None:
    folder = Folder.of(fill(tmp_path / "state"), "read")
    files.send(folder, "node", machine.ask)
    (own,) = (tmp_path / "scratch").iterdir()
    abandoned = own.with_name(f"{PREFIX}killed")
    shutil.copytree(own, abandoned)  # which no process holds
    code = "from tramontane.temporary import process_folder; process_folder()"
    environment = os.environ | {"TMPDIR": str(tmp_path / "scratch")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert [*(tmp_path / "scratch").iterdir()] == [own]
    assert content(own)
