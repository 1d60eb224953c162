"""Every config that ships is valid, as it is or with the keys that it asks for, and fits into the
memory of the cluster that it names."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.paths import ROOT
from tramontane.cli import app
from tramontane.config import Config, Section, load_section
from tramontane.config.sft import SFTConfig
from tramontane.curation.config import CurateConfig
from tramontane.errors import InputError
from tramontane.recipes.recipe import KINDS

FILES = sorted(path for path in (ROOT / "configs").glob("*") if path.is_file())
# Keys that a config leaves null, for the user to set on the command line.
REQUIRED = {
    "dapo": ["model=any", "data.train=any.jsonl"],
    "grpo": ["model=any", "data.train=any.jsonl"],
    "gsm8k": ["model=any"],
    "judge": ["model=any", "data.train=any.jsonl"],
    "medium": ["model=any", "data.train=any.jsonl"],
    "recipe_medium": ["model=any"],
    "recipe_small": [
        "model=any",
        "teacher=any",
        "answers.source=any.jsonl",
        "general.train=any.jsonl",
    ],
    "scalerl": ["model=any", "data.train=any.jsonl"],
    "small": ["model=any", "data.train=any.jsonl"],
    "tir": ["model=any"],
}


def kind(file: Path) -> type[Section]:
    """The class of the command that the file is for, by its name."""
    if file.stem.startswith("curate_"):
        return CurateConfig
    if file.stem.startswith("recipe_"):
        return KINDS[file.stem.split("_")[1]]
    return SFTConfig if file.stem.startswith("tiny_") else Config


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_shipped_config_is_valid(file: Path) -> None:
    assert file.suffix == ".yaml"
    load_section(kind(file), file, REQUIRED.get(file.stem))


@pytest.mark.parametrize("name", REQUIRED)
def test_a_key_that_a_shipped_config_leaves_to_the_user_is_named(name: str) -> None:
    file = ROOT / f"configs/{name}.yaml"
    with pytest.raises(InputError) as caught:
        load_section(kind(file), file)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(REQUIRED[name])
    for line, override in zip(lines, REQUIRED[name], strict=True):
        assert f"{override.partition('=')[0]}: not given; set it" in line


# Commands in the comments of the configs, which name the model and the GPUs.
CLUSTERS = [
    shlex.split(command)
    for file in FILES
    for command in re.findall(r"^#   tramontane (train .*--model-shape.*)$", file.read_text(), re.M)
]


def test_the_configs_for_clusters_name_them() -> None:
    named = {(args[1], args[args.index("--model-shape") + 1]) for args in CLUSTERS}
    assert named == {
        ("configs/medium.yaml", "mistral-large-123b"),
        ("configs/medium.yaml", "mistral-small-24b"),
        ("configs/small.yaml", "mistral-small-24b"),
    }


@pytest.mark.parametrize("args", CLUSTERS, ids=" ".join)
def test_a_config_fits_its_cluster(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    gpus = [line for line in lines if line.startswith("GPU of each")]
    assert len(gpus) == 2
    assert all("; fits in" in line for line in gpus)


def test_a_config_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    args = ["train", "configs/small.yaml", "--dry-run", "--model-shape", "mistral-small-24b"]
    result = CliRunner().invoke(app, [*args, "--gpu", "h200", "trainer.ranks=2"])
    assert result.exit_code
    assert "does NOT fit" in result.stdout
    assert "GPU of each trainer rank (h200) has 139.8 GiB" in str(result.exception)
    assert re.search(r"set trainer.ranks=\d+ \(now 2\)", str(result.exception))
