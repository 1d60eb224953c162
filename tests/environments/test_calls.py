"""Calls in the forms that models write."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.environments.templates import SHAPES, tokenizer_of
from tests.environments.worlds import add
from tramontane.environments import wire
from tramontane.environments.answers import ChatAnswer, Choice
from tramontane.environments.calls import Parser, form_of, outside_thoughts
from tramontane.environments.tools import schema_of
from tramontane.errors import InputError
from tramontane.types import PAPER_TAGS, Completion

TOOLS = [schema_of(add)]
FORMS = ("hermes", "qwen_xml", "llama", "mistral", "code")
TOKENIZER = tokenizer_of("qwen2.5")
ARGUMENTS = {"a": 1, "b": [1, {"c": "}</tool>"}]}
OBJECT = json.dumps({"name": "add", "arguments": ARGUMENTS})
AS_TEXT = json.dumps({"name": "add", "arguments": json.dumps(ARGUMENTS)})
LLAMA = OBJECT.replace("arguments", "parameters")


def parse(text, form, tools=TOOLS):
    return Parser(TOKENIZER, form, PAPER_TAGS).parse(text, tools)


def calls(text, form):
    return [(call.name, call.arguments) for call in parse(text, form).calls]


def test_the_chat_template_tells_the_form():
    forms = {shape: form_of(tokenizer_of(shape)) for shape in SHAPES}
    assert {shape for shape, form in forms.items() if form == "mistral"} == {
        "mistral-v7",
        "mistral-v13",
    }
    assert forms["qwen3"] == forms["base"] == "hermes" and forms["llama-3"] == "llama"


@pytest.mark.parametrize(
    ("form", "text", "value"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "7"}}</tool_call>', "7"),
        ("qwen_xml", "<function=f><parameter=x>7</parameter></function>", 7),
        ("glm", "<tool_call>f<arg_key>x</arg_key><arg_value>7</arg_value></tool_call>", 7),
        ("invoke", '<invoke name="f"><parameter name="x">7</parameter></invoke>', 7),
        ("harmony",
         'to=f<|message|><invoke name="f"><parameter name="x">7</parameter></invoke>', 7),
    ],
)  # fmt: skip
def test_a_text_without_quotes_may_be_a_number(form, text, value):
    parameters = {"type": "object", "properties": {"x": {"type": ["integer", "string"]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    [call] = parse(text, form, [tool]).calls
    assert call.arguments == {"x": value}


@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        ("hermes", f"So: <tool_call>\n{OBJECT}\n</tool_call>", "So:"),
        ("hermes", f"<tool_call>{OBJECT}", ""),  # the end of the turn came first
        ("hermes", f"<tool_call>{AS_TEXT}", ""),
        ("llama", LLAMA, ""),
        ("llama", f"<|python_tag|>{LLAMA}", ""),
        ("mistral", f"So: [TOOL_CALLS][{OBJECT}]", "So:"),
        ("mistral", f"[TOOL_CALLS] {OBJECT}", ""),
        ("mistral", f"[TOOL_CALLS]add[ARGS]{json.dumps(ARGUMENTS)}", ""),
        ("mistral", f"[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{json.dumps(ARGUMENTS)}", ""),
    ],
)  # fmt: skip
def test_a_call_is_read(form, text, content):
    found = parse(text, form)
    assert [(c.name, c.arguments) for c in found.calls] == [("add", ARGUMENTS)]
    assert found.content == content and found.text == text


@pytest.mark.parametrize(
    "held", ["</tool_call>", "<tool_call>", "[TOOL_CALLS]", "[ARGS]", "]", ";"]
)
@pytest.mark.parametrize(
    ("form", "around"),
    [
        ("hermes", "<tool_call>\n{}\n</tool_call>"),
        ("hermes", "<tool_call>{}<tool_call>{}"),
        ("hermes", "<tool_call>[{}, {}]</tool_call>"),
        ("mistral", "[TOOL_CALLS][{}, {}]"),
        ("mistral", "[TOOL_CALLS]{}[TOOL_CALLS]{}"),
        ("llama", "{}; {}"),
    ],
)
def test_arguments_may_hold_delimiters(form, around, held):
    arguments = {"code": f"print('{held}')"}
    call = json.dumps({"name": "f", "arguments": arguments})
    assert calls(around.replace("{}", call), form) == [("f", arguments)] * around.count("{}")
    named = f"[TOOL_CALLS]f[ARGS]{json.dumps(arguments)}"
    assert calls(named * 2, "mistral") == [("f", arguments)] * 2


@pytest.mark.parametrize("held", ["</tool_call>", "</parameter>", "</function>"])
def test_parameters_may_hold_delimiters(held):
    code = f"print('{held}')\nx = 1"
    one = (
        f"<tool_call>\n<function=f>\n<parameter=code>\n{code}\n</parameter>\n<parameter=b>\n2\n"
        f"</parameter>\n</function>\n</tool_call>"
    )
    assert calls(f"{one}\n{one}", "qwen_xml") == [("f", {"code": code, "b": "2"})] * 2
    cut = "<tool_call>\n<function=g>\n<parameter=a>\n1"
    assert calls(one + cut, "qwen_xml")[-1] == ("g", {"a": "1"})
    assert calls(cut + one, "qwen_xml")[0] == ("g", {"a": "1"})


@pytest.mark.parametrize("form", ["hermes", "mistral"])
def test_a_broken_call_leaves_the_others(form):
    one = {
        "hermes": f"<tool_call>{OBJECT}</tool_call>",
        "mistral": f"[TOOL_CALLS]{OBJECT}",
    }[form]
    broken = one.replace('"name"', '"name', 1)
    for text in (broken + one, one + broken, one + one[:-15]):
        names = sorted(name for name, _ in calls(text, form))
        assert names == ["", "add"]


def test_several_calls_of_one_turn():
    one, two = '{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "arguments": {}}'
    both = [("f", {"x": 1}), ("g", {})]
    assert calls(f"<tool_call>{one}</tool_call>\n<tool_call>{two}</tool_call>", "hermes") == both
    assert calls(f"<tool_call>{one}<tool_call>{two}", "hermes") == both
    assert calls(f"[TOOL_CALLS][{one}, {two}]", "mistral") == both
    assert calls('[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}', "mistral") == both
    assert calls(f"{one}; {two}", "llama") == both


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        ("<|python_start|>So.<|python_end|>" + LLAMA, "So.", ("add", ARGUMENTS)),
        (f"<|python_start|>{LLAMA}<|python_end|>", "", ("add", ARGUMENTS)),
        ("<|python_start|>print(1)<|python_end|>", "", ("python", {"code": "print(1)"})),
        ("[add(a=1, b=[None, 'x'])]", "", ("add", {"a": 1, "b": [None, "x"]})),
        ("<|python_start|>[add(a=1)]<|python_end|>", "", ("add", {"a": 1})),
    ],
)
def test_calls_of_llama_4(text, content, expected):
    found = parse(text, "llama")
    assert [(call.name, call.arguments) for call in found.calls] == [expected]
    assert found.content == content
    for answer in ("[1, 2]", "[other(a=1)]", "Say [add(a=1)]"):
        assert parse(answer, "llama").calls == []


def test_qwen_coder_xml_has_the_types_of_the_schema():
    text = (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=code>\nif a < b:\n"
        "    print('</b>')\n</parameter>\n</function>\n</tool_call>"
    )
    assert calls(text, "qwen_xml") == [("add", {"a": 1, "code": "if a < b:\n    print('</b>')"})]


_PI = '<|tool_call>call:f{a:1,b:[True,None],c:{k:<|"|>}, "x"<|"|>}}<tool_call|>'


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
         [{"a": "1"}]),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value>y</arg_value></tool_call>",
         [{"a": "x</arg_value>y"}]),
        ("glm", "<tool_call>f</tool_call><tool_call>f<arg_key>a</arg_key><arg_val", [{}, None]),
        ("invoke", '<m:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke>'
         '<invoke name="f"></invoke></m:tool_call>', [{"a": "1"}, {}]),
        ("gemma", _PI * 2, [{"a": 1, "b": [True, None], "c": {"k": '}, "x"'}}] * 2),
        ("gemma", "<|tool_call>call:f{a:", [None]),
        ("lfm", "<|tool_call_start|>[f(a='it's, b=1', b=None), f()]<|tool_call_end|>",
         [{"a": "it's, b=1", "b": None}, {}]),
        ("lfm", '<|tool_call_start|>[f(a="x]", c={"k": true})]<|tool_call_end|>',
         [{"a": "x]", "c": {"k": True}}]),
        ("lfm", "<|tool_call_start|>[f(a=", [None]),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
         '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', [{"a": 1}]),
        ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>', [{"a": 1}]),
        ("kimi", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'
         "<|tool_call_end|>", [{"a": 1}]),
        ("harmony", '<|channel|>analysis<|message|>So.<|end|><|start|>assistant to=functions.f'
         '<|channel|>commentary json<|message|>{"a": 1}<|call|><|start|>assistant to=functions.f'
         '<|channel|>commentary json<|message|>{"a": 2}', [{"a": 1}, {"a": 2}]),
        ("harmony", "to=f<|message|><x:invoke name=\"f\"><x:parameter name=\"a\">1</x:parameter>"
         "</x:invoke><|eot|>", [{"a": "1"}]),
        ("deepseek", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [{"a": 1}]),
        ("qwen_xml", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [{"a": 1}]),
        ("qwen_xml", "<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>", [{"a": "1"}]),
        ("qwen_xml", "<tool_call><function=f><parameter=a>\n<tool_call>\n</parameter></function>"
         "<function=f></function></tool_call>", [{"a": "<tool_call>"}, {}]),
    ],
)  # fmt: skip
def test_calls_of_families_with_tokens_of_their_own(form, text, expected):
    """None is a call that cannot be read, which leaves the others."""
    found = parse(f"Well. {text}" if form != "harmony" else text, form)
    assert [None if c.error else c.arguments for c in found.calls] == expected
    assert {c.name for c in found.calls} <= {"f", ""}
    if form == "harmony":
        assert found.thoughts == ("So." if "analysis" in text else "")
    elif None not in expected:
        assert found.content == "Well."


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("mistral", '[TOOL_CALLS]f[CALL_ID]XyZ123456[ARGS]{"a": 1}', "XyZ123456"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "XyZ123456"}]', "XyZ123456"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "no id"}]', ""),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}', ""),
        ("kimi", "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>",
         "functions.f:3"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', ""),
    ],
)  # fmt: skip
def test_the_id_that_a_model_wrote_is_kept(form, text, expected):
    (call,) = parse(text, form).calls
    assert (call.name, call.id) == ("f", expected)


def test_arguments_have_the_types_of_the_schema():
    types = {
        "n": {"type": "integer"},
        "ok": {"type": "boolean"},
        "xs": {"type": "array", "items": {"type": "integer"}},
        "o": {"type": "object"},
        "s": {"type": "string"},
        "m": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "f": {"type": "number"},
        "t": {"type": ["string", "null"]},
        "e": {"enum": [1, 2]},
    }
    tool = {"type": "function", "function": {"name": "book", "parameters": {"properties": types}}}
    given = {"n": "3", "ok": "True", "xs": "[1, '2']", "o": "{'a': None}", "s": "12"}
    given |= {"m": "None", "f": "2.5", "t": "null", "e": "2"}
    wanted = {"n": 3, "ok": True, "xs": [1, 2], "o": {"a": None}, "s": "12", "m": None}
    wanted |= {"f": 2.5, "t": None, "e": 2}
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in given.items())
    text = f"<tool_call>\n<function=book>\n{body}</function>\n</tool_call>"
    (call,) = parse(text, "qwen_xml", [tool]).calls
    assert call.arguments == wanted
    wrong = text.replace("\n3\n", "\nthree\n")
    assert parse(wrong, "qwen_xml", [tool]).calls[0].arguments["n"] == "three"


def test_code_is_a_call_of_python():
    text = "First\n```python\nprint(1)\n```\nthen\n```py\nprint(2)\n```\n"
    found = parse(text, "code")
    assert [(c.name, c.arguments) for c in found.calls] == [("python", {"code": "print(2)\n"})]
    assert calls("<|python_tag|>print(3)", "llama") == [("python", {"code": "print(3)"})]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>'),
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>'),
        ("hermes", '<tool_call>["add"]</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"x": {"[" * 50 + "]" * 50}}}}}'),
        ("qwen_xml", "<tool_call><function=add><parameter=a"),
        ("llama", '{"name": "add", "parameters": {'),
        ("mistral", "[TOOL_CALLS]add(1, 2)"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{1}"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(form, text):
    [call] = parse(text, form).calls
    assert call.name == "" and call.error
    assert call.answer.startswith("error: the call cannot be read: ") and len(call.answer) < 300


def test_half_a_character_is_replaced():
    text = r'<tool_call>{"name": "f\ud800", "arguments": {"x\udfff": ["\ud83d\ude42", "\ud800"]}}'
    assert calls(text, "hermes") == [("f?", {"x?": ["🙂", "?"]})]


def test_thoughts_hold_no_calls():
    call = f"<tool_call>{OBJECT}</tool_call>"
    assert calls(f"<think>I could {call}</think>42", "hermes") == []
    assert calls(f"I could {call}</think>42", "hermes") == []  # the prompt holds the opening tag
    assert calls(f"<think>I could {call}", "hermes") == []  # never closed
    assert len(calls(f"<think>so</think>{call}", "hermes")) == 1
    for text, found in (
        ("a<think>b</think>c<think>d</think>e", ("bd", "ace")),
        ("<think>a<think>b</think>c", ("a<think>b", "c")),
        ("a</think>b</think>c", ("a", "b</think>c")),  # the prompt opens them once
        ("<think>a</think>b<think>c", ("ac", "b")),
        ("a", ("", "a")),
    ):
        assert outside_thoughts(text, PAPER_TAGS) == found


def test_thoughts_in_a_channel_are_those_of_gemma_alone():
    text = "<|channel>thought\nA\n<channel|>3"
    assert parse(text, "gemma")[1:3] == ("A", "3")
    assert parse(f"<think>B</think>{text}", "gemma")[1:3] == ("A", "3")
    assert parse("<think>B</think>3", "gemma")[1:3] == ("B", "3")
    assert parse(text, "hermes")[1:3] == ("", text)


def test_cohere_s_tokens_around_a_content_are_no_part_of_it():
    for kind in ("RESPONSE", "TEXT"):
        assert parse(f"<|START_{kind}|>3<|END_{kind}|>", "hermes").content == "3"


def test_a_message_of_harmony_has_no_calls_without_tools():
    text = '<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>'
    assert parse(text, "harmony", []) == (text, "", "", [])
    assert [call.name for call in parse(text, "harmony").calls] == ["add"]


def test_an_answer_is_no_call():
    for text in (
        '{"answer": 3}',
        '{"name": "Ada", "age": 36}',
        '{"type": "circle", "r": 2}',
        '{"name": ["add"]}',
        '{"name": "Ada", "knows": "add"',
        '{"function": "x"}',
    ):
        found = parse(text, "llama")
        assert (found.calls, found.content) == ([], text)
    assert calls('{"name": "add"}', "llama") == [("add", {})]
    assert calls('{"name": "other", "parameters": {}}', "llama") == [("other", {})]
    assert calls("It is 3.", "llama") == calls("It is 3.", "hermes") == []
    assert parse(f"<tool_call>{OBJECT}</tool_call>", "hermes", []).calls == []  # there are no tools


def test_a_response_template_comes_first():
    tokenizer = tokenizer_of("smollm2")
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "defaults": {"role": "assistant"},
        "fields": {
            "tool_calls": {
                "open": "<call>", "close": "</call>", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {},
        },
    }  # fmt: skip
    try:
        parser = Parser(tokenizer, "auto", PAPER_TAGS)
        assert parser.form == "template"
        found = parser.parse(f"Well <call>{OBJECT}</call>", TOOLS)
        assert [(c.name, c.arguments) for c in found.calls] == [("add", ARGUMENTS)]
        [broken] = parser.parse("<call>{</call>", TOOLS).calls
        assert broken.name == "" and broken.error
        del tokenizer.response_template["start_anchor"]
        with pytest.raises(InputError, match="response_template: .*start_anchor"):
            Parser(tokenizer, "auto", PAPER_TAGS)
    finally:
        tokenizer.response_template = None


BITS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=", "<function=f>", "<parameter=x>", "</parameter>",
     "</function>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", '{"name": "f"',
     ', "arguments": {', '"parameters": ', "}", "]", "[", "{", '"', "```", "```python\n", "\n",
     "<think>", "</think>", "\\", "NaN", "1e999", "\ud800", "\x00", "é", ";", "f"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    form=st.sampled_from(FORMS), bits=st.lists(st.one_of(BITS, st.text(max_size=5)), max_size=20)
)
def test_no_text_breaks_the_parser(form, bits):
    text = "".join(bits)
    found = parse(text, form)
    assert found.text == text
    for call in found.calls:
        assert isinstance(call.arguments, dict)
        assert call.name or (call.error and call.answer)


def test_a_response_template_reads_the_end_of_the_prompt_and_of_the_message():
    """The templates are those published for Llama 3 (the end token closes a call) and Nemotron 3
    (the prompt opens the thoughts)."""
    tokenizer = tokenizer_of.__wrapped__("qwen2.5")
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": r"<\\|im_start\\|>assistant\n(?:<think>\n)?",
        "fields": {
            "reasoning_content": {
                "open_pattern": r"(?=[\s\S]*?</think>)",
                "close_pattern": r"</think>\s*",
                "content": "text",
            },
            "tool_calls": {
                "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
                "close_pattern": r"\}<\|im_end\|>\s*",
                "repeats": True,
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }
    parser = Parser(tokenizer, "auto", PAPER_TAGS)
    text = '<think>\nAdd.\n</think>\n\n{"name": "add", "parameters": {"a": 1, "b": 2}}'
    message = parser.parse(text, [schema_of(add)], "<think>\n")
    assert message.thoughts.strip() == "Add."
    assert [(call.name, call.arguments) for call in message.calls] == [("add", {"a": 1, "b": 2})]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_answer_that_the_length_cut_says_so(reason):
    body = wire.ChatRequest(model="m", messages=[{"role": "user", "content": "?"}], tools=TOOLS)
    text = f"<tool_call>{OBJECT}</tool_call>\n<tool_call>{OBJECT[:20]}"
    read = Parser(TOKENIZER, "hermes", PAPER_TAGS).parse

    def shown(_):
        return wire.readable(read(text, TOOLS), PAPER_TAGS)

    answer = ChatAnswer(body, [1], shown, lambda _: [], PAPER_TAGS, 3)
    tokens = Completion(0, 0, [1], np.array([1]), np.array([0.0]), np.array([0]))
    (choice,) = answer.whole([Choice(tokens, reason)])["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == ("length" if reason == "length" else "tool_calls")


def test_an_empty_list_of_calls_is_not_content():
    empty = "a<|tool_call_start|>[]<|tool_call_end|>b"
    assert parse(empty, "lfm")[2:] == ("ab", [])


MIXED = {  # by form: a call that is read, and others that are not
    "hermes": (
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": ',
        '<tool_call>{"named": "add"}</tool_call>',
    ),
    "llama": ('{"name": "add", "parameters": {"a": 1}}', '{"name": "add", "parame'),
    "mistral": ('[TOOL_CALLS]add[ARGS]{"a": 1}', '[TOOL_CALLS]add[ARGS]{"a": ', "[TOOL_CALLS]add"),
    "qwen_xml": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=add\n<para",
    ),
    "glm": (
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_val",
    ),
    "gemma": ("<|tool_call>call:add{a:1}<tool_call|>", "<|tool_call>call:add(a=1)<tool_call|>"),
    "lfm": (
        "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
        "<|tool_call_start|>[add(1)]<|tool_call_end|>",
    ),
    "kimi": (
        '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
        '<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{"a": ',
        "<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>[1]<|tool_call_end|>",
    ),
}


@pytest.mark.parametrize("form", MIXED)
def test_content_holds_a_broken_call_and_none_that_is_read(form):
    """A client that sends the message back would otherwise write the call twice."""
    good, *broken = MIXED[form]
    parser = Parser(TOKENIZER, form, PAPER_TAGS)
    for each in broken:
        join = "; " if form == "llama" else "\n"
        said = wire.readable(parser.parse(good + join + each, TOOLS), PAPER_TAGS)
        assert (said.content, [call.name for call in said.calls]) == (each.strip(), ["add"])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [1e999]}}</tool_call>'),
        ("lfm", "<|tool_call_start|>[add(a=-1e999)]<|tool_call_end|>"),
        ("lfm", '<|tool_call_start|>[add(**{"a": 1})]<|tool_call_end|>'),
        ("gemma", "<|tool_call>call:add{a:Infinity}<tool_call|>"),
    ],
)
def test_what_json_cannot_write_is_no_argument(form, text):
    """A client could not read it, and a tool for integers got `nan`."""
    [call] = Parser(TOKENIZER, form, PAPER_TAGS).parse(text, TOOLS).calls
    assert not call.name and call.error


@pytest.mark.parametrize("written", ["NaN", "1e999", "[1e999]", "{'k': -1e999}"])
def test_a_text_that_is_no_finite_number_stays_a_text(written):
    text = f"<function=add><parameter=a>{written}</parameter></function>"
    [call] = Parser(TOKENIZER, "qwen_xml", PAPER_TAGS).parse(text, TOOLS).calls
    assert call.arguments == {"a": written}
