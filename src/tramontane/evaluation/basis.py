"""What completions depend on: settings, problems and weights.

It is recorded in `NAME.json` next to `NAME.jsonl`, so that only the same evaluation can continue
the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tramontane.config import PromptConfig
from tramontane.errors import InputError
from tramontane.models.names import resolve, with_tokenizer
from tramontane.types import Problem
from tramontane.workplace import write_whole

if TYPE_CHECKING:
    from tramontane.evaluation.checkpoint import Settings

# These affect speed, not completions; the problems have their own hash.
FREE = {"sampling": {"slots", "problems"}, "generator": {"workers"}, "verifier": {"workers"}}
MODEL_FILES = (
    *("*.safetensors", "*.bin", "config.json", "generation_config.json"),
    *("tokenizer*", "chat_template*"),
)


@dataclass(frozen=True)
class Basis:
    """What the completions of an evaluation depend on.

    Args:
        model: its path or name, and
        source: of the problems; both for the reader only, as checkpoints and files may be moved.
        settings: sampling, prompts, generator and verifier, in JSON types.
        problems: hash of the problems, in order.
        weights: hash of a checkpoint folder's files; for a Hugging Face name, its commit.
    """

    model: str
    source: str
    settings: dict[str, dict[str, Any]]
    problems: str
    weights: str

    @classmethod
    def of(cls, settings: Settings, problems: Sequence[Problem]) -> Basis:
        """The basis of an evaluation on these problems."""
        config = settings.config.model_dump(mode="json")
        prompts = {name: config["data"][name] for name in PromptConfig.model_fields}
        parts = {"sampling": asdict(settings.sampling), "data": prompts}
        parts |= {name: config[name] for name in ("generator", "verifier")}
        kept = {
            part: {key: value for key, value in values.items() if key not in FREE.get(part, ())}
            for part, values in parts.items()
        }
        model, source = settings.config.model, settings.config.data.eval
        return cls(
            model=model,
            source=source or settings.config.data.train,
            settings=kept,
            problems=problems_hash(problems),
            weights=weights_hash(with_tokenizer(model, settings.config.tokenizer)),
        )

    def check(self, file: Path) -> None:
        """Check that a file of completions, if there is one, has this basis.

        Raises:
            InputError: it has a different one, or none that can be read.
        """
        record = record_of(file)
        begun = file.is_file() and file.stat().st_size > 0
        if not record.is_file():
            if begun:
                raise InputError(
                    f"{file}: there is no {record.name} that says what these rows were made "
                    f"with; name another file (--out), or remove this one"
                )
            return
        before = _read(record)
        if not begun:
            return
        if changed := self._changes(before):
            raise InputError(
                f"{record}: the completions in {file.name} were made with other "
                f"{', other '.join(changed)}; name another place (--out), or remove both files"
            )

    def write(self, file: Path, figures: Mapping[str, Any]) -> None:
        """Record the basis of a file of completions, and their results."""
        write_whole(record_of(file), json.dumps(asdict(self) | dict(figures), indent=1) + "\n")

    def _changes(self, before: Mapping[str, Any]) -> list[str]:
        """Differences from a recorded basis, as text."""
        keys = [
            f"{part}.{key}"
            for part, values in self.settings.items()
            for key in values
            if values[key] != before["settings"].get(part, {}).get(key)
        ]
        found = [f"settings ({', '.join(keys)})"] if keys else []
        return found + [
            name for name in ("problems", "weights") if getattr(self, name) != before[name]
        ]


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
    found = hashlib.sha256()
    for problem in problems:
        fields = asdict(problem)
        del fields["where"]  # a copy of the file holds the same problems
        found.update(json.dumps(fields, sort_keys=True).encode() + b"\n")
    return found.hexdigest()


def weights_hash(model: str) -> str:
    """Hash of the content of a model's weights, architecture and tokenizer, so that a copy has the
    same hash; `NAME@COMMIT` for a Hugging Face name."""
    from tramontane.models import loading

    folder = Path(resolve(model)).expanduser()
    if not folder.is_dir():
        return f"{model}@{loading.load_config(model)._commit_hash}"
    found = hashlib.sha256()
    for file in sorted({file for pattern in MODEL_FILES for file in folder.glob(pattern)}):
        stat = file.stat()
        found.update(f"{file.name} {_file_hash(file, stat.st_size, stat.st_mtime_ns)}\n".encode())
    return found.hexdigest()


@lru_cache(maxsize=4096)
def _file_hash(file: Path, size: int, mtime_ns: int) -> str:
    """Hash of a file, read again only if its size or modification time changes."""
    found = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def _read(record: Path) -> dict[str, Any]:
    fault = (
        f"{record}: not the record of an evaluation, or damaged; name another place (--out), or "
    )
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not {"settings", "problems", "weights"} <= found.keys():
        raise InputError(f"{fault}remove it and {record.stem}.jsonl")
    return found
