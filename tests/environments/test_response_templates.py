"""Calls that a tokenizer's `response_template` reads, and the forms that chat templates show."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from tests.environments.templates import tokenizer_of
from tests.environments.worlds import add
from tests.environments.written import in_json, in_tags, said, tokenizer
from tramontane.config import Config
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.calls import Parser, form_of
from tramontane.environments.forms import MAX_CALLS
from tramontane.environments.learned import ARGUMENT, NAME
from tramontane.environments.tools import schema_of
from tramontane.environments.worker import EnvironmentWorker
from tramontane.errors import InputError
from tramontane.types import PAPER_TAGS, Problem

TOOLS = [schema_of(add)]
CALL = {"name": "f", "arguments": {"a": 1}}
WRITTEN = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
END = "<|im_end|>"


class Scripted:
    """A parser of Qwen 2.5, whose template shows calls as Hermes', with a response template that
    answers with `found`, or raises it, by the end that is tried: none, or the turn's last token."""

    def __init__(self, *found, opens="", refuses=False):
        self.asked = []
        tokenizer = tokenizer_of.__wrapped__("qwen2.5")
        written = "{{ raise_exception('no') }}" if refuses else tokenizer.chat_template
        tokenizer.chat_template = written.replace("assistant\n' }}", f"assistant\n{opens}' }}}}")
        tokenizer.response_template = {"fields": {"content": {"close": END}}}
        tokenizer.parse_response = lambda *arguments, **named: {}  # as the parser is made
        self._parser, self._found = Parser(tokenizer, "template", PAPER_TAGS), list(found)
        tokenizer.parse_response = self._answer

    def _answer(self, text, *, prefix, tools):
        self.asked.append((text, prefix, tools))
        found = self._found[len(self.asked) - 1]
        if isinstance(found, Exception):
            raise found
        return found

    def parse(self, text, prefix=""):
        message = self._parser.parse(text, TOOLS, prefix)
        assert message.text == text
        calls = [(call.name, call.arguments) for call in message.calls if call.name]
        said = [call.answer for call in message.calls if not call.name]
        return message.thoughts, message.content, calls, said


def failed(reason):
    return [f"error: the call cannot be read: {reason}"]


READ = [("f", {"a": 1})]
OWN = [("add", {})]


@pytest.mark.parametrize(
    ("text", "found", "expected"),
    [
        # The first end that shows a call counts, else the first of all.
        ("x", [{"content": "a"}, {"content": "b", "tool_calls": [CALL]}], ("", "b", READ, [])),
        ("x", [{"tool_calls": [{"function": CALL}]}], ("", "", READ, [])),
        ("x", [{"content": "a"}, {"content": "b"}], ("", "a", [], [])),
        ("x", [{"content": None, "tool_calls": None}, {}], ("", "", [], [])),
        ("x", [ValueError("1"), {"content": "b", "tool_calls": [CALL]}], ("", "b", READ, [])),
        # An end that cannot be read leaves no message without calls; the first failure is told.
        ("x", [ValueError("1"), KeyError("2")], ("", "x", [], failed("ValueError: 1"))),
        ("x", [{"content": "a"}, KeyError("2")], ("", "x", [], failed("KeyError: '2'"))),
        ("x", [ValueError("1"), {"content": "b"}], ("", "x", [], failed("ValueError: 1"))),
        ("x", [3, 3], ("", "x", [], failed("AttributeError: 'int' object has no attribute 'get'"))),
        ("<think>t</think>x", [ValueError("1")] * 2,
         ("t", "<think>t</think>x", [], failed("ValueError: 1"))),
        # Calls as the chat template shows them, where they are more, or where reading fails.
        (f"x {WRITTEN}", [{"content": "y"}] * 2, ("", "x", OWN, [])),
        (f"x {WRITTEN}", [ValueError("1")] * 2, ("", "x", OWN, [])),
        (f"x {WRITTEN}", [{"content": "y", "tool_calls": [CALL]}], ("", "y", READ, [])),
        (WRITTEN * 2, [{"content": "y", "tool_calls": [CALL]}], ("", "", OWN * 2, [])),
        ("<tool_call>{</tool_call>", [{"content": "y"}] * 2, ("", "y", [], [])),
        # Thoughts by either name, or in the thinking tags.
        ("x", [{"reasoning_content": "r", "thinking": "t", "content": "<think>c</think>"}] * 2,
         ("r", "<think>c</think>", [], [])),
        ("x", [{"thinking": "t", "content": "c"}] * 2, ("t", "c", [], [])),
        ("<think>t</think>x", [{"content": "<think>t</think> x "}] * 2, ("t", "x", [], [])),
        # No more calls than a turn may have.
        ("x", [{"tool_calls": [CALL] * (MAX_CALLS + 1)}], ("", "", READ * MAX_CALLS, [])),
    ],
)  # fmt: skip
def test_what_a_response_template_reads_is_the_message(text, found, expected):
    assert Scripted(*found).parse(text) == expected


def test_a_response_template_is_given_the_prompts_end_the_tools_and_the_last_token():
    scripted = Scripted({}, {})
    scripted.parse("<think>\nx", prefix="<think>\n")
    prompt = "<|im_start|>assistant\n<think>\n"
    assert [text for text, *_ in scripted.asked] == ["x", "x" + END]
    assert all(prefix.endswith(prompt) for _, prefix, _ in scripted.asked)
    assert all(tools == TOOLS for *_, tools in scripted.asked)
    scripted._found.append({"tool_calls": [CALL]})
    scripted._parser.parse("x", TOOLS)
    assert scripted.asked[2][1] == scripted.asked[0][1].removesuffix("<think>\n")
    opening = Scripted({}, {}, opens="<think>\n")
    opening.parse("<think>\nx", prefix="<think>\n")
    assert [made[1] for made in opening.asked] == [made[1] for made in scripted.asked[:2]]
    refusing = Scripted({}, refuses=True)
    refusing.parse("<think>\nx", prefix="<think>\n")
    assert refusing.asked[0][:2] == ("x", "<think>\n")


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, "hermes"),
        ("{{ messages }}", "hermes"),
        ("<tool_call> <function= <parameter=", "qwen_xml"),
        ("<tool_call> <arg_key>", "glm"),
        ('<minimax:tool_call> <invoke name="', "invoke"),
        ('<tool_call> {"name": …, "parameters": {…}}', "hermes"),
        ('[TOOL_CALLS] "parameters": ', "mistral"),
        ('<|python_tag|> "arguments": ', "llama"),
        ('{"name": …, "parameters": {…}}', "llama"),
        ("<|tool_call>call:", "gemma"),
        ("<|tool_call_start|>", "lfm"),
        ("<|tool_list_start|>", "lfm"),
        ("<｜tool▁calls▁begin｜> <tool_call>", "deepseek"),
        ("<|tool_call_begin|> <tool_call>", "kimi"),
        ("<|channel|>analysis <tool_call>", "harmony"),
        ("<|start|>assistant to= <tool_call>", "harmony"),
    ],
)
def test_what_a_chat_template_writes_tells_the_form(template, form):
    assert form_of(SimpleNamespace(chat_template=template)) == form
    given = SimpleNamespace(chat_template=template, response_template={})
    assert form_of(given) == "template"


def in_numbers(message):
    """A form that nothing reads."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return said(message, "".join(f"\n#{c['name']}:{c['arguments'].get('x')}\n" for c in calls))


def in_hermes(message):
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return said(message, "".join(f"<tool_call>{json.dumps(dict(c))}</tool_call>" for c in calls))


READ_BACK = {  # what the template writes, the form, and a call as it writes it
    in_json: ("learned", '<call>add => {"a": 7}</call>', 7),
    in_tags: ("learned", '<all>\n<do name="add">\n<p name="a">7</p>\n</do>\n</all>', 7),
    in_hermes: ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 7}}</tool_call>', 7),
}


@pytest.mark.parametrize("write", READ_BACK)
def test_calls_are_read_as_the_chat_template_writes_them(write):
    form, text, value = READ_BACK[write]
    parser = Parser(tokenizer(write), "auto", PAPER_TAGS)
    assert (parser.form, parser.unread) == (form, "")
    parser.check(TOOLS)
    [call] = parser.parse(text, TOOLS).calls
    assert (call.name, call.arguments) == ("add", {"a": value})
    assert parser.parse(text).calls == []
    either = {"name": "add", "parameters": {"properties": {"a": {"type": ["string", "integer"]}}}}
    quoted = text.replace("7", '"7"') if "{" in text else text  # tags have no quotes
    [call] = parser.parse(quoted, [{"type": "function", "function": either}]).calls
    assert call.arguments == {"a": 7 if write is in_tags else "7"}
    given = Parser(tokenizer(write), "llama", PAPER_TAGS)  # a form that is named is not learned
    assert (given.form, given.unread) == ("llama", "")


def test_calls_in_a_form_that_is_not_read_are_refused_where_there_are_tools():
    parser = Parser(tokenizer(in_numbers), "auto", PAPER_TAGS)
    assert (parser.form, parser.unread) == ("hermes", f"\n#{NAME}:{ARGUMENT}")
    parser.check([])
    with pytest.raises(InputError, match=f"a call is '#{NAME}:{ARGUMENT}': name the form"):
        parser.check(TOOLS)
    Parser(tokenizer(said), "auto", PAPER_TAGS).check(TOOLS)  # it writes no calls


def test_so_are_those_of_an_environments_own_tools():
    made = tokenizer_of.__wrapped__("qwen2.5")
    written = "c.function.arguments | tojson"
    made.chat_template = made.chat_template.replace(written, "c.function.arguments.x")
    data = {"train": "playground:", "tools": ["tests.environments.worlds:add"]}
    worker = EnvironmentWorker(Config(model="tiny", data=data), PromptEncoder(made))
    for tools, ending in ((data["tools"], "environment_failed"), ([], None)):
        worker._config.data.tools = tools
        started = asyncio.run(worker.start((0, 0), Problem("1", "math", "?", answer="5"), 7))
        assert started.ending == ending and ("is not read" in started.reason) == bool(tools)


def test_a_response_template_comes_before_what_is_learned():
    made = tokenizer(in_json)
    made.response_template = {"fields": {}}
    made.parse_response = lambda text, prefix="", tools=(): {"content": "x"}
    parser = Parser(made, "auto", PAPER_TAGS)
    assert (parser.form, parser.unread) == ("template", "")
    [call] = parser.parse('<call>add => {"a": 7}</call>', TOOLS).calls
    assert (call.name, call.arguments) == ("add", {"a": 7})


def test_what_surrounds_an_answer_is_told_and_taken_away():
    def channels(message):
        thought = message.get("reasoning_content")
        before = f"<t>{thought}</t>" if thoughts and thought else ""
        return said(message, head=f"<|a|>{before}<final>", end="</final><|e|>")

    thoughts = False
    parser = Parser(tokenizer(channels), "auto", PAPER_TAGS)
    assert parser.headers == ("", "<final>", "</final>")
    assert parser.parse("<final>42</final>").content == "42"
    thoughts = True
    parser = Parser(tokenizer(channels), "auto", PAPER_TAGS)
    assert parser.headers == ("<t>", "</t><final>", "</final>")
    assert parser.parse("<t>so</t><final>42</final>")[1:3] == ("so", "42")
    assert parser.parse("<think>so</think><final>42</final>")[1:3] == ("so", "42")
