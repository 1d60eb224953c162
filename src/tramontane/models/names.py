"""Resolves names of models, alike for every command; the user's cache folder, and checksums of
files. torch is not imported here.

A name is that of a model in this package (`SHIPPED`), a checkpoint folder, a run's folder, the
folder of one of its checkpoints, or a Hugging Face name, which a revision may follow:
`NAME@REVISION`, with a branch, tag or commit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import zlib
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import cache
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from tramontane.errors import InputError, importing

logger = logging.getLogger("tramontane")

SHIPPED = {"tiny": "tiny_base", "tiny_vision": "tiny_vision"}  # models in this package: folders
HUB_SECONDS = 5.0  # for a first connection to the model hub
BLOCK = 1 << 22  # bytes of a file read at once
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json"),
)


def pinned(model: str) -> tuple[str, str | None]:
    """A Hugging Face name and its revision, None without one; other names are unchanged."""
    found = re.fullmatch(r"(\w[\w.-]*(?:/[\w.-]+)?)@([\w./-]+)", model)
    if found is None or Path(model).exists():
        return model, None
    return found[1], found[2]


def find_weights(model: str) -> str:
    """The checkpoint that a name means: for a run's folder, the weights of its newest checkpoint;
    for a checkpoint's folder (`update_20`), its weights. Other names are returned unchanged.

    Raises:
        InputError: a file, the folder of a run that has no checkpoint, or nearly a name of
            `SHIPPED`.
    """
    path = Path(model).expanduser()
    # The hub has no such name, and an unreachable hub would be queried repeatedly.
    near = [] if model in SHIPPED else get_close_matches(model, SHIPPED, 1, cutoff=0.8)
    if near and not path.exists():
        raise InputError(f"model {model!r}: no such model; did you mean {near[0]!r}?")
    if path.is_file():
        raise InputError(f"model {model!r}: a file; name the folder of the checkpoint")
    if not path.is_dir() or (path / "config.json").is_file():
        return model
    checkpoints = [path, *numbered(path), *numbered(path / "checkpoints")]
    found = [f / "weights" for f in checkpoints if (f / "weights" / "config.json").is_file()]
    if found:
        return str(found[-1])
    if (path / "config.yaml").is_file():
        raise InputError(
            f"model {model!r}: a run that has no checkpoint yet; wait for its first one "
            f"(checkpoint.every), or name the model that the run began with"
        )
    return model


def resolve(model: str) -> str:
    """`find_weights`; for a name of `SHIPPED`, its folder inside this package."""
    if model in SHIPPED:
        return str(resources.files("tramontane") / SHIPPED[model])
    return find_weights(model)


def is_local(model: str) -> bool:
    """True if a name is, or can only be, a folder on this machine."""
    model = pinned(model)[0]
    path = Path(model).expanduser()
    begins_as_path = model.startswith((".", "/", "~", "runs/")) or model.count("/") > 1
    return model in SHIPPED or begins_as_path or path.exists()


def folder_of(name: str, files: Sequence[str] | None = None, what: str = "model") -> Path:
    """The folder of a model or tokenizer; a Hugging Face name is downloaded first.

    Args:
        name: see above.
        files: patterns of the needed files; None: all.
        what: what the name refers to, for errors.

    Raises:
        InputError: no such folder, and no such name.
    """
    folder = Path(resolve(name)).expanduser()
    if folder.is_dir():
        return folder.absolute()
    if is_local(name):
        raise InputError(f"{what} {name!r}: no such folder")
    check_hub(name, what)
    from huggingface_hub import snapshot_download

    patterns = list(files) if files else None
    repository, revision = pinned(name)
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except Exception as error:
        # The hub's client raises many types; all mean that the files are not available.
        raise InputError(
            f"{what} {name!r}: no such folder, and it cannot be fetched from the hub "
            f"({type(error).__name__}: {error})"
        ) from error


def check_hub(name: str, what: str = "model") -> None:
    """Check that the hub can be reached, if the name of a model, tokenizer or `dataset` must be
    fetched from it: its client would retry for a minute. Behind a proxy, that is left to the
    client.

    Raises:
        InputError: it cannot.
    """
    with importing():
        from huggingface_hub import constants, try_to_load_from_cache

    name, revision = pinned(name)
    if constants.HF_HUB_OFFLINE or getproxies() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return
    if (
        what == "dataset"
        and (Path(constants.HF_HOME) / "datasets" / name.replace("/", "___")).is_dir()
    ):
        return
    if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        return
    place = "file or folder" if what == "dataset" else "folder"
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or {"http": 80}.get(hub.scheme, 443)
    try:
        socket.create_connection((hub.hostname or "", port), HUB_SECONDS).close()
    except OSError as error:
        raise InputError(
            f"{what} {name!r}: no such {place}, and the model hub cannot be reached "
            f"({hub.hostname}: {error}); check the path, or the connection"
        ) from error


def end_tokens(name: str) -> list[int]:
    """The tokens that end a completion by the generation config of a folder, or of a Hugging Face
    name in the cache; none if it has no such file."""
    from huggingface_hub import try_to_load_from_cache

    file: object = Path(name) / "generation_config.json"
    repository, revision = pinned(name)
    if not Path(name).is_dir() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repository):
        file = try_to_load_from_cache(repository, "generation_config.json", revision=revision)
    if not isinstance(file, str | Path) or not Path(file).is_file():
        return []
    ends = json.loads(Path(file).read_text(encoding="utf-8")).get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def has_tokenizer(folder: Path) -> bool:
    """True if a checkpoint folder holds a tokenizer's vocabulary or settings."""
    return any(_is_tokenizer(file) and "template" not in file.name for file in folder.iterdir())


def with_tokenizer(model: str, tokenizer: str | None) -> str:
    """A checkpoint with another's tokenizer, as a folder of links in the user's cache, which is
    loaded, sent and hashed like any other. None: the model unchanged.

    Raises:
        InputError: no such model, or no such tokenizer.
    """
    if tokenizer is None:
        return model
    folder = folder_of(tokenizer, TOKENIZER_FILES, "tokenizer")
    if not has_tokenizer(folder):
        raise InputError(f"tokenizer {tokenizer!r}: {folder} holds no tokenizer")
    files = [file for file in folder.iterdir() if _is_tokenizer(file)]
    files += [file for file in folder_of(model).iterdir() if not _is_tokenizer(file)]
    stats = sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    joined = cache_dir() / "joined" / hashlib.sha256(repr(stats).encode()).hexdigest()[:24]
    if not joined.is_dir():
        joined.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=joined.parent))
        for file in files:
            (made / file.name).symlink_to(file)
        if joined.is_dir():  # another process was faster
            shutil.rmtree(made)
        else:
            made.rename(joined)
    return str(joined)


def numbered(folder: Path) -> list[Path]:
    """The folders of checkpoints (a run's `update_20`, fine-tuning's `step_20`) in a folder, oldest
    first; other names, such as `update_x`, are skipped.

    A run's used to be called `step_N`: these are read too, with a warning, and sort before an
    `update_N` of the same number.
    """
    names = re.compile(r"[a-z]+_[0-9]{1,18}")
    found = [f for f in folder.glob("*_*") if names.fullmatch(f.name) and f.is_dir()]
    if any(f.name.startswith("step_") and (f / "weights").is_dir() for f in found):
        _warn_renamed(folder)
    return sorted(found, key=lambda f: (int(f.name.partition("_")[2]), f.name))


@cache
def _warn_renamed(folder: Path) -> None:
    """Once, though a run's checkpoints are listed several times."""
    logger.warning(f"{folder}: step_N is now called update_N")


def _is_tokenizer(file: Path) -> bool:
    return file.is_file() and any(fnmatch(file.name, pattern) for pattern in TOKENIZER_FILES)


def crc32(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            value = zlib.crc32(block, value)
    return value


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def cache_dir() -> Path:
    """The user's folder for downloads: `$XDG_CACHE_HOME/tramontane`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tramontane"
