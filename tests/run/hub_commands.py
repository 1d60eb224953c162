"""Commands in forks of one process, which has imported the hub's client: it reads the hub's address
when it is imported, so that `tests.fork_server` cannot run them.

    python -m tests.run.hub_commands

reads a `Request` as a line of JSON, and answers with the exit code.
"""

import atexit
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.run.hub import Hub


class Request(NamedTuple):
    """A command's words, its folder, the hub's token, and the files of what it prints."""

    words: Sequence[str]
    folder: str
    token: str
    stdout: str
    stderr: str


class Done(NamedTuple):
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


class Client:
    """The process, with the hub's address and a folder for what its forks fetch."""

    def __init__(self, hub: Hub, home: Path) -> None:
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
        variables |= {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
        self._home = home
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.run.hub_commands"],
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def run(self, folder: Path, words: Sequence[str], token: str) -> Done:
        """Run `tramontane WORDS` in a folder."""
        printed = [self._home / name for name in ("stdout", "stderr")]
        request = Request(words, str(folder), token, *map(str, printed))
        assert self._process.stdin and self._process.stdout
        print(json.dumps(request), file=self._process.stdin)
        code = int(self._process.stdout.readline())
        return Done(code, *(file.read_text() for file in printed))

    def close(self) -> None:
        self._process.communicate()


def forked(request: Request) -> int:
    """Run a command in a fork; returns its exit code."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code: object = 0
    try:
        for number, file in enumerate((os.devnull, request.stdout, request.stderr)):
            opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY)
            os.dup2(opened, number)
        os.chdir(request.folder)
        os.environ["HF_TOKEN"] = request.token
        sys.argv = ["tramontane", *request.words]
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    import tramontane.evaluation.checkpoint
    import tramontane.run.publish
    import tramontane.run.train  # noqa: F401
    from tramontane.cli import main

    while line := sys.stdin.readline():
        print(forked(Request(*json.loads(line))), flush=True)
