"""Rewards and environments that have processes of their own."""

import asyncio
import subprocess
import sys

import pytest

from tests.verifier.test_user_functions import HERE, SECONDS, SUM, config, graded, running
from tests.verifier.user_functions import SHORT
from tramontane.config import Config
from tramontane.environments.calls import Parsed
from tramontane.environments.running import Runner
from tramontane.environments.session import Session
from tramontane.verifier.pool import VerifierPool

FORKING = ["fork_pool", "futures", "kept_pool", "exits", "fails", "returns"]


def test_processes_of_a_reward_neither_hang_nor_answer_for_it_nor_stay(capfd):
    with VerifierPool(config(*FORKING), 256, 32) as pool:
        mark = pool._workers[0].child._mark
        found = pool.score(SUM, SHORT).result(SECONDS)
        assert len(running(mark)) > 2
    for name in FORKING:
        assert [v.parts[name] for v in found] == [0.1, 0.1], (name, found)
    assert running(mark) == []
    said = capfd.readouterr().err
    assert said.count("a forked process returned") == 2 and said.count("Traceback") == 2
    assert "KeyError: 'in the child'" in said and "handle is closed" not in said


@pytest.mark.slow
def test_a_reward_may_spawn_processes():
    assert [v.parts["spawn_pool"] for v in graded(SUM, "spawn_pool")] == [0.1, 0.1]


def stepped(name):
    """The reward of a step."""

    async def run():
        session = Session(
            Config(model="tiny", data={"environment": f"{HERE}:{name}"}).data, 99, Runner()
        )
        await session.start(SUM, 0)
        reply = await session.step(Parsed("", "", "", []))
        await session.close()
        return reply.reward

    return asyncio.run(asyncio.wait_for(run(), SECONDS))


@pytest.mark.parametrize("name", ["Forks", "ForksInLoop"])
def test_an_environment_may_have_processes(name):
    # In a process of its own, like an environment's: that of the tests may have a handler of
    # Ray's, whose SystemExit a child loses that is ended while it is forked.
    code = f"from {__name__} import stepped; print(stepped({name!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert done.stdout.split()[-1] == "3.0"
