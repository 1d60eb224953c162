"""Pushes a run to the Hugging Face hub: its newest weights with their card, and its rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from tramontane.errors import InputError
from tramontane.models.names import check_hub
from tramontane.run.folder import RunFolder
from tramontane.run.manifest import damage
from tramontane.run.rollouts import PATTERN
from tramontane.workplace import owned_folder

WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]  # others of an earlier push go
ROLLOUTS_CARD = """---
tags: [rollouts, tramontane]
configs:
- config_name: default
  data_files: "data/*.parquet"
---
# Rollouts of {name}

Every completion that the run's updates trained on, or that was filtered before: problem, text,
tokens with log-probs and versions of the weights, verdict and reward by part.
"""


@dataclass(frozen=True)
class Pushed:
    """What is on the hub.

    Args:
        name: the repository of the weights.
        commit: their commit; `model=NAME@COMMIT` is this state, whatever is pushed later.
        url: address of the commit.
        rollouts: the repository of the rollouts; None if they were not asked for.
    """

    name: str
    commit: str
    url: str
    rollouts: str | None


def push(
    run: str | Path, name: str, *, rollouts: str | None = None, public: bool = False
) -> Pushed:
    """Push the weights of a run's newest checkpoint, with tokenizer and model card, as one commit.

    In repositories that exist, weights and rollouts of an earlier push are replaced and other files
    stay. The hub is `HF_ENDPOINT`, and the token that of `hf auth login` or `HF_TOKEN`.

    Args:
        run: a run's folder. No other process may be working in it.
        name: the repository, `USER/NAME`; it is created if missing.
        rollouts: repository of a data set of all recorded completions; None: do not push them.
        public: create repositories that everyone can read; by default, private ones.

    Raises:
        InputError: not a run folder, no intact checkpoint, no rollouts, or the hub refuses or
            cannot be reached.
    """
    for repository in (name, rollouts):
        if repository is not None and repository.count("/") != 1:
            raise InputError(f"{repository!r}: not a repository's name, USER/NAME")
    folder = RunFolder(run)
    folder.check_begun()
    with owned_folder(folder.path, "pushed"):
        weights = _weights(folder)
        files = sorted(folder.rollouts.glob(PATTERN)) if rollouts else []
        if rollouts and not files:
            raise InputError(f"{folder.rollouts}: no rollouts are recorded (key `rollouts`)")
        about = f"{folder.name()}, update {folder.newest_version}"
        check_hub(name)
        with _hub_errors(name):
            api = HfApi()
            api.create_repo(name, private=not public, exist_ok=True)
            done = api.upload_folder(
                repo_id=name, folder_path=weights, commit_message=about, delete_patterns=WEIGHTS
            )
        if rollouts:
            with _hub_errors(rollouts):
                api.create_repo(rollouts, private=not public, exist_ok=True, repo_type="dataset")
                to: dict[str, Any] = {"repo_id": rollouts, "repo_type": "dataset"}
                card = ROLLOUTS_CARD.format(name=name).encode()
                api.upload_file(path_or_fileobj=card, path_in_repo="README.md", **to)
                api.upload_folder(
                    folder_path=folder.rollouts, allow_patterns=PATTERN, path_in_repo="data",
                    commit_message=about, delete_patterns="*.parquet", **to,
                )  # fmt: skip
    return Pushed(name, str(done.oid), str(done.commit_url), rollouts)


def _weights(folder: RunFolder) -> Path:
    checkpoint = folder.checkpoint(folder.newest_version)
    if not folder.newest_version or not checkpoint.is_dir():
        raise InputError(f"{folder.path}: no checkpoint yet; wait for its first one")
    if reason := damage(checkpoint, state=False):
        raise InputError(f"{checkpoint}: damaged ({reason}); restore it from a copy")
    return checkpoint / "weights"


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        remedy = {
            401: "log in with `hf auth login`, or set HF_TOKEN",
            403: "use a token that may write there",
        }.get(status, "try again")
        raise InputError(f"{name}: refused by {constants.ENDPOINT} ({error}); {remedy}") from error
    except HFValidationError as error:
        raise InputError(f"{name!r}: not a repository's name, USER/NAME ({error})") from error
    except Exception as error:
        # The client's transport has been requests, httpx and httpx2, which share no error.
        raise InputError(
            f"{name}: {constants.ENDPOINT} cannot be reached ({error}); check the connection, "
            f"HF_ENDPOINT and HF_HUB_OFFLINE"
        ) from error
