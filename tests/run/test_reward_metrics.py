"""Completions that could not be judged are not zeros in the figures about the model."""

import pytest

from tramontane.config import Config
from tramontane.config.verifier import RewardConfig
from tramontane.run.metrics import effort_metrics, reward_metrics
from tramontane.types import Completion, Group, Problem, Verdict

FAILED, PLACE = "reward 'brevity': KeyError: ", "my_rewards.py:6, in brevity"
PARTS = ("format", "correctness", "length", "language")
SHOWN = (*PARTS, "format_rate", "language_rate")


class Counted:
    def count(self, completion: Completion) -> int:
        return 1


def group(*outcomes: str, effort: str | None = None) -> Group:
    completions = [Completion(0, i, [1], [1], [-1.0], [0], "stop") for i in range(len(outcomes))]
    verdicts = []
    for outcome in outcomes:
        right = float(outcome == "right")
        parts = dict.fromkeys(PARTS, 0.0) | {"correctness": right}
        reason = f"{FAILED}{len(verdicts)} ({PLACE})" if outcome == "unscorable" else ""
        verdicts.append(Verdict(right, parts, outcome, reason))
    return Group(0, Problem("p", "math", "?", "1", effort=effort), completions, verdicts)


def test_means_are_over_the_judged_completions() -> None:
    groups = [group("right", "unscorable", "wrong"), group("unscorable")]
    found = reward_metrics(groups, SHOWN, {None: Counted()})
    assert found["reward"] == found["pass_rate"] == found["reward_correctness"] == 0.5
    assert (found["format_rate"], found["unscorable_rate"]) == (1, 0.5)
    assert found["completion_tokens"] == 1
    assert found["failures"] == {f"reward 'brevity': KeyError ({PLACE})": 2}


def test_without_a_judged_completion_there_is_no_mean() -> None:
    found = reward_metrics([group("unscorable")], SHOWN, {None: Counted()})
    assert found["unscorable_rate"] == 1 and found.keys().isdisjoint({"reward", "pass_rate"})
    levels = [group("unscorable", effort="low"), group("right", "unscorable", effort="high")]
    rates = effort_metrics(levels, {"low": Counted(), "high": Counted()})
    assert rates["effort_pass_rate"] == {"high": pytest.approx(1.0)}
    assert rates["effort_completion_tokens"] == {"low": 1, "high": 1}


def test_parts_and_rates_that_nothing_rewards_are_not_recorded() -> None:
    data = {"train": "rows.jsonl", "environment": "guessing"}
    config = Config.model_validate({"data": data, "conversation": {"reward": "last"}})
    shown = [*config.verifier.reward.rewarded, *config.evaluated_rates]
    found = reward_metrics([group("right", "wrong")], shown, {None: Counted()})
    parts = {key for key in found if key.startswith("reward") or key.endswith("_rate")}
    assert parts == {
        "reward", "reward_correctness", "pass_rate", "unscorable_rate", "length_limited_rate"
    }  # fmt: skip
    rest = RewardConfig(custom=({"function": "my.brevity", "weight": -0.5},), language=0)
    assert rest.rewarded == ["format", "correctness", "length", "brevity"]
