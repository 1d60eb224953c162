"""The reward of one completion: the paper's values, and properties for any text."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tramontane.config import Config, CustomReward, RewardConfig, VerifierConfig
from tramontane.types import Completion, Problem, TurnRecord
from tramontane.verifier.custom import Response
from tramontane.verifier.reward import grade, grade_apart, length_penalty

CONFIG = VerifierConfig()
SUM = Problem("sum", "math", "What is the sum of $2$ and $3$?", "5", language="en")
GOOD = r"<think>I add two and three and get five.</think>So the answer is \boxed{5}."


def score(text, n_tokens=10, problem=SUM, config=CONFIG):
    return grade(problem, text, n_tokens, config, l_max=100, l_cache=20)


@pytest.mark.parametrize(
    ("n_tokens", "penalty"),
    [(0, 0), (79, 0), (80, 0), (85, -0.025), (90, -0.05), (100, -0.1), (101, -0.1), (1000, -0.1)],
)
def test_length_penalty(n_tokens, penalty):
    assert length_penalty(n_tokens, l_max=100, l_cache=20) == pytest.approx(penalty)


def test_length_penalty_without_cache_is_a_step():
    assert length_penalty(100, l_max=100, l_cache=0) == 0
    assert length_penalty(101, l_max=100, l_cache=0) == -0.1
    assert length_penalty(90, l_max=100, l_cache=20, scale=1.0) == pytest.approx(-0.5)


def test_all_four_axes():
    verdict = score(GOOD)
    assert verdict.verdict == "right"
    assert verdict.reward == pytest.approx(1.1)
    assert verdict.parts == {"format": 0.1, "correctness": 0.9, "length": 0.0, "language": 0.1}
    assert verdict.answer == "5"
    assert verdict.seconds > 0


def test_each_axis_alone():
    assert score(GOOD.replace("{5}", "{6}")).reward == pytest.approx(0.2)
    assert score(GOOD, n_tokens=90).reward == pytest.approx(1.05)
    assert score(GOOD, n_tokens=101).reward == pytest.approx(1.0)
    german = r"<think>Ich addiere die beiden Zahlen und erhalte fünf.</think>Also \boxed{5}."
    assert score(german).reward == pytest.approx(1.0)


def test_a_stated_language_counts_more_than_the_text():
    formula = Problem("sum", "math", "$2 + 3$", "5", language="fr")
    assert score(GOOD, problem=formula).parts["language"] == 0
    assert score(GOOD, problem=replace(formula, language=None)).parts["language"] == 0.1


def test_format_failure_ends_grading():
    verdict = score(GOOD.replace("<think>", ""), n_tokens=500)
    assert (verdict.verdict, verdict.reward) == ("malformed", 0.0)
    assert set(verdict.parts.values()) == {0.0}
    assert "<think>" in verdict.reason


def test_weights_are_config():
    config = VerifierConfig(reward=RewardConfig(format=0, correctness=1, length=0, language=0))
    assert score(GOOD, n_tokens=500, config=config).reward == 1.0


def test_unscorable_has_a_reason_and_no_reward():
    verdict = score(GOOD, problem=Problem("p", "math", "?", None))
    assert (verdict.verdict, verdict.reward) == ("unscorable", 0.0)
    assert "no reference" in verdict.reason
    unreadable = score(GOOD, problem=Problem("p", "math", "?", "\\frac{1}{"))
    assert (unreadable.verdict, unreadable.answer) == ("unscorable", "5")


def test_an_exception_is_unscorable_not_wrong():
    broken = Problem("p", "code", "Print seven.", tests={"type": "stdio"})  # without cases
    config = VerifierConfig(allow_unsandboxed=True)
    verdict = score("<think>Easy.</think>```python\nprint(7)\n```", problem=broken, config=config)
    assert (verdict.verdict, verdict.reason) == (
        "unscorable",
        "the tests need cases, each with input and output as text",
    )
    assert set(verdict.parts.values()) == {0.0}


def raises(problem, text, n_tokens):
    raise ValueError(text * 100)


def test_the_reason_of_an_exception_is_cut():
    reward = CustomReward(name="raises", function=f"{__name__}.raises", weight=1)
    config = VerifierConfig(reward=RewardConfig(custom=(reward,)))
    verdict = score(GOOD, config=config)
    assert verdict.verdict == "unscorable"
    assert verdict.reason.startswith("reward 'raises': ValueError: <think>")
    assert len(verdict.reason) < 400  # with the line of the function that failed


WORDS = r"""
    <think> </think> \boxed{ } { 5 \frac 1 , ( ) [ ] = ^ \text{ or \ $ % x \sqrt _ ! \pm √ ² ½ 5cm
    \cup \infty & \begin{pmatrix} \end{pmatrix} . < > | ``` 答案 e
"""
PIECES = st.sampled_from([*WORDS.split(), " ", "\n", " or "])
TEXTS = st.text(max_size=60) | st.lists(PIECES, max_size=14).map("".join)
REFERENCES = st.sampled_from(
    ["5", "x+1", "(1, 2)", r"\{1, 2\}", "[0, 1)", r"\text{odd}", "x=5", "3 cm"]
)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, reference=REFERENCES, n_tokens=st.integers(0, 200), wrap=st.booleans())
def test_properties(text, reference, n_tokens, wrap):
    problem = Problem("p", "math", "What is the answer to this question?", reference)
    response = f"<think>Let me see.</think>\\boxed{{{text}}}" if wrap else text
    verdict = grade(problem, response, n_tokens, CONFIG, l_max=100, l_cache=20)
    assert -0.1 <= verdict.reward <= 1.1 + 1e-9
    assert sum(verdict.parts.values()) == pytest.approx(verdict.reward)
    assert list(verdict.parts) == ["format", "correctness", "length", "language"]
    if verdict.verdict in ("malformed", "unscorable"):
        assert verdict.reward == 0
        assert verdict.reason
    assert (verdict.parts["correctness"] > 0) == (verdict.verdict == "right")


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_code_responses_without_a_fence_never_raise(text):
    problem = Problem("p", "code", "Print.", tests={"type": "stdio", "cases": []})
    assert grade(problem, text, 1, CONFIG, 100, 20).verdict in ("malformed", "unscorable", "wrong")


CASES = [{"input": f"{n}\n", "output": f"{n * n}\n"} for n in range(20)]
SQUARE = Problem("sq", "code", "Square.", tests={"type": "stdio", "cases": CASES}, language="en")
SLEEPING = "import time\nn = int(input())\nif n in {tests}: time.sleep(99)\nprint(n * n)"
FRACTION = VerifierConfig(
    allow_unsandboxed=True, code_timeout_s=1.0, reward=RewardConfig(code="fraction")
)


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("print(int(input()) ** 2)", 20),
        ("n = int(input()); print(n * n if n != 4 else 0)", 19),
        ("n = int(input()); print(n * n if n % 2 else 1 / 0)", 10),
        pytest.param(SLEEPING.format(tests=(5, 6)), 18, marks=pytest.mark.slow),
        # After the third test that times out no more are run: tests 9 to 20 would pass.
        pytest.param(SLEEPING.format(tests=(5, 6, 7)), 5, marks=pytest.mark.slow),
        ("syntax error", 0),
    ],
)
def test_a_reward_of_the_fraction_of_tests(program, passed):
    text = f"<think>I square the number.</think>Here it is:\n```python\n{program}\n```\n"
    verdict = score(text, problem=SQUARE, config=FRACTION)
    assert verdict.parts["correctness"] == pytest.approx(0.9 * passed / 20)
    assert verdict.verdict == ("right" if passed == 20 else "wrong")
    if passed < 20:
        assert verdict.reason.startswith(f"{passed} of 20 tests; test ")
        all_or_nothing = FRACTION.model_copy(update={"reward": RewardConfig()})
        assert score(text, problem=SQUARE, config=all_or_nothing).parts["correctness"] == 0


CALL = '<think>I had better use the calculator for this.</think><tool_call>{"a": 1}</tool_call>'


def judged(*turns, config=CONFIG, **fields):
    turns = [(turn, "<tool_call>" in turn) for turn in turns]
    text = "\n\n".join(turn for turn, _ in turns)
    return grade_apart(SUM, Response(text, 10, turns=turns, **fields), config, 100, 20)


def test_a_conversation_is_graded_by_its_last_turn_its_format_by_each_turn():
    assert judged(CALL, CALL, GOOD).reward == pytest.approx(1.1)
    assert judged(CALL, GOOD.replace("{5}", "{6}")).parts["correctness"] == 0
    unthought = judged(CALL, CALL.partition("</think>")[2], GOOD)
    assert unthought.verdict == "malformed"
    assert unthought.reason == "turn 2: does not start with <think>"
    assert judged(GOOD, CALL).verdict == "malformed"  # no answer in the last turn


def test_all_that_the_model_wrote_but_calls_counts_for_the_language():
    german = "<think>Ich sollte dafür wohl lieber den Taschenrechner benutzen.</think>"
    assert judged(CALL.replace("calculator", "Taschenrechner"), GOOD).parts["language"] == 0.1
    assert judged(german + CALL.partition("</think>")[2], GOOD).parts["language"] == 0
    spoken = "<think>I ask.</think>Kannst du mir bitte sagen, wie viel das zusammen ist?"
    assert judged(spoken, GOOD).parts["language"] == 0


def test_an_environment_may_give_the_reward_and_its_failure_is_unscorable():
    wrong = GOOD.replace("{5}", "{6}")
    earned = judged(CALL, wrong, earned=1.0)
    assert (earned.verdict, earned.reward) == ("right", pytest.approx(1.1))
    half = judged(CALL, GOOD, earned=0.5)
    assert half.parts["correctness"] == pytest.approx(0.45)
    assert half.reason == "the environment's reward: 0.5"
    failed = judged(CALL, GOOD, failure="step_timeout: over 3 s")
    assert (failed.verdict, failed.reason) == ("unscorable", "step_timeout: over 3 s")


SHOP = {
    "data": {"train": "playground:", "environment": "shop:Shop"},
    "conversation": {"reward": "sum"},
}


def test_a_reward_of_an_environment_is_all_that_counts_in_any_format():
    config = Config.model_validate(SHOP).verifier
    for answer in ("pear", "<think>Ich kaufe lieber", GOOD, GOOD * 9):
        long = judged("apple", answer, earned=2.5, config=config)
        assert (long.reward, long.verdict) == (2.5, "right")
        none = judged("apple", answer, earned=0.0, config=config)
        assert (none.reward, none.verdict) == (0.0, "wrong")


def test_keys_add_axes_to_a_reward_of_an_environment_and_none_is_a_gate():
    reward = {"format": 0.1, "language": 0.2, "length": 0.4}
    config = Config.model_validate(SHOP | {"verifier": {"reward": reward}}).verifier
    parts = judged(CALL, GOOD, earned=1.0, config=config).parts
    assert parts == {"format": 0.1, "correctness": 1.0, "length": 0.0, "language": 0.2}
    plain = judged("I would like to buy a pear, please.", earned=1.0, config=config)
    assert plain.parts == {"format": 0.0, "correctness": 1.0, "length": 0.0, "language": 0.2}
    german = judged("Ich möchte bitte sofort eine Birne kaufen.", earned=1.0, config=config)
    assert german.parts["language"] == 0.0


def test_axes_that_are_not_set_keep_the_papers_weights_elsewhere():
    def weights(raw):
        reward = Config.model_validate(raw).verifier.reward
        return reward.format, reward.correctness, reward.length, reward.language

    paper = (0.1, 0.9, 0.1, 0.1)
    assert weights({}) == weights({"conversation": {"reward": "last"}}) == paper  # no environment
    assert weights(SHOP | {"conversation": {"reward": "verifier"}}) == paper
    assert weights(SHOP) == (0, 1, 0, 0)
    assert weights(Config.model_validate(SHOP).model_dump()) == (0, 1, 0, 0)
    sums = {"domains": {"sums": {}}, "reward": {"custom": [{"function": "mine.close"}]}}
    assert weights({"data": {"train": "playground:", "domain": "sums"}, "verifier": sums}) == (
        0,
        0,
        0,
        0,
    )
    sums["reward"]["length"] = 0.3
    assert weights({"data": {"train": "playground:", "domain": "sums"}, "verifier": sums}) == (
        0,
        0,
        0.3,
        0,
    )
    assert weights({"verifier": sums}) == (0.1, 0.9, 0.3, 0.1)  # beside the rows' verifiers


def test_the_reward_of_a_conversation_is_its_last_or_their_sum():
    turns = [TurnRecord(0, 1, 0, "a", reward=0.25), TurnRecord(2, 3, 0, "b", reward=0.5)]
    turns.append(TurnRecord(4, 5, 0, "c"))
    tokens = [1] * 5, [-1.0] * 5, [0] * 5
    completion = Completion(0, 0, [1], *tokens, "stop", turns=turns, ending="completed")
    found = [Response.of(completion, reward).earned for reward in ("verifier", "last", "sum")]
    assert found == [None, 0.5, 0.75]
    completion.turns = turns[2:]
    never = Response.of(completion, "last")  # the environment ended it, and gave no reward
    assert grade_apart(SUM, never, CONFIG, 100, 20).verdict == "unscorable"
    assert never.failure == "completed, without a reward (conversation.reward: last)"
    assert Response.of(completion).failure == ""
    completion.ending = "max_turns"  # before the environment could give one
    assert (Response.of(completion, "last").earned, Response.of(completion).failure) == (0, "")
    completion.ending, completion.ending_reason = "environment_failed", "KeyError: 'a'"
    assert Response.of(completion).failure == "environment_failed: KeyError: 'a'"
