"""The user's own rewards, through the real pool: named parts, and no silent zero."""

import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

import tramontane
from tests.runs import small_config
from tests.view.reports import answers_of
from tramontane.config import CustomReward, RewardConfig, VerifierConfig, parse_settings
from tramontane.errors import InputError
from tramontane.run.folder import RunFolder
from tramontane.run.rollouts import read_run
from tramontane.run.screen import QuietScreen
from tramontane.types import Problem
from tramontane.verifier import functions
from tramontane.verifier.pool import VerifierPool
from tramontane.verifier.reward import grade

ROW = {
    "id": "1", "domain": "math", "problem": "2+3?", "answer": "5",
    "response": r"<think>5</think> $\boxed{5}$",
}  # fmt: skip
PICKY = "def picky(problem, text, n_tokens):"
SUM = Problem("sum", "math", "What is the sum of $2$ and $3$?", "5", language="en")
MODULE = """
import mmap, numpy, os, time
print("a library may print")
RESERVED = mmap.mmap(-1, 4 << 30, prot=mmap.PROT_READ)  # as libraries for each of many cores

def brevity(problem, text, n_tokens):
    assert problem.id and problem.answer
    return 1.0 if len(text) < 60 and n_tokens < 50 else 0.0

def picky(problem, text, n_tokens):
    if "raise" in text:
        raise KeyError("no such thing")
    if "hang" in text:
        time.sleep(60)
    if "exit" in text:
        os._exit(3)
    if "memory" in text:
        bytearray(10 << 30)
    if "print" in text:
        print("x" * (32 << 20))
    if "fork" in text and os.fork() == 0:
        time.sleep(0.2)
        os._exit(0)
    odd = {"two": 2.0, "nan": float("nan"), "none": None, "str": "0.5", "bool": True,
           "array": numpy.ones(2), "numpy": numpy.float32(0.5)}
    return odd.get(text.split()[-1], 0.5)

def leaves(problem, text, n_tokens):
    raise SystemExit("bye")

number = 3

def two(problem, text):
    return 1.0

def never(problem, text, n_tokens):
    return check(text)

def check(text):
    return {}["no such key"]

def sometimes(problem, text, n_tokens):
    kind = len(text) % 6
    if kind == 0 and n_tokens > 9:
        raise KeyError("no such thing")
    if kind == 1 and n_tokens > 9 and n_tokens % 8 == 0:
        time.sleep(60)
    return 0.5
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "test_custom_rewards.py").write_text(MODULE)
    (folder / "my_broken.py").write_text("1 / 0\n")
    (folder / "my_script.py").write_text("raise SystemExit(2)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


def rewards(**functions):
    custom = [
        CustomReward(name=name, function=f"test_custom_rewards.{name}", weight=weight)
        for name, weight in functions.items()
    ]
    return VerifierConfig(timeout_s=3.0, reward=RewardConfig(custom=tuple(custom)))


def response(words, answer=5):
    return f"<think>I add them.</think>So \\boxed{{{answer}}} {words}"


@pytest.fixture(scope="module")
def pool(folder):
    with VerifierPool(rewards(brevity=0.2, picky=-0.4), 256, 32) as pool:
        yield pool


def test_each_part_is_recorded_under_its_name_and_added(pool):
    texts = [(response("ok"), 10), (response("ok"), 60), (response("ok", 6), 10), ("5", 1)]
    right, long, wrong, malformed = pool.score(SUM, texts).result(timeout=300)
    assert right.parts == {
        "format": 0.1, "correctness": 0.9, "length": 0.0, "language": 0.1,
        "brevity": 0.2, "picky": -0.2,
    }  # fmt: skip
    assert right.reward == pytest.approx(1.1)
    assert long.reward == pytest.approx(0.9)
    assert (wrong.verdict, wrong.reward) == ("wrong", pytest.approx(0.2))
    assert (malformed.verdict, malformed.reward) == ("malformed", 0.0)
    assert set(malformed.parts) == set(right.parts)


@pytest.mark.slow
def test_a_failed_reward_makes_its_completion_unscorable_and_no_other(folder, pool):
    words = ["ok", "raise", "hang", "exit", "memory", "two", "nan", "none", "str", "bool", "array"]
    verdicts = pool.score(SUM, [(response(w), 10) for w in words]).result(timeout=300)
    assert [v.verdict for v in verdicts] == ["right", *["unscorable"] * 10]
    assert {v.reward for v in verdicts[1:]} == {0.0}
    assert all(set(v.parts) == set(verdicts[0].parts) for v in verdicts)
    file = folder / "test_custom_rewards.py"
    lines = file.read_text().splitlines()
    begin, fails = (lines.index(x) + 1 for x in (PICKY, '        raise KeyError("no such thing")'))
    assert [v.reason for v in verdicts[1:4]] == [
        f"reward 'picky': KeyError: 'no such thing' ({file}:{fails}, in picky)",
        f"reward 'picky' ({file}:{begin}): timed out after 3 s",
        f"reward 'picky' ({file}:{begin}): the worker died (exit code 3)",
    ]
    assert verdicts[4].reason.startswith("reward 'picky': MemoryError")
    returned = ["2.0 (float)", "nan (float)", "None (NoneType)", "'0.5' (str)", "True (bool)"]
    returned.append("array([1., 1.]) (ndarray)")
    assert [v.reason for v in verdicts[5:]] == [
        f"reward 'picky': returned {value}, not a number from 0 to 1 ({file}:{begin})"
        for value in returned
    ]
    fine = pool.score(SUM, [(response(w), 10) for w in ("print", "fork", "numpy")]).result(300)
    assert [v.verdict for v in fine] == ["right"] * 3


def test_a_reward_of_weight_0_is_never_called(folder):
    verdict = grade(SUM, response("raise"), 10, rewards(picky=0.0), l_max=256, l_cache=32)
    assert (verdict.verdict, verdict.parts["picky"]) == ("right", 0.0)


def test_a_reward_that_exits_is_a_failed_one(folder):
    verdict = grade(SUM, response("ok"), 10, rewards(leaves=0.5), l_max=256, l_cache=32)
    assert verdict.verdict == "unscorable"
    assert verdict.reason.startswith("reward 'leaves': SystemExit: bye (")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("test_custom_rewards.brevety", "AttributeError.*brevety"),
        ("no_such_module.f", "ModuleNotFoundError"),
        ("my_broken.f", "ZeroDivisionError"),
        ("my_script.f", r"SystemExit: 2; .*my_script.py:1"),
        ("test_custom_rewards.number", "is of type int, not a function"),
        ("test_custom_rewards.two", r"two\(problem, text\), .*rewards.py:\d+, is called with"),
    ],
)
def test_a_failed_import_is_reported_before_a_run_starts(folder, tmp_path, function, message):
    reward = {"name": "mine", "function": function, "weight": 1}
    config = small_config(tmp_path / "run", verifier={"reward": {"custom": [reward]}})
    with pytest.raises(InputError, match=f"custom: mine: .*{message}"):
        tramontane.train(config, screen=QuietScreen())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dry", [True, False])
def test_a_reward_that_fails_ends_a_run_before_it_starts(folder, tmp_path, dry):
    reward = {"function": "test_custom_rewards.never"}
    config = small_config(tmp_path / "run", verifier={"reward": {"custom": [reward]}})
    place = r"test_custom_rewards.py:\d+, in check\)"
    with pytest.raises(InputError, match=rf"^reward 'never': KeyError: 'no such key' \(.*{place}"):
        tramontane.dry_run(config) if dry else tramontane.train(config, screen=QuietScreen())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("custom", "message"),
    [
        ("[{name: length, function: a.b, weight: 1}]", "two rewards are named 'length'"),
        ("[{name: x, function: b, weight: 1}]", "function: 'b' is not an import path"),
        ("[{name: x, function: a.b, weight: .inf}]", "weight: Input should be a finite number"),
        ("[{name: x, function: a.b, wieght: 1}]", "did you mean 'weight'"),
    ],
)
def test_a_config_that_cannot_be_meant(custom, message):
    with pytest.raises(InputError, match=message):
        parse_settings(VerifierConfig, {}, [f"reward.custom={custom}"], "test")


@pytest.mark.slow
def test_a_run_records_and_reports_custom_parts(folder, tmp_path):
    brevity = {"name": "brevity", "function": "test_custom_rewards.brevity", "weight": 0.2}
    run = tmp_path / "run"
    config = small_config(
        run,
        verifier={"reward": {"custom": [brevity]}},
        pipeline={"updates": 1, "diversity": "none"},
    )
    result = tramontane.train(config, screen=QuietScreen())
    folder, again = RunFolder.open(run)
    [metrics] = folder.metrics()
    assert again.verifier.reward.custom == config.verifier.reward.custom
    assert 0 <= metrics["reward_brevity"] <= 0.2
    parts = [f"reward_{p}" for p in again.verifier.reward.parts]
    assert sum(metrics[p] for p in parts) == pytest.approx(metrics["reward"])
    [row] = answers_of(Path(result.report))["metrics"]["rows"]
    assert row["reward_brevity"] == pytest.approx(metrics["reward_brevity"], rel=1e-5)


@pytest.mark.parametrize("policy", ["drop", "wrong"])
@pytest.mark.slow
def test_groups_with_an_unscorable_completion_by_policy(folder, tmp_path, policy):
    sometimes = {"name": "sometimes", "function": "test_custom_rewards.sometimes", "weight": 0.1}
    config = small_config(
        tmp_path / "run",
        pipeline={
            "updates": 1,
            "unscorable": policy,
            "diversity": "none",
            "group_size": 2,
            "n_batch": 8,
            "n_async": 16,
        },
        verifier={"timeout_s": 0.5, "reward": {"custom": [sometimes]}},
    )
    result = tramontane.train(config, screen=QuietScreen(), report=False)
    run = RunFolder(tmp_path / "run")
    [metrics] = run.metrics()
    rows = list(read_run(tmp_path / "run"))
    bad = [row for row in rows if row["verdict"] == "unscorable"]
    assert bad and {row["reward"] for row in bad} == {0.0}
    trained = [row for row in bad if row["filtered"] is None]
    dropped = {row["group"] for row in rows if row["filtered"]}
    counted = metrics["failures"]
    assert sum(counted.values()) == len(bad) and counted == result.summary["failures"]
    assert metrics["unscorable_trained"] == result.summary["unscorable_trained"] == len(trained)
    assert metrics["groups_unscorable"] == result.summary["groups_unscorable"] == len(dropped)
    assert bool(trained) == (policy == "wrong")
    if policy == "drop":
        assert dropped == {row["group"] for row in bad}


@pytest.mark.parametrize(
    "section",
    [
        "reward: {{custom: [{{name: one, function: '{}'}}]}}",
        "domains: {{math: {{verifier: '{}'}}}}",
    ],
)
def test_a_pickled_function_of_a_config_runs_with_consent_only(
    tmp_path: Path, pickled: tuple[Path, str], section: str
) -> None:
    rows, config = tmp_path / "rows.jsonl", tmp_path / "config.yaml"
    rows.write_text(json.dumps(ROW) + "\n")
    ran, path = pickled
    config.write_text("verifier: {" + section.format(path) + "}")
    with pytest.raises(InputError, match="TRAMONTANE_ALLOW_PICKLE"):
        tramontane.score(rows, config=config)
    assert not ran.exists()


@pytest.fixture(scope="module")
def pickled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A file that is made where the function of a path is loaded, and the path."""
    ran = tmp_path_factory.mktemp("pickled") / "ran"
    # Another process: this one may load what it pickled itself.
    write = (
        "import sys; from tramontane.verifier.functions import path_of\n"
        "class One:\n"
        "    def __init__(self): pass\n"
        "    def __call__(self, problem, text, n_tokens=0): return 1.0\n"
        "    def __reduce__(self): return exec, (f'open({sys.argv[1]!r}, {chr(119)!r})',)\n"
        "print(path_of(One()))"
    )
    path = subprocess.run(
        [sys.executable, "-c", write, str(ran)], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert path.startswith("pickle:")
    return ran, path


@pytest.mark.parametrize("path", ["os.popen", "builtins.exec", "timeit.timeit", "subprocess.call"])
def test_functions_of_python_itself_grade_nothing(path: str) -> None:
    with pytest.raises(InputError, match="a function of Python itself"):
        parse_settings(VerifierConfig, {"domains": {"math": {"verifier": path}}}, [], "config")


def test_a_module_in_the_folder_of_a_run_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "planted_by_another.py").write_text("print('imported')")
    found = "from tramontane import imports; imports.import_module('planted_by_another')"
    command = [sys.executable, "-P", "-c", found]
    assert b"imported" in subprocess.run(command, cwd=tmp_path, capture_output=True).stdout
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").touch()
    assert b"imported" not in subprocess.run(command, cwd=tmp_path, capture_output=True).stdout


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(0.5), 0.5),
        (torch.tensor(1), 1.0),
        (np.float32(0.5), 0.5),
        (np.array(0.5), 0.5),
        (torch.tensor([0.5]), 0.5),
        (np.array([[0.5]]), 0.5),
        (torch.tensor([[True]]), None),
        (torch.tensor([0.5, 0.5]), None),
        (np.array([]), None),
        ([0.5], None),
        (torch.tensor(float("nan")), None),
        (torch.tensor(True), None),
        ("0.5", None),
        (np.ma.masked, None),
        (np.ma.array([0.5], mask=[True]), None),
        (np.ma.array([0.5], mask=[False]), 0.5),
        (torch.empty((), device="meta"), None),
        (pandas.Series([0.5]), 0.5),
        (pandas.DataFrame([[0.5]]), None),
        (Decimal("0.5"), 0.5),
        (Decimal("NaN"), None),
        (Decimal("1e400"), None),
    ],
)
def test_one_rule_says_what_a_reward_is(value, expected):
    assert functions.number(value) == expected


def test_true_is_1_where_rewards_may_be_bools():
    assert functions.number(torch.tensor(True), bools=True) == 1


@pytest.mark.parametrize(
    ("reasons", "kind"),
    [
        (
            "reward 'a': KeyError: 'word {}' (my_rewards.py:12, in a)",
            "reward 'a': KeyError (my_rewards.py:12, in a)",
        ),
        ("reward 'a': OSError: (x) at: {} (dir/r.py:7)", "reward 'a': OSError (dir/r.py:7)"),
        (
            "reward 'a': returned '{} (a)' (str), not a number from 0 to 1 (r.py:7)",
            "reward 'a': returned a str (r.py:7)",
        ),
        (
            "environment_failed: Shop.step: OSError: gone {} (shop.py:8, in step)",
            "environment_failed: Shop.step: OSError (shop.py:8, in step)",
        ),
        ("reward 'a' (r.py:7): timed out after {} s", "reward 'a': timed out after N s (r.py:7)"),
        ("the tests never called the program", "the tests never called the program"),
        ("", ""),
    ],
)
def test_failures_of_a_kind_differ_in_texts_and_values_only(reasons, kind):
    found = functions.failures(reasons.format(number) for number in (1, 20))
    assert found == {kind: 2}


def test_many_kinds_of_failures_are_counted_together():
    found = functions.failures(f"reward 'a': KeyError: 'b' (r.py:{line})" for line in range(40))
    assert len(found) == 17 and sum(found.values()) == 40 and found["other kinds"] == 24
