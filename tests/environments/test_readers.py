"""Calls in each family's form: white space, tags that are left out, texts around, and breaks."""

import json

import pytest

from tramontane.environments.forms import MAX_CALLS
from tramontane.environments.readers import READERS, harmony, outside_channel

TOOLS = [{"type": "function", "function": {"name": n, "parameters": {}}} for n in ("f", "g")]
CALL = '{"name": "f", "arguments": {"a": 1}}'
LLAMA = CALL.replace("arguments", "parameters")
F, G = ("f", {"a": 1}), ("g", {})
A = {"a": 1}


def shown(calls):
    """(name, arguments) of each call; what one that cannot be read keeps as its text."""
    return [(call.name, call.arguments) if call.name else call.text for call in calls]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", f"a<tool_call> {CALL}\n </tool_call>b", "ab", [F]),
        ("hermes", f"<tool_call>[{CALL}, 3]</tool_call>", "", [F, ""]),
        ("hermes", f"a<tool_call>{CALL}<tool_call>{CALL}", "a", [F, F]),
        ("hermes", f"<tool_call>{CALL} x</tool_call>b", "b", [f"<tool_call>{CALL} x</tool_call>"]),
        ("hermes", "a<tool_call></tool_call>b", "ab", ["<tool_call></tool_call>"]),
        ("hermes", "a<tool_call>[]</tool_call>", "a", ["<tool_call>[]</tool_call>"]),
        ("hermes", "<tool_call>\n{\n</tool_call>b", "b", ["<tool_call>\n{\n</tool_call>"]),

        ("llama", f"  {LLAMA} ", "", [F]),
        ("llama", f"x<|python_tag|> {LLAMA}", "x", [F]),
        ("llama", "x<|python_tag|> print(1) ", "x", [("python", {"code": "print(1)"})]),
        ("llama", "x<|python_tag|>a<|python_tag|>b", "x",
         [("python", {"code": "a<|python_tag|>b"})]),
        ("llama", '<|python_tag|>{"x": 1}', "", ['{"x": 1}']),
        ("llama", f"{LLAMA}\n;\n{LLAMA}\t{CALL}{LLAMA}", "", [F] * 4),
        ("llama", '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [F]),
        ("llama", '{"function": "f", "parameters": {}}', "",
         ['{"function": "f", "parameters": {}}']),
        ("llama", '{"type": "function", "name": "g"}', "", [G]),
        ("llama", '{"type": "function", "x', '{"type": "function", "x', []),
        ("llama", '{ "name" : "f", "x', "", ['{ "name" : "f", "x']),
        ("llama", '{"name":"f","x', "", ['{"name":"f","x']),
        ("llama", '{"name": "h", "parameters" : [', "", ['{"name": "h", "parameters" : [']),
        ("llama", '{"name": "h", "arguments":', "", ['{"name": "h", "arguments":']),
        ("llama", '{"name": "h", "x": 1', '{"name": "h", "x": 1', []),
        ("llama", f'{LLAMA}; {{"name": ', "", [F, '{"name":']),
        ("llama", f"x {LLAMA}", f"x {LLAMA}", []),
        ("llama", "[f(a=1), g()]", "", [F, G]),
        ("llama", "[ f(a=1)]", "", [F]),
        ("llama", "[h.f(a=1)]", "[h.f(a=1)]", []),
        ("llama", "f(a=1)", "f(a=1)", []),
        ("llama", "<|python_start|>a<|python_end|>  ", "", [("python", {"code": "a"})]),
        ("llama", "<|python_start|>a<|python_end|>", "", [("python", {"code": "a"})]),
        ("llama", f"<|python_start|><|python_end|>{LLAMA}", "", [F]),
        ("llama", "<|python_start|>a<|python_end|>b<|python_end|>",
         "<|python_start|>a<|python_end|>b<|python_end|>", []),
        ("llama", f" <|python_start|>a\nb<|python_end|>\n{LLAMA}\n", "a\nb", [F]),

        ("mistral", '[TOOL_CALLS] f [CALL_ID]a1[ARGS] {"a": 1} ', "", [F]),
        ("mistral", '[TOOL_CALLS]f\n[ARGS]{"a": 1}', "", [F]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID][ARGS]{"a": 1}', "", [F]),
        ("mistral", 'x[TOOL_CALLS]f g[ARGS]{"a": 1}', "x", [("f g", A)]),
        ("mistral", "[TOOL_CALLS]f[ARGS]{} x", "", ["[TOOL_CALLS]f[ARGS]{} x"]),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]", "", ["[TOOL_CALLS]f[ARGS][1]"]),
        ("mistral", "[TOOL_CALLS]f[ARGS]{", "", ["[TOOL_CALLS]f[ARGS]{"]),
        ("mistral", "[TOOL_CALLS]f[ARGS]", "", ["[TOOL_CALLS]f[ARGS]"]),
        ("mistral", "[TOOL_CALLS]x", "", ["[TOOL_CALLS]x"]),
        ("mistral", f"[TOOL_CALLS][{CALL}] x", " x", [F]),
        ("mistral", f"x[TOOL_CALLS][{CALL}]y[TOOL_CALLS]g[ARGS]{{}}", "xy", [F, G]),
        ("mistral", "x[TOOL_CALLS]", "x", ["[TOOL_CALLS]"]),
        ("mistral", f"[TOOL_CALLS][{CALL}]\n[TOOL_CALLS]g[ARGS]{{}}", "", [F, G]),

        ("code", "a\n```\nx\n```\nb", "a\nb", [("python", {"code": "x\n"})]),
        ("code", "a\n```PY\nx\n```\nb", "a\nb", [("python", {"code": "x\n"})]),
        ("code", "```python\nx\n```\n```js\ny\n```\n", "```js\ny\n```\n",
         [("python", {"code": "x\n"})]),
        ("code", "```js\ny\n```\n", "```js\ny\n```\n", []),

        ("qwen_xml", "a<seed:tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
         "</function>\n</seed:tool_call>b", "ab", [("f", {"a": "1"})]),
        ("qwen_xml", "<tool_call> <function=f > <parameter=a > x </parameter> </function> "
         "</tool_call> b", " b", [("f", {"a": " x "})]),
        ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=a>1</parameter><parameter=b>\n2\n"
         "<parameter=c>\n3</function></tool_call>", "", [("f", {"a": "1", "b": "2", "c": "3"})]),
        ("qwen_xml", "<tool_call><function=f><parameter=a>\n1\n<tool_call>\n<function=g>\n"
         "</function>\n</tool_call>", "", [("f", {"a": "1"}), G]),
        ("qwen_xml", "<function=g></function>\n<function=g>", "", [G, G]),

        ("glm", "a<tool_call> f \n<arg_key> a </arg_key>\n<arg_value>1</arg_value>\n<arg_key>b"
         "</arg_key><arg_value></arg_value></tool_call>b", "ab", [("f", {"a": "1", "b": ""})]),
        ("glm", "<tool_call>\nf\n<arg_key>a</arg_key> <arg_value>x\ny</arg_value> ", "",
         [("f", {"a": "x\ny"})]),
        ("glm", f"<tool_call>{CALL}</tool_call>", f"<tool_call>{CALL}</tool_call>", []),

        ("invoke", 'a<function_calls>\n<invoke name="f">\n<parameter name="a" type="int">1'
         "</parameter>\n</invoke>\n</function_calls>b", "ab", [("f", {"a": "1"})]),
        ("invoke", '<x:tool_call> <x:invoke name="f" > <x:parameter name="a">1</x:parameter> '
         "</x:invoke> </x:tool_call>b", "b", [("f", {"a": "1"})]),
        ("invoke", '<tool_calls><invoke name="g"></invoke></tool_calls>', "", [G]),

        ("gemma", "a<|tool_call>call:f{ a : 1 , b:{c:[ {d:null}]}}<tool_call|>b", "ab",
         [("f", {"a": 1, "b": {"c": [{"d": None}]}})]),
        ("gemma", '<|tool_call>call:f{a:<|"|>x:{}, None, y:<tool_call|>"\n<|"|>}<tool_call|>', "",
         [("f", {"a": 'x:{}, None, y:<tool_call|>"\n'})]),
        ("gemma", '<|tool_call>call:f {"a":1}<tool_call|>', "", [F]),
        ("gemma", "<|tool_call>call:f{a.b-c:False}<tool_call|>", "", [("f", {"a.b-c": False})]),
        ("gemma", "<|tool_call>call:f{a:[None,True, null]}", "",
         [("f", {"a": [None, True, None]})]),
        ("gemma", "<|tool_call>call:f{a:Falsely}<tool_call|>", "",
         ["<|tool_call>call:f{a:Falsely}<tool_call|>"]),
        ("gemma", "<|tool_call>call:f{a:1}<|tool_call>call:g{}", "", [F, G]),

        ("lfm", "a<|tool_call_start|>f(a=1)<|tool_call_end|>b", "ab", [F]),
        ("lfm", "a<|tool_call_start|><|tool_call_end|>b", "ab",
         ["<|tool_call_start|><|tool_call_end|>"]),
        ("lfm", "<|tool_call_start|>[f(a=1)]<|tool_call_start|> [g()]", "", [F, G]),
        ("lfm", f"<|tool_call_start|> [{CALL}, {CALL}]\n<|tool_call_end|>", "", [F, F]),
        ("lfm", f"<|tool_call_start|>{CALL}<|tool_call_end|>", "", [F]),
        ("lfm", "<|tool_call_start|>[f(a={'k': null, 1: [true, false, 'null']})]<|tool_call_end|>",
         "", [("f", {"a": {"k": None, "1": [True, False, "null"]}})]),
        ("lfm", "<|tool_call_start|>[a.f(b='it's', c='that's'), g(d='x')]<|tool_call_end|>", "",
         [("a.f", {"b": "it's", "c": "that's"}), ("g", {"d": "x"})]),
        ("lfm", "<|tool_call_start|>[f(a='it's',b=''),g(c='that's')]<|tool_call_end|>", "",
         [("f", {"a": "it's", "b": ""}), ("g", {"c": "that's"})]),
        ("lfm", "<|tool_call_start|>f(a='it's')", "", [("f", {"a": "it's"})]),
        ("lfm", "<|tool_call_start|>[f(a= 'it's\nso' , b=2)]<|tool_call_end|>", "",
         [("f", {"a": "it's\nso", "b": 2})]),
        *(("lfm", f"a<|tool_call_start|>{wrong}<|tool_call_end|>", "a",
           [f"<|tool_call_start|>{wrong}<|tool_call_end|>"])
          for wrong in ("[f(1)]", "[f]", "[f(a=b)]", "[f(a={**b})]", "[f(a=1",
                        "[f(**{'a': 1})]")),

        ("deepseek", "a<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
         '```json\n{"a": 1}\n```\n<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
         "<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜> <｜tool▁calls▁end｜>b", "ab",
         [F, G]),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
         '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>b', "b", [F]),
        ("deepseek", '<｜tool▁call▁begin｜>f <｜tool▁sep｜> {"a": 1}', "", [F]),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{", "",
         ["<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"]),

        ("kimi", "a<|tool_calls_section_begin|> <|tool_call_begin|> functions.f:0 "
         '<|tool_call_argument_begin|> {"a": 1} <|tool_call_end|> <|tool_call_begin|>g'
         "<|tool_call_argument_begin|>{}<|tool_call_end|> <|tool_calls_section_end|>b", "ab",
         [F, G]),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>"
         '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>b', "b", [F]),
        ("kimi", "<|tool_call_begin|>functions.a.b:12<|tool_call_argument_begin|>{}", "",
         [("a.b", {})]),
        ("kimi", "<|tool_call_begin|>f:x<|tool_call_argument_begin|>{}", "", [("f:x", {})]),
        ("kimi", "<|tool_call_begin|>f<|tool_call_argument_begin|>{<|tool_call_end|>", "",
         ["<|tool_call_begin|>f<|tool_call_argument_begin|>{<|tool_call_end|>"]),
    ],
)  # fmt: skip
def test_calls_are_read_and_the_rest_is_content(form, text, content, calls):
    found = READERS[form](text, TOOLS)
    assert (found[0], shown(found[1])) == (content, calls)
    assert not any(call.name and call.answer != "" for call in found[1])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("42", ("", "42", [])),
        ("<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>42"
         "<|return|>", ("So.", "42", [])),
        ("<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B"
         "<|end|> \n", ("A\nB", "", [])),
        ("to=self<|message|>hm<|eot|>", ("hm", "", [])),
        ("to=user<|message|>hi<|eom|>\n<|start|>assistant to=all<|message|>all<|eot|>",
         ("", "hiall", [])),
        ('<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>', ("", "", [F])),
        ('<|channel|>analysis to=f<|message|>{"a": 1} ', ("", "", [F])),
        ("to=python<|message|>print(1)<|call|>", ("", "", [("python", {"code": "print(1)"})])),
        ('to=python<|message|>{"code": "1"}', ("", "", [("python", {"code": "1"})])),
        ("to=f<|message|>{} x<|call|>", ("", "", ["to=f<|message|>{} x<|call|>"])),
        ("to=f<|message|>no", ("", "", ["to=f<|message|>no"])),
        ("goto=f<|message|>{}", ("", "{}", [])),
        ("to=f<|message|> ", ("", "", ["to=f<|message|> "])),
        ("to=<|message|>hi", ("", "hi", [])),
        ("an analysis to=f", ("", "an analysis to=f", [])),  # of no message
        ("to=g<|message|>{}<|start|>assistant" * (MAX_CALLS + 1), ("", "", [G] * MAX_CALLS)),
    ],
)  # fmt: skip
def test_messages_of_a_turn_have_a_channel_or_a_recipient(text, found):
    thoughts, content, calls = harmony(text)
    assert (thoughts, content, shown(calls)) == found
    assert not any(call.name and call.answer != "" for call in calls)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("B", ("", "B")),
        ("<|channel>thought\nA\n<channel|>B", ("A", "B")),
        ("<|channel>thought\n<channel|>B", ("", "B")),
        ("<|channel>A<channel|>B<|channel>thought\nC\nD", ("AC\nD", "B")),
    ],
)
def test_thoughts_in_a_channel_are_set_apart(text, found):
    assert outside_channel(text) == found


def test_hermes_calls_beyond_those_of_a_turn_are_no_content():
    text = f"a{'<tool_call>' + CALL + '</tool_call>'}" * (MAX_CALLS + 2)
    content, calls = READERS["hermes"](text + "b", TOOLS)
    assert (content, len(calls)) == ("a" * (MAX_CALLS + 2) + "b", MAX_CALLS)


def test_the_id_of_a_call_in_a_list_is_kept():
    made = [{"id": "XyZ123456", "name": "f"}, {"name": "g"}]
    for text, form in ((f"<tool_call>{json.dumps(made)}", "hermes"),
                       (f"[TOOL_CALLS]{json.dumps(made)}", "mistral")):  # fmt: skip
        assert [call.id for call in READERS[form](text, TOOLS)[1]] == ["XyZ123456", ""]
