"""Runs without anything to learn from: they end soon, and say why."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs import small_config
from tramontane.config import Config
from tramontane.evaluation.malformed import REMEDIES
from tramontane.run.checks import (
    ADVICE,
    NoSignal,
    SignalMonitor,
    Tally,
    evaluation_warnings,
)
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.types import (
    Completion,
    Ending,
    FilterReason,
    FinishReason,
    Group,
    Outcome,
    Problem,
    ToolCall,
    TurnRecord,
    Verdict,
)
from tramontane.verifier.custom import Response
from tramontane.verifier.reward import grade_apart

EQUAL = FilterReason("no diversity")


def group(
    outcome: Outcome = "wrong",
    reason: str = "",
    finish: FinishReason = "stop",
    text: str = "some text",
    size: int = 4,
) -> Group:
    completions = [Completion(0, i, [1], [2], [0.0], [0], finish, text) for i in range(size)]
    verdicts = [Verdict(0.0, {}, outcome, reason)] * size
    return Group(0, Problem("p", "math", "What is 3 + 4?", "7"), completions, verdicts)


def monitor(warnings: list[str], updates: int = 0, **pipeline: Any) -> SignalMonitor:
    config = Config.model_validate({"pipeline": pipeline})
    return SignalMonitor(config, Path("runs/x"), warnings.append, updates, str)


def talk(
    reason: str, earned: float | None, outcome: Outcome, ending: Ending = "completed"
) -> Group:
    turn = TurnRecord(0, 1, 0, "pear", [{"role": "user", "content": "4 are left."}], [], earned)
    completions = [
        Completion(0, i, [5, 6], [2], [0.0], [0], "stop", "pear", turns=[turn], ending=ending)
        for i in range(4)
    ]
    verdicts = [Verdict(0.0, {"correctness": 0.9 * (earned or 0.0)}, outcome, reason)] * 4
    return Group(0, Problem("p", "math", "What is 3 + 4?", "7"), completions, verdicts)


def test_a_conversation_is_shown_as_the_model_read_it() -> None:
    tally = Tally(Config(), lambda ids: f"<s>Spend {len(ids)} coins.")
    tally.add(talk("", 0.0, "wrong"), EQUAL)
    text = tally.diagnosis()
    assert "  │ prompt: <s>Spend 2 coins.\n  │ model: pear\n  │ user: 4 are left." in text


def test_an_environment_without_a_reward_is_advised_to_give_one() -> None:
    tally = Tally(Config(), str)
    tally.add(
        talk("completed, without a reward (conversation.reward: last)", None, "unscorable"), EQUAL
    )
    first = tally.diagnosis().partition("try, in this order:\n")[2].splitlines()[0]
    assert "let the environment give a reward by its last turn" in first
    assert "sandbox" not in tally.diagnosis()


def test_an_environment_that_is_cut_short_before_any_reward_gave_none() -> None:
    config = Config.model_validate(
        {
            "data": {"train": "playground:", "environment": "shop:Shop"},
            "conversation": {"reward": "last"},
            "pipeline": {"max_groups_without_signal": 2},
        }
    )
    warnings: list[str] = []
    watched = SignalMonitor(config, Path("runs/x"), warnings.append, 1, str)
    group = talk("", None, "wrong", "max_turns")
    earned = Response.of(group.completions[0], "last")
    verdict = grade_apart(group.problem, earned, config.verifier, 64, 16)
    assert (verdict.reward, verdict.verdict) == (0.0, "wrong")
    assert verdict.reason.startswith("max_turns, without a reward")
    for _ in range(2):
        watched.graded(replace(group, verdicts=[verdict] * 4), EQUAL)
    told = "your environment gave no reward before it was cut short, which counts as 0,"
    assert warnings[0].startswith(f"{told} for all 8 completions, which teaches nothing: let the")
    first, *_, last = warnings[1].partition("; try, in this order:\n")[2].splitlines()
    assert "let the environment give a reward" in first and "conversation.turns" in last
    assert "gave 0 " not in " ".join(warnings) and "easier problems" not in " ".join(warnings)


def mixed(reason: str) -> Group:
    """A group with one completion that could not be judged."""
    found = group("wrong", "not the reference")
    return replace(found, verdicts=[*found.verdicts[1:], Verdict(0.0, {}, "unscorable", reason)])


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("reward 'flaky': ValueError: bad (my_r.py:7, in flaky)", "correct the function"),
        ("every reward returned None", "return a number for every text"),
    ],
)
def test_advice_is_for_what_makes_most_groups_be_dropped(reason: str, advice: str) -> None:
    tally = Tally(Config(), str)
    for _ in range(3):
        tally.add(mixed(reason), FilterReason("unscorable", reason))
    headline, _, remedies = tally.diagnosis().partition("; try, in this order:\n")
    assert headline.endswith(
        "most groups were dropped, each for a completion that could not be judged"
    )
    assert advice in remedies.splitlines()[0]


def test_an_environments_constant_reward_is_named() -> None:
    config = Config.model_validate({"conversation": {"reward": "last"}})
    tally = Tally(config, str)
    tally.add(talk("", 0.5, "right"), EQUAL)
    assert "your environment gave 0.5 for all 4 completions" in tally.diagnosis()
    assert "tramontane score" not in tally.diagnosis()  # it calls no environment
    tally.add(talk("", 1.0, "right"), EQUAL)
    assert "your environment" not in tally.diagnosis()


def test_a_constant_reward_is_warned_of_though_other_parts_differ() -> None:
    config = Config.model_validate(
        {"conversation": {"reward": "last"}, "pipeline": {"max_groups_without_signal": 4}}
    )
    warnings: list[str] = []
    watched = SignalMonitor(config, Path("runs/x"), warnings.append, 0, str)
    for _ in range(8):
        watched.graded(talk("", 0.5, "right"), None)
    [warning] = warnings
    assert warning.startswith("your environment gave 0.5 for all 16 completions")


def test_constant_results_of_functions_are_named_in_place_of_harder_problems() -> None:
    custom = [{"name": "polite", "function": "tests.verifier.test_custom.polite", "weight": 0.5}]
    config = Config.model_validate(
        {"verifier": {"reward": {"custom": custom}, "domains": {"task": {}}}}
    )
    tally = Tally(config, str)
    for _ in range(32):
        same = group("right")
        same.problem = Problem("p", "task", "Greet me.")
        same.verdicts = [Verdict(0.5, {"polite": 0.5}, "right")] * 4
        tally.add(same, EQUAL)
    text = tally.diagnosis()
    assert "your functions returned 1 (polite) for all 128 completions" in text
    assert "harder problems" not in text


def test_the_default_is_four_batches_of_groups_and_at_least_32() -> None:
    sizes = {"n_batch": 256, "group_size": 16, "n_async": 256}
    assert monitor([], **sizes).limit == 64
    assert monitor([], **sizes | {"n_batch": 64}).limit == 32
    assert monitor([], **sizes, max_groups_without_signal=5).limit == 5


def test_the_first_failure_of_each_kind_is_shown_at_once() -> None:
    warnings: list[str] = []
    signal = monitor(warnings)
    for number in range(3):
        failed = f"reward 'brief': KeyError: 'word {number}' (my_rewards.py:12, in brief)"
        signal.graded(group("unscorable", failed), None)
    [first] = warnings
    assert "reward 'brief': KeyError: 'word 0' (my_rewards.py:12, in brief)" in first
    signal.graded(group("unscorable", "reward 'brief': KeyError: 'x' (my_rewards.py:20)"), None)
    signal.graded(group("unscorable", "reward 'brief': ValueError: x (my_rewards.py:12)"), None)
    assert len(warnings) == 3
    for line in range(99):
        reason = f"reward 'brief': KeyError: 'x' (my_rewards.py:{line})"
        signal.graded(group("unscorable", reason), None)
    assert len(warnings) == 16


def test_a_run_ends_at_the_limit_when_none_of_its_first_groups_is_kept() -> None:
    signal = monitor([], max_groups_without_signal=8)
    for _ in range(7):
        signal.graded(group(), EQUAL)
    with pytest.raises(NoSignal, match="none of the first 8 groups"):
        signal.graded(group(), EQUAL)


@pytest.mark.parametrize("updates", [0, 3])
def test_after_a_kept_group_four_times_as_many_in_a_row_end_the_run(updates: int) -> None:
    signal = monitor([], updates, max_groups_without_signal=8, min_kept_share=0)
    if updates == 0:
        for _ in range(7):
            signal.graded(group(), EQUAL)
        signal.graded(group(), None)
    for _ in range(31):
        signal.graded(group(), EQUAL)
    with pytest.raises(NoSignal, match="none of the last 32 groups"):
        signal.graded(group(), EQUAL)


def test_a_share_of_kept_groups_below_the_bound_is_warned_of_once_per_fall() -> None:
    warnings: list[str] = []
    signal = monitor(warnings, max_groups_without_signal=8, min_kept_share=0.5)

    def window(kept: int) -> int:
        for i in range(8):
            signal.graded(group("malformed", "no </think>"), None if i < kept else EQUAL)
        return len(warnings)

    assert [window(kept) for kept in (4, 3, 1, 2, 4, 8, 3)] == [0, 1, 1, 1, 1, 1, 2]
    assert warnings[0].startswith("only 3 of the last 8 groups can be learned from (38%")
    assert "32   100%  malformed: no </think>" in warnings[0]


def test_a_diagnosis_counts_verdicts_by_reason_and_shows_a_completion_of_the_main_cause() -> None:
    tally = Tally(Config(), str)
    for seconds in (3, 4):
        reason = f"timed out after {seconds} s"
        tally.add(group("unscorable", reason), FilterReason("unscorable", reason))
    for number in range(3):
        text = f"attempt {number}\x1b[31m\nnext line"
        tally.add(group("malformed", "does not start with <think>", text=text), EQUAL)
    tally.add(group("right"), None)
    lines = tally.diagnosis().splitlines()
    assert "         12    50%  malformed: does not start with <think>" in lines
    assert "          8    33%  unscorable: timed out after N s" in lines
    assert "          1    17%  kept" in lines
    assert "          3    50%  filtered: no diversity" in lines
    assert "          2    33%  filtered: unscorable: timed out after N s" in lines
    assert "  │ attempt 0·[31m" in lines and "  │ next line" in lines
    assert any("data.system_prompt=magistral" in line for line in lines)


@pytest.mark.parametrize(
    ("groups", "advice"),
    [
        ([group("malformed", "no </think>", "length")], "pipeline.l_max"),
        ([group("malformed", "does not start with <think>", "length")], "data.response_prefix"),
        ([group("right")], "harder problems"),
        ([group("right", finish="length")], "harder problems"),
        ([group("wrong")], "easier problems"),
        ([group("unscorable", "no sandbox")], "tramontane doctor"),
        ([group("wrong"), *[group("malformed", "no balanced \\boxed")] * 2], "ask for \\boxed{}"),
    ],
)
def test_the_advice_is_for_the_most_frequent_cause(groups: list[Group], advice: str) -> None:
    tally = Tally(Config(), str)
    for one in groups:
        tally.add(one, EQUAL)
    assert advice in tally.diagnosis().partition("try, in this order:")[2]


def test_longer_completions_are_not_advised_where_none_was_cut_off() -> None:
    tally = Tally(Config(), str)
    tally.add(group("malformed", "no </think>"), EQUAL)
    advice = tally.diagnosis().partition("try, in this order:")[2]
    assert "cold_start" in advice
    assert "l_max" not in advice


def test_a_long_completion_is_shown_by_its_start_and_end() -> None:
    tally = Tally(Config(), str)
    tally.add(group(text="a" * 2000 + "\n" + "z" * 3000), EQUAL)
    shown = tally.diagnosis()
    assert "a" * 1200 in shown and "a" * 1201 not in shown
    assert "z" * 400 in shown and "z" * 401 not in shown
    assert "… 3,401 characters …" in shown


def test_every_key_that_advice_names_exists() -> None:
    dump = Config().model_dump()
    keys = re.findall(
        r"\b(?:data|pipeline|verifier|generator|trainer)\.[a-z_.]*[a-z_]", str((ADVICE, REMEDIES))
    )
    assert len(keys) > 8
    for key in keys:
        section: Any = dump
        for part in key.split("."):
            assert part in section, key
            section = section[part]


class Watcher(QuietScreen):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def cut_short(folder: Path, **sections: Any) -> Config:
    """A run whose completions are too short for the format."""
    sizes = {"l_max": 4, "l_cache": 0, "max_groups_without_signal": 6}
    return small_config(folder, pipeline=sizes, **sections)


def test_a_model_that_never_writes_the_format_ends_its_run_with_a_diagnosis(tmp_path: Path) -> None:
    screen = Watcher()
    config = cut_short(
        tmp_path / "run",
        data={"eval": "playground:"},
        evaluation={"problems": 4, "samples": 2},
    )
    with pytest.raises(NoSignal) as error:
        train(config, screen)
    message = str(error.value)
    assert "none of the first 6 groups can be learned from" in message
    assert re.search(r"4\d +100%  malformed: no </think>, cut off at l_max", message)
    assert "most completions are cut off" in message and "raise pipeline.l_max" in message
    assert f"tramontane train --resume {tmp_path / 'run'} key=value" in message
    (warning,) = [said for said in screen.warnings if "format rate" in said]  # others: of speed
    assert "format rate 0. None of 8 completions" in warning and "100% were cut off" in warning
    assert warning in (tmp_path / "run/events.log").read_text()
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert not list((tmp_path / "run/checkpoints").iterdir())


@pytest.mark.slow
def test_a_model_that_solves_nothing_is_warned_of_before_training(tmp_path: Path) -> None:
    rows = [{"id": f"p{n}", "problem": f"What is {n} + 1?", "answer": "no"} for n in range(4)]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    from tramontane import evaluate

    result = evaluate("tiny", str(file), samples=2, max_tokens=64)
    assert result.format_rate > 0
    (warning,) = evaluation_warnings(result)
    assert "pass@2 is 0. None of 4 problems was solved in 2 samples" in warning
    assert not evaluation_warnings(evaluate("tiny", "playground:", problems=16, max_tokens=96))


def test_the_diagnosis_of_a_failing_reward_speaks_of_the_reward() -> None:
    reason = "reward 'close': KeyError: 'sum' (my_task.py:12, in close)"
    tally = Tally(Config(), str)
    for _ in range(3):
        tally.add(group("unscorable", reason), FilterReason("unscorable", reason))
    told = tally.diagnosis()
    assert told.count("my_task.py:12, in close)") == 3  # completions, groups, the example
    most = "most completions could not be graded: your reward, verifier or environment failed"
    assert f"{most}; try, in this order" in told
    assert "sandbox" not in told and "tramontane score" in told
    reason = "environment_failed: Shop.step: KeyError: 'fig' (shop.py:6, in step)"
    tally = Tally(Config(), str)
    tally.add(talk(reason, None, "unscorable", "environment_failed"), FilterReason("unscorable"))
    assert "at the line named above" in tally.diagnosis()
    assert "tramontane score" not in tally.diagnosis()  # it calls no environment
    tally = Tally(Config(), str)
    tally.add(group("unscorable", "no sandbox works"), FilterReason("unscorable", "no sandbox"))
    assert "sandbox works on this machine" in tally.diagnosis()


def test_rewards_of_an_environment_that_do_not_count_are_told_of_once() -> None:
    played = group("right")
    played.completions[0].turns = [TurnRecord(0, 1, 0, "text", reward=0.0)]
    warnings: list[str] = []
    data = {"train": "a", "environment": "tests.environments.worlds:Guess"}
    for reward, told in ({}, 1), ({"reward": "verifier"}, 1):
        config = Config.model_validate({"data": data, "conversation": reward})
        watched = SignalMonitor(config, Path("runs/x"), warnings.append, 0, str)
        for _ in range(2):
            watched.graded(played, None)
        assert len(warnings) == told
    assert warnings[0].startswith("Guess gives rewards, which do not count")


def test_a_run_whose_model_never_calls_its_tools_ends_though_groups_are_kept() -> None:
    def called(name: str) -> Group:
        talked = group("right", size=4)
        unread = ToolCall(name, {}, "not a call", error=not name)
        talked.completions[1].turns = [TurnRecord(0, 1, 0, "text", calls=[unread])]
        return talked

    tools = ["calculator"]
    config = Config.model_validate({"pipeline": {"max_groups_without_signal": 3}})
    watched = SignalMonitor(config, Path("runs/x"), [].append, 0, str)
    watched.graded(called(""), None, tools)
    for _ in range(9):
        watched.graded(group("right"), None)  # of a row without tools
    watched.graded(group("right"), None, tools)
    with pytest.raises(NoSignal, match=r"none of the first 3 groups .*\(calculator\); 2 calls"):
        watched.graded(called(""), None, tools)
    watched = SignalMonitor(config, Path("runs/x"), [].append, 0, str)
    watched.graded(called("calculator"), None, tools)
    resumed = SignalMonitor(config, Path("runs/x"), [].append, 1, str)
    for _ in range(9):
        watched.graded(group("right"), None, tools)
        resumed.graded(group("right"), None, tools)


@pytest.mark.slow
def test_a_run_whose_model_never_calls_the_tools_of_its_environment_ends(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        data={"environment": "tests.environments.worlds:Stocked"},
        pipeline={"diversity": "none", "l_max": 192, "max_groups_without_signal": 2},
        conversation={"reward": "last"},
    )
    with pytest.raises(NoSignal, match=r"tool call that can be read \(look\); 0 calls"):
        train(config, QuietScreen())
