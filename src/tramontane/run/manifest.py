"""`manifest.json` of a checkpoint: sizes and checksums of all its files.

A file that a crash, a full disk or an incomplete copy truncated or damaged is so detected before it
is read.
"""

from __future__ import annotations

import json
from pathlib import Path

from tramontane.models.names import crc32

MANIFEST = "manifest.json"


def seal(folder: Path) -> None:
    """Write the manifest of all files in a checkpoint's folder.

    The ranks that wrote the trainer's state have already computed checksums of its files
    (`trainer/state.py`), which are not read again.
    """
    known = _rank_checksums(folder)
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    entries = {str(path.relative_to(folder)): path for path in files}
    manifest = {
        name: {"bytes": path.stat().st_size, "crc32": known.get(name) or f"{crc32(path):08x}"}
        for name, path in entries.items()
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def damage(folder: Path, state: bool = True) -> str | None:
    """Describe the first damage found in a checkpoint; None if it is intact.

    Args:
        folder: the checkpoint.
        state: also compare the checksums of the trainer's tensors, which are most of the bytes. A
            trainer that loads them compares them anyway (`trainer.state.DamagedState`).
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"{MANIFEST}: {error}"
    if not isinstance(manifest, dict) or not all(isinstance(e, dict) for e in manifest.values()):
        return f"{MANIFEST}: not a size and a checksum for each file"
    if "pipeline.json" not in manifest:
        return f"{MANIFEST} lists no pipeline.json"
    paths = {name: folder / name for name in manifest}
    # Sizes first: they are cheap to check and reveal truncated files.
    for name, path in paths.items():
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != (size := manifest[name].get("bytes", 0)):
            return f"{name} has {path.stat().st_size:,} of {size:,} bytes"
    for name, path in paths.items():
        if path.suffix == ".distcp" and not state:
            continue
        if f"{crc32(path):08x}" != manifest[name].get("crc32"):
            return f"{name} is not what was written (checksum)"
    return None


def _rank_checksums(folder: Path) -> dict[str, str]:
    lists = (folder / "trainer").glob("checksums_*")
    lines = [line for path in lists for line in path.read_text(encoding="utf-8").splitlines()]
    return {f"trainer/{name}": crc for crc, _, name in (line.partition(" ") for line in lines)}
