"""The printed command that continues a run works in a shell, whatever code the run uses."""

import importlib
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests import fork_server, forked
from tramontane.errors import InputError
from tramontane.run.folder import RunFolder

SCRIPT = """
import os, signal, sys
import tramontane
from beside import REWARDS

class Mine:
    def step(self, message):
        return [], REWARDS[len(message["content"]) % 3], True

def stop(metrics):
    os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    rows = [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(8)]
    sizes = {"updates": 2, "n_batch": 8, "n_async": 16, "group_size": 4, "l_max": 48}
    tramontane.train(
        overrides={"run_dir": sys.argv[1], "conversation.reward": "last", "pipeline.l_cache": 8,
                   **{f"pipeline.{key}": value for key, value in sizes.items()}},
        model=sys.argv[2], data=rows, environment=Mine, on_update=stop,
    )
"""


# The installed command, in a fork that has what it imports.
COMMAND = """#!/bin/sh
exec {python} -c '
import os, sys
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)  # as Python does when it starts
from tramontane.cli import main
main()
' "$@"
"""


def folder_with(tmp_path: Path, **config: object) -> RunFolder:
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return RunFolder(folder)


def test_ordinary_runs_need_nothing(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, model="tiny", data={"train": "playground:", "environment": "guessing"}
    )
    assert folder.resume_command == f"tramontane train --resume '{folder.path}'"


def test_pickled_code_needs_consent(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, data={"train": "playground:", "environment": "pickle:abc", "tools": []}
    )
    assert "TRAMONTANE_ALLOW_PICKLE=1 " in folder.resume_command
    assert folder.resume_command.endswith(f"tramontane train --resume '{folder.path}'")


def test_modules_out_of_reach_need_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_code_elsewhere.py").write_text("class Shop: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("my_code_elsewhere")
    folder = folder_with(
        tmp_path, data={"train": "playground:", "tools": ["my_code_elsewhere:Shop", "json:loads"]}
    )
    assert folder.resume_command.startswith(f"PYTHONPATH={tmp_path} tramontane train --resume ")
    monkeypatch.chdir(tmp_path)
    assert folder.resume_command.startswith("tramontane train --resume ")


def test_a_folder_that_is_not_a_run_is_not_to_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty; name another folder"):
        RunFolder(tmp_path).check_new()
    with (
        pytest.raises(InputError, match="cannot be made there; name another folder"),
        RunFolder.owned("/proc/none/here"),
    ):
        pass


@pytest.mark.slow
def test_the_command_continues_a_script_with_a_class_of_its_own(
    tmp_path: Path, one_layer: str
) -> None:
    (tmp_path / "beside.py").write_text("REWARDS = [0.0, 0.5, 1.0]\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "elsewhere").mkdir()
    options = {"cwd": tmp_path / "elsewhere", "capture_output": True, "text": True}
    script = forked.Command(
        str(tmp_path / "script.py"), "mine", one_layer, folder=tmp_path / "elsewhere"
    )
    resume = script.communicate().partition("stopped; continue with: ")[2].strip()
    assert resume, script.printed
    command = tmp_path / "bin/tramontane"
    command.parent.mkdir()
    command.write_text(COMMAND.format(python=fork_server.python()))
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    resumed = subprocess.run(resume, shell=True, env={**os.environ, "PATH": path}, **options)  # type: ignore[call-overload]
    assert resumed.returncode == 0, resumed.stderr
    assert "update 2/2" in resumed.stdout
