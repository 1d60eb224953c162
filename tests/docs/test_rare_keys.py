"""docs/rare-keys.md has a line for every key that nothing in the repository sets."""

import re
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import get_args

from pydantic import BaseModel

from tests.paths import ROOT
from tramontane.config import Config

SETTING = ("configs", "examples", "benchmarks", "chaos", "papers", "README.md")
SETTING += ("src/tramontane/studies", "src/tramontane/recipes")


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        types = [field.annotation, *get_args(field.annotation)]
        sections = [t for t in types if isinstance(t, type) and issubclass(t, BaseModel)]
        if not sections:
            yield prefix + name
        for section in sections:
            yield from leaves(section, f"{prefix}{name}.")


def set_somewhere() -> set[str]:
    """The last parts of the keys that a config, a script or a command sets."""
    listed = subprocess.run(["git", "ls-files", *SETTING], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.split()]
    text = "\n".join(p.read_text() for p in files if p.suffix in {".yaml", ".py", ".md"})
    return set(re.findall(r"""\b([a-z_0-9]+)\b(?=["']?\s*[:=])""", text))


def test_every_key_that_nothing_sets_has_a_line() -> None:
    keys, known = set(leaves(Config)), set_somewhere()
    page = (ROOT / "docs/rare-keys.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    patterns = [pattern for row in rows for pattern in re.findall(r"`([^`]+)`", row)]
    rare = {key for key in keys if key.split(".")[-1] not in known}
    assert not {key for key in rare if not any(fnmatch(key, p) for p in patterns)}
    assert not [p for p in patterns if not any(fnmatch(key, p) for key in keys)]
