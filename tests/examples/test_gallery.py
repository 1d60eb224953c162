"""Every command of the gallery's index runs, in smoke size: the same files with smaller keys."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import blocks
from tests.forked import Command
from tests.paths import ROOT

INDEX = ROOT / "examples/README.md"
ROW = re.compile(r"^\| .*$", re.M)
COMMAND = re.compile(r"`((?:python|tramontane (?:sft|study|sweep)) examples/[^`]+)`")
# Appended to what a script or a command is given, or merged into the sizes of a notebook.
SMOKE = {
    "pipeline.updates": 1,
    "pipeline.n_batch": 16,
    "pipeline.n_async": 16,
    "pipeline.group_size": 8,
    "evaluation.problems": 2,
    "evaluation.samples": 1,
}
# Constants of a script, which are replaced in a copy of it.
SMALLER = {
    "judge.py": {
        "RATED, KEPT_BACK = 1024, 200": "RATED, KEPT_BACK = 288, 128",
        '"temperature": 1.0}': '"temperature": 1.0, "max_tokens": 96}',
    },
    "offline.py": {
        "record(problems: int = 64": "record(problems: int = 16",
        "temperature=1.0,": "temperature=1.0, max_tokens=96,",
    },
}
COLD_START = ["cold_start.steps=2", "cold_start.batch_tokens=512"]


def commands() -> list[str]:
    return COMMAND.findall(INDEX.read_text())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with what a checkout has, where an example may write."""
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(root: Path, words: list[str]) -> str:
    """What a command prints; fails with its last lines."""
    command = Command(*words, folder=root)
    printed = command.communicate()
    assert command.wait() == 0, f"{shlex.join(words)}\n{printed[-4000:]}"
    return printed


def smaller(model: str) -> str:
    """`examples/small.yaml` in smoke size."""
    sizes = yaml.safe_load((ROOT / "examples/small.yaml").read_text()) | {"model": model}
    for key, value in SMOKE.items():
        section, _, name = key.partition(".")
        sizes[section][name] = value
    sizes["pipeline"]["l_max"] = 96
    sizes["pipeline"]["diversity"] = "none"  # a batch of two groups must not wait for a signal
    return yaml.safe_dump(sizes)


def smoke(words: list[str], root: Path, model: str) -> list[str]:
    """A command of the index with smaller sizes, and a smaller model."""
    if words[0] == "tramontane":
        program = words[1:]
        if words[1] == "sft":
            return [*program, "model=tiny", "steps=1", "batch_tokens=512"]
        (root / "smoke.yaml").write_text(smaller(model))
        base = program.index("examples/small.yaml")
        last = ["--seeds", "1"]
        if words[1] == "sweep":
            *last, seeds, _ = program[base + 1 :]
            last.append(seeds.partition(",")[0])  # of the two seeds one
        return [*program[:base], "smoke.yaml", *last]
    source = (ROOT / words[1]).read_text()
    if words[1].endswith(("rl_loop.py", "trl_script.py")):
        return words[1:]
    sizes = [f"{key}={value}" for key, value in SMOKE.items()] + [f"model={model}"]
    if "pipeline.diversity" not in source:
        sizes.append("pipeline.diversity=none")
    if "configs/" not in source and "conversation." not in source:
        sizes.append("pipeline.l_max=96")
    if "cold_start" in source:
        sizes += COLD_START
    if constants := SMALLER.get(Path(words[1]).name):
        for large, small in constants.items():
            assert large in source
            source = source.replace(large, small)
        (root / "smoke.py").write_text(source)
        return ["smoke.py", *words[2:], *sizes]
    return [*words[1:], *sizes]


def test_every_example_is_in_the_index() -> None:
    listed = set(re.findall(r"\]\((\w+\.\w+)\)", INDEX.read_text()))
    made = {file.name for file in (ROOT / "examples").iterdir() if file.is_file()}
    assert listed == made - {"README.md"}
    assert len(commands()) == len(listed) - 1  # a notebook is opened


def test_examples_are_short() -> None:
    for file in (ROOT / "examples").glob("*.py"):
        lines = len(file.read_text().splitlines())
        assert lines < 80, f"{file.name} has {lines} lines"


def test_a_trl_script_and_its_counterpart_have_the_same_rows_and_reward() -> None:
    def shared(name: str) -> str:
        source = (ROOT / "examples" / name).read_text()
        return source[source.index("ROWS = ") : source.index("\n\n\n", source.index("def correct"))]

    assert shared("trl_script.py") == shared("trl_counterpart.py")


@pytest.mark.slow(10)
@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_gallery_works(command: str, root: Path, one_layer: str) -> None:
    words = shlex.split(command)
    if words[1].endswith("rl_loop.py"):
        return  # tests/examples/test_rl_loop.py
    for needed, name in (("trl", "trl_script.py"), ("openai", "harness.py")):
        if words[1].endswith(name) and importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    run(root, smoke(words, root, one_layer))
    assert [*root.glob("runs/*"), *root.glob("studies/*"), *root.glob("sweeps/*")]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=str)
def test_a_notebook_runs_and_shows_its_outputs(notebook: Path, root: Path, one_layer: str) -> None:
    """Its cells as one script; the cell that is tagged `parameters` is followed by smaller ones."""
    cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    assert any(cell["outputs"] for cell in cells)
    assert sum(len(cell["source"]) for cell in cells) < 80
    script = ""
    for cell in cells:
        script += "".join(cell["source"]) + "\n"
        if "parameters" in cell["metadata"].get("tags", ()):
            small = {key: value for key, value in SMOKE.items() if key.startswith("pipeline")}
            small |= {"pipeline.diversity": "none", "model": one_layer}
            script += f"sizes |= {small!r}\n"
    assert "sizes |= " in script
    (root / "notebook.py").write_text(script)
    assert "update 1" in run(root, ["notebook.py"])


@pytest.mark.slow
def test_the_python_of_the_readme_runs(tmp_path: Path, one_layer: str) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/small.yaml").write_text(smaller(one_layer))
    [program] = blocks(ROOT / "README.md", "python")
    (tmp_path / "readme.py").write_text(program)
    assert "update_1/weights" in run(tmp_path, ["readme.py"])
