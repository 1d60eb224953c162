"""Every command of README and docs works as it is printed, run small or dry."""

import gzip
import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from typer.main import get_command

from tests.data.test_catalog import IFEVAL, write_bfcl
from tests.docs import test_own_task
from tests.docs.pages import Command, blocks, commands
from tests.paths import ROOT
from tests.runs import small_config
from tramontane import plan, train
from tramontane.cli import app
from tramontane.config import load_section, parse_settings
from tramontane.curation.config import CurateConfig
from tramontane.models.fetch import SOURCES
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.recipes.config import HarvestConfig
from tramontane.recipes.recipe import KINDS
from tramontane.run.folder import RunFolder
from tramontane.studies.study import names
from tramontane_oversight.studies.lessons import drills, lessons, write_lessons, write_problems

pytestmark = pytest.mark.usefixtures("forked_workers")

SUMS = [{"id": f"s{n}", "problem": f"What is {n} + {n + 1}?", "answer": str(2 * n + 1)}
        for n in range(8)]  # fmt: skip
PLAYGROUND = 'data: {train: "playground:", eval: "playground:"}\n'  # the default: no file is needed
COSTLY = ("sft", "compare")  # they take seconds
ON_CPU = ["generator.device=cpu", "trainer.device=cpu"]


def listed(*programs: str) -> list[object]:
    return [pytest.param(c, id=c.where) for c in commands(*programs)]


def tried() -> Iterator[object]:
    """Every command of ours, and whether it works if that takes seconds."""
    for command in commands("tramontane"):
        yield pytest.param(command, False, id=command.where)
        if command.words[1] in COSTLY:
            yield pytest.param(command, True, id=f"{command.where} works", marks=pytest.mark.slow)


def write_own(folder: Path) -> str:
    """Write what docs/your-own.md says to save in a folder; the program that makes the data."""
    page = ROOT / "docs/your-own.md"
    make_data, reward = blocks(page, "python")
    (folder / "own.yaml").write_text(blocks(page, "yaml")[0])
    (folder / "my_rewards.py").write_text(reward)
    return make_data


@pytest.fixture(scope="module")
def desk(forked_workers: None, tmp_path_factory: pytest.TempPathFactory, one_layer: str) -> Path:
    """A folder with what the commands name: data files, a config, a reward, runs, a model."""
    desk = tmp_path_factory.mktemp("desk")
    for folder in ("benchmarks", "configs", "examples", "papers"):
        (desk / folder).symlink_to(ROOT / folder)
    planned = plan({"model": "llama-3.1-8b", "gpus": 16, "n_batch": 64})
    (desk / "plan.yaml").write_text(planned.config_file)
    lines = "".join(json.dumps(row) + "\n" for row in SUMS)
    for name in ("train.jsonl", "test.jsonl", "first/kept.jsonl", "filtered/kept.jsonl"):
        (desk / name).parent.mkdir(exist_ok=True)
        (desk / name).write_text(lines)
    for name in ("raw.jsonl.gz", "math500.jsonl.gz", "gsm8k_train.jsonl.gz"):
        with gzip.open(desk / name, "wt") as file:
            file.write(lines)
    (desk / "ifeval.jsonl").write_text(json.dumps(IFEVAL) + "\n")
    write_bfcl(desk)
    Dataset.from_list(SUMS).to_parquet(desk / "more.parquet")
    write_own(desk)
    (desk / "estimates.jsonl").write_text(test_own_task.PROBLEMS)
    (desk / "my_task.py").write_text(test_own_task.TASK)
    (desk / "task.yaml").write_text(test_own_task.CONFIG)
    own_objective = ROOT / "docs/your-objective.md"
    (desk / "asymre.yaml").write_text(blocks(own_objective, "yaml")[0] + PLAYGROUND)
    (desk / "asymre.py").write_text(blocks(own_objective, "python")[0])
    tuning = ROOT / "docs/fine-tuning.md"
    (desk / "own_rows.yaml").write_text(blocks(tuning, "yaml")[0])
    (desk / "examples.jsonl").write_text(blocks(tuning, "json")[0])
    # A model whose context holds the lengths of the shipped configs.
    long = load_model(one_layer)
    long.config.max_position_embeddings = 1 << 17
    long.save_pretrained(desk / "long")
    load_tokenizer(one_layer).save_pretrained(desk / "long")
    load_model(one_layer).save_pretrained(desk / "my-model")
    load_tokenizer(one_layer).save_pretrained(desk / "my-model")
    [gemma] = blocks(ROOT / "docs/gemma.md", "yaml")
    (desk / "gemma.yaml").write_text(gemma.replace("models/gemma3-270m", str(desk / "my-model")))
    (desk / "runs").mkdir(exist_ok=True)
    for name in ("runs/oversight_drilled", "runs/oversight_tiny", "own_rows"):
        shutil.copytree(desk / "my-model", desk / name)
    (desk / "runs/oversight_data").mkdir()
    write_lessons(desk / "runs/oversight_data/lessons.jsonl", lessons(0, 2))
    write_lessons(desk / "runs/oversight_data/drills.jsonl", drills(0, 2, ["en"]))
    for name in ("problems", "held_out"):
        write_problems(desk / f"runs/oversight_data/{name}.jsonl", "train", 0, 4)
    (desk / "models").mkdir()
    for name in SOURCES:
        (desk / "models" / name).symlink_to(desk / "long")
    data = {"train": str(desk / "train.jsonl"), "eval": str(desk / "test.jsonl")}
    config = small_config(
        desk / "runs/quickstart",
        model=one_layer,
        data=data,
        pipeline={"updates": 1, "diversity": "none"},
        evaluation={"problems": 4, "samples": 1},
    )
    train(config, quiet=True)
    # As if it had been stopped before its end, after an update that the commands name.
    stopped = RunFolder(desk / "runs/quickstart")
    stopped.write_config(stopped.config(["pipeline.updates=40"]))
    (desk / "runs/quickstart/summary.json").unlink()
    # `x` had no update yet, so that any key may change.
    shutil.copytree(desk / "runs/quickstart", desk / "runs/x")
    shutil.rmtree(desk / "runs/x/checkpoints")
    (desk / "runs/x/metrics.jsonl").unlink()
    for name, step in (("own", 16), ("NAME", 30), ("quickstart", 36)):
        run = desk / "runs" / name
        if not run.exists():
            shutil.copytree(desk / "runs/quickstart", run)
        (run / "checkpoints" / f"update_{step}").symlink_to(run / "checkpoints/update_1")
    return desk


@cache  # it reads the types of all parameters of all commands: 0.02 s
def group() -> Any:
    return get_command(app)


def without_work(args: list[str], works: bool) -> bool:
    """True for a command that is only checked here: bare mentions, models and data of a hub, and
    what is costly unless it `works`."""
    if len(args) == 1 and args[0] not in ("config", "doctor"):
        return args[0] in group().list_commands(None)
    if args[:1] == ["study"] and args[1] != "list":
        studies = group().commands["study"].commands
        known = args[1] in [*names(), *studies] or args[1].endswith(".yaml")
        return known or args[1] in ("--all", "--report")  # hours of work
    if args[:1] == ["recipe"] and "--dry-run" not in args:
        recipe = load_section(KINDS[args[1]], args[2], [word for word in args[3:] if "=" in word])
        return bool(recipe.out)
    if args[:1] == ["transplant"]:
        return len([word for word in args[1:] if "=" not in word]) == 3
    if args[:1] == ["extract"]:
        return len(args) == 3
    if args[:1] == ["harvest"]:
        overrides = [word for word in args[2:] if "=" in word]
        return parse_settings(HarvestConfig, {}, overrides, "harvest").per_problem > 0
    if args[:1] == ["view"]:  # it ends with Ctrl-C
        command = group().commands["view"]
        return bool(command.make_context("view", args[1:]).params["runs"])
    if args[:1] == ["look"]:  # it ends with q
        return len(args) == 2
    if args[:1] == ["push"]:  # to a hub
        command = group().commands["push"]
        return bool(command.make_context("push", args[1:]).params["name"])
    if args[:1] == ["judge-errors"]:  # of a run that the docs train
        return len(args) == 2
    if args[:1] == ["fetch"]:
        return args[1] in SOURCES
    if args[0] in COSTLY and not works:
        command = group().commands[args[0]]
        return bool(command.make_context(args[0], args[1:]).params)
    if args[:1] == ["curate"] and args[1].startswith("configs/"):
        overrides = [word for word in args[2:] if "=" in word]
        return bool(load_section(CurateConfig, args[1], overrides).stages)
    return False


def shortened(words: list[str], desk: Path) -> list[str]:
    """The arguments of a `tramontane` command, with what makes it small or dry."""
    args = [re.sub("path/or/name|FOLDER", "long", word) for word in words[1:]]
    command = args[0]
    # A reader's evaluations are not all made in one folder.
    own = f"measured_{len(list(desk.glob('measured_*.jsonl')))}.jsonl"
    if command in ("train", "sweep") and "--dry-run" not in args:
        args.append("--dry-run")
    if command == "train" and not {"--resume", "--model-shape"} & set(args):
        config = (desk / args[1]).read_text()
        if "device: cuda" in config:
            args += ON_CPU
        for key in ("model", "data.train"):
            last = key.split(".")[-1]
            if re.search(rf"^\s*{last}: null", config, re.M) and not any(
                a.startswith(f"{key}=") for a in args
            ):
                args.append({"model": "model=long", "data.train": "data.train=train.jsonl"}[key])
        if "data.eval" not in str(args) and "playground" not in config:
            args.append("data.eval=test.jsonl")
        if "also:" in config:
            args.append("evaluation.also={}")
        args = ["model=long" if word.startswith("model=Qwen") else word for word in args]
    smaller = {
        "eval": ["--problems", "2", "--samples", "1", "--max-tokens", "16", "--out", own],
        "compare": ["--problems", "2", "--samples", "1", "--max-tokens", "16", "--out", "compared"],
        "generate": ["--max-tokens", "8"],
        "plan": ["n_batch=256"],
        "oversight": ["questions.limit=1", f"out=overseen/{Path(args[-1]).stem}"],
        "oversight-data": ["--lessons=2", "--drills=2", "--problems=2", "--held-out=2"],
        "sft": ["steps=1", "batch_tokens=512", f"output=made/{Path(args[-1]).stem}"]
        + ["new_model.tokenizer_examples=600"] * ("tiny_base" in args[-1]),
    }.get(command, [])
    added = {word.partition("=")[0] for word in smaller if "=" in word}
    return [word for word in args if word.partition("=")[0] not in added] + smaller


@pytest.mark.parametrize(("command", "works"), [*tried()])
def test_a_command_of_the_docs_works(
    command: Command, works: bool, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.syspath_prepend(str(desk))
    if without_work(command.words[1:], works):
        return
    if "generator.kind=vllm" in command.words:
        pytest.skip("needs vLLM's environment (make vllm)")
    args = shortened(command.words, desk)
    code = group()(args, standalone_mode=False)
    assert not code, f"{command.where}: {' '.join(args)} exited with {code}"


def test_every_target_of_make_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    variables = set(re.findall(r"^([A-Z]+) \?=", (ROOT / "Makefile").read_text(), re.M))
    for command in commands("make"):
        for word in command.words[1:]:
            name = word.split("=")[0]
            assert name in (variables if "=" in word else targets), f"{command.where}: make {word}"


def test_every_extra_that_is_installed_exists() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for command in commands("pip"):
        # `.[extra]` or `tramontane-rl[extra]`; others' packages have extras of their own.
        for extra in re.findall(r"(?:\.|tramontane-rl)\[([\w-]+)\]", " ".join(command.words)):
            assert f"\n{extra} = [" in project, command.where


@pytest.mark.parametrize("command", listed("python", "pytest"))
def test_a_script_of_the_docs_exists_and_knows_its_options(command: Command) -> None:
    words = command.words[1:]
    if words[0] == "-m":
        name = words[1].replace(".", "/")
        found = [p for p in (ROOT / f"{name}.py", ROOT / name / "__main__.py") if p.exists()]
    else:
        found = [ROOT / words[0]]
    assert found and found[0].exists(), f"{command.where}: {' '.join(command.words)}"
    source = found[0].read_text()
    if command.words[0] == "pytest":
        selected = words[words.index("-k") + 1] if "-k" in words else "def test_"
        assert selected in source, command.where
    else:
        for option in (word for word in words[1:] if word.startswith("--")):
            assert f'"{option}"' in source, f"{command.where}: {option}"


@pytest.mark.slow
def test_the_task_of_ones_own_is_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(compile(write_own(tmp_path), "make_data.py", "exec"), {})
    train_rows, test_rows = (
        [json.loads(line)["problem"] for line in Path(name).read_text().splitlines()]
        for name in ("train.jsonl", "test.jsonl")
    )
    assert (len(train_rows), len(test_rows)) == (1000, 64)
    assert not set(train_rows) & set(test_rows)
    short = ["pipeline.updates=6", "evaluation.problems=2", "evaluation.samples=2"]
    short += ["pipeline.n_batch=64", "pipeline.n_async=64"]
    result = train("own.yaml", short, quiet=True, report=False)
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").open()]
    first, last = rows[:2], rows[-2:]
    for key in ("reward", "reward_correctness", "reward_house_style"):
        assert sum(r[key] for r in last) > 1.1 * sum(r[key] for r in first), key
    assert (result.weights / "README.md").is_file()


@pytest.mark.slow
def test_the_tour_runs_from_start_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for block in blocks(ROOT / "docs/tour.md", "python"):
        exec(compile(block, "docs/tour.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert "right 1.1" in printed
    assert "n_batch" in printed.splitlines()[-1]
