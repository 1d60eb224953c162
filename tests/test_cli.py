"""The command line: every command once, and bad input: one message, exit code 2, nothing left
behind."""

import importlib.metadata
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

import tramontane
from tests.paths import ROOT
from tests.runs import SMALL, begun, small_config
from tramontane import InputError
from tramontane.cli import app, main, terminal
from tramontane.loopback import listening
from tramontane.studies.reproduction import undecided

runner = CliRunner()


class Ended(NamedTuple):
    code: int
    stdout: str
    stderr: str


Run = Callable[..., Ended]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The whole command, errors and exit code included, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def command(*args: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["tramontane", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return command


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(SMALL))
    return file


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pipeline.n_bach=8"], "pipeline.n_bach: unknown key; did you mean 'n_batch'?"),
        (["pipeline.n_minibatch=24"], "n_minibatch 24 does not divide n_batch 16"),
        (["pipeline.group_size=5"], "group_size 5 does not divide n_batch 16"),
        (["pipeline.l_cache=97"], "l_cache 97 is above l_max 96"),
        (["model=null"], "model: not given; set it in the file, or as key=value"),
        (["model=./nowhere"], "model './nowhere': no such folder"),
        (["data.train=nowhere.jsonl"], "nowhere.jsonl"),
        (["pipeline.l_max=5000"], "context"),
    ],
)
def test_bad_input_is_one_message_before_anything_starts(
    run: Run, config: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    result = run("train", str(config), *overrides)
    assert result.code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()


def test_missing_config_and_run(run: Run) -> None:
    assert "no such config file" in run("train", "none.yaml").stderr
    assert "not a run folder" in run("train", "--resume", ".").stderr


def test_the_module_is_the_command() -> None:
    module = [sys.executable, "-m", "tramontane"]
    done = subprocess.run([*module, "train", "none.yaml"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "reading none.yaml …\n")
    assert done.stderr.startswith("error: none.yaml: no such config file")


def test_a_warning_of_ours_is_one_line() -> None:
    """Without the place in the code that it comes from; warnings of other libraries keep theirs."""
    program = (
        "import sys, warnings, tramontane\nfrom tramontane.cli import main\n"
        "sys.argv = ['tramontane', '--version']\n"
        "try:\n    main()\nfinally:\n"
        "    warnings.warn_explicit('few rows', UserWarning, tramontane.__file__, 7)\n"
        "    warnings.warn_explicit('old call', UserWarning, 'library.py', 7)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "warning: few rows\nlibrary.py:7: UserWarning: old call\n"


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"tramontane {tramontane.__version__}\n", "")
    assert importlib.metadata.version("tramontane-rl") == tramontane.__version__
    assert (Path(tramontane.__file__).parent / "py.typed").is_file()


def test_neither_the_package_nor_the_command_line_imports_heavy_libraries() -> None:
    heavy = {"torch", "matplotlib", "pyarrow", "pandas"}
    program = f"import sys, tramontane.cli; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize(
    ("given", "used"), [({}, terminal.SPIN_COUNT), ({"GOMP_SPINCOUNT": "7"}, "7")]
)
def test_how_long_threads_spin_is_known_before_torch_is_loaded(
    given: dict[str, str], used: str
) -> None:
    program = (
        "import atexit, os, sys\nfrom tramontane.cli import main\n"
        "atexit.register(lambda: print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules))\n"
        "sys.argv = ['tramontane', '--version']\nmain()"
    )
    others = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=others | given
    )
    assert done.stdout.splitlines()[-1] == f"{used} False", done.stderr


def test_libraries_are_not_taken_apart_at_the_end() -> None:
    program = (
        "import atexit, gc, sys\nfrom tramontane.cli import main\n"
        "atexit.register(lambda: print(len(gc.get_objects()) < gc.get_freeze_count()))\n"
        "sys.argv = ['tramontane', '--version']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "True", done.stderr


def test_help_has_the_commands_in_groups(run: Run) -> None:
    text = run("--help").stdout
    groups = ["Train", "Measure", "Data", "Look", "Research"]
    for group, after in zip(groups, [*groups[1:], None], strict=True):
        part = text.partition(f"─ {group} ─")[2].partition(f"─ {after} ─")[0]
        assert part.count("│") > 2
    assert "─ Commands ─" not in text  # every command belongs to a group


def test_what_commands_print_is_not_wrapped(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal.console, "_width", 40)
    assert "\nKeys of a section: tramontane config " in run("config", "trainer").stdout
    run_dir = begun(small_config(tmp_path / "a run with a long name")).path
    (run_dir / "summary.json").touch()
    said = run("train", "--resume", str(run_dir)).stderr
    assert f"tramontane train --resume '{run_dir}' pipeline.updates=4\n" in said


TWO_BATCHES = ["pipeline.n_async=64", "pipeline.n_batch=32"]


def test_dry_run_from_python(config: Path) -> None:
    found = tramontane.dry_run(config, TWO_BATCHES)
    assert found.config.pipeline.n_async == 64
    assert (found.longest_prompt, found.held_out) == (256, 0)
    assert found.kv_cache_bytes == 5120 * 2 * 64 * 912  # as in the test below
    assert "about 2.0 (n_async / n_batch)" in found.lines.values()


def test_dry_run_prints_the_arithmetic(config: Path) -> None:
    result = runner.invoke(app, ["train", str(config), *TWO_BATCHES, "--dry-run"])
    assert result.exit_code == 0
    assert "about 2.0 (n_async / n_batch)" in result.stdout
    # 2 (K, V) × 4 layers × 160 × 4 bytes = 5 KiB per token. 64 slots of 256 + 96 tokens, in lanes
    # of 352, 224, 144, 96, 64 and 32 of their own, and as much for prefixes: 2 · 64 · 912 tokens.
    assert (
        "KV cache: 570 MiB at most (5.0 KiB a token, lanes of all lengths, each full)"
        in result.stdout
    )


def test_a_dry_run_of_a_resumed_run_checks_that_runs_config(config: Path, tmp_path: Path) -> None:
    run_dir = begun(small_config(tmp_path / "run", pipeline={"n_async": 32})).path
    before = sorted(tmp_path.rglob("*"))
    result = runner.invoke(app, ["train", "--resume", str(run_dir), "--dry-run"])
    assert result.exit_code == 0
    assert "about 2.0 (n_async / n_batch)" in result.stdout
    assert sorted(tmp_path.rglob("*")) == before
    changes = ["pipeline.n_async=16", "pipeline.updates=3"]
    result = runner.invoke(app, ["train", "--resume", str(run_dir), *changes, "--dry-run"])
    assert result.exit_code == 0
    assert "about 1.0 (n_async / n_batch)" in result.stdout
    assert sorted(tmp_path.rglob("*")) == before
    for args, message in (
        ([str(config)], "a resumed run has its config already"),
        (["run_dir=elsewhere"], "cannot change when a run is resumed"),
    ):
        result = runner.invoke(app, ["train", *args, "--resume", str(run_dir), "--dry-run"])
        assert message in str(result.exception)


def test_generate_prints_a_completion(capsys: pytest.CaptureFixture[str]) -> None:
    result = runner.invoke(app, ["generate", "tiny", "What is 3 + 4 + 2?", "--temperature", "0"])
    assert result.exit_code == 0
    assert "boxed" in result.stdout
    again = tramontane.generate("tiny", "What is 3 + 4 + 2?", temperature=0.0)
    assert result.stdout == again[0] + "\n"


def test_eval_measures_and_writes_every_completion(tmp_path: Path) -> None:
    out = tmp_path / "eval.jsonl"
    args = ["eval", "tiny", "playground:", "--problems", "4", "--samples", "2", "--out", str(out)]
    args += ["--top-k", "20", "data.playground.levels=[1, 2]", "verifier.workers=2"]
    args += ["verifier.reward.language=0"]
    result = runner.invoke(app, [*args, "generator.device=cpu", "generator.dtype=float32"])
    assert result.exit_code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 8
    right = sum(row["verdict"] == "right" for row in rows)
    assert f"{right / 8:.3f}" in result.stdout
    assert {row["difficulty"] for row in rows} <= {1, 2}
    assert "format rate" in result.stdout
    assert "language rate" not in result.stdout  # which nothing rewards here


def test_rows_that_cannot_be_read_are_reported_once_for_each_kind(tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    bad = ['{"id": "a", "domain": "math", "problem": "1"}', '{"id": 1, "domain": "poetry"}']
    rows.write_text("\n".join([*(bad * 40), '{"domain": "song"}', '{"id": 1, "id": 2}']))
    result = runner.invoke(app, ["score", str(rows)])
    assert result.exit_code == 1
    said = [line for line in result.stderr.splitlines() if "in.jsonl" in line]
    assert [line.partition("in.jsonl:")[2].partition(":")[0] for line in said] == ["1", "2", "82"]
    assert said[0].endswith("(and 39 more rows like it)")
    assert said[1].endswith('not "poetry" (and 40 more rows like it)')
    assert said[2].endswith("remove one")


def test_score_grades_rows_and_reports_bad_lines(tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    good = {"id": "a", "domain": "math", "problem": "1+1", "answer": "2"}
    rows.write_text(
        json.dumps(good | {"response": "<think>x</think>\\boxed{2}"})
        + "\nnot json\n"
        + json.dumps(good | {"id": "b", "response": "<think>x</think>\\boxed{3}"})
        + "\n"
    )
    out = tmp_path / "out.jsonl"
    result = runner.invoke(app, ["score", str(rows), "--out", str(out)])
    assert result.exit_code == 1
    verdicts = [json.loads(line)["verdict"] for line in out.read_text().splitlines()]
    assert verdicts == ["right", "wrong"]
    assert "in.jsonl:2" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["eval", "tiny", "playground:", "--slots", "0"],
        ["eval", "tiny", "playground:", "--samples", "0"],
        ["eval", "tiny", "playground:", "--problems", "0"],
        ["generate", "tiny", "1 + 1", "-n", "0"],
    ],
)
def test_sizes_start_at_one(args: list[str]) -> None:
    result = runner.invoke(app, args)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert not isinstance(result.exception, InputError)  # typer names the option


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots is 0; it must be at least 1"),
        ({"samples": 0}, "samples is 0"),
        ({"problems": 0}, "problems is 0"),
        ({"temperature": -1}, "temperature is -1; it must be at least 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 7}, "top_p is 7; it must be above 0 and at most 1"),
        ({"top_k": -2}, "top_k is -2"),
        ({"n": 3}, r"unknown keyword; a key of verl; here it is samples=…"),
        ({"data": 5}, "data: of type int; give a list of dicts"),
        ({"config": {"model": "tiny"}}, "config of type dict: give a Config"),
        ({"overrides": "pipeline.updats=2"}, "did you mean 'updates'"),
        ({"write_to": "nodir/x.jsonl"}, "there is no folder nodir"),
        ({"write_to": "."}, "a folder; name a file"),
        ({"overrides": {"data.fields": {"problme": "x"}}}, "no such field; did you mean 'problem'"),
        ({"max_tokens": 2000}, "leave no room for a prompt .* allow fewer tokens a completion"),
    ],
)
def test_an_evaluation_refuses_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tramontane.evaluate("tiny", **{"data": "playground:"} | options)


def test_an_evaluation_needs_problems() -> None:
    with pytest.raises(InputError, match="no problems to evaluate on: name their source"):
        tramontane.evaluate("tiny")


@pytest.mark.parametrize("prompt", [5, ["1 + 1?"], []])
def test_generate_refuses_what_is_neither_a_text_nor_a_chat(prompt: Any) -> None:
    with pytest.raises(InputError, match="prompt: it is empty; give a text, in quotes"):
        tramontane.generate("tiny", "  ")
    with pytest.raises(InputError, match="give a text, or a list of messages"):
        tramontane.generate("tiny", prompt)


def test_a_path_of_a_model_that_does_not_exist_is_no_folder() -> None:
    with pytest.raises(InputError, match="model 'runs/nosuch': no such folder"):
        tramontane.evaluate("runs/nosuch", "playground:")


def test_another_host_is_asked_for_where_the_host_is_wrong() -> None:
    with pytest.raises(InputError, match="choose another host"), listening(0, "192.0.2.1"):
        pass
    with listening(0) as taken:
        port = taken.socket.getsockname()[1]
        with pytest.raises(InputError, match="choose another port"), listening(port):
            pass


def test_generate_refuses_no_completions() -> None:
    with pytest.raises(InputError, match="n is 0; it must be at least 1"):
        tramontane.generate("tiny", "1 + 1", n=0)


def test_eval_checks_device_and_dtype() -> None:
    result = runner.invoke(app, ["eval", "tiny", "playground:", "generator.device=gpu"])
    assert "eval: generator.device: 'gpu' is not a device" in str(result.exception)
    result = runner.invoke(app, ["eval", "tiny", "playground:", "generator.dtype=float16"])
    assert "eval: generator.dtype: Input should be 'auto', 'float32' or 'bfloat16'" in str(
        result.exception
    )


def test_score_help_names_the_fields() -> None:
    text = " ".join(runner.invoke(app, ["score", "--help"]).stdout.replace("│", " ").split())
    assert "id, domain (math or code), problem, response, and answer (math) or tests" in text
    assert "pipeline.l_max=TOKENS and pipeline.l_cache=TOKENS turn the length reward on" in text


def test_a_plan_names_its_assumptions_and_both_ways(run: Run, tmp_path: Path) -> None:
    done = run(
        *["plan", "model=llama-3.1-8b", "gpus=8", "n_batch=64", "length_mean=400"],
        *["length_max=2000", "train_mfu=0.31", "--out", "plan.yaml"],
    )
    assert done.code == 0, done.stderr
    assert "train_mfu=0.31" in done.stdout and "79.1 GiB" in done.stdout
    for row in ("trainer", "generators", "n_async", "staleness", "synchronous, together"):
        assert row in done.stdout
    assert done.stdout.endswith((tmp_path / "plan.yaml").read_text())
    refused = run("plan", "gpus=8", "gpu=abacus")
    assert refused.code == 2
    assert "plan: gpu: no data sheet for the GPU 'abacus'; choose from a100" in refused.stderr


def test_a_study_is_verified_and_more_seeds_are_planned_by_options(tmp_path):
    page = str(ROOT / "docs/reproduction.md")
    result = runner.invoke(app, ["study", "staleness", "--verify", "--page", page])
    assert result.exit_code == 0 and "seals, registrations and verdicts are those" in result.output
    args = ["--undecided", "--hours", "0", "--page", page, "--out", str(tmp_path)]
    result = runner.invoke(app, ["study", *args])
    assert result.exit_code == 0
    for study in undecided(tmp_path, Path(page)):
        assert f"{study.name}: skipped, its next look takes" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("train run.yaml --learning_rate 1e-5", "write trainer.learning_rate=1e-5"),
        ("train run.yaml --learning-rate=1e-5", "write trainer.learning_rate=1e-5"),
        ("train run.yaml --num_train_epochs 3", "write pipeline.updates=… (counted in updates"),
        ("train run.yaml --packing_samples", "no such key here (sequences are always packed)"),
        ("sft run.yaml --learning_rate 1e-5", "write learning_rate=1e-5"),
    ],
)
def test_options_that_are_keys_elsewhere_are_answered(run: Run, line: str, answer: str) -> None:
    ended = run(*line.split())
    assert ended.code == 2 and answer in ended.stderr


def test_ctrl_c_while_commands_are_put_together_leaves_no_traceback() -> None:
    program = """
import os, signal, sys
import typer.main
import tramontane.__main__ as command

made = typer.main.get_command_from_info
def interrupted(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGINT)
    return made(*args, **kwargs)

typer.main.get_command_from_info = interrupted
sys.argv = ["tramontane", "--help"]
command.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_while_the_command_is_imported_leaves_no_traceback() -> None:
    program = """
import importlib.abc, os, signal, sys
import tramontane.__main__ as command

class Interrupted(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("rich."):  # in the middle of the imports
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupted())
sys.argv = ["tramontane", "--help"]
command.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
