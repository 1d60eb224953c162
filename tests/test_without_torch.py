"""The base installation, without the extras `train` and `parquet`: it grades, curates by rules,
reads the logs of runs and validates configs. With `parquet` it also reads their rollouts."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from pyarrow import Table, parquet

from tests.paths import ROOT
from tests.view.pages import make_run
from tramontane.errors import TRAIN

SECONDS = 120.0  # limit of one program

PROGRAM = r"""
import importlib, json, sys
from pathlib import Path
import tramontane
from tramontane.config import load_config
from tramontane.errors import InputError

folder = Path(sys.argv[1])
config = load_config(sys.argv[2], ["model=Qwen/Qwen3-0.6B"])
graded = tramontane.score(folder / "answers.jsonl", folder / "verdicts.jsonl")
curated = tramontane.curate(None, [f"out={folder / 'curated'}"], inputs=[str(folder / "raw.jsonl")])

def curated_from(source):
    out = folder / f"curated_{Path(source).stem}"
    return tramontane.curate(None, [f"out={out}"], inputs=[source])

def in_table():
    from tramontane.view.runs import load_runs
    from tramontane.view.summary import summary

    [run] = load_runs([folder / "run"])
    return run.rollouts.table().num_rows, bool(summary(run))

refused = [
    ("train", lambda: tramontane.plan()),
    ("train", lambda: tramontane.train(sys.argv[2], [f"run_dir={folder / 'new'}"])),
    ("train", lambda: curated_from("openai/gsm8k#main")),
    ("parquet", lambda: tramontane.audit(folder / "run")),
    ("parquet", lambda: curated_from(str(folder / "raw.parquet"))),
]
audited = tramontane.audit(folder / "verdicts.jsonl", rows=folder / "answers.jsonl")
found = {finding.name: finding.found for finding in tramontane.doctor()}
assert found["torch"] == found["scipy"] == "not installed", found
for extra, call in refused:
    try:
        call()
    except InputError as error:
        assert f"pip install 'tramontane-rl[{extra}]'" in str(error), error
        assert "\n" not in str(error)
    else:
        raise AssertionError("it needs a package that is not there")
read = None
if sys.argv[3:]:
    sys.path.append(sys.argv[3])
    importlib.invalidate_caches()
    of_run = tramontane.audit(folder / "run").completions
    of_file = curated_from(str(folder / "raw.parquet")).summary["stages"][-1]["left"]
    read = [*in_table(), of_run, of_file]
assert not {"torch", "transformers", "scipy"} & sys.modules.keys()
print(json.dumps({
    "config": config.name, "right": graded.outcomes["right"], "wrong": graded.outcomes["wrong"],
    "left": curated.summary["stages"][-1]["left"], "audited": audited.completions,
    "read": read,
}))
"""


def answer(row_id: str, text: str, **row: object) -> dict[str, object]:
    form = {"id": row_id, "domain": "math", "problem": "", "response": f"<think>x</think>{text}"}
    return {**form, **row}


def prepared(folder: Path) -> Path:
    make_run(folder / "run")
    program = "```python\ndef square(x): return x * x\n```"
    tests = {"type": "python_assert", "entry_point": "square", "code": "assert square(3) == 9"}
    rows = [
        answer("half", r"\boxed{0.5}", answer=r"\frac12"),
        answer("third", r"\boxed{0.5}", answer=r"\frac13"),
        answer("square", program, domain="code", tests=tests),
    ]
    raw = [{"problem": f"Compute {i} plus {i} times seven.", "answer": str(8 * i)} for i in "234"]
    for name, written in (("answers", rows), ("raw", raw)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    parquet.write_table(Table.from_pylist(raw), folder / "raw.parquet")
    return folder


def ran(python: list[str], folder: Path, *parquet: str, **environment: str) -> None:
    """Run PROGRAM, and compare what it found. What the extra `parquet` needs is in a folder that it
    adds at the end, if there is one."""
    done = subprocess.run(
        [*python, "-c", PROGRAM, str(folder), str(ROOT / "configs/quickstart.yaml"), *parquet],
        env=os.environ | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "config": "quickstart", "right": 2, "wrong": 1, "left": 3, "audited": 3,
        "read": [60, True, 60, 3] if parquet else None,
    }  # fmt: skip


def linked(folder: Path, wanted: Callable[[str], bool]) -> str:
    """A folder with some of this interpreter's packages, by name."""
    folder.mkdir()
    for place in filter(lambda place: place.endswith("site-packages"), sys.path):
        for entry in Path(place).iterdir():
            name = entry.name.partition("-")[0].partition(".")[0].lower()
            if wanted(name) and entry.suffix != ".pth":
                (folder / entry.name).exists() or (folder / entry.name).symlink_to(entry)
    return str(folder)


def test_everything_but_models_works_without_torch(tmp_path: Path) -> None:
    absent = {*TRAIN, "torchgen", "pandas", "fastapi", "scipy", "pyarrow"}
    base = linked(tmp_path / "base", lambda name: name not in absent)
    parquet = linked(tmp_path / "parquet", lambda name: name == "pyarrow")
    python = getattr(sys, "_base_executable", sys.executable)
    path = os.pathsep.join([str(ROOT / "src"), base])
    # -S: without the packages that are beside this interpreter.
    ran([python, "-S"], prepared(tmp_path), parquet, PYTHONPATH=path)


def test_graders_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, tramontane.verdicts, tramontane.verifier.pool\n"
        "from tramontane.verdicts import verify\n"
        "assert verify('1/2', '0.5').verdict == 'right'\n"
        "print(*{'torch', 'transformers', 'datasets', 'numpy', 'pandas'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == []
