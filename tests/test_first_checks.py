"""What needs no model is checked before torch is imported, which takes seconds: bad input, and
whether another process works in the same place."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import forked
from tests.runs import begun, small_config
from tramontane.workplace import owned_file, owned_folder

CONFIGS = Path(__file__).parents[1] / "configs"
HEAVY = ("torch", "transformers", "datasets", "matplotlib", "pandas", "scipy", "sympy", "ray")
LIMIT_S = 300
REWARD = "{name: mine, function: nowhere.score, weight: 1}"

# Runs commands one after another in one process: each must be refused, and none may import what is
# heavy, unless it begins with "heavy". A plain interpreter, since this one has everything imported.
SCRIPT = f"""
import sys
from tramontane import workplace
from tramontane.cli import main
for owned in (workplace.owned_folder, workplace.owned_file):
    owned.__wrapped__.__kwdefaults__["wait"] = 0.05  # for a killed process to release its lock
workplace.EXIT_SECONDS = 0.05
for line in open(sys.argv[1]).read().splitlines():
    expected, *words = line.split("\t")
    sys.argv = ["tramontane", *words]
    print("::", line, file=sys.stderr, flush=True)
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code
    assert code == 2, (code, line)
    found = [name for name in {HEAVY!r} if name in sys.modules]
    assert expected.startswith("heavy") or not found, (found, line)
"""


def check(cases: list[tuple[str, ...]], tmp_path: Path) -> None:
    """Run commands, given behind a part of the message that each must end with: one line, however
    narrow the terminal, so that commands and paths in it can be copied."""
    file = tmp_path / "cases"
    file.write_text("\n".join("\t".join(case) for case in cases))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(file)],
        capture_output=True,
        text=True,
        cwd=CONFIGS.parent,
        env=os.environ | {"COLUMNS": "40"},
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    for part in done.stderr.split(":: ")[1:]:
        line, _, answer = part.partition("\n")
        expected = line.split("\t")[0].removeprefix("heavy ")
        assert expected in answer, part
        assert answer.startswith("error: ") and answer.count("\n") == 1, part


def test_faults_that_need_no_model_are_reported_before_heavy_imports(tmp_path: Path) -> None:
    broken, run = tmp_path / "broken.jsonl", tmp_path / "exists"
    broken.write_text('{"problem": "1+1?", "ans')
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    quickstart, small = str(CONFIGS / "quickstart.yaml"), str(CONFIGS / "recipe_small_tiny.yaml")
    tiny_base, medium = str(CONFIGS / "tiny_base.yaml"), str(CONFIGS / "recipe_medium_tiny.yaml")
    there = f"run_dir={tmp_path / 'new'}"
    cases = [
        ("unknown key", "train", quickstart, "nokey=1"),
        ("no such file", "train", quickstart, there, "data.train=missing.jsonl"),
        ("no such file", "train", quickstart, there, "data.eval=missing.jsonl"),
        ("broken.jsonl:1", "train", quickstart, there, f"data.train={broken}"),
        ("not empty", "train", quickstart, f"run_dir={run}"),
        ("nowhere", "train", quickstart, there, f"verifier.reward.custom=[{REWARD}]"),
        ("nowhere", "train", quickstart, "--dry-run", f"verifier.reward.custom=[{REWARD}]"),
        ("it does not exist", "train", "--resume", "missing"),
        ("no such file", "sft", tiny_base, f"output={tmp_path / 'o'}", "data.train=missing.jsonl"),
        ("unknown key", "sft", tiny_base, "nokey=1"),
        ("no such file", "eval", "tiny", "missing.jsonl", "--out", str(tmp_path / "e.jsonl")),
        ("broken.jsonl:1", "eval", "tiny", str(broken), "--out", str(tmp_path / "e.jsonl")),
        ("no such file", "compare", "tiny", "--on", "missing.jsonl", "--out", str(tmp_path / "c")),
        ("no such config file", "generate", "tiny", "1+1?", "--config", "missing.yaml"),
        ("no such file", "score", "missing.jsonl"),
        ("no such file", "audit", "missing"),
        ("no such file", "curate", "missing.jsonl", f"out={tmp_path / 'curated'}"),
        ("unknown key", "recipe", "small", small, "nokey=1"),
        ("missing", "recipe", "small", small, f"out={tmp_path / 'r'}", "teacher=missing"),
        (
            "no such file",
            *("recipe", "medium", medium, f"out={tmp_path / 'm'}"),
            "rl.set={data.train: missing.jsonl, stages: [{name: one}]}",
        ),
        ("not a run folder", "harvest", "missing"),
        ("no such study", "study", "nosuch"),
        ("missing", "study", "curve", "missing"),
        ("missing", "study", "landscape", "missing"),
        ("unknown key", "plan", "model=tiny", "gpus=2", "nokey=1"),
        ("it does not exist", "view", "missing"),
    ]
    check(cases, tmp_path)


def hold(places: list[tuple[str, str]], ready: Path) -> None:
    """Own files, whose names have an ending, and folders, until killed."""
    with ExitStack() as stack:
        for place, work in places:
            owned = owned_file if Path(place).suffix else owned_folder
            stack.enter_context(owned(place, work))
        ready.touch()
        time.sleep(600)


def test_every_command_that_writes_is_refused_at_once_where_another_process_works(
    tmp_path: Path,
) -> None:
    run, new = str(begun(small_config(tmp_path / "run")).path), tmp_path / "new"
    yaml = {name: str(CONFIGS / f"{name}.yaml") for name in (
        "quickstart", "recipe_small_tiny", "recipe_medium_tiny", "tiny_base")}  # fmt: skip
    commands = [
        (run, "trained", "train", "--resume", run, "pipeline.updates=3"),
        (f"{new}/train", "trained", "train", yaml["quickstart"], f"run_dir={new}/train"),
        (f"{new}/s", "followed", "recipe", "small", yaml["recipe_small_tiny"], f"out={new}/s"),
        (f"{new}/m", "followed", "recipe", "medium", yaml["recipe_medium_tiny"], f"out={new}/m"),
        (f"{new}/st/group_size", "studied", "study", "group_size", "--out", f"{new}/st"),
        (f"{new}/curated", "curated", "curate", "playground:", f"out={new}/curated"),
        (f"{new}/e.jsonl", "evaluated", "eval", "tiny", "playground:", "--out", f"{new}/e.jsonl"),
        (f"{new}/c", "compared", "compare", "tiny", "--on", "playground:", "--out", f"{new}/c"),
        (f"{new}/sft", "fine-tuned", "sft", yaml["tiny_base"], f"output={new}/sft"),
        (f"{new}/sft", "fine-tuned", "sft", yaml["tiny_base"], f"output={new}/sft", "--resume"),
        (f"{new}/h.jsonl", "harvested", "harvest", run, "--out", f"{new}/h.jsonl"),
        (f"{new}/v.jsonl", "scored", "score", f"{new}/in.jsonl", "--out", f"{new}/v.jsonl"),
        (f"{run}/audit.md", "written", "audit", run),
    ]
    new.mkdir()
    (new / "in.jsonl").write_text("{}\n")
    check_refused(commands, tmp_path)


@pytest.mark.slow
def test_commands_that_import_what_is_heavy_are_refused_too(tmp_path: Path) -> None:
    run, new = str(begun(small_config(tmp_path / "run")).path), tmp_path / "new"
    new.mkdir()
    commands = [
        (f"{new}/venv", "set up", "vllm", f"{new}/venv"),
        (f"{new}/smoke", "tested", "study", "--smoke", "--out", f"{new}/smoke"),
        (f"{new}/page.md", "written", "study", "--report", "--page", f"{new}/page.md"),
        (f"{run}/landscape", "drawn", "study", "landscape", run),
    ]
    check_refused(commands, tmp_path, "heavy ")


def check_refused(commands: list[tuple[str, ...]], tmp_path: Path, imports: str = "") -> None:
    """Own the place of each command (place, work, words…) in another process: the command is
    refused, and nothing changes on the disk."""
    places = list(dict.fromkeys(command[:2] for command in commands))
    holder = forked.start(hold, places, tmp_path / "ready")
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lease"}
    try:
        check(
            [
                (f"{imports}{place}: being {work} by process {holder.pid} on", *words)
                for place, work, *words in commands
            ],
            tmp_path,
        )
    finally:
        holder.kill()
        holder.join()
    before[tmp_path / "cases"] = (tmp_path / "cases").read_bytes()
    after = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lease"}
    assert before == after


def test_help_imports_little() -> None:
    code = "import sys, tramontane.cli; print([m for m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    for name in (
        *HEAVY,
        "pydantic",
        "numpy",
        "yaml",
        "importlib.metadata",
        "asyncio",
        "multiprocessing",
    ):
        assert f"'{name}'" not in found
