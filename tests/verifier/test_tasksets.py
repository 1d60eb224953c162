"""Sets of tasks of verifiers: problems, and their rubrics as rewards, against the package."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tramontane.config import DataConfig, VerifierConfig
from tramontane.data.load import load_problems
from tramontane.errors import InputError
from tramontane.verifier import tasksets
from tramontane.verifier.pool import VerifierPool
from tramontane.verifier.reward import grade


def load(source):
    return load_problems(source, DataConfig(train="playground:"), split="train", limit=None, seed=0)


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(InputError, match=r"verifiers:sums.*install 'tramontane-rl\[verifiers\]'"):
        load("verifiers:sums")


@pytest.fixture
def sums(monkeypatch):
    pytest.importorskip("verifiers", reason="needs tramontane-rl[verifiers]", exc_type=ImportError)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of workers
    return load("verifiers:sums_taskset")


def test_a_set_of_tasks_is_a_source_of_problems(sums):
    assert [p.metadata["idx"] for p in sums] == [0, 1, 2, 3, 4] and len({p.id for p in sums}) == 5
    assert {p.domain for p in sums} == {"verifiers"} and sums[3].answer == "4"
    assert sums[3].messages == [
        {"role": "system", "content": "Calculate."},
        {"role": "user", "content": "3 + 1?"},
    ]
    with pytest.raises(InputError, match="data 'verifiers:nonesuch': cannot be loaded: ModuleNot"):
        load("verifiers:nonesuch")
    with pytest.raises(InputError, match="tools, a container or a user of their own"):
        load("verifiers:boxed_taskset")
    for stage in ("setup", "finalize"):
        with pytest.raises(InputError, match=f"the {stage} of its tasks uses a container"):
            load(f"verifiers:{stage}_taskset")


def test_the_rewards_of_an_answer_are_a_share_of_their_weights(sums):
    for said, share in (("4", 1.0), ("5", 0.2), ("four", 0.0)):
        found = asyncio.run(tasksets.score(sums[3], "", said, None))
        assert found[0] == pytest.approx(share)
    with pytest.raises(Exception, match="the judge is gone"):
        asyncio.run(tasksets.score(sums[3], "", "fail", None))


@pytest.mark.parametrize(
    ("said", "verdict", "correctness"),
    [
        ("4", "right", 1.0), ("tokens", "wrong", 0.4), ("broken", "wrong", 0.0),
        ("nan", "wrong", 0.0), ("fail", "unscorable", 0.0),
    ],
)  # fmt: skip
def test_what_an_answer_causes_in_rewards_is_wrong(sums, said, verdict, correctness):
    """Other errors, as of a judge that cannot be reached, are unscorable."""
    config = VerifierConfig(reward={"correctness": 1.0, "language": 0.0})
    graded = grade(sums[3], said, 5, config, 100, 50)
    assert graded.verdict == verdict, graded
    assert graded.parts["correctness"] == pytest.approx(correctness)


def test_the_task_travels_in_the_row(sums):
    """Of an endless set that is another at each load; with a mapping, a penalty, a metric that
    rewards read, and stages."""
    with pytest.raises(InputError, match=r"endless; say how many tasks \(data.limit\)"):
        load("verifiers:odd_taskset")
    [first, second] = load_problems(
        "verifiers:odd_taskset", DataConfig(train="playground:"), split="train", limit=2, seed=0
    )
    assert int(second.answer) == int(first.answer) + 1
    tasksets._taskset.cache_clear()  # as in a worker
    for said, rewards in (
        (second.answer, 3.0),
        (first.answer, 1.0),
        ("no answer at all " * 3, 0.5),
    ):
        for scale in (None, 6.0):
            found, named = asyncio.run(tasksets.score(second, "I think.", said, scale))
            assert found == pytest.approx(rewards / (scale or 3.0)), named
    config = VerifierConfig(reward={"correctness": 1.0, "language": 0.0, "verifiers_scale": 0.25})
    assert grade(second, "no answer at all " * 3, 5, config, 100, 50).reward == pytest.approx(2.0)


@pytest.mark.slow
def test_the_rubric_judges_in_the_verifiers_worker(sums):
    """Asynchronous rewards, weighted; a failure of theirs is not a wrong answer."""
    said = ["4", "<think>3 + 1 is four.</think>4", "5", "four", "fail"]
    with VerifierPool(VerifierConfig(memory_mb=1024), l_max=256, l_cache=32) as pool:
        verdicts = pool.score(sums[3], [(text, 5) for text in said]).result(timeout=300)
    assert [v.parts["correctness"] for v in verdicts[:4]] == pytest.approx([0.9, 0.9, 0.18, 0.0])
    assert [v.verdict for v in verdicts] == ["right", "right", "wrong", "wrong", "unscorable"]
    assert "right 0, short 1" in verdicts[2].reason and "the judge is gone" in verdicts[4].reason
