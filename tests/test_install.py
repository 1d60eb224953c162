"""Which torch an installation takes, and that nothing installed later changes it."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tramontane
from tests.docs.pages import commands
from tests.paths import ROOT
from tramontane.errors import install, other_project


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
    assert package.endswith("--editable '.[train]'") and "--upgrade" not in package


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
    assert -1 < text.find("PyPI's brings gigabytes of CUDA") < text.find("pip install\n'.[train]'")
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
    ["train", "reasoning-gym", "ray", "lora", "gguf", "studies", "view", "trackers", "docs"],
)
def test_an_extra_accepts_the_torch_that_is_there(extra: str) -> None:
    """pip keeps an installed package that every requirement admits."""
    version = importlib.metadata.version("torch")
    todo, seen = [("tramontane-rl", frozenset({extra}))], set()
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
    assert install("view") == f"{sys.executable} -m pip install 'tramontane-rl[view]'"
    extras = importlib.metadata.metadata("tramontane-rl").get_all("Provides-Extra") or []
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        for extra in re.findall(r"\binstall\(['\"]([\w-]+)['\"]\)", text):
            assert extra in extras, path
        # Bare `pip` may belong to any environment.
        assert not re.search(r"(?<!-m )\bpip install", text.replace("`pip install", "")), path


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *words], check=True)


def import_error(site: Path, program: str) -> str:
    """The last error of a program that finds the packages in `site` first."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=site.parent,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    return done.stderr.rpartition("ImportError: ")[2]


@pytest.mark.slow
def test_a_wheel_and_an_sdist_install_the_same_package(tmp_path: Path) -> None:
    build = "import sys; from hatchling.build import build_sdist; build_sdist(sys.argv[1])"
    pip("install", "--target", str(tmp_path / "hatchling"), "hatchling>=1.26")
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "hatchling")},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    [sdist] = tmp_path.glob("tramontane_rl-*.tar.gz")
    pip("wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT))
    [wheel] = tmp_path.glob("tramontane_rl-*.whl")
    files = []
    for number, source in enumerate((wheel, sdist)):
        site = tmp_path / f"site{number}"
        pip("install", "--no-deps", "--target", str(site), str(source))
        program = "import tramontane.errors as e; raise ImportError(e.__file__)"
        assert import_error(site, program).startswith(str(site))
        files.append({p.relative_to(site) for p in (site / "tramontane").rglob("*.py")})
    assert files[0] == files[1]


def test_files_of_the_other_project_are_named(tmp_path: Path) -> None:
    """They replaced a module: the first line of its import error says so, and the remedy."""
    site = tmp_path / "site"
    shutil.copytree(Path(tramontane.__file__).parent, site / "tramontane")
    assert not other_project(site / "tramontane")
    (site / "tramontane/cli/training.py").write_text("from tramontane.core import Agent\n")
    info = site / "tramontane-0.2.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tramontane\nVersion: 0.2.4\n")
    (info / "RECORD").write_text("tramontane/cli/training.py,,\n")
    first, rest = import_error(site, "import tramontane.cli").split("\n", 1)
    assert "files of tramontane 0.2.4, an unrelated project" in first
    assert "install --force-reinstall --no-deps tramontane-rl" in first
    assert "No module named 'tramontane.core'" in rest
    assert other_project(site / "tramontane") == first
