"""What users' functions do beside computing a number: processes, arguments in any order, changes of
their arguments, other folders."""

import asyncio
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.verifier import user_functions
from tests.verifier.user_functions import SHORT
from tramontane.config import Config, CustomReward, DomainConfig, RewardConfig, VerifierConfig
from tramontane.environments.calls import Parsed
from tramontane.environments.running import Runner
from tramontane.environments.session import Session
from tramontane.environments.tools import Toolset
from tramontane.errors import InputError
from tramontane.types import Problem, ToolCall
from tramontane.verifier.pool import VerifierPool
from tramontane.verifier.reward import grade

SECONDS = 300.0  # limit of every wait
HERE = user_functions.__name__
SUM = Problem("sum", "math", "1 + 1?", "2", language="en", metadata={"seen": []})


def config(*names, **domains):
    custom = tuple(CustomReward(name=name, function=f"{HERE}.{name}", weight=0.1) for name in names)
    reward = RewardConfig(custom=custom)
    return VerifierConfig(workers=1, timeout_s=60.0, reward=reward, domains=domains)


def graded(problem, *names, **domains):
    with VerifierPool(config(*names, **domains), 256, 32) as pool:
        return pool.score(problem, SHORT).result(SECONDS)


def running(mark):
    """Processes with the mark of a worker."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found += [entry.name] if mark.encode() in (entry / "environ").read_bytes() else []
        except OSError:  # it has ended, or is another user's
            continue
    return found


def test_arguments_are_given_by_name_where_their_order_is_another():
    problem = replace(SUM, domain="turned")
    turned = DomainConfig(verifier=f"{HERE}.turned", format="boxed")
    verdict = grade(problem, SHORT[0].text, 9, config("in_another_order", turned=turned), 256, 32)
    assert (verdict.verdict, verdict.parts["in_another_order"]) == ("right", 0.1), verdict


def test_an_interrupt_that_a_function_raises_is_its_failure():
    found = graded(SUM, "interrupts")
    assert [v.verdict for v in found] == ["unscorable"] * 2
    assert found[0].reason.startswith("reward 'interrupts': KeyboardInterrupt"), found[0]


def test_an_order_that_would_be_mistaken_is_refused():
    with pytest.raises(InputError, match=r"misnamed\(text, problem, length\).*'problem' is at ano"):
        VerifierPool(config("misnamed"), 256, 32)


def test_a_function_that_changes_its_problem_changes_it_for_no_other():
    found = graded(SUM, "changes", "changes_all")
    assert [(v.parts["changes"], v.parts["changes_all"]) for v in found] == [(0.1, 0.1)] * 2


def test_each_call_begins_in_the_folder_of_the_run(tmp_path, monkeypatch):
    (tmp_path / "here").touch()
    monkeypatch.chdir(tmp_path)
    assert [v.parts["moves"] for v in graded(SUM, "moves")] == [0.1, 0.1]


def test_a_tool_that_changes_its_arguments_changes_no_record():
    class Spoiler:
        def tally(self, numbers: list[int]) -> int:
            """Add numbers.

            Args:
                numbers: Some.
            """
            return sum(numbers.pop() for _ in range(len(numbers)))

    class World:
        def step(self, message):
            message["tool_calls"][0]["function"]["arguments"]["numbers"].clear()
            return "", 1.0, True

    call = ToolCall("tally", {"numbers": [1, 2]}, "")

    async def run():
        session = Session(Config(model="tiny").data, 99, Runner())
        session._environment, session._kind = World(), "environment"
        session.toolset = Toolset([Spoiler().tally], 99, session._data.images.limits)
        await session.step(Parsed("", "", "", [call]))

    asyncio.run(run())
    assert (call.answer, call.arguments) == ("3", {"numbers": [1, 2]})


def test_what_a_module_prints_on_import_is_not_part_of_a_commands_output(tmp_path, capfd):
    (tmp_path / "printing_rewards.py").write_text(
        "print('imported')\n\ndef one(problem, text, n_tokens):\n    return 1.0\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        function = CustomReward(name="one", function="printing_rewards.one", weight=0.1)
        with VerifierPool(VerifierConfig(reward=RewardConfig(custom=(function,))), 256, 32) as pool:
            assert pool.score(SUM, SHORT).result(SECONDS)[0].parts["one"] == 0.1
    found = capfd.readouterr()
    assert (found.out, found.err.splitlines()[0]) == ("", "imported")
    assert "reward: imported" in found.err


# A signal that arrives during the fork, and a handler that raises, as Ray installs one: what it
# raises there is lost, and the child would go on.
RAISES = """
import os, signal, sys, time
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
import tramontane.interrupt
if not (child := os.fork()):
    time.sleep(60)
    os._exit(9)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_is_ended_while_it_is_forked_ends():
    done = subprocess.run(
        [sys.executable, "-c", RAISES], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.split() == [str(-signal.SIGTERM)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unsayable", "Unsayable: (its text cannot be made)"),
        ("beyond_exceptions", "BaseException: of no kind"),
        ("cancelled", "CancelledError: "),
    ],
)
def test_whatever_a_reward_raises_is_named_and_ends_no_worker(name, said):
    verdict = grade(SUM, SHORT[0].text, 9, config(name), 256, 32)
    assert verdict.verdict == "unscorable"
    assert verdict.reason.startswith(f"reward '{name}': {said} (")
    assert "user_functions.py:" in verdict.reason
