r"""Format: each condition of the paper, with near misses."""

import time

import pytest

from tramontane.verifier.format import check_format, fences, last_box

GOOD_MATH = r"<think>2 + 3 is 5.</think>The answer is \boxed{5}."
GOOD_CODE = "<think>Easy.</think>Here:\n```python\nprint(5)\n```\n"


def test_good_responses():
    ok, reason, thoughts, answer = check_format(GOOD_MATH, "math")
    assert (ok, reason) == (True, "")
    assert thoughts == "2 + 3 is 5."
    assert answer == r"The answer is \boxed{5}."
    assert check_format(GOOD_CODE, "code").ok


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "does not start"),
        (" " + GOOD_MATH, "does not start"),
        ("Sure! " + GOOD_MATH, "does not start"),
        (GOOD_MATH[len("<think>") :], "does not start"),
        (GOOD_MATH.replace("<think>", "<Think>"), "does not start"),
        (GOOD_MATH + GOOD_MATH, "more than one <think>"),
        ("<think>" + GOOD_MATH, "more than one <think>"),
        (GOOD_MATH.replace("</think>", ""), "no </think>"),
        (GOOD_MATH + "</think>", "more than one </think>"),
        (r"<think>It is \boxed{5}.</think>The answer is 5.", "no balanced"),
        (r"<think>a</think>The answer is \boxed{5.", "no balanced"),
        (r"<think>a</think>The answer is \boxed 5.", "no balanced"),
        (r"<think>a</think>The answer is boxed{5}.", "no balanced"),
        (r"<think>a</think>\boxed{\frac{1}{2}", "no balanced"),
        (r"<think>a</think>\boxed{5\}", "no balanced"),
        ("<think>a</think>", "no balanced"),
    ],
)
def test_malformed_math(text, reason):
    ok, why, *_ = check_format(text, "math")
    assert not ok
    assert why.startswith(reason)


@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think>print(5)",
        "<think>a</think>`python print(5)`",
        "<think>a</think>```\nprint(5)\n```",
        "<think>a</think>```python\nprint(5)",
        "<think>```python\nprint(5)\n```</think>That is it.",
        "<think>a</think>```python print(5)```",
        r"<think>a</think>\boxed{5}",
    ],
)
def test_malformed_code(text):
    assert not check_format(text, "code").ok


def test_last_box():
    assert last_box(r"\boxed{1} \boxed{2}") == "2"
    assert last_box(r"\boxed{\frac{1}{2}} and } stray") == r"\frac{1}{2}"
    assert last_box(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_box(r"\boxed {7}") == "7"
    assert last_box(r"\boxed{}") == ""
    assert last_box(r"\boxed{1 + \boxed{2}}") == r"1 + \boxed{2}"
    assert last_box(r"\boxed{1 and \boxed{2}") == "2"
    assert last_box("none") is None


def test_fences():
    text = "a\n```cpp\nx\n```\n~~~~py\n```\n~~~~\n```\nplain\n```\n```python\nopen"
    assert [(f.tag, f.body) for f in fences(text)] == [
        ("cpp", "x\n"),
        ("py", "```\n"),
        ("", "plain\n"),
    ]
    first = fences(text)[0]
    assert text[first.start : first.end] == "```cpp\nx\n```\n"


@pytest.mark.parametrize(
    "text",
    ["\\boxed{" * 50_000, "{" * 200_000, "```a\n" * 50_000, "<think>" * 50_000, "}" * 200_000],
)
def test_linear_time(text):
    started = time.perf_counter()
    check_format("<think>a</think>" + text, "math")
    check_format("<think>a</think>" + text, "code")
    assert time.perf_counter() - started < 1.5
