"""What completions depend on: settings, problems and weights.

It is recorded in `NAME.json` next to `NAME.jsonl`, so that only the same evaluation can continue
the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from tramontane.config import PromptConfig
from tramontane.errors import InputError
from tramontane.evaluation.settings import CONVERSING, Settings
from tramontane.journals import check_same
from tramontane.models.names import folder_of, pinned, resolve, with_tokenizer
from tramontane.types import Problem
from tramontane.workplace import write_whole

# These affect speed, not completions; the problems have their own hash.
FREE = {
    "sampling": {"slots", "problems"},
    "generator": {"workers"},
    "verifier": {"workers"},
    "conversation": {"workers", "memory_mb", "replay"},
}
MODEL_FILES = (
    *("*.safetensors", "*.bin", "config.json", "generation_config.json"),
    *("tokenizer*", "chat_template*"),
)


ANOTHER = "name another place (--out), or remove both files"

Basis = dict[str, Any]  # as in `basis_of`, in JSON types


def basis_of(settings: Settings, problems: Sequence[Problem]) -> Basis:
    """What the completions of an evaluation depend on.

    `settings` are those of sampling, prompts, generator and verifier; `problems` is a hash of the
    problems, in order; `weights` one of a checkpoint folder's files, or a Hugging Face name's
    commit. `model` and `source` are for the reader only, as checkpoints and files may be moved.
    """
    config = settings.config.model_dump(mode="json")
    prompts = {name: config["data"][name] for name in PromptConfig.model_fields}
    parts = {"sampling": asdict(settings.sampling), "data": prompts}
    parts |= {name: config[name] for name in ("generator", "verifier")}
    if settings.config.data.effort:
        prompts["effort"] = config["data"]["effort"]
    if settings.config.converses:
        prompts |= {name: config["data"][name] for name in CONVERSING}
        parts["conversation"] = config["conversation"]
    return {
        "model": settings.config.model,
        "source": settings.config.data.eval,
        "settings": {
            part: {key: value for key, value in values.items() if key not in FREE.get(part, ())}
            for part, values in parts.items()
        },
        "problems": problems_hash(problems),
        "weights": weights_hash(with_tokenizer(settings.config.model, settings.config.tokenizer)),
    }


def another(file: Path) -> str:
    """The remedy for a file that is taken: the first of its name with a number that is free."""
    names = (file.with_name(f"{file.stem}_{number}{file.suffix}") for number in count(2))
    free = next(n for n in names if not n.exists() and not n.with_suffix(".json").exists())
    return f"name another file, e.g. --out {free}, or remove both"


def check_basis(basis: Basis, file: Path, remedy: str = ANOTHER) -> None:
    """Check that a file of completions, if there is one, has this basis; `remedy` is what to do if
    not.

    Raises:
        InputError: it has a different one, or none that can be read.
    """
    made_with = {name: basis[name] for name in ("settings", "problems", "weights")}
    check_same(file, record_of(file), made_with, remedy, levels=3)


def write_basis(basis: Basis, file: Path, figures: Mapping[str, Any]) -> None:
    """Record the basis of a file of completions, and their results."""
    write_whole(record_of(file), json.dumps(basis | dict(figures), indent=1) + "\n")


def record_of(file: Path) -> Path:
    """The path of the file that records the basis of a file of completions.

    Raises:
        InputError: they would be the same file.
    """
    if file.suffix == ".json":
        raise InputError(f"{file}: completions are JSONL; name a .jsonl file")
    return file.with_suffix(".json")


def problems_hash(problems: Sequence[Problem]) -> str:
    """Hash of problems: statements, answers, tests and everything that verifiers read, in order."""
    digest = hashlib.sha256()
    for problem in problems:
        fields = asdict(problem)
        # A copy of the file holds the same problems, and so does one with other names of columns.
        del fields["where"], fields["renamed"]
        if not problem.images:  # as hashed before problems could have any
            del fields["images"]
        digest.update(json.dumps(fields, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def weights_hash(model: str) -> str:
    """Hash of the content of a model's weights, architecture and tokenizer, so that a copy has the
    same hash; `NAME@COMMIT` for a Hugging Face name."""
    folder = Path(resolve(model)).expanduser()
    if not folder.is_dir():
        # The cache has a folder for each commit.
        return f"{pinned(model)[0]}@{folder_of(model, ['config.json']).name}"
    digest = hashlib.sha256()
    for file in sorted({file for pattern in MODEL_FILES for file in folder.glob(pattern)}):
        stat = file.stat()
        digest.update(f"{file.name} {_file_hash(file, stat.st_size, stat.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


@lru_cache(maxsize=4096)
def _file_hash(file: Path, size: int, mtime_ns: int) -> str:
    """Hash of a file, read again only if its size or modification time changes."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
