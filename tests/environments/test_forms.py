"""What the readers of calls share: objects that are calls, and calls written as texts."""

import json

import pytest

from tramontane.environments.forms import (
    DELIMITERS,
    MAX_CALLS,
    MAX_DEPTH,
    call_of,
    decoded,
    from_json,
    kept_id,
    unparsed,
    written,
    written_as,
)
from tramontane.environments.readers import READERS
from tramontane.types import ToolCall

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        ({"name": "f", "arguments": {"a": 1}}, {"a": 1}),
        ({"name": "f", "parameters": {"a": 1}}, {"a": 1}),
        ({"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}, {"a": 1}),
        ({"name": "f", "arguments": '{"a": 1}'}, {"a": 1}),
        ({"name": "f", "arguments": " \n"}, {}),
        ({"name": "f", "arguments": "null"}, {}),
        ({"name": "f", "arguments": None}, {}),
        ({"name": "f"}, {}),
        ({"name": "f", "arguments": {"a\ud800": ["\udfff", {"b": "\ud800"}]}},
         {"a?": ["?", {"b": "?"}]}),
        ({"name": "f", "arguments": {"a": nested(MAX_DEPTH - 1)}}, {"a": nested(MAX_DEPTH - 1)}),
    ],
)  # fmt: skip
def test_an_object_with_a_name_and_arguments_is_a_call(value, arguments):
    call = call_of(value)
    assert (call.name, call.arguments, call.answer, call.error) == ("f", arguments, "", False)
    assert from_json(json.dumps(value)) == call


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (["f"], "not an object with `name` and `arguments`"),
        ("f", "not an object with `name` and `arguments`"),
        ({"arguments": {}}, "it has no `name`"),
        ({"name": "", "arguments": {}}, "it has no `name`"),
        ({"name": ["f"], "arguments": {}}, "it has no `name`"),
        ({"name": "f", "arguments": [1]}, "its `arguments` are not an object"),
        ({"name": "f", "arguments": "[]"}, "its `arguments` are not an object"),
        ({"name": "f", "arguments": 0}, "its `arguments` are not an object"),
        ({"name": "f", "arguments": "{"}, "its arguments are not JSON: Expecting"),
        ({"name": "f", "arguments": {"a": [float("inf")]}},
         "its arguments are not JSON: inf is not a finite number"),
        ({"name": "f", "arguments": {"a": nested(MAX_DEPTH)}},
         "its arguments are not JSON: nested too deeply"),
        ({"name": "f", "arguments": "[" * 100_000}, "its arguments are not JSON: "),
    ],
)  # fmt: skip
def test_any_other_value_is_an_error_that_says_why(value, reason):
    call = call_of(value)
    assert (call.name, call.arguments, call.error, call.id) == ("", {}, True, "")
    assert call.answer.startswith(f"error: the call cannot be read: {reason}")


def test_a_text_that_is_no_json_says_where():
    for text in ("", "{", "[" * 100_000):
        assert from_json(text).answer.startswith("error: the call cannot be read: not JSON: ")


def test_a_long_reason_is_cut():
    head = unparsed("").answer
    assert unparsed("x" * 1000).answer == head + "x" * 200
    assert unparsed("why", "what was written").text == "what was written"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("XyZ123456", True),
        ("XyZ12345", False),
        ("XyZ1234567", False),
        ("XyZ12345_", False),
        ("functions.f:0", True),
        ("functions.a-b.c:12", True),
        ("functions.f:", False),
        ("functions.:0", False),
        ("functions.f g:0", False),
        ("functions.f<:0", False),
        ("functions_f:0", False),
        (123456789, False),
        (None, False),
    ],
)
def test_ids_that_models_are_trained_on_are_kept(text, kept):
    assert kept_id(text) == (text if kept else "")
    assert call_of({"name": "f"}, text).id == kept_id(text)


def test_a_value_is_decoded_from_where_it_starts():
    assert decoded('x \n{"a": 1} y', 1) == ({"a": 1}, 11)
    assert decoded("null", 0) == (None, 4)
    for text, start in (("x 1", 0), ("1", 1), ("[" * 100_000, 0)):
        assert decoded(text, start) == (None, None)


def test_a_broken_call_holds_its_text_unless_another_is_read():
    good, bad, other = ToolCall("f", {}, ""), unparsed("so"), unparsed("so")
    assert [call.text for call in written_as("t", [bad, other])] == ["t", ""]
    fresh = unparsed("so")
    assert [call.text for call in written_as("t", [fresh, good])] == ["", ""]
    assert written_as("t", []) == []


ARGUMENTS = ({"a": "it's “é”\n", "b": [None, True, 1.5, {"c": ""}]}, {})


@pytest.mark.parametrize("form", ["hermes", "lfm", "llama"])
@pytest.mark.parametrize("count", [1, 2])
def test_calls_that_are_written_are_read(form, count):
    made = [{"name": "f", "arguments": each} for each in ARGUMENTS[:count]]
    text = written(form, made)
    content, calls = READERS[form](text, TOOLS)
    assert [(call.name, call.arguments, call.error) for call in calls] == [
        ("f", each["arguments"], False) for each in made
    ]
    assert content.strip() == "" and "é" in text
    if form in DELIMITERS:
        opening, closing = DELIMITERS[form]
        assert text.startswith(opening) and text.endswith(closing)


MANY = {  # by form: one call, and what stands around all of them
    "hermes": '<tool_call>{"name": "f"}</tool_call>',
    "qwen_xml": "<tool_call>\n<function=f>\n</function>\n</tool_call>",
    "llama": '{"name": "f", "parameters": {}};',
    "mistral": "[TOOL_CALLS]f[ARGS]{}",
    "glm": "<tool_call>f\n</tool_call>",
    "invoke": '<invoke name="f"></invoke>',
    "gemma": "<|tool_call>call:f{}<tool_call|>",
    "deepseek": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "kimi": "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>",
}


@pytest.mark.parametrize("form", MANY)
def test_no_more_calls_are_read_than_a_turn_may_have(form):
    for count in (MAX_CALLS - 1, MAX_CALLS, MAX_CALLS + 1):
        calls = READERS[form](MANY[form] * count, TOOLS)[1]
        assert [call.name for call in calls] == ["f"] * min(count, MAX_CALLS)
