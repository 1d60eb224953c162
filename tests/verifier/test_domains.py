"""Domains of the user's own, through the real pool: formats, verifiers, rewards, limits."""

import re

import pytest

from tramontane.config import BUILT_IN, Config, FormatConfig, VerifierConfig, parse, parse_settings
from tramontane.errors import InputError
from tramontane.types import Problem
from tramontane.verifier.format import check_format
from tramontane.verifier.pool import VerifierPool
from tramontane.verifier.reward import grade

MODULE = """
import os, time

def move(problem, answer):
    if answer == "raise":
        raise KeyError("no board")
    if answer == "hang":
        time.sleep(60)
    if answer == "exit":
        os._exit(3)
    if answer == "memory":
        bytearray(10 << 30)
    if answer == "much":
        return 2.0
    if answer == "nothing":
        return None
    if answer == "text":
        return "0.5"
    if answer == "half":
        return 0.5, "legal, but not the best"
    return answer == problem.metadata["best"]

def total(problem, answer):
    return answer["a"] + answer["b"] == 5

def short(problem, text, n_tokens):
    return float(n_tokens < 10)

def polite(problem, text, n_tokens):
    return float("please" in text)

def one_argument(problem):
    return 1.0

number = 3
"""
CHESS = Problem("c", "chess", "White to move.", language="en", metadata={"best": "Ke2"})
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


@pytest.fixture(autouse=True, scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    (folder / "test_domains_task.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def domains(**entries):
    """A config with these domains; a verifier's name is that of a function above."""
    for entry in entries.values():
        if entry.get("verifier") not in (None, "math", "code"):
            entry["verifier"] = f"test_domains_task.{entry['verifier']}"
    return parse_settings(VerifierConfig, {"timeout_s": 1.0, "domains": entries}, [], "test")


def custom(config, **rewards):
    """The config with rewards above by name, each (weight, malformed)."""
    rows = [
        {"name": n, "function": f"test_domains_task.{n}", "weight": w, "malformed": m}
        for n, (w, m) in rewards.items()
    ]
    raw = config.model_dump() | {"reward": {"custom": rows}}
    return parse_settings(VerifierConfig, raw, [], "test")


def graded(problem, text, config, n_tokens=5):
    return grade(problem, text, n_tokens, config, l_max=256, l_cache=32)


# ------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize(
    ("form", "response", "extracted"),
    [
        ("boxed", r"<think>a</think>So \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("fenced", "<think>a</think>```py\n3\n```", "3\n"),
        ("none", "anything at all", "anything at all"),
        ("none", "<think>a</think>b", "b"),
        ("none", "<think>never closed", "<think>never closed"),
        ({"regex": r"Move: (\w+)"}, "Move: e4. No, Move: d4", "d4"),
        ({"regex": r"Move: (?:\d+\.)?(?P<answer>\w+)"}, "<think>Move: a1</think>Move: 1.e4", "e4"),
        ({"regex": r"\d+"}, "12 or 13", "13"),
        ({"json_schema": SCHEMA}, '{"a": 2, "b": 3}', {"a": 2, "b": 3}),
        ({"json_schema": SCHEMA}, 'So\n```json\n{"a": 2, "b": 3}\n```\n', {"a": 2, "b": 3}),
        ({"json_schema": {}}, "<think>x</think> [1]", [1]),
        ({"answer": "boxed", "thinking": "optional"}, r"\boxed{7}", "7"),
    ],
)
def test_what_a_format_accepts_and_extracts(form, response, extracted):
    parsed = check_format(response, FormatConfig.model_validate(form))
    assert (parsed.ok, parsed.extracted) == (True, extracted)


@pytest.mark.parametrize(
    ("form", "response", "reason"),
    [
        ("boxed", r"\boxed{7}", "does not start with <think>"),
        ({"regex": r"Move: \w+"}, "e4", "no match of the domain's regular expression"),
        ({"regex": r"Move: \w+"}, "<think>Move: e4</think>e4", "no match"),
        ({"regex": r"\w+"}, "<think>Move: e4", "no </think>"),
        ({"regex": r"\w+", "thinking": "required"}, "e4", "does not start with <think>"),
        ({"json_schema": SCHEMA}, "The sum is 5.", "no JSON in the answer part"),
        ({"json_schema": SCHEMA}, '{"a": NaN, "b": 1}', "no JSON in the answer part"),
        ({"json_schema": SCHEMA}, "[" * 100_000, "no JSON in the answer part"),
        ({"json_schema": SCHEMA}, '{"a": 2}', "does not fit the schema at $ (required)"),
        ({"json_schema": SCHEMA}, '{"a": 2, "b": "3"}', "does not fit the schema at $.b (type)"),
    ],
)
def test_what_a_format_refuses_and_why(form, response, reason):
    parsed = check_format(response, FormatConfig.model_validate(form))
    assert not parsed.ok
    assert reason in parsed.reason


def test_a_schema_that_refers_elsewhere_is_never_fetched():
    remote = {"$ref": "http://127.0.0.1:9/schema.json"}
    config = domains(sums={"verifier": "total", "format": {"json_schema": remote}})
    verdict = graded(Problem("s", "sums", "?"), "{}", config)
    assert verdict.verdict == "unscorable"
    assert "schema.json" in verdict.reason


# ----------------------------------------------------------------------------------- verifiers


def test_a_verifier_of_ones_own_decides_correctness():
    config = domains(chess={"verifier": "move", "format": {"regex": r"Move: (\w+)"}})
    right = graded(CHESS, "I like the king. Move: Ke2", config)
    assert (right.verdict, right.answer) == ("right", "Ke2")
    assert right.parts["format"] == 0.1 and right.parts["correctness"] == 0.9
    assert graded(CHESS, "Move: e4", config).verdict == "wrong"
    assert graded(CHESS, "Ke2", config).verdict == "malformed"


def test_a_result_between_0_and_1_is_a_share_of_the_reward():
    entry = {"verifier": "move", "format": {"regex": r"(\w+)$"}}
    verdict = graded(CHESS, "half", domains(chess=dict(entry)))
    assert (verdict.verdict, verdict.reason) == ("wrong", "legal, but not the best")
    assert verdict.parts["correctness"] == pytest.approx(0.45)
    passed = graded(CHESS, "half", domains(chess=entry | {"pass_mark": 0.5}))
    assert passed.verdict == "right"
    assert passed.parts["correctness"] == pytest.approx(0.45)


def test_a_verifier_receives_parsed_json():
    config = domains(sums={"verifier": "total", "format": {"json_schema": SCHEMA}})
    verdict = graded(Problem("s", "sums", "2 + 3"), '{"a": 2, "b": 3}', config)
    assert (verdict.verdict, verdict.answer) == ("right", '{"a": 2, "b": 3}')


def test_the_maths_verifier_under_another_format():
    config = domains(physics={"verifier": "math", "format": {"regex": r"Answer: (.*)"}})
    problem = Problem("p", "physics", "How far?", "0.5")
    assert graded(problem, r"Answer: \frac{1}{2}", config).verdict == "right"
    assert graded(problem, "Answer: 2", config).verdict == "wrong"


@pytest.mark.slow
def test_a_failing_verifier_makes_its_completion_unscorable_and_no_other():
    config = domains(chess={"verifier": "move", "format": {"regex": r"\w+"}})
    words = ["Ke2", "raise", "hang", "exit", "memory", "much", "nothing", "text", "e4"]
    with VerifierPool(config, 256, 32) as pool:
        verdicts = pool.score(CHESS, [(word, 5) for word in words]).result(timeout=300)
    assert [v.verdict for v in verdicts] == ["right", *["unscorable"] * 7, "wrong"]
    reasons = [v.reason for v in verdicts]
    assert re.match(r"verifier 'chess': KeyError: 'no board' \(.*\.py:\d+, in move\)", reasons[1])
    assert re.match(r"verifier 'chess' \(.*\.py:\d+\): timed out after 1 s", reasons[2])
    assert reasons[3].endswith(": the worker died (exit code 3)")
    assert "MemoryError" in reasons[4]
    wanted = "not True, False or a number from 0 to 1"
    assert reasons[5].startswith(f"verifier 'chess': returned 2.0 (float), {wanted} (")
    assert f"returned None (NoneType), {wanted}" in reasons[6]
    assert f"returned '0.5' (str), {wanted}" in reasons[7]


def test_a_domain_has_a_time_limit_of_its_own():
    entry = {"verifier": "move", "format": "none", "timeout_s": 0.3}
    with VerifierPool(domains(chess=entry), 256, 32) as pool:
        [verdict] = pool.score(CHESS, [("hang", 5)]).result(timeout=300)
    assert verdict.reason.endswith("timed out after 0.3 s")


# ------------------------------------------------------------------------------------- rewards


def test_without_a_verifier_rewards_decide():
    config = custom(domains(talk={}), short=(0.5, False), polite=(1.0, False))
    problem = Problem("t", "talk", "Ask for tea.", language="en")
    both = graded(problem, "Tea for two, please.", config)
    assert (both.verdict, both.parts["format"], both.parts["correctness"]) == ("right", 0.0, 0.0)
    assert both.reward == pytest.approx(1.5 + both.parts["language"])
    part = graded(problem, "Tea for two, please.", config, n_tokens=20)
    assert (part.verdict, part.reason) == ("wrong", "rewards 1 of 1.5")


def test_a_reward_sees_malformed_completions_where_it_asks_to():
    config = custom(domains(), short=(0.2, True), polite=(0.3, False))
    problem = Problem("m", "math", "2 + 3", "5")
    verdict = graded(problem, "please", config)
    assert verdict.verdict == "malformed"
    assert verdict.reward == verdict.parts["short"] == 0.2
    assert verdict.parts["polite"] == 0.0


# -------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mvoe", "verifier.domains.chess.verifier: function .*AttributeError"),
        ("number", "is of type int, not a function"),
        ("one_argument", r"one_argument\(problem\), .*, is called with \(problem, answer\): too"),
    ],
)
def test_a_verifier_that_cannot_be_called_is_refused_at_the_start(name, message):
    with pytest.raises(InputError, match=message):
        VerifierPool(domains(chess={"verifier": name}), 256, 32)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"verifier": "__main__.check"}, "other processes cannot import __main__"),
        ({"verifier": "check"}, "'check' is not an import path"),
        ({"format": "boxes"}, "format.answer: Input should be 'boxed', 'fenced' or 'none'"),
        ({"format": {"regex": "("}}, "format.regex: not a regular expression"),
        ({"format": {"json_schema": {"type": "int"}}}, "format.json_schema: not a JSON schema"),
        ({"format": {"regex": "a", "answer": "boxed"}}, "answer and regex exclude each other"),
        ({"formt": "boxed"}, "domains.chess.formt: unknown key; did you mean 'format'"),
    ],
)
def test_a_domain_that_cannot_be_meant(entry, message):
    with pytest.raises(InputError, match=message):
        parse_settings(VerifierConfig, {"domains": {"chess": entry}}, [], "test")


def test_maths_and_code_keep_what_is_not_overridden():
    config = parse_settings(VerifierConfig, {}, ["domains.math.timeout_s=9"], "test")
    assert config.domains["math"] == BUILT_IN["math"].model_copy(update={"timeout_s": 9.0})
    assert config.domains["code"] == BUILT_IN["code"]


@pytest.mark.parametrize("domain", ["math", "open"])
def test_a_judges_score_of_one_half_is_right_unless_a_mark_is_set(domain):
    """A classifier's probability never reaches 1, the mark of other verifiers."""

    def mark(**entry):
        given = {"domains": {domain: entry}, "judge": {"reward_model": "folder"}}
        return parse(VerifierConfig, given, "test").domains[domain].pass_mark

    assert mark(verifier="judge") == 0.5
    assert mark(verifier="judge", pass_mark=0.75) == 0.75
    assert parse(VerifierConfig, {}, "test").domains["math"].pass_mark == 1


def test_an_unknown_domain_is_refused():
    with (
        VerifierPool(VerifierConfig(), 256, 32) as pool,
        pytest.raises(InputError, match="unknown domain 'chess'; verifier.domains has math, code"),
    ):
        pool.score(CHESS, [("e4", 1)])


def test_diversity_by_correctness_needs_a_verifier():
    raw = {"pipeline": {"diversity": "correctness"}, "verifier": {"domains": {"talk": {}}}}
    with pytest.raises(InputError, match="nothing judges it in domain 'talk'"):
        parse_settings(Config, raw, [], "test")
