"""Chat templates held to their own rendering, family by family."""

import json

import pytest

from tests.data.chat_templates import build_tokenizer
from tests.environments.templates import _CHATML, _THINK, SHAPES, tokenizer_of
from tramontane.data.prompts import PromptEncoder
from tramontane.environments import wire
from tramontane.environments.calls import Parsed, Parser
from tramontane.environments.chat import Chat
from tramontane.environments.chat_format import ChatFormat
from tramontane.environments.recorded import Conversation, ConversationEncoder
from tramontane.environments.template_checks import COLUMNS, TOOL, Case, Family, misread, same
from tramontane.errors import InputError
from tramontane.types import PAPER_TAGS, ToolCall

CALL = {"id": "call00000", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
ASKED = {"role": "user", "content": "What is 1 + 2?"}
_USER = "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% endif %}"
_END = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
# A message of the model has no end: the next turn's token ends it (GLM).
UNENDED = (
    "{{ tools | tojson if tools else '' }}" + _USER + "{% if m.role == 'assistant' %}<|assistant|>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>{{ m.content }}{% endif %}" + _END
)
# Contents are lists of parts (Idefics 3).
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
# Python calls in the prompt, whose template writes none (LFM2).
LISTED = (
    "{% if tools %}<|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Arguments are JSON in a text (DeepSeek-V3).
AS_JSON = (
    "{{ tools | tojson if tools else '' }}" + _USER + "{% if m.role == 'assistant' %}<|assistant|>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}<｜tool▁call▁end｜>"
    "{% endfor %}<|end|>{% elif m.role == 'tool' %}<|observation|>{{ m.content }}{% endif %}" + _END
).replace("{{ tools", "{{ '<｜tool▁calls▁begin｜>' if 0 else '' }}{{ tools")
# Arguments in a form of its own, which JSON in a text is not (Gemma 4).
_VALUE = "{{ '<|q|>' + v + '<|q|>' if v is string else v | tojson }}"
OWN_VALUES = (
    "{{ tools | tojson if tools else '' }}" + _USER + "{% if m.role == 'assistant' %}<|assistant|>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name + '{' }}"
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{% for k, v in c.function.arguments.items() %}{{ k + ':' }}"
    + _VALUE.replace("<|q|>", '<|"|>')
    + "{% if not loop.last %},{% endif %}{% endfor %}{% endif %}}<tool_call|>{% endfor %}<|end|>"
    "{% elif m.role == 'tool' %}<|observation|>{{ m.content }}{% endif %}" + _END
)
# The generation is marked, with the header and without the line break (gpt-oss, Gemma).
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n"
    "{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CALL = (
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}'
)
_TOLD = "{% else %}{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
# Thoughts and the answer have headers of their own (Kimi K3, Solar).
HEADED = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<|im_start|>"
    "{% if m.role == 'assistant' %}assistant<|thinks|>{{ m.reasoning_content or '' }}<|says|>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}" + _CALL + "}</tool_call>{% endfor %}"
    "<|said|>\n<|im_end|>\n" + _TOLD + "{% if add_generation_prompt %}<|im_start|>assistant"
    "<|thinks|>{% endif %}"
)
# Thoughts, a text and each call are messages, each with its channel.
CHANNELS = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<|im_start|>model<|in|>thoughts<|is|>{{ m.reasoning_content }}"
    "<|over|>{% endif %}{% if m.content %}<|im_start|>model<|in|>said<|is|>{{ m.content }}"
    "{{ '<|over|>' if m.tool_calls else '<|im_end|>' }}{% endif %}{% for c in m.tool_calls or [] %}"
    "<|im_start|>model<|in|>call {{ c.function.name }}<|is|>{{ c.function.arguments | tojson }}"
    "{{ '<|im_end|>' if loop.last else '<|over|>' }}{% endfor %}{% else %}<|im_start|>"
    "{{ m.role }}<|is|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model{% endif %}"
)
# Calls get their ids once they are answered, and two tokens end a message (Apriel 1.5).
LATE = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{% set last = loop.last %}"
    "<|im_start|>{% if m.role == 'assistant' %}assistant\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}" + _CALL + '{% if not last %}, "id": "{{ c.id }}"'
    "{% endif %}}</tool_call>{% endfor %}\n<|said|>\n<|im_end|>\n"
    + _TOLD
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The template writes ids of its own, and answers by the call's (Kimi K2).
NUMBERED = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<|im_start|>"
    "{% if m.role == 'assistant' %}assistant\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<|tool_call_begin|>functions.{{ c.function.name }}:{{ loop.index0 }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|im_end|>\n{% elif m.role == 'tool' %}tool\n{{ m.tool_call_id }}: {{ m.content }}<|im_end|>\n"
    + _TOLD
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# An empty message stands behind one with calls (DeepSeek-R1 in transformers, which has no null).
DOUBLED = AS_JSON.replace("{{ m.content }}{% for", "{% for", 1).replace(
    "{% endfor %}<|end|>",
    "{% endfor %}{% if m.tool_calls %}<|end|><|assistant|>{% endif %}{{ m.content }}<|end|>",
    1,
)
# Arguments in tags: with attributes, with names of their own and tags within tags, around both.
_TAGGED = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<|im_start|>"
    "{% if m.role == 'assistant' %}assistant\n{{ m.content }}{% if m.tool_calls %}"
    + "SECTION{% for c in m.tool_calls %}CALL{% endfor %}OVER{% endif %}<|im_end|>\n"
    + _TOLD
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ITEMS = "{% for k, v in c.function.arguments.items() %}ITEM{% endfor %}"
_TEXT = "{{ v if v is string else v | tojson }}"
ATTRIBUTES = (
    _TAGGED.replace("SECTION", "<tools>")
    .replace("OVER", "</tools>")
    .replace(
        "CALL",
        '<call tool="{{ c.function.name }}" number="{{ loop.index }}">'
        + _ITEMS.replace(
            "ITEM",
            "<arg key=\"{{ k }}\" type=\"{{ 'text' if v is string else 'json' }}\">"
            + _TEXT
            + "</arg>",
        )
        + "</call>",
    )
)
NESTED = (
    "{% macro nest(v) %}{% if v is mapping %}{% for k, each in v.items() %}"
    "{% if each is not none %}<{{ k }}>{{ nest(each) }}</{{ k }}>{% endif %}{% endfor %}"
    "{% elif v is string or v is not iterable %}" + _TEXT + "{% else %}{% for each in v %}"
    "<li>{{ nest(each) }}</li>{% endfor %}{% endif %}{% endmacro %}"
) + _TAGGED.replace("SECTION", "<calls>").replace("OVER", "\n</calls>").replace(
    "CALL", '\n<do name="{{ c.function.name }}">{{ nest(c.function.arguments) }}</do>'
)
PAIRED = (
    _TAGGED.replace("SECTION", "<run:a>\n")
    .replace("OVER", "</run:a>")
    .replace(
        "CALL",
        "<one:a>{{ c.function.name }}<of:a>\n"
        + _ITEMS.replace("ITEM", "<k:a>{{ k }}</k:a>\n<v:a>" + _TEXT + "</v:a>\n")
        + "</one:a>\n",
    )
)
_TURNS = ("<|user|>", "<|assistant|>", "<|observation|>", "<|end|>")
OWN = {
    "unended": (UNENDED, (*_TURNS, "<|endoftext|>"), ("<tool_call>", "</tool_call>"), None),
    "parts": (PARTS, _CHATML, _THINK, "<|im_end|>"),
    "listed": (
        LISTED,
        (*_CHATML, "<|tool_call_start|>", "<|tool_call_end|>"),
        _THINK,
        "<|im_end|>",
    ),
    "as JSON": (AS_JSON, _TURNS, ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"), "<|end|>"),
    "own values": (OWN_VALUES, (*_TURNS, "<|tool_call>", "<tool_call|>", '<|"|>'), (), "<|end|>"),
    "marked": (MARKED, _CHATML, _THINK, "<|im_end|>"),
    "headed": (HEADED, (*_CHATML, "<|thinks|>", "<|says|>", "<|said|>"), _THINK, "<|im_end|>"),
    "channels": (CHANNELS, (*_CHATML, "<|in|>", "<|is|>", "<|over|>"), _THINK, "<|im_end|>"),
    "late": (LATE, (*_CHATML, "<|said|>"), _THINK, "<|im_end|>"),
    "own ids": (
        NUMBERED,
        (*_CHATML, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        _THINK,
        "<|im_end|>",
    ),
    "attributes": (ATTRIBUTES, _CHATML, _THINK, "<|im_end|>"),
    "nested": (NESTED, _CHATML, _THINK, "<|im_end|>"),
    "paired": (PAIRED, _CHATML, _THINK, "<|im_end|>"),
}


def encoder_of(name, folder=None):
    tokenizer = build_tokenizer(*OWN[name])
    if folder is not None and name == "unended":
        ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        tokenizer.name_or_path = str(folder)
    return PromptEncoder(tokenizer)


def told(row):
    return {column: str(cell) for column, cell in row.items() if str(cell) != "ok"}


# What is told of shapes besides `ok`, and EOS as the end of turns.
_UNWRITTEN = "refused; the chat template does not write a message's"
_BESIDE = f"{_UNWRITTEN} content (a text and a call, thoughts and a call)"
_ONE = "one call a message (two calls)"
_ANEW = "the template writes a prompt differently once a message follows"
SAID = {
    "qwen3": {
        "bridge": "ok; a new sequence (an answer, thoughts and an answer, a call, a text and a "
        "call, two calls, a call with all types)"
    },
    "llama-3": {
        "bridge": f"ok; {_ONE}",
        "SFT text": f"{_BESIDE}; single tool-calls only (two calls)",
        "calls read back": f"ok; {_ONE}",
    },
    "mistral-v7": {"SFT text": _BESIDE},
    "r1-distill": {
        "bridge": "ok; a new sequence",
        "SFT text": f"{_UNWRITTEN} thoughts (thoughts and an answer, thoughts and a call)",
    },
    "gpt-oss": {
        "bridge": f"ok; a new sequence (answers); {_ONE}",
        "SFT text": f"{_UNWRITTEN} thoughts (thoughts and an answer); "
        f"{_UNWRITTEN.removeprefix('refused; ')} call of add (two calls)",
        "calls read back": f"ok; its text is written as thoughts (a text and a call); {_ONE}",
        "end of turn": "ok; `<|return|>` (answers); `<|call|>` (calls)",
    },
    "numbered": {
        "bridge": f"refused; {_ANEW}",
        "SFT text": f"refused; {_ANEW.replace('the', 'the chat', 1)}",
        "calls read back": f"refused; {_ANEW}",
    },
    "late": {"bridge": "ok; a new sequence (calls)"},
    "unended": {"end of turn": "ok; `<|user|>` (answers); `<|observation|>` (calls)"},
}


@pytest.mark.parametrize("shape", [*SHAPES, *OWN])
def test_no_shape_is_wrong_in_a_column(shape, tmp_path):
    own = shape in OWN
    encoder = encoder_of(shape, tmp_path) if own else PromptEncoder(tokenizer_of(shape))
    row = Family(encoder).row()
    assert [*row] == [*COLUMNS]
    end = {"end of turn": f"ok; `{encoder.tokenizer.eos_token}`"}
    assert told(row) == end | SAID.get(shape, {})


def test_an_empty_message_behind_calls_is_put_in():
    tokenizer = build_tokenizer(DOUBLED, *OWN["as JSON"][1:])
    refused = "refused; the template writes the text beside calls as another message"
    assert told(Family(PromptEncoder(tokenizer)).row()) == {
        "bridge": f"{refused} (a text and a call)",
        "SFT text": f"{_UNWRITTEN} thoughts (thoughts and an answer, thoughts and a call)",
        "calls read back": f"{refused} (a text and a call)",
        "end of turn": "ok; `<|end|>`",
    }


def test_calls_between_texts_of_its_own_are_learned_from_the_template():
    tokenizer = build_tokenizer(*OWN["as JSON"])
    tokenizer.chat_template = AS_JSON.replace("<｜tool▁call▁begin｜>", "<call>")
    family = Family(PromptEncoder(tokenizer))
    assert family.parser.form == "learned" and not family.parser.unread
    assert {cell.state for cell in family.row().values()} == {"ok"}
    broken = family.parser.parse("<call>function<｜tool▁sep｜>add\n```json\n{", [TOOL])
    assert [call.name for call in broken.calls] == [""]


@pytest.mark.parametrize("name", ["attributes", "nested", "paired"])
@pytest.mark.parametrize(
    "held", ["a < b", "</arg>", "</v:a>", "</text>", "</do>", "<call", "<li>", "a\n\nb", ""]
)
def test_texts_in_tags_of_a_template_may_hold_tags(name, held):
    family = Family(encoder_of(name))
    case = Case("held", calls=({"a": 1, "text": held}, {"a": 2, "b": 3}))
    read = family.parser.parse(family.sampled(case).removesuffix("<|im_end|>"), [TOOL])
    assert [call.arguments for call in read.calls] == list(case.calls) and not read.content


@pytest.mark.parametrize("name", ["attributes", "nested", "paired"])
def test_calls_in_tags_that_are_cut_or_broken_leave_the_others(name):
    family = Family(encoder_of(name))
    text = family.sampled(Case("two", "Hm.", calls=({"a": 1, "b": 2}, {"a": 3, "b": 4})))
    for size in range(text.index("add") + 3, len(text)):
        read = family.parser.parse(text[:size], [TOOL])
        assert read.content.startswith("Hm.") and len(read.calls) <= 2
        assert all(
            call.arguments in ({"a": 1, "b": 2}, {"a": 3, "b": 4})
            for call in read.calls
            if call.name and len(call.arguments) == 2
        )
    broken = family.parser.parse(text.replace("add", "add add", 1), [TOOL]).calls
    assert [(call.name, call.arguments) for call in broken if call.name] == [
        ("add", {"a": 3, "b": 4})
    ]


def test_calls_are_given_as_objects_where_a_template_also_takes_them_as_json():
    family = Family(encoder_of("own values"))
    assert family.parser.form == "gemma"
    sampled = family.sampled(Case("one", calls=({"a": 1, "text": "b"},)))
    assert sampled == '<|tool_call>call:add{a:1,text:<|"|>b<|"|>}<tool_call|><|end|>'


def test_thoughts_are_not_put_behind_calls():
    """Gemma 4's second template writes the content there, and has no key for thoughts."""
    tokenizer = build_tokenizer(*OWN["own values"])
    behind = OWN_VALUES.replace("{{ m.content }}{% for c", "{% for c")
    tokenizer.chat_template = behind.replace("<|end|>", "{{ m.content }}<|end|>", 1)
    encoder = PromptEncoder(tokenizer)
    assert ChatFormat(encoder).drops_thoughts
    said = {"role": "assistant", "content": "", "reasoning_content": "So.", "tool_calls": [CALL]}
    made = ConversationEncoder(encoder, lambda _, text: text)
    with pytest.raises(InputError, match="does not write a message's thoughts"):
        list(made.examples(Conversation.of([ASKED, said], [TOOL], "row 1"), "row 1"))
    assert "wrong" not in {cell.state for cell in Family(encoder).row().values()}


def test_a_text_and_calls_are_one_content_where_the_template_drops_the_calls():
    tokenizer = build_tokenizer(*OWN["attributes"])
    tokenizer.chat_template = ATTRIBUTES.replace(
        "{% if m.tool_calls", "{% if not m.content and m.tool_calls"
    )
    encoder = PromptEncoder(tokenizer)
    assert Family(encoder).row()["history"].state == "ok"
    form = ChatFormat(encoder)
    assert form.writes_calls("") and not form.writes_calls("Let me add.")
    said = {"role": "assistant", "content": "Let me add.", "tool_calls": [CALL]}
    made = ConversationEncoder(encoder, lambda _, text: text)
    with pytest.raises(InputError, match="does not write a message's call of add"):
        list(made.examples(Conversation.of([ASKED, said], [TOOL], "row 1"), "row 1"))
    refusing = "{% if m.content and m.tool_calls %}{{ raise_exception('no text') }}{% endif %}"
    tokenizer.chat_template = ATTRIBUTES.replace(
        "{% if m.tool_calls", refusing + "{% if m.tool_calls"
    )
    made = ConversationEncoder(PromptEncoder(tokenizer), lambda _, text: text)
    with pytest.raises(InputError, match="no text"):  # it is not put into the text instead
        list(made.examples(Conversation.of([ASKED, said], [TOOL], "row 1"), "row 1"))


@pytest.mark.parametrize("other", ["add", "subtract"])
def test_calls_of_which_the_template_writes_one_are_refused(other):
    template = ATTRIBUTES.replace("in m.tool_calls %}", "in m.tool_calls[:1] %}")
    encoder = PromptEncoder(build_tokenizer(template, *OWN["attributes"][1:]))
    calls = [CALL, {"function": CALL["function"] | {"name": other}}]
    said = {"role": "assistant", "content": "Both.", "tool_calls": calls}
    made = ConversationEncoder(encoder, lambda _, text: text)
    with pytest.raises(InputError, match=f"does not write a message's call of {other};"):
        list(made.examples(Conversation.of([ASKED, said], [TOOL], "row 1"), "row 1"))


def test_calls_in_a_form_that_is_not_read_are_refused():
    tokenizer = build_tokenizer(*OWN["as JSON"])
    template = AS_JSON.replace("<｜tool▁call▁begin｜>", "<call>")
    tokenizer.chat_template = template.replace("c.function.arguments", "c.function.arguments[1:]")
    row = Family(PromptEncoder(tokenizer)).row()
    told = str(row["calls read back"])
    assert told.startswith("refused; ") and "not read" in told and told.endswith("(calls)")
    escaped = "(c.function.arguments | tojson)[1:-1]"  # not as JSON, nor as a text of it
    tokenizer.chat_template = template.replace("c.function.arguments", escaped)
    assert "<call>" in Parser(tokenizer, "auto", PAPER_TAGS).unread


def test_a_message_in_thoughts_that_never_close_is_refused():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
        "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    encoder = PromptEncoder(build_tokenizer(template, _CHATML, _THINK, "<|im_end|>"))
    chat = [ASKED, {"role": "assistant", "content": "3"}]
    conversation = Conversation.of(chat, [], "row 1")
    with pytest.raises(InputError, match="row 1: .*thoughts that it never closes"):
        list(ConversationEncoder(encoder, lambda _, text: text).examples(conversation, "row 1"))


def test_a_message_without_an_end_is_refused_unless_the_generation_config_names_one():
    row = Family(encoder_of("unended")).row()
    end = "refused; no token ends it: neither the template's nor the generation config's"
    assert told(row) == {"bridge": end, "end of turn": end}


@pytest.mark.parametrize(
    ("case", "thoughts", "content", "calls", "found"),
    [
        (Case("", "3", "So."), "So.", "3", (), ("ok", "")),
        (Case("", "3", "So."), "\nSo. ", " 3\n", (), ("ok", "")),
        (Case("", "3", "So."), "So. 3", "", (), ("ok", "its text is written as thoughts")),
        (Case("", "3", "So."), "S", "3", (), ("wrong", "its thoughts are not found")),
        (Case("", "3", "not written"), "", "3", (), ("ok", "")),
        (Case("", "3", "So."), "So.", "3!", (), ("wrong", "its content has more or less")),
        (Case("", "not written", "So."), "So.", "", (), ("ok", "")),
        (Case("", calls=({"a": 1},)), "Hm.", "", ({"a": 1},), ("wrong", "its thoughts")),
        (Case("", calls=({"a": 1},)), "", "Hm.", ({"a": 1},), ("wrong", "its content")),
        (Case("", calls=({"a": 1},)), "", "", ({"a": 2},), ("wrong", "reads [{'a': 2}]")),
        (Case("", calls=({"a": 1, "b": None},)), "", "", ({"a": 1},), ("ok", "")),
        (Case("", calls=({"a": 1, "So": None},)), "", "", ({"a": 1},), ("wrong", "reads [")),
    ],
)
def test_what_is_misread_is_named(case, thoughts, content, calls, found):
    made = [ToolCall("add", arguments, "") for arguments in calls]
    state, said = misread(case, Parsed("", thoughts, content, made), "So. 3")
    assert state == found[0] and said.startswith(found[1]) and bool(said) == bool(found[1])


def test_tokens_that_differ_are_shown_with_what_stands_before():
    encoder = PromptEncoder(tokenizer_of("qwen2.5"))
    one, other = (encoder.tokenizer(text)["input_ids"] for text in ("Hm 12345678x", "Hm 12345678y"))
    assert same(one, one, encoder) == ("ok", "")
    assert same(one, other, encoder) == ("wrong", "'12345678x' for '12345678y'")
    assert same(other[:1], one, encoder)[1].startswith(f"'H' for '{encoder.decode(one)[:48]}")


@pytest.mark.parametrize("between", ["", " "])
def test_the_generation_config_ends_answers_and_calls(between, tmp_path):
    encoder = encoder_of("unended", tmp_path)
    encoder.tokenizer.chat_template = UNENDED.replace("<|user|>", f"{between}<|user|>").replace(
        "<|observation|>", f"{between}<|observation|>"
    )
    form = ChatFormat(encoder)
    assert (form.turn_end, form.call_end) == ("<|user|>", "<|observation|>")
    assert {"<|endoftext|>", "<|user|>", "<|observation|>"} == form.stops
    bare = ChatFormat(encoder_of("unended"))
    assert bare.turn_end == bare.call_end == "<|endoftext|>"
    text = "It is 3.\n"
    assert form.closed(text) == "It is 3.<|user|>"
    assert form.closed(text, called=True) == "It is 3.<|observation|>"


@pytest.mark.parametrize("between", ["", "{% endgeneration %}Hm.{% generation %}"])
def test_fine_tuning_learns_what_the_template_marks(between):
    template = "{{ tools | tojson if tools else '' }}" + MARKED.replace("<|im_end|>{% endg", "END")
    template = template.replace("END", f"{between}<|im_end|>{{% endg")
    encoder = PromptEncoder(build_tokenizer(template, *OWN["marked"][1:]))
    chat = [ASKED, {"role": "assistant", "content": "3"}] * 2
    made = ConversationEncoder(encoder, lambda _, text: text)
    (example,) = made.examples(Conversation.of(chat, [TOOL], "here"), "here")
    own = [*example.prompt, *example.response]
    found = encoder.tokenizer.apply_chat_template(
        chat, [TOOL], return_dict=True, return_assistant_tokens_mask=True
    )
    put = {len(example.prompt) + place for span in example.inserted for place in span}
    learned = [int(n >= len(example.prompt) and n not in put) for n in range(len(own))]
    assert learned == found["assistant_masks"][: len(own)]
    assert own == found["input_ids"][: len(own)] and 0 in learned[len(example.prompt) :]


def test_a_message_of_which_the_template_marks_nothing_is_refused():
    some = MARKED.replace("'assistant' %}", "'assistant' and m.content != '4' %}", 1)
    encoder = PromptEncoder(build_tokenizer(some, *OWN["marked"][1:]))
    chat = [{"role": "assistant", "content": said} for said in "34"]
    unmarked = Conversation.of([ASKED, chat[0], ASKED, chat[1]], [], "row 1")
    with pytest.raises(InputError, match="row 1: .* marks no part of a message as generated"):
        list(ConversationEncoder(encoder, lambda _, text: text).examples(unmarked, "row 1"))


def test_several_calls_of_one_turn_are_written_as_in_a_history():
    """gpt-oss writes one call a message: they are not left as text in an answer's channel."""
    encoder = PromptEncoder(tokenizer_of("gpt-oss"))
    form, prompt = ChatFormat(encoder), [ASKED]
    call = ' to=functions.add<|channel|>commentary json<|message|>{"a": %d, "b": 2}<|call|>'
    text = "<|start|>assistant".join(call % n for n in range(2)).removesuffix("<|call|>")
    chat = Chat(form, [TOOL])
    chat.start(prompt)
    message = Parser(encoder.tokenizer, "auto", encoder.tags).parse(text, [TOOL])
    assert [made.arguments for made in message.calls] == [{"a": n, "b": 2} for n in range(2)]
    put = [{"role": "tool", "content": f"{n + 2}"} for n in range(2)]
    following = chat.follow(message, put)
    calls = [
        {"id": f"c{n}", "function": {"name": "add", "arguments": json.dumps({"a": n, "b": 2})}}
        for n in range(2)
    ]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    answers = [{**each, "tool_call_id": f"c{n}"} for n, each in enumerate(put)]
    history = [wire.ChatMessage.model_validate(each) for each in (*prompt, said, *answers)]
    whole = following.whole()
    assert following.rewritten and whole == wire.write(Chat(form, [TOOL]), history)
    text = encoder.decode(whole)
    assert (
        text.count(" to=functions.add<|channel|>commentary") == 2 and "<|channel|>final" not in text
    )


@pytest.mark.parametrize("shape", ["llama-3", "gpt-oss"])
def test_several_calls_of_a_history_are_written_one_after_another(shape):
    """Where a template takes one call a message, each is a message, with its answer."""
    form = ChatFormat(PromptEncoder(tokenizer_of(shape)))
    calls = [
        {"id": f"c{n}", "function": {"name": "add", "arguments": json.dumps({"a": n, "b": 2})}}
        for n in range(2)
    ]
    answers = [{"role": "tool", "tool_call_id": f"c{n}", "content": f"{n + 2}"} for n in range(2)]
    chat = [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, *answers]
    prompt = wire.write(Chat(form), [wire.ChatMessage.model_validate(each) for each in chat])
    text = form.encoder.decode(prompt)
    places = [text.index(part) for part in ('{"a": 0', '"2"', '{"a": 1', '"3"')]
    assert places == sorted(places) and text.count('"a": ') == 2
