"""Pushing a run to a stand-in for the hub, and using what was pushed at its revision."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.run.hub import TOKEN, Hub, served_hub
from tests.run.hub_commands import Client, Done
from tests.runs import small_config
from tramontane import train
from tramontane.errors import InputError
from tramontane.models.names import is_local, pinned
from tramontane.run.folder import RunFolder
from tramontane.run.publish import push
from tramontane.workplace import owned_folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, one_layer: str) -> Path:
    folder = tmp_path_factory.mktemp("own") / "run"
    evaluation = {"problems": 4, "samples": 1}
    data = {"eval": "playground:"}
    config = small_config(folder, model=one_layer, data=data, evaluation=evaluation)

    def brief(
        problem: object, text: str, n_tokens: int
    ) -> float:  # pickled: a push needs no consent
        return float(n_tokens < 60)

    train(config, rewards=[brief], quiet=True, report=False)
    return folder


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, Client]]:
    with served_hub() as hub:
        client = Client(hub, tmp_path_factory.mktemp("home"))
        yield hub, client
        client.close()


@pytest.fixture
def hub(client: tuple[Hub, Client]) -> Hub:
    """A hub without repositories."""
    hub, _ = client
    for kept in (hub.repositories, hub.private, hub.stored):
        kept.clear()
    return hub


@pytest.fixture
def command(client: tuple[Hub, Client], tmp_path: Path) -> Callable[..., Done]:
    def run(*words: str, token: str = TOKEN) -> Done:
        return client[1].run(tmp_path, words, token)

    return run


@pytest.mark.slow
def test_a_run_is_pushed_and_its_revision_is_what_was_pushed(
    run: Path, hub: Hub, tmp_path: Path, command: Callable[..., Done]
) -> None:
    done = command("push", str(run), "me/own", "--rollouts", "me/own-rollouts")
    assert done.returncode == 0, done.stderr
    files = hub.files("model", "me/own")
    weights = RunFolder(run).checkpoint(2) / "weights"
    # No optimizer's state.
    assert files == {f.name: f.read_bytes() for f in weights.iterdir()} | {".gitattributes": b""}
    assert files["README.md"].startswith(b"---\n") and b"pass@1" in files["README.md"]
    assert all(hub.private.values()) and len(hub.private) == 2
    rollouts = hub.files("dataset", "me/own-rollouts")
    read = pq.read_table(pa.BufferReader(rollouts["data/update_000002.parquet"]))
    assert read.equals(pq.read_table(run / "rollouts/update_000002.parquet"))
    assert b'data_files: "data/*.parquet"' in rollouts["README.md"]
    [_, commit] = hub.repositories["model", "me/own"]
    assert f"model=me/own@{commit}" in done.stdout
    options = ["--problems", "1", "--samples", "1", "--out", "e.jsonl"]
    evaluated = command("eval", "me/own", "playground:", *options)
    assert evaluated.returncode == 0, evaluated.stderr
    assert f"me/own@{commit}" in (tmp_path / "e.json").read_text()
    # A later push does not change what the revision names.
    later = dict(files) | {"config.json": b"not JSON"}
    hub.repositories["model", "me/own"]["f" * 40] = later
    keys = ["model=me/own@" + commit, "data.train=playground:", "pipeline.updates=1"]
    (tmp_path / "own.yaml").write_text("name: own\n")
    found = command("train", "own.yaml", *keys, "--dry-run")
    assert found.returncode == 0, found.stderr
    newest = command("train", "own.yaml", "model=me/own", *keys[1:], "--dry-run")
    assert newest.returncode == 2 and "config.json" in newest.stderr
    missing = command("train", "own.yaml", f"model=me/own@{'0' * 40}", "--dry-run")
    assert missing.returncode == 2, missing.stderr


@pytest.mark.slow
def test_a_push_replaces_the_weights_and_rollouts_of_another_run(
    run: Path, hub: Hub, command: Callable[..., Done]
) -> None:
    index, shards = "model.safetensors.index.json", [f"model-0000{n}-of-00002" for n in (1, 2)]
    theirs = {"plot.png": b"theirs", "extra/model.safetensors": b"theirs", ".gitattributes": b""}
    old = {f"{name}.safetensors": b"old" for name in shards} | {index: b"{}", "config.json": b"{}"}
    hub.repositories["model", "me/own"] = {"a" * 40: theirs | old}
    rollouts = {"data/update_000009.parquet": b"old", "README.md": b"old"}
    hub.repositories["dataset", "me/rollouts"] = {"b" * 40: rollouts}
    done = command("push", str(run), "me/own", "--rollouts", "me/rollouts")
    assert done.returncode == 0, done.stderr
    weights = RunFolder(run).checkpoint(2) / "weights"
    assert hub.files("model", "me/own").keys() == {f.name for f in weights.iterdir()} | {*theirs}
    data = {f"data/update_00000{n}.parquet" for n in (1, 2)}
    assert hub.files("dataset", "me/rollouts").keys() == data | {"README.md"}


@pytest.mark.slow
def test_what_the_hub_refuses_is_said(run: Path, hub: Hub, command: Callable[..., Done]) -> None:
    done = command("push", str(run), "me/own", token="hf_wrong")
    assert done.returncode == 2 and "hf auth login" in done.stderr
    done = command("push", str(run), "others/own")
    assert done.returncode == 2 and "may write there" in done.stderr
    assert "Traceback" not in done.stderr and not hub.repositories


@pytest.mark.parametrize("names", [["own"], ["me/own/x"], ["me/own", "rollouts"]])
def test_a_name_without_its_owner_is_refused_before_anything_is_pushed(
    names: list[str], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"'{names[-1]}': not a repository's name, USER/NAME"):
        push(tmp_path, names[0], rollouts=names[1] if names[1:] else None)


@pytest.mark.slow
def test_only_an_intact_checkpoint_of_an_idle_run_is_pushed(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run folder"):
        push(tmp_path, "me/own")
    with owned_folder(run, "trained"), pytest.raises(InputError, match="being trained by process"):
        push(run, "me/own")
    file = RunFolder(run).checkpoint(2) / "weights/config.json"
    content = file.read_bytes()
    file.write_bytes(content[:-20])
    with pytest.raises(InputError, match="damaged"):
        push(run, "me/own")
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("model", "name", "revision"),
    [
        ("org/name@main", "org/name", "main"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
        ("gpt2@0123abc", "gpt2", "0123abc"),
        ("org/name", "org/name", None),
        ("./run@home", "./run@home", None),
        ("a/b/c@d", "a/b/c@d", None),
    ],
)
def test_a_revision_follows_a_name_of_the_hub(
    model: str, name: str, revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert pinned(model) == (name, revision)
    assert is_local(model) == (model.startswith(".") or model.startswith("a/b/c"))
    if revision is not None:  # a folder of that name is a folder
        (tmp_path / model).mkdir(parents=True)
        assert pinned(model) == (model, None) and is_local(model)
