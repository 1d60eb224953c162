"""One completion: its rewards, its length, its turns, and the language of all that it says."""

import time
from dataclasses import replace

import pytest

from tests.verifier.test_group_parts import GOOD, SUM, by_length, rewards
from tramontane.config import VerifierConfig, parse
from tramontane.verifier.custom import Response
from tramontane.verifier.reward import grade_apart


def apart(*turns, config=VerifierConfig(), problem=SUM, n_tokens=10, **fields):  # noqa: B008
    response = Response("\n\n".join(turns), n_tokens, turns=[(t, False) for t in turns], **fields)
    return grade_apart(problem, response, config, 100, 20)


def test_a_reward_of_weight_0_is_not_called_and_one_that_fails_is_unscorable():
    assert apart(GOOD, config=rewards(by_length, weight=0.0), n_tokens=5).verdict == "right"
    failed = apart(GOOD, config=rewards(by_length), n_tokens=5)
    assert (failed.verdict, failed.reward) == ("unscorable", 0.0)
    assert failed.reason.startswith("reward 'by_length': returned None")


def test_a_reward_may_count_for_malformed_completions():
    for malformed, part in ((True, 0.5), (False, 0.0)):
        found = apart("no format", config=rewards(by_length, malformed=malformed), n_tokens=6)
        assert (found.verdict, found.reward) == ("malformed", part)
        assert found.parts["by_length"] == part


def test_a_reward_counts_in_any_format_beside_an_environment_s():
    found = apart("no format", config=rewards(by_length), n_tokens=6, earned=1.0)
    assert (found.verdict, found.parts["by_length"]) == ("right", 0.5)


def test_calls_have_no_language():
    turns = [(f"<think>{ENGLISH}</think>{GERMAN}", True), (GOOD, False)]
    found = grade_apart(SUM, Response("", 10, turns=turns), VerifierConfig(), 100, 20)
    assert found.parts["language"] == 0.1


def test_the_seconds_of_a_verdict():
    started = time.perf_counter()
    seconds = apart(GOOD).seconds
    assert 0 < seconds <= time.perf_counter() - started


def test_a_problem_has_a_length_penalty_of_its_own():
    assert apart(GOOD, n_tokens=90).parts["length"] == pytest.approx(-0.05)
    own = replace(SUM, length_penalty=1.0)
    assert apart(GOOD, n_tokens=90, problem=own).parts["length"] == pytest.approx(-0.5)
    none = replace(SUM, length_penalty=0.0)
    assert apart(GOOD, n_tokens=90, problem=none).parts["length"] == 0


def test_the_last_turn_s_fault_is_the_response_s():
    bare = GOOD.partition("</think>")[2]
    found = apart(GOOD, bare)
    assert (found.verdict, found.reward) == ("malformed", 0.0)
    assert found.reason == "does not start with <think>"
    assert apart(bare, GOOD).reason == "turn 1: does not start with <think>"


def test_an_environment_s_reward_is_judged_by_the_pass_mark():
    found = apart(GOOD, earned=1.0)
    assert (found.verdict, found.reason) == ("right", "")
    found = apart(GOOD, earned=0.25, unrewarded="max_turns, without a reward")
    assert (found.verdict, found.reason) == ("wrong", "max_turns, without a reward")


GERMAN = "Ich addiere einfach die beiden Zahlen und erhalte dann das Ergebnis fünf."
ENGLISH = "I simply add the two numbers and then get the result, which is five."


@pytest.mark.parametrize(
    ("turns", "part"),
    [
        ([ENGLISH], 0.1),
        ([GERMAN], 0.0),
        ([f"<think>{GERMAN}</think>{ENGLISH}"], 0.0),
        ([f"<think>{ENGLISH}</think>{GERMAN}"], 0.0),
        ([f"<think>{ENGLISH}</think>{ENGLISH}"], 0.1),
        ([GERMAN, ENGLISH, ENGLISH], 0.0),
        ([ENGLISH, GERMAN, ENGLISH], 0.0),
        ([f"<think>{GERMAN}</think>", f"<think>{ENGLISH}</think>{ENGLISH}", ENGLISH], 0.0),
        ([ENGLISH, ENGLISH, ENGLISH], 0.1),
    ],
)
@pytest.mark.parametrize("form", ["none", "boxed"])
def test_thoughts_and_answers_of_all_turns_have_a_language(turns, part, form):
    """With thoughts or without, and whatever the format, where an environment gives the reward."""
    domain = {"domains": {"talk": {"format": form}}, "reward": {"language": 0.1}}
    config = parse(VerifierConfig, domain, "test")
    found = apart(*turns, config=config, problem=replace(SUM, domain="talk"), earned=1.0)
    assert found.parts["language"] == part


def test_thoughts_are_between_the_configured_tags():
    config = parse(VerifierConfig, {"thinking_tags": ["[THINK]", "[/THINK]"]}, "test")
    tagged = GOOD.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    assert apart(tagged, tagged, config=config).reward == pytest.approx(1.1)
    assert apart(GOOD, config=config).verdict == "malformed"
    for thoughts, part in ((GERMAN, 0.0), (ENGLISH, 0.1)):
        unboxed = f"[THINK]{thoughts}[/THINK]{ENGLISH}"
        assert apart(unboxed, config=config, earned=1.0).parts["language"] == part


def test_empty_thoughts_have_no_language_where_thoughts_are_required():
    found = apart(f"<think></think>{ENGLISH} \\boxed{{5}}")
    assert (found.verdict, found.parts["language"]) == ("right", 0.0)
