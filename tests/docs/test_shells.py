"""The commands of README and docs mean the same to bash and zsh, which expands `[…]` and `{…}`."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
PROGRAMS = ("tramontane", "pip", "python", "make", "uv", "git", "curl", "docker", "ray")
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.S | re.M)
OVERRIDE = re.compile(r"'?[a-z_]+(\.[a-z_]+)+=\S")


def commands(page: Path) -> list[str]:
    """Commands of a page or of a config's comments: in fenced blocks, with continued lines joined,
    and in code spans, where a key with its value also counts."""
    text = page.read_text()
    if page.suffix == ".yaml":
        comments = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
        lines = "\n".join(comments).replace("\\\n", " ").splitlines()
    else:
        blocks = [body for kind, body in FENCE.findall(text) if kind in ("", "bash", "sh")]
        lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
        spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
        lines += [f"tramontane {span}" if OVERRIDE.match(span) else span for span in spans]
    first = re.compile(rf"(?:\w+=\S* )*(?:{'|'.join(PROGRAMS)}) ")
    found = [line.strip().removeprefix("$ ") for line in lines]
    return [line for line in found if first.match(line)]


def read_by(shell: list[str], command: str) -> tuple[int, str]:
    """What a shell passes to the programs of a command, one argument a line."""
    stubs = "".join(f"{name}() {{ printf '%s\\n' {name} \"$@\"; }}\n" for name in PROGRAMS)
    done = subprocess.run([*shell, "-c", stubs + command], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_commands_of_the_docs_mean_the_same_to_bash_and_zsh(tmp_path: Path) -> None:
    every = {c: page.name for page in PAGES + CONFIGS for c in commands(page)}
    assert len(every) > 100
    plain = re.compile(r"[\w\s./:=,@+%-]*")  # nothing that a shell would expand
    for command, page in every.items():
        if plain.fullmatch(command):
            continue
        harmless = re.split(r"\s[|>&]+\s|;\s|\s#", command)[0]  # what the program itself receives
        zsh, bash = (read_by(shell, harmless) for shell in (["zsh", "-f"], ["bash"]))
        assert zsh == bash and zsh[0] == 0, f"{page}: {command}"
        for argument in bash[1].splitlines():
            assert argument.count("{") == argument.count("}"), f"{page}: {command}"
            assert argument.count("[") == argument.count("]"), f"{page}: {command}"
