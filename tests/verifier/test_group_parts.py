"""Rewards of a completion and of a group, called in this process: what functions are given, which
completions they count for, and what becomes of what they return."""

import re
from dataclasses import replace

import pytest

from tramontane.config import (
    CustomReward,
    RewardConfig,
    VerifierConfig,
    parse,
)
from tramontane.errors import InputError
from tramontane.types import Completion, Message, Problem, ToolCall, TurnRecord, Verdict
from tramontane.verifier import custom
from tramontane.verifier.custom import (
    GroupCall,
    GroupResult,
    JudgeCall,
    Response,
    failure_of,
    fault,
    kind_of,
    turn_messages,
)
from tramontane.verifier.functions import FunctionFailed
from tramontane.verifier.group_rewards import (
    check_columns,
    group_calls,
    run_group_call,
    with_group_rewards,
)
from tramontane.verifier.reward import grade, grade_apart

SUM = Problem("sum", "math", "What is the sum of $2$ and $3$?", "5", language="en")
GOOD = r"<think>I add two and three and get five.</think>So the answer is \boxed{5}."
GIVEN = []


def texts_only(texts):
    return [1.0] * len(texts)


def keeps_texts(problem, texts, n_tokens):
    GIVEN.append((problem, texts, n_tokens))
    problem.metadata["changed"] = True
    return [0.5, None][: len(texts)]


def keeps_columns(**columns):
    GIVEN.append(columns)
    columns["log_extra"]("name", [1])
    columns["log_metric"]("name", 1)
    for message in columns["completions"][0] if columns["question"][0] == "chat" else ():
        message["role"] = "changed"
    return [None for _ in columns["prompts"]]


def needs_columns(prompts, completions, completion_ids, trainer_state, log_extra, log_metric,
                  level, task, other=1, *more, **columns):  # fmt: skip
    GIVEN.append((level, task))
    return [1.0] * len(prompts)


def reads_queries(prompts, queries, **columns):
    return [1.0] * len(prompts)


def fails(texts):
    raise KeyError("no such text")


def reads_texts(problem, texts, more):
    return [0.0]


def booleans(texts):
    return [True, False]


def by_length(problem, text, n_tokens):
    return {1: 0, 2: 1, 3: 1.25, 4: -0.25, 5: None, 6: 0.5}[n_tokens]


def rewards(*functions, weight=1.0, **fields):
    given = [
        CustomReward(name=f.__name__, function=f"{__name__}.{f.__name__}", weight=weight, **fields)
        for f in functions
    ]
    return VerifierConfig(reward=RewardConfig(custom=tuple(given)))


def judged_by(domain="math", **reward):
    given = {"domains": {domain: {"verifier": "judge"}}, "judge": {"reward_model": "folder"}}
    return parse(VerifierConfig, given | {"reward": reward}, "test")


@pytest.fixture(autouse=True)
def nothing_given():
    GIVEN.clear()


# ------------------------------------------------------------------------------- conversations


def test_a_turn_as_messages():
    answers = [
        {"role": "tool", "content": "5"},
        {"role": "user", "content": "Go on."},
        {"role": "tool", "content": "error"},
        {"role": "tool", "content": "nobody asked"},
    ]
    calls = iter([("add", {"a": 2}), ("", {}), ("sub", {})])
    assert turn_messages("I add.", calls, answers[:3]) == [
        {"role": "assistant", "content": "I add.", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}},
            {"type": "function", "function": {"name": "sub", "arguments": {}}}]},
        {"role": "tool", "content": "5", "name": "add"},
        {"role": "user", "content": "Go on."},
        {"role": "tool", "content": "error", "name": ""},
    ]  # fmt: skip
    assert turn_messages("Hm.", [("", {})], ()) == [{"role": "assistant", "content": "Hm."}]
    assert turn_messages("", [], answers[3:])[1]["name"] == ""


def test_the_graded_part_of_a_conversation():
    start, later = [Message(role="user", content="Hello.")], [Message(role="user", content="New.")]
    turns = [
        TurnRecord(0, 2, 0, "One.", calls=[ToolCall("add", {"a": 2}, "5")],
                   messages=[Message(role="tool", content="5")], reward=0.25),
        TurnRecord(4, 5, 1, "Two.", opened=later, reward=0.5),
    ]  # fmt: skip
    completion = Completion(0, 0, [1], text="One.\n\nTwo.", turns=turns, ending="completed",
                            opened=start)  # fmt: skip
    completion.token_ids.extend([7, 8, 9])
    found = Response.of(completion, "sum")
    assert found.text == "One.\n\nTwo." and found.last == "Two."
    assert (found.n_tokens, [*found.token_ids]) == (3, [7, 8, 9])
    assert found.turns == [("One.", True), ("Two.", False)]
    assert [message["content"] for message in found.messages] == ["One.", "5", "Two."]
    assert found.messages[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert found.opened == [(0, start), (3, later)]
    assert (found.earned, found.failure, found.unrewarded) == (0.75, "", "")
    last = replace(completion, turns=[turns[1], *turns])
    assert [Response.of(last, kind).earned for kind in ("last", "sum")] == [0.5, 1.25]
    alone = Response.of(replace(completion, turns=[], ending=None, opened=()), "last")
    assert alone.last == alone.text == "One.\n\nTwo."
    assert (alone.turns, alone.messages, alone.opened, alone.earned) == ([], [], [], None)
    cut = replace(completion, turns=[TurnRecord(0, 2, 0, "One.")], ending="max_turns")
    assert Response.of(cut, "sum")[4:7] == (
        0.0, "", "max_turns, without a reward (conversation.reward: sum)",
    )  # fmt: skip


def test_an_environment_that_failed_is_told_from_one_that_ended():
    assert failure_of("step_timeout", "over 3 s") == "step_timeout: over 3 s"
    assert failure_of("environment_failed", "KeyError") == "environment_failed: KeyError"
    assert failure_of("completed", "x") == failure_of("max_turns", "") == failure_of(None, "") == ""
    assert failure_of(["step_timeout"], "") == ""  # whatever a record says


# ------------------------------------------------------------------------- kinds and signatures


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda problem, text, n_tokens: 0, "completion"),
        (lambda p, t, *, n_tokens=0, **rest: 0, "completion"),
        (lambda *arguments: 0, "completion"),
        (lambda **columns: 0, "TRL"),
        (lambda prompts: 0, "TRL"),
        (lambda texts, completions: 0, "TRL"),
        (lambda completion_ids, **columns: 0, "TRL"),
        (lambda completions_ids: 0, "TRL"),
        (lambda texts: 0, "group"),
        (lambda problem, texts, n_tokens: 0, "group"),
    ],
)
def test_the_kind_of_a_function_is_told_by_its_parameters(function, kind):
    assert kind_of(function) == kind


@pytest.mark.parametrize(
    "function",
    [
        lambda problem, text, n_tokens: 0,
        lambda problem, text, n_tokens, reference=None: 0,
        lambda texts: 0,
        lambda n_tokens, texts: 0,
        lambda prompts, anything: 0,
    ],
)
def test_functions_without_a_fault(function):
    assert fault(function) == ""


@pytest.mark.parametrize(
    "name",
    ["ground_truth", "solution_str", "answer", "reference", "label", "labels", "target"],
)
def test_parameters_of_other_projects_are_refused(name):
    scope = {}
    exec(f"def theirs(data, {name}, more): return 1.0", scope)
    found = fault(scope["theirs"])
    assert found.startswith(f"theirs(data, {name}, more, …), ")
    assert f"takes {name!r}, and would be called with (problem, text, n_tokens)" in found


class Theirs:
    def __call__(self, problem, answer, n_tokens):
        return 0.0


def test_a_function_that_cannot_be_called_is_told_the_three_ways():
    assert fault(Theirs()).startswith("Theirs(problem, answer, n_tokens, …), ")
    found = fault(lambda problem: 0)
    assert (
        "(problem, text, n_tokens), one of a whole group by keyword with (problem, texts, n_tok"
        in (found)
    )
    assert found.endswith("(prompts, completions, completion_ids, **columns)")
    assert "texts, n_tokens" in fault(lambda texts, n_tokens, problem, more: 0) + "texts, n_tokens"
    assert "missing" in fault(lambda texts, more: 0)
    assert "test_group_parts.py:" in fault(lambda problem, answer, n_tokens: 0)
    with pytest.raises(InputError, match=r"verifier.reward.custom: reads_texts: .*is called with"):
        custom.check(rewards(reads_texts).reward.custom[0])
    custom.check(rewards(by_length).reward.custom[0])


def test_a_part_is_a_number_from_0_to_1_times_the_weight():
    (reward,) = rewards(by_length, weight=0.5).reward.custom
    found = [custom.part(reward, SUM, "x", n) for n in (1, 2, 6)]
    assert found == [0, 0.5, 0.25]
    for n, value in ((3, "1.25 (float)"), (4, "-0.25 (float)"), (5, "None (NoneType)")):
        with pytest.raises(
            FunctionFailed,
            match=re.escape(f"reward 'by_length': returned {value}, not a number from 0 to 1"),
        ):
            custom.part(reward, SUM, "x", n)


# -------------------------------------------------------------------------- what they are given


def run(function, problem, responses, progress=(3, 12)):
    return run_group_call(
        problem, GroupCall(function.__name__, responses, progress), rewards(function)
    )


def test_a_group_function_is_given_the_problem_texts_and_lengths():
    problem = Problem("p", "math", "?", "5")
    found = run(keeps_texts, problem, [Response("a", 3), Response("b", 4)])
    assert found == GroupResult([0.5, None])
    ((given, texts, lengths),) = GIVEN
    assert (given.id, texts, lengths) == ("p", ["a", "b"], [3, 4])
    assert "changed" not in problem.metadata
    assert run(texts_only, problem, [Response("a", 3)]).values == [1.0]
    assert run(booleans, problem, [Response("a", 3)] * 2).values == [1.0, 0.0]
    failed = run(fails, problem, [Response("a", 3)])
    assert failed.values == []
    assert failed.reason.startswith("reward 'fails': KeyError: 'no such text' (")
    assert run_group_call(SUM, JudgeCall("judge", []), VerifierConfig()) == GroupResult(
        [], "judge: only a VerifierPool asks it"
    )


def test_a_function_of_trl_is_given_columns():
    row = {"question": "2+3", "prompt": "hidden", "completion": "hidden", "completion_ids": [0]}
    problem = Problem("p", "math", "2 + 3?", "5", metadata={"columns": 1})
    problem = replace(problem, row=row) if "row" in problem.__dataclass_fields__ else problem
    responses = [Response("a", 3), Response("b", 2, [7, 8])]
    problem.metadata.update(question="2+3", prompt="hidden", completion="hidden")
    assert run(keeps_columns, problem, responses) == GroupResult([None, None])
    (given,) = GIVEN
    assert given["prompts"] == ["2 + 3?"] * 2 and given["completions"] == ["a", "b"]
    assert given["completion_ids"] == given["completions_ids"] == [[0, 0, 0], [7, 8]]
    state = given["trainer_state"]
    assert (state.global_step, state.max_steps) == (3, 12)
    assert given["question"] == ["2+3"] * 2
    assert not {"prompt", "completion"} & given.keys()


def test_a_function_of_trl_is_given_messages_of_its_own():
    chat = [{"role": "user", "content": "2 + 3?"}]
    problem = Problem("p", "math", "2 + 3?", "5", messages=chat, metadata={"question": "chat"})
    kept = [{"role": "assistant", "content": "It is 5."}]
    run(keeps_columns, problem, [Response("5", 1, messages=kept), Response("6", 1)])
    (given,) = GIVEN
    assert given["prompts"] == [chat, chat]
    assert given["completions"][1] == [{"role": "assistant", "content": "6"}]
    assert given["completions"][0] == [{"role": "changed", "content": "It is 5."}]
    assert kept[0]["role"] == "assistant"


def test_columns_that_a_row_lacks_are_none_and_those_that_all_lack_are_refused():
    rows = [Problem("1", "math", "?", "5", metadata={"level": 4, "task": "x"}), SUM]
    responses = [Response("a", 1), Response("b", 1)]
    assert run(needs_columns, rows[0], responses).values == [1.0, 1.0]
    assert run(needs_columns, rows[1], responses).values == [1.0, 1.0]
    assert GIVEN == [([4, 4], ["x", "x"]), ([None, None], [None, None])]
    needing = rewards(needs_columns).reward.custom
    check_columns(needing, rows)
    check_columns(rewards(keeps_columns, texts_only, by_length).reward.custom, iter(()))
    with pytest.raises(InputError) as caught:
        check_columns(needing, [SUM, replace(SUM, metadata={"task": 1, "completion_ids": [2]})])
    said = str(caught.value)
    assert said.startswith("reward 'needs_columns' (") and "test_group_parts.py:" in said
    assert " takes level, and no row of the data has such a column; the columns are " in said
    columns = said.rpartition("columns are ")[2].split(", ")
    assert columns == ["answer", "domain", "id", "language", "problem", "source", "task"]
    with pytest.raises(
        InputError, match="takes queries, and .*; OpenRLHF's queries and labels are"
    ):
        check_columns(rewards(reads_queries).reward.custom, [SUM])


# --------------------------------------------------------------------- which completions count

VERDICTS = {
    outcome: Verdict(0.0, {"format": 0.0, "texts_only": 0.0}, outcome, "so", 1.5, "5")
    for outcome in ("right", "wrong", "malformed", "unscorable")
}
FOUR = [Response(name, 1) for name in VERDICTS]


def test_a_function_is_called_if_it_counts_for_any_completion():
    verdicts, config = list(VERDICTS.values()), rewards(texts_only)
    (call,) = group_calls(SUM, verdicts, FOUR, config, (1, 2))
    assert call == GroupCall("texts_only", FOUR, (1, 2))
    assert group_calls(SUM, verdicts, FOUR, config)[0].progress == (0, 1)
    assert group_calls(SUM, verdicts[2:], FOUR[2:], config) == []
    also = rewards(texts_only, malformed=True)
    assert len(group_calls(SUM, verdicts[2:], FOUR[2:], also)) == 1
    assert group_calls(SUM, verdicts[3:], FOUR[3:], also) == []
    assert group_calls(SUM, verdicts, FOUR, rewards(texts_only, weight=0.0)) == []
    assert group_calls(SUM, verdicts, FOUR, rewards(by_length)) == []  # of one completion


def test_a_function_s_part_is_added_where_it_counts():
    results, config = {"texts_only": GroupResult([0.5] * 4)}, rewards(texts_only, weight=2.0)
    found = with_group_rewards(SUM, list(VERDICTS.values()), results, config)
    assert [v.reward for v in found] == [1.0, 1.0, 0.0, 0.0]
    assert [v.parts["texts_only"] for v in found] == [1.0, 1.0, 0.0, 0.0]
    assert [(v.verdict, v.reason) for v in found] == [(name, "so") for name in VERDICTS]
    also = rewards(texts_only, weight=2.0, malformed=True)
    found = with_group_rewards(SUM, list(VERDICTS.values()), results, also)
    assert [v.reward for v in found] == [1.0, 1.0, 1.0, 0.0]
    for value in (None, 0.0):
        none = {"texts_only": GroupResult([value] * 4)}
        found = with_group_rewards(SUM, list(VERDICTS.values()), none, config)
        assert [v.parts["texts_only"] for v in found] == [0.0] * 4
    failed = {"texts_only": GroupResult([], "KeyError")}
    found = with_group_rewards(SUM, list(VERDICTS.values()), failed, config)
    assert [v.verdict for v in found] == ["unscorable", "unscorable", "malformed", "unscorable"]
    assert (found[0].seconds, found[0].answer) == (1.5, "5")
    assert found[0].reason == "KeyError" and found[0].parts == {"format": 0.0, "texts_only": 0.0}
    assert with_group_rewards(SUM, list(VERDICTS.values()), {}, config) == list(VERDICTS.values())


def test_a_judge_is_asked_about_completions_that_count_and_gives_their_verdict():
    config, verdicts = judged_by(), list(VERDICTS.values())
    (call,) = group_calls(SUM, verdicts, FOUR, config)
    assert call == JudgeCall("correctness", ["right", "wrong", None, None])
    assert group_calls(SUM, verdicts[2:], FOUR[2:], config) == []
    earned = [response._replace(earned=1.0) for response in FOUR]
    assert group_calls(SUM, verdicts, earned, config) == []
    # Whatever they were before.
    results = {"correctness": GroupResult([0.25, 0.75, 1.0, 1.0], notes=("", "good", "", ""))}
    found = with_group_rewards(SUM, verdicts, results, config)
    assert [(v.verdict, v.reason) for v in found] == [
        ("wrong", "judged 0.25"), ("right", ""), ("malformed", "so"), ("unscorable", "so"),
    ]  # fmt: skip
    assert [v.parts.get("correctness", 0) for v in found] == pytest.approx([0.225, 0.675, 0, 0])
    notes = ("", "", "", "")
    unread = {"correctness": GroupResult([None, 0.0], notes=("no grade", "it misses a step"))}
    found = with_group_rewards(SUM, verdicts[:2], unread, config)
    assert [(v.verdict, v.reason) for v in found] == [
        ("unscorable", "no grade"), ("wrong", "it misses a step"),
    ]  # fmt: skip
    half = {"correctness": GroupResult([0.5] * 4, notes=notes)}
    assert with_group_rewards(SUM, verdicts, half, config)[0].verdict == "right"


def test_a_judge_beside_another_verifier_adds_a_part_alone():
    config = parse(VerifierConfig, {"judge": {"reward_model": "folder"}, "reward": {"judge": 0.5}},
                   "test")  # fmt: skip
    (call,) = group_calls(SUM, list(VERDICTS.values()), FOUR, config)
    assert call == JudgeCall("judge", ["right", "wrong", None, None])
    results = {"judge": GroupResult([0.5] * 4, notes=[""] * 4)}
    found = with_group_rewards(SUM, list(VERDICTS.values()), results, config)
    assert [v.parts.get("judge", 0) for v in found] == [0.25, 0.25, 0, 0]
    assert [(v.verdict, v.reason) for v in found] == [(name, "so") for name in VERDICTS]


def test_a_reward_for_malformed_completions_judges_none():
    given = {"domains": {"talk": {}}, "reward": {"custom": [
        {"function": f"{__name__}.texts_only", "weight": 1.0, "malformed": True}]}}  # fmt: skip
    config = parse(VerifierConfig, given, "test")
    results = {"texts_only": GroupResult([1.0])}
    talk = Problem("p", "talk", "?")
    (found,) = with_group_rewards(talk, [VERDICTS["malformed"]], results, config)
    assert (found.verdict, found.reason, found.reward) == ("malformed", "so", 1.0)
    (found,) = with_group_rewards(talk, [VERDICTS["wrong"]], results, config)
    assert (found.verdict, found.reason) == ("right", "")
    none = {"texts_only": GroupResult([None])}
    (found,) = with_group_rewards(talk, [VERDICTS["wrong"]], none, config)
    assert (found.verdict, found.reason) == ("unscorable", "every reward returned None")
    assert found.seconds == 1.5


def test_without_a_verifier_the_rewards_of_a_group_decide():
    config = parse(
        VerifierConfig,
        {"domains": {"talk": {"pass_mark": 0.5}}, "reward": {"custom": [
            {"function": f"{__name__}.texts_only", "weight": 1.0},
            {"function": f"{__name__}.by_length", "weight": 1.0}]}},
        "test",
    )  # fmt: skip
    talk = Problem("p", "talk", "?")
    assert grade(talk, "x", 1, config, 99, 9).verdict == "right"  # 1 of 2
    verdicts = [grade_apart(talk, Response("x", n), config, 99, 9) for n in (1, 2)]
    found = with_group_rewards(talk, verdicts, {"texts_only": GroupResult([0.25, 0.25])}, config)
    assert [(v.verdict, v.reason) for v in found] == [("wrong", "rewards 0.25 of 2"), ("right", "")]
    left = with_group_rewards(talk, verdicts, {"texts_only": GroupResult([None, None])}, config)
    assert [(v.verdict, v.reason) for v in left] == [("wrong", "rewards 0 of 1"), ("right", "")]


def test_whatever_a_problem_is_a_grade_is_a_verdict():
    verdict = grade(Problem("p" * 400, "chess", "?"), GOOD, 1, VerifierConfig(), 99, 9)
    assert (verdict.verdict, verdict.reward) == ("unscorable", 0.0)
    assert verdict.reason == f"InputError: problem {'p' * 400!r}"[:300]
    assert set(verdict.parts.values()) == {0.0}
