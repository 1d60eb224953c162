"""Commands, studies, objectives and domains of other packages, and what is said without them."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.docs.pages import blocks
from tests.paths import ROOT
from tramontane import InputError, plugins
from tramontane.cli import app
from tramontane.config import Config, Section, parse
from tramontane.studies.study import load_study, names
from tramontane.trainer.objectives import load_objective
from tramontane.verifier.functions import load

PAGE = ROOT / "docs/your-study.md"
GROUPS = re.compile(r'^\[project.entry-points."(.*)"\]\n((?:.+ = .+\n)+)', re.M)


def printed(language: str, name: str) -> str:
    """The file `name` of the page's example."""
    return next(b for b in blocks(PAGE, language) if b.startswith(f"# {name}\n"))


def install(site: Path, name: str, entries: str) -> None:
    """What an installer leaves of a package: its name, version and entry points."""
    info = site / f"{name}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(entries)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of docs/your-study.md, installed, with an objective and a domain's verifier."""
    site = tmp_path / "site"
    (site / "random_walks/studies").mkdir(parents=True)
    (site / "random_walks/__init__.py").touch()
    for language, name in (
        ("python", "random_walks/walks.py"),
        ("yaml", "random_walks/studies/walk-drift.yaml"),
    ):
        (site / name).write_text(printed(language, name))
    objective = blocks(ROOT / "docs/your-objective.md", "python")[0]
    (site / "random_walks/asymre.py").write_text(objective)
    (site / "random_walks/grading.py").write_text("def check(problem, answer):\n    return 1.0\n")
    groups = GROUPS.findall(printed("toml", "pyproject.toml"))
    entries = "".join(f"[{group}]\n{lines}" for group, lines in groups).replace('"', "")
    install(site, "random_walks", entries)
    monkeypatch.syspath_prepend(str(site))
    for module in [name for name in sys.modules if name.partition(".")[0] == "random_walks"]:
        monkeypatch.delitem(sys.modules, module)  # of an earlier test
    return site


def test_a_package_adds_a_command(package: Path) -> None:
    found = CliRunner().invoke(app, ["walk", "100", "--drift", "0.5"])
    assert found.exit_code == 0 and 10 < float(found.stdout) < 90
    listed = CliRunner().invoke(app, ["--help"]).stdout
    assert "Print where a random walk ends." in listed


def test_a_command_may_be_an_app_with_subcommands(package: Path) -> None:
    (package / "random_walks/apps.py").write_text(
        "import typer\n\n"
        "app = typer.Typer(help='Some walks.')\n\n"
        "@app.command()\ndef up() -> None:\n    print('up')\n\n"
        "@app.command()\ndef down() -> None:\n    print('down')\n"
    )
    install(package, "more_walks", "[tramontane.commands]\nwalks = random_walks.apps:app\n")
    importlib.invalidate_caches()
    assert CliRunner().invoke(app, ["walks", "down"]).stdout == "down\n"
    assert "Some walks." in CliRunner().invoke(app, ["--help"]).stdout


@pytest.mark.usefixtures("forked_workers")
def test_a_package_adds_a_study(package: Path, tmp_path: Path) -> None:
    assert "walk-drift" in names() and names() == sorted(names())
    assert "Random walks with drift" in CliRunner().invoke(app, ["study", "list"]).stdout
    out = str(tmp_path / "studies")
    assert app(["study", "walk-drift", "--out", out], standalone_mode=False) is None
    result = json.loads((tmp_path / "studies/walk-drift/results.json").read_text())
    assert result["verdicts"][0]["outcome"] == "holds"


def test_a_package_adds_a_config(package: Path) -> None:
    keys = "from tramontane.config import Section\n\nclass Walk(Section):\n"
    (package / "random_walks/keys.py").write_text(
        f'{keys}    """A walk."""\n\n    steps: int = 3\n    """Number of steps."""\n'
    )
    install(package, "more_walks", "[tramontane.configs]\nwalk = random_walks.keys:Walk\n")
    importlib.invalidate_caches()
    assert issubclass(plugins.load(plugins.offered(plugins.CONFIGS)["walk"]), Section)
    shown = CliRunner().invoke(app, ["config", "walk"]).stdout
    assert "A walk." in shown and "steps  integer; default 3" in shown


def test_an_objective_and_a_domain_of_a_package_are_named_by_import_path(package: Path) -> None:
    settings = {
        "trainer": {"objective": {"name": "random_walks.asymre", "custom": {"delta": -0.5}}},
        "verifier": {"domains": {"walks": {"verifier": "random_walks.grading.check"}}},
    }
    config = parse(Config, settings, "test")
    assert load_objective(config.trainer.objective).loss.__module__ == "random_walks.asymre"
    assert load(config.verifier.domains["walks"].verifier)(None, "x") == 1.0


def test_a_package_that_does_not_load_is_named(package: Path) -> None:
    entries = "[tramontane.commands]\nfly = random_walks.absent:fly\n"
    install(package, "broken_walks", f"{entries}[tramontane.studies]\nflights = no_such.studies\n")
    importlib.invalidate_caches()
    for words in (["fly"], ["study", "flights"]):
        with pytest.raises(InputError, match="the package broken_walks does not load: No module"):
            app(words, standalone_mode=False)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry points look as if no other package were installed."""
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())


PAPERS = [(project.parent, project.read_text()) for project in ROOT.glob("papers/*/pyproject.toml")]
ENTRIES = [
    (folder, group, name)
    for folder, text in PAPERS
    for group, lines in GROUPS.findall(text)
    for name in re.findall(r"^([\w-]+) =", lines, re.M)
]


@pytest.mark.parametrize(("folder", "group", "name"), ENTRIES)
def test_a_paper_that_is_not_installed_names_its_installation(
    folder: Path, group: str, name: str, alone: None
) -> None:
    words = {plugins.COMMANDS: [name], plugins.STUDIES: ["study", name]}
    with pytest.raises(InputError) as caught:
        app(words.get(group, ["config", name]), standalone_mode=False)
    message = str(caught.value)
    assert message.endswith(f" -m pip install {folder}") and "\n" not in message


@pytest.mark.usefixtures("alone")
def test_an_unknown_command_is_told_the_nearest() -> None:
    with pytest.raises(InputError, match="no command 'trian'; did you mean 'train'"):
        app(["trian"], standalone_mode=False)
    with pytest.raises(InputError, match=r"no command 'xyzzy'; `tramontane --help` lists"):
        app(["xyzzy"], standalone_mode=False)
    assert plugins.remedy(plugins.COMMANDS, "xyzzy") is None


def test_studies_of_papers_can_be_loaded() -> None:
    """The installed entries are those of the folders."""
    for _, group, name in ENTRIES:
        assert name in plugins.offered(group)
        if group == plugins.STUDIES:
            assert load_study(name).runner
