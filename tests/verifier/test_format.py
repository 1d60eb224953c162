r"""Format: each condition of the paper, with near misses."""

import pytest

from tests.verifier import processor
from tramontane.config import BUILT_IN, VerifierConfig, load_section
from tramontane.config.domains import FormatConfig
from tramontane.errors import InputError
from tramontane.types import ThinkingTags
from tramontane.verifier.format import check_format, fences, last_box, split_response, thinking_text

MATH, CODE = BUILT_IN["math"].format, BUILT_IN["code"].format
GOOD_MATH = r"<think>2 + 3 is 5.</think>The answer is \boxed{5}."
GOOD_CODE = "<think>Easy.</think>Here:\n```python\nprint(5)\n```\n"


NO_MATCH = "no match of the domain's regular expression in the answer part"


@pytest.mark.parametrize(
    ("form", "response", "parsed"),
    [
        ({}, "a", (True, "", "", "a", "a")),
        ({}, "<think>a</think>b", (True, "", "a", "b", "b")),
        ({}, "<think>a", (True, "", "", "<think>a", "<think>a")),
        ({"thinking": "required"}, "<think>a</think>b", (True, "", "a", "b", "b")),
        ({"regex": r"(\w)(?P<answer>\w)"}, "ab", (True, "", "", "ab", "b")),
        ({"regex": r"\d"}, "<think>1</think>a", (False, NO_MATCH, "1", "a", None)),
    ],
)
def test_all_that_is_read_in_a_response(form, response, parsed):
    assert check_format(response, FormatConfig(**form)) == parsed


@pytest.mark.parametrize(
    ("response", "parts"),
    [
        ("<think>a</think>b</think>c", ("<think>a</think>", "b</think>c")),
        ("a</think>", ("a</think>", "")),
        ("<think>a", ("", "<think>a")),
    ],
)
def test_thoughts_end_at_the_first_closing_tag(response, parts):
    assert split_response(response) == parts


def test_good_responses():
    ok, reason, thoughts, answer, box = check_format(GOOD_MATH, MATH)
    assert (ok, reason) == (True, "")
    assert thoughts == "2 + 3 is 5."
    assert answer == r"The answer is \boxed{5}."
    assert box == "5"
    assert check_format(GOOD_CODE, CODE).ok


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "does not start"),
        ("Sure! " + GOOD_MATH, "does not start"),
        ("\ufeff" + GOOD_MATH, "does not start"),
        ("<think" + GOOD_MATH[len("<think>") :], "does not start"),
        (r"</think><think>a \boxed{5}", "does not start"),
        (r"<think><think>a</think></think>\boxed{5}", "more than one <think>"),
        (r"<think>a</think>So \boxed{5} <think>b", "more than one <think>"),
        (r"<think>a</ think>\boxed{5}", "no </think>"),
        (r"<think>a</think >\boxed{5}", "no </think>"),
        (r"<think>a</think>\fbox{5}", "no balanced"),
        (r"<think>a</think>\boxed(5)", "no balanced"),
        (r"<think>a</think>\\boxed{5}", "no balanced"),
        (r"<think>a</think>\boxed{\}", "no balanced"),
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
    parsed = check_format(text, MATH)
    assert parsed.ok is False
    assert parsed.reason.startswith(reason)
    if reason == "no balanced":  # thoughts and answer could be told apart, and are kept
        assert parsed.reason == r"no balanced \boxed{} in the answer part"
        assert "<think>" + "</think>".join(parsed[2:4]) == text
    else:
        assert parsed[2:4] == ("", "")
    assert parsed.extracted is None


@pytest.mark.parametrize("space", [" ", "\n", "\r\n\t", "\u3000"])
def test_white_space_before_the_opening_tag_is_ignored(space):
    assert check_format(space + GOOD_MATH, MATH) == check_format(GOOD_MATH, MATH)
    assert check_format(space + GOOD_CODE, CODE).ok


MISTRAL = ThinkingTags("[THINK]", "[/THINK]")


def with_tags(text, tags):
    return text.replace("<think>", tags.opening).replace("</think>", tags.closing)


@pytest.mark.parametrize(
    "tags", [MISTRAL, ThinkingTags("◁think▷", "◁/think▷"), ThinkingTags("#", "$$")]
)
def test_other_tags_obey_the_same_conditions(tags):
    parsed = check_format(with_tags(GOOD_MATH, tags), MATH, tags)
    assert parsed == check_format(GOOD_MATH, MATH)
    assert check_format(with_tags(GOOD_CODE, tags), CODE, tags).ok
    reasons = {
        GOOD_MATH: f"does not start with {tags.opening}",
        with_tags("<think>" + GOOD_MATH, tags): f"more than one {tags.opening}",
        with_tags(GOOD_MATH + "</think>", tags): f"more than one {tags.closing}",
        with_tags(GOOD_MATH.replace("</think>", ""), tags): f"no {tags.closing}",
    }
    for text, reason in reasons.items():
        parsed = check_format(text, MATH, tags)
        assert (parsed.ok, parsed.reason) == (False, reason)


def test_other_tags_leave_the_papers_tags_as_plain_text():
    text = r"[THINK]a <think> b</think> c[/THINK]\boxed{5}"
    assert check_format(text, MATH, MISTRAL).thoughts == "a <think> b</think> c"


def test_tags_are_a_setting_of_the_verifier(tmp_path):
    assert VerifierConfig().tags == ("<think>", "</think>")
    assert VerifierConfig(thinking_tags=("[THINK]", "[/THINK]")).tags == MISTRAL
    for opening, closing in (("#", "##"), ("[A]", "[A]"), ("", "b"), (" a", "b")):
        path = tmp_path / "verifier.yaml"
        path.write_text(f"thinking_tags: ['{opening}', '{closing}']")
        with pytest.raises(InputError, match="thinking_tags"):
            load_section(VerifierConfig, path)


@pytest.mark.parametrize(
    ("text", "thoughts"),
    [
        ("<think>a b</think> c", "a b"),
        ("a b</think> c", "a b"),
        ("<think>a b", "a b"),
        ("a b", ""),
        ("<think>a</think>b</think>", "a"),
    ],
)
def test_thinking_text(text, thoughts):
    assert thinking_text(text) == thoughts
    assert thinking_text(with_tags(text, MISTRAL), MISTRAL) == thoughts


def test_thinking_text_begins_at_the_first_opening_tag():
    assert thinking_text("<think>a<think>b</think> c") == "a<think>b"


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
        "<think>a</think>``python\nprint(5)\n``",
        "<think>a</think>```python\nprint(5)\n``",
        "<think>a</think>```python\nprint(5)\n~~~",
        "<think>a</think>````python\nprint(5)\n```",
        "<think>a</think>    ```python\n    print(5)\n    ```",  # indented code, no fence
        "<think>a</think>```python print(5)```\ntext\n```",  # inline code, then an open fence
        "<think>a</think>Here: ```python\nprint(5)\n```",
        "<think>a</think>```python\u2028print(5)\u2028```",  # no line ends for Markdown
        "<think>a</think>```{.python}\nprint(5)\n```",
        "<think>a</think>```1\nprint(5)\n```",
        "<think>a</think>```python\nprint(5)\n``` text",  # no text may follow a closing fence
        "<think>a</think>```python\nprint(5)\n```python",
        "<think>a</think>~~~python\nprint(5)\n~~~ text",
    ],
)
def test_malformed_code(text):
    thoughts, answer = text.removeprefix("<think>").split("</think>")
    reason = "no fenced block with a language tag in the answer part"
    assert check_format(text, CODE) == (False, reason, thoughts, answer, None)


def test_code_without_thoughts_is_malformed():
    expected = (False, "does not start with <think>", "", "", None)
    assert check_format("```python\nprint(5)\n```", CODE) == expected


@pytest.mark.parametrize(
    ("opening", "closing", "tag"),
    [
        ("```python", "```", "python"),
        ("``` python", "```", "python"),
        ("~~~c++", "~~~~", "c++"),
        ("````cpp", "`````", "cpp"),
        ("   ```py", "  ```  ", "py"),
        ('```python title="a.py" {1,2}', "```", "python"),
        ("~~~py `x`", "~~~", "py"),
        ("```Python3\r", "```\r", "Python3"),
    ],
)
def test_fences_with_a_tag(opening, closing, tag):
    response = f"<think>a</think>Here:\n{opening}\nprint(5)\n{closing}\n"
    parsed = check_format(response, CODE)
    assert parsed.ok, parsed.reason
    [fence] = fences(parsed.answer)
    assert (fence.tag, fence.body.strip()) == (tag, "print(5)")


@pytest.mark.parametrize("line", ["``` text", "```python", "  ``` `", "    ```", "~~~", "``"])
def test_a_line_that_is_no_closing_fence_belongs_to_the_block(line):
    [fence] = fences(f"```python\nprint(5)\n{line}\nprint(6)\n```\nThe end.")
    assert fence.body == f"print(5)\n{line}\nprint(6)\n"


def test_a_fence_in_a_list_is_not_indented():
    [fence] = fences("1. Loop:\n   ```python\n   for x in y:\n       z\n\n  w\n   ```\n")
    assert fence.body == "for x in y:\n    z\n\nw\n"


def test_a_tagged_fence_after_one_without_a_tag_is_accepted():
    assert check_format("<think>a</think>```\n3\n```\n```py\nprint(3)\n```", CODE).ok


def test_last_box():
    assert last_box(r"\boxed{1} \fbox{2} \boxed 3") == "1"
    assert last_box(r"\boxed{5 \text{ \} }}") == r"5 \text{ \} }"
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
    [
        "\\boxed{" * 50_000,
        "\\boxed " * 50_000,
        "\\boxed" + " " * 200_000,
        "{" * 200_000,
        "}" * 200_000,
        "\\" * 200_000,
        "```a\n" * 50_000,
        "```a\nx\n```\n" * 20_000,
        "`" * 200_000,
        "\r" * 200_000,
        "x" * 200_000,
        "<think>" * 50_000,
    ],
)
def test_scans_take_linear_time(text):
    with processor.at_most(1.5, text):
        check_format("<think>a</think>" + text, MATH)
        check_format("<think>a</think>" + text, CODE)
