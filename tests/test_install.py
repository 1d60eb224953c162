"""Which torch an installation takes, and that nothing installed later changes it."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.docs.pages import commands
from tests.paths import ROOT
from tramontane.errors import install


def recipe(path: str, *settings: str) -> list[str]:
    """The commands of `make quickstart` in a fresh clone, with this PATH."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "quickstart", *settings],
        cwd=ROOT,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.replace("\\\n", "").splitlines()


def without_nvidia() -> str:
    folders = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(f for f in folders if not Path(f, "nvidia-smi").exists())


def test_without_a_driver_only_builds_for_cpus_satisfy_the_requirement() -> None:
    [torch, package] = [line for line in recipe(without_nvidia()) if "pip install" in line]
    assert "'torch==2.13.0+cpu'" in torch
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in torch
    assert "--timeout" in torch and "--retries" in torch
    assert "--no-deps" in torch  # no other package is looked for in that index
    assert package.endswith("--editable .") and "--upgrade" not in package


def test_with_a_driver_torch_brings_cuda(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    lines = recipe(f"{tmp_path}{os.pathsep}{without_nvidia()}")
    [torch] = [line for line in lines if "pip install" in line and "torch" in line]
    assert "'torch==2.13.0'" in torch and "whl/cpu" not in torch
    assert any("an NVIDIA driver was found; several GB" in line for line in lines)


def test_a_build_of_ones_own_is_taken() -> None:
    lines = recipe(without_nvidia(), "TORCH=torch==2.14.0+rocm")
    [torch] = [line for line in lines if "pip install" in line and "torch" in line]
    assert "'torch==2.14.0+rocm'" in torch and "whl/cpu" not in torch


def test_the_readme_names_the_build_for_cpus_before_an_installation_by_hand() -> None:
    text = (ROOT / "README.md").read_text()
    build = "pip install torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu"
    assert -1 < text.find("PyPI's brings gigabytes of CUDA") < text.find("`pip install .`")
    release = build.split()[2].partition("+")[0]  # that of `make`
    assert build in text and f"TORCH ?= {release}" in (ROOT / "Makefile").read_text()


def test_no_constraint_asks_for_another_torch() -> None:
    assert not re.search(r"^torch\b", (ROOT / "constraints.txt").read_text(), re.M)
    # What the docs say to install either leaves torch alone, or is about torch itself.
    for command in commands("pip"):
        words = set(command.words)
        assert not words & {"-U", "--upgrade", "--force-reinstall", "-c"}, command.where


def required(package: str, extras: frozenset[str] = frozenset()) -> dict[str, Requirement]:
    """What an installed package, with extras, asks for here."""
    found = {}
    for line in importlib.metadata.requires(package) or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": e}) for e in extras or {""}):
            found[requirement.name] = requirement
    return found


@pytest.mark.parametrize(
    "extra",
    ["reasoning-gym", "ray", "lora", "gguf", "studies", "view", "trackers", "docs"],
)
def test_an_extra_accepts_the_torch_that_is_there(extra: str) -> None:
    """pip keeps an installed package that every requirement admits."""
    version = importlib.metadata.version("torch")
    todo, seen = [("tramontane", frozenset({extra}))], set()
    while todo:
        package, extras = todo.pop()
        for name, requirement in required(package, extras).items():
            if name == "torch":
                assert requirement.specifier.contains(version, prereleases=True), package
            try:
                importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            wanted = (name, frozenset(requirement.extras))
            if wanted not in seen:
                seen.add(wanted)
                todo.append(wanted)


def test_advice_names_this_interpreter_and_an_extra_that_exists() -> None:
    assert install("view") == f"{sys.executable} -m pip install 'tramontane[view]'"
    extras = importlib.metadata.metadata("tramontane").get_all("Provides-Extra") or []
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        for extra in re.findall(r"\binstall\(['\"]([\w-]+)['\"]\)", text):
            assert extra in extras, path
        # Bare `pip` may belong to any environment.
        assert not re.search(r"(?<!-m )\bpip install", text.replace("`pip install", "")), path
