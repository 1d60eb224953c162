"""A run folder with known rollouts, and the page over it, for the tests of the viewer."""

import json
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import yaml

from tests.run.test_report import metrics
from tramontane.run.folder import RunFolder
from tramontane.types import Completion, FilterReason, Group, Learned, Problem, Verdict
from tramontane.view.app import make_app
from tramontane.view.runs import load_runs

TOKEN = "a-token-for-tests"
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
SIZE, GROUPS, UPDATES = 4, 3, 5
SECONDS = 30.0  # limit of a start


def completion(group: int, index: int, update: int) -> Completion:
    text = f"<think>group {group} adds {index}</think>\n\\boxed{{{group + index}}}"
    if (update, index) == (2, 1):
        text = f"Answer: {HOSTILE} & <b>bold</b>"
    count = 10 + index
    versions = [max(0, update - 2)] * 4 + [update - 1] * (count - 4)
    logprobs = [-0.1 * i for i in range(count)]
    ids = list(range(40, 40 + count))
    return Completion(group, index, [1], ids, logprobs, versions, "stop", text)


def group(number: int, update: int, learned: bool) -> Group:
    problem = Problem(
        f"problem-{number % 7}", "math", f"What is {number} + 1?", str(number + 1),
        language="fr" if number % 2 else "en", difficulty=2,
    )  # fmt: skip
    completions = [completion(number, i, update) for i in range(SIZE)]
    verdicts = [
        Verdict(
            float(i % 2), {"correctness": float(i % 2)}, "right" if i % 2 else "wrong",
            "" if i % 2 else "the answer differs", 0.0, "3",
        )
        for i in range(SIZE)
    ]  # fmt: skip
    made = Group(number, problem, completions, verdicts)
    if learned:
        logprobs = [p + 0.1 for c in completions for p in c.logprobs]
        made.learned = Learned(array("d", [-1.0, 1.0, -1.0, 1.0]), array("f", logprobs))
    return made


def make_run(path: Path, *, name: str = "made-up", updates: int = UPDATES) -> RunFolder:
    """A run whose groups are numbered from 0; each update's last group was filtered."""
    folder = RunFolder(path)
    folder.rollouts.mkdir(parents=True)
    config = {"name": name, "model": "tiny", "pipeline": {"updates": updates, "group_size": SIZE}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    for update in range(1, updates + 1):
        write_update(folder, update)
    folder.log_worker("trainer", process=1)
    folder.log_worker("generator 0", version=0)
    folder.log_worker("generator 0", lost="generator 0 died: killed <b>hard</b>")
    folder.log_activity("trainer", "wait for a batch", time.time() - 9, 4.0)
    folder.log_activity("trainer", "step", time.time() - 5, 5.0)
    passed = {"value": 0.4, "low": 0.3, "high": 0.5}
    folder.log_evaluation({"when": "before", "set": "held_out", "version": 0, "pass_at_1": passed})
    return folder


def write_update(folder: RunFolder, update: int) -> None:
    first = (update - 1) * GROUPS
    reason = FilterReason("no diversity", "all are equal")
    groups = [(group(first + i, update, i < 2), None if i < 2 else reason) for i in range(GROUPS)]
    folder.write_rollouts(update, groups, ["correctness"])
    folder.log(metrics(update))


class Page:
    """Requests to a page at an address."""

    def __init__(self, address: str) -> None:
        self.address = address

    def answer(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any, bytes]:
        """Status, headers and content."""
        try:
            with urlopen(Request(path, headers=headers or {}), timeout=SECONDS) as found:
                return found.status, found.headers, found.read()
        except HTTPError as error:
            return error.code, error.headers, error.read()

    def get(self, name: str, **params: Any) -> Any:
        status, _, content = self.answer(f"{self.address}api/{name}?{urlencode(params)}")
        assert status == 200, content
        return json.loads(content)


@contextmanager
def served(*paths: Path) -> Iterator[Page]:
    """The page over some runs, on a free port."""
    import uvicorn

    app = make_app(load_runs([*paths]), TOKEN)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + SECONDS
    while not server.started:
        assert time.monotonic() < end, "the page did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Page(f"http://127.0.0.1:{port}/{TOKEN}/")
    server.should_exit = True
    thread.join(SECONDS)
