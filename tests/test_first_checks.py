"""What needs no model is checked before torch is imported, which takes seconds."""

import subprocess
import sys
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "configs"
HEAVY = ("torch", "transformers", "datasets", "matplotlib", "scipy", "sympy", "ray")
REWARD = "{name: mine, function: nowhere.score, weight: 1}"

# Runs commands one after another in one process: each must be refused, and none may import what is
# heavy. A plain interpreter, since this one has everything imported.
SCRIPT = f"""
import sys
from tramontane.cli import main
for line in open(sys.argv[1]).read().splitlines():
    expected, *words = line.split("\\t")
    sys.argv = ["tramontane", *words]
    print("::", line, file=sys.stderr, flush=True)
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code
    assert code == 2, (code, line)
    found = [name for name in {HEAVY!r} if name in sys.modules]
    assert not found, (found, line)
"""


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
        ("not a run folder", "train", "--resume", "missing"),
        ("no such file", "sft", tiny_base, f"output={tmp_path / 'o'}", "data.train=missing.jsonl"),
        ("unknown key", "sft", tiny_base, "nokey=1"),
        ("no such file", "eval", "tiny", "missing.jsonl", "--out", str(tmp_path / "e.jsonl")),
        ("broken.jsonl:1", "eval", "tiny", str(broken), "--out", str(tmp_path / "e.jsonl")),
        ("no such file", "compare", "tiny", "--on", "missing.jsonl", "--out", str(tmp_path / "c")),
        ("no such config file", "generate", "tiny", "1+1?", "--config", "missing.yaml"),
        ("no such file", "score", "missing.jsonl"),
        ("no such file", "audit", "missing"),
        ("no such file", "curate", "missing.jsonl", "--out", str(tmp_path / "curated")),
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
        ("unknown key", "plan", "nokey=1"),
        ("no such config file", "oversight", "missing.yaml"),
        ("missing", "judge-errors", "missing"),
        ("not a run folder", "view", "missing"),
    ]
    file = tmp_path / "cases"
    file.write_text("\n".join("\t".join(case) for case in cases))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(file)],
        capture_output=True,
        text=True,
        cwd=CONFIGS.parent,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for part in done.stderr.split(":: ")[1:]:
        line, _, answer = part.partition("\n")
        expected = line.split("\t")[0]
        assert expected in answer, part


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
