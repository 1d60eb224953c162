"""What user code prints: on standard error, and in a run's folder."""

import logging
import os
import threading
from functools import partial

import pytest

from tests.environments.worlds import LOUD
from tests.placement.test_placement import PATIENCE, actors
from tramontane.config import Config, CustomReward, RewardConfig, VerifierConfig
from tramontane.controller.verifiers import Grader
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.host import Call, EnvironmentHost
from tramontane.models.loading import load_tokenizer
from tramontane.placement import printed
from tramontane.placement.printed import PrintedLog
from tramontane.run.folder import RunFolder
from tramontane.types import Problem
from tramontane.verifier.custom import Response
from tramontane.verifier.pool import VerifierPool

SUM = Problem("sum", "math", "1 + 1?", "2", language="en")
CASES = [{"input": "", "output": "5"}]
PROGRAM = Problem("echo", "code", "Print 5.", tests={"type": "stdio", "cases": CASES})
LOUD_PROGRAM = "import sys\nprint('a program', file=sys.stderr)\nprint(5)"
RIGHT = "<think>a</think>\\boxed{2}"


def config(name="loud"):
    reward = CustomReward(name=name, function=f"tests.placement.printing.{name}", weight=0.1)
    return VerifierConfig(workers=1, reward=RewardConfig(custom=(reward,)), allow_unsandboxed=True)


@pytest.mark.slow
def test_a_reward_s_print_reaches_standard_error_and_a_graded_program_s_does_not(capfd):
    with VerifierPool(config(), 256, 32) as pool:
        fenced = f"<think>a</think>\n```python\n{LOUD_PROGRAM}\n```"
        verdicts = [
            pool.score(problem, [Response(text, 9)]).result(PATIENCE)[0]
            for problem, text in ((SUM, RIGHT), (PROGRAM, fenced))
        ]
    assert [verdict.verdict for verdict in verdicts] == ["right", "right"]
    found = capfd.readouterr()
    lines = [f"reward: reads {name} …\\ud800\nreward: worried\n" for name in ("sum", "echo")]
    assert (found.out, found.err) == ("", "".join(lines))


def test_a_line_without_an_end_is_shown_when_its_process_ends(capfd):
    with VerifierPool(config("unfinished"), 256, 32) as pool:
        pool.score(SUM, [Response(RIGHT, 9)]).result(PATIENCE)
    assert "reward: thinks\n" in capfd.readouterr().err


@pytest.mark.parametrize("ended_before", [False, True])
def test_a_relay_that_was_not_waited_for_leaves_no_descriptor(monkeypatch, ended_before):
    """Standard error was blocked for longer than `close` waits."""
    monkeypatch.setattr(printed, "CLOSE_SECONDS", 0.05)
    unblocked = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: unblocked.wait(PATIENCE) and None
    monkeypatch.setattr(printed.logger, "handlers", [handler])
    before = set(os.listdir("/proc/self/fd"))
    relay = printed.Relay("reward")
    os.write(relay.writing, b"a line\n")
    os.close(relay.writing)
    if ended_before:
        unblocked.set()
        relay._thread.join(PATIENCE)
    relay.close()
    unblocked.set()
    relay._thread.join(PATIENCE)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_an_environment_s_print_reaches_standard_error(capfd):
    config = Config(model="tiny", data={"environment": LOUD})
    host = EnvironmentHost(config, PromptEncoder(load_tokenizer("tiny"), config.data))
    try:
        calls, answers = [Call(0, "start", (0, 0), (SUM, 0), 60.0)], []
        while not answers:
            answers, _ = host.exchange(calls, 60.0)
            calls = []
    finally:
        host.close()
    assert "environment: starts\nenvironment: from a child\n" in capfd.readouterr().err


@pytest.mark.slow
def test_what_an_actor_s_processes_print_comes_with_its_answers(ray_cluster, capfd):
    actor = actors(partial(Grader, config(), 256, 32), 1)
    actor.submit("call", "score", SUM, [Response(RIGHT, 9)]).result(PATIENCE)
    actor.close()
    assert "reward: reads sum …\\ud800\nreward: worried\n" in capfd.readouterr().err


def test_a_run_keeps_what_is_printed_up_to_a_limit_from_the_start_on(tmp_path, monkeypatch):
    monkeypatch.setattr(printed, "MAX_LOG", 100)
    with RunFolder.owned(tmp_path / "run") as folder:
        printed.logger.warning("reward: before the folder is a run's")
        folder.check_new()
        folder.begin(Config(model="tiny"))
        for number in range(9):
            printed.logger.warning("reward: %d", number)
    printed.logger.warning("reward: of another run")
    lines = (tmp_path / "run" / "printed.log").read_text().splitlines()
    told = [line.partition(" reward: ")[2] for line in lines[:-1]]
    assert told == ["before the folder is a run's", "0", "1"]
    assert lines[-1].startswith("… no more is kept")


def test_what_is_printed_before_a_run_that_fails_to_start_leaves_nothing(tmp_path):
    with PrintedLog(tmp_path / "printed.log", lambda: False):
        printed.logger.warning("reward: once")
    assert not (tmp_path / "printed.log").exists()
