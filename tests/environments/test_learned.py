"""Forms of calls that are learned from what a chat template writes, by templates in Python."""

import json
import re
from functools import partial

import pytest

from tests.environments.written import SPECIAL, in_json, in_keys, in_tags, said, tokenizer
from tramontane.environments.forms import MAX_CALLS, MAX_DEPTH
from tramontane.environments.json_calls import JsonCalls
from tramontane.environments.learned import (
    ARGUMENT,
    NAME,
    PROBE,
    Around,
    Calls,
    around_answer,
    call_id,
    loose,
    own_calls,
    rendered,
    shared,
    special_tokens,
    taken_by,
    without_end,
)
from tramontane.environments.tagged import Tags
from tramontane.types import PAPER_TAGS


def test_the_common_start_of_two_texts():
    assert shared("abc", "abd") == shared("ab", "abc") == shared("abc", "ab") == 2
    assert shared("", "x") == shared("x", "y") == 0


@pytest.mark.parametrize(
    ("text", "tokens", "left"),
    [
        ("a<e> \n", ["<e>"], "a"),
        ("a<e>", ["e>", "<e>", ">"], "a"),
        ("a<e><e>", ["<e>"], "a<e>"),
        ("a<e>b ", ["<e>"], "a<e>b"),
        (" a \n", [], " a"),
    ],
)
def test_a_text_without_the_token_at_its_end(text, tokens, left):
    assert without_end(text, tokens) == left


def test_special_tokens_are_those_that_are_marked_so():
    assert special_tokens(tokenizer(said)) == [*SPECIAL]


def test_ids_are_nine_letters_and_digits():
    assert [call_id(0, 0), call_id(12, 3), call_id(1234, 105)] == [
        "call00000", "call01203", "call23405",
    ]  # fmt: skip


def test_the_calls_that_a_template_is_tried_with_fit_the_tool_that_it_is_shown():
    function = PROBE["function"]
    for call in Calls(False, "").probe(2)[-1]["tool_calls"]:
        assert call["function"]["name"] == function["name"]
        assert {*call["function"]["arguments"]} == {*function["parameters"]["required"]}


def test_a_message_with_calls_is_what_the_template_takes():
    calls = [("f", {"é": 1}), ("g", {})]
    made = Calls(False, None).message("so", calls, ["1", "2"])
    assert made["content"] == "so" and made["role"] == "assistant"
    functions = [{"name": "f", "arguments": {"é": 1}}, {"name": "g", "arguments": {}}]
    assert made["tool_calls"] == [
        {"id": i, "type": "function", "function": f} for i, f in zip("12", functions, strict=True)
    ]
    as_text = Calls(True, "").message("", calls, ["1", "2"])
    assert [c["function"]["arguments"] for c in as_text["tool_calls"]] == ['{"é": 1}', "{}"]
    assert as_text["content"] == "" and Calls(False, None).message("", [], [])["content"] is None
    with pytest.raises(ValueError, match="argument"):
        Calls(False, None).message("", calls, ["1"])


def test_how_a_template_takes_calls_is_found_by_trying():
    def writes(if_text, if_object, if_none, if_empty):
        """What a template writes by the kind of arguments and of content."""

        def render(chat):
            message = chat[-1]
            given = message["tool_calls"][0]["function"]["arguments"]
            text = if_text if isinstance(given, str) else if_object
            text += if_none if message["content"] is None else if_empty
            return text.replace("CALL", f"{NAME}{ARGUMENT}")

        return render

    cases = [
        (("CALL", "CALL", "", ""), Calls(False, "")),  # an object and an empty content come first
        (("CALL", "", "", ""), Calls(True, "")),
        (("CALL", NAME, "", ""), Calls(True, "")),  # without its arguments
        (("CALL", ARGUMENT, "", ""), Calls(True, "")),
        (("CALL", "CALL", "", "<|e|>"), Calls(False, None)),  # an empty content is a message
        (("CALL", "CALL", "<|e|>", ""), Calls(False, "")),
        (("CALL", "", "", "<|e|>"), Calls(True, None)),
        (("", "", "CALL", ""), Calls(False, None)),  # no calls beside a content
        (("", "", "", ""), None),
    ]
    for case, found in cases:
        assert taken_by(writes(*case), SPECIAL) == found, case


def test_a_chat_that_a_template_refuses_is_empty():
    def refuse(message):
        raise ValueError("no")

    assert rendered(tokenizer(refuse), [{"role": "user", "content": "a"}]) == ""
    assert rendered(tokenizer(said), [{"role": "user", "content": "a"}]) == "<|u|>a<|e|>"
    assert own_calls(tokenizer(refuse)) == []
    assert own_calls(tokenizer(said)) == []  # it writes no calls
    assert around_answer(tokenizer(refuse), PAPER_TAGS) == Around()
    unasked = tokenizer(in_json)  # it refuses to begin an answer
    unasked.apply_chat_template = lambda chat, add_generation_prompt, **more: (
        1 / 0 if add_generation_prompt else tokenizer(in_json).apply_chat_template(
            chat, add_generation_prompt=False, **more))  # fmt: skip
    assert own_calls(unasked) == [] and around_answer(unasked, PAPER_TAGS) == Around()


def ended(end, message):
    return in_json(message).replace("<|e|>", end)


def test_calls_as_a_template_writes_them_begin_and_end_where_an_answer_does():
    one = f'<call>{NAME} => {{"x": "{ARGUMENT}"}}</call>'
    assert own_calls(tokenizer(in_json)) == [one, one * 2]
    assert own_calls(tokenizer(in_json, (*SPECIAL, "</call>"))) == [one, one * 2]
    for end in ("<|e|><|e|>", "</say>\n<|e|>", "\n"):
        write = partial(ended, end)
        assert own_calls(tokenizer(write)) == [one, one * 2]
    # Without an end that is a token, a special token at the end is cut.
    calling = tokenizer(lambda m: (in_json if "tool_calls" in m else write)(m))
    assert own_calls(calling) == [one, one * 2]

    def apart(message):
        return in_json(message).replace("</call><call>", "</call><|e|><|a|><call>")

    assert own_calls(tokenizer(apart)) == [one, f"{one}<|e|><|a|>{one}"]


def test_headers_are_parts_of_calls_where_messages_have_some():
    one = f'<call>{NAME} => {{"x": "{ARGUMENT}"}}</call>'

    def headed(message):
        return in_json(message).replace("<|a|>", "<|a|>to=" if "tool_calls" in message else "<|a|>")

    def alike(message):
        return in_json(message).replace("<|a|>", "<|a|><h>")

    def unlike(message):  # not as the prompt ends
        return in_json(message).replace("<|a|>", "<|b|><h>")

    for template, header, start in ((headed, "to=", "to="), (alike, "<h>", ""), (unlike, "", "")):
        assert own_calls(tokenizer(template), headed=True)[0] == header + one
        assert own_calls(tokenizer(template))[0] == start + one


def test_json_behind_a_name_is_read_as_the_template_writes_it():
    form = JsonCalls.of(own_calls(tokenizer(in_json)))
    written = '<call>f.g-h  =>{"a": [1]}</call>'
    content, calls = form.read(f"so {written}{written} and")
    assert content == "so  and"
    assert [(call.name, call.arguments) for call in calls] == [("f.g-h", {"a": [1]})] * 2
    content, calls = form.read('x<call>f => {</call><call>g => {"a": 1}')
    assert content == "x" and [call.name for call in calls] == ["", "g"]
    assert calls[0].text == "<call>f => {</call>" and "after '<call>'" in calls[0].answer
    assert form.read("x<call>")[1][0].text == "<call>"
    assert form.read("nothing") == ("nothing", [])
    apart = form._replace(following=None)
    assert len(apart.read(written * (MAX_CALLS + 1))[1]) == MAX_CALLS


@pytest.mark.parametrize("call", [f'{NAME} {{"x": "{ARGUMENT}"}}',
                                  json.dumps({"name": NAME, "args": {"x": ARGUMENT}})])  # fmt: skip
def test_a_template_may_write_one_call_a_message(call):
    form = JsonCalls.of([f"<call>{call}</call>"] * 2)
    text = f"<call>{call}</call>".replace(NAME, "f")
    assert [call.name for call in form.read(text * 2)[1]] == ["f", "f"]
    if call.startswith("{"):  # a model may write an id where its template has none
        [made] = form.read(text.replace("{", '{"id": "abcdefgh1", ', 1))[1]
        assert (made.name, made.id) == ("f", "abcdefgh1")


@pytest.mark.parametrize(
    "bodies",
    [
        ["no call", "no call"],
        [f'{NAME} {{"x": "{ARGUMENT}"}}'] * 2,  # nothing stands before the name
        [f'{{"x": "{ARGUMENT}"}} {NAME}'] * 2,
        [f'<call {NAME}>{NAME} {{"x": "{ARGUMENT}"}}'] * 2,  # it has the name twice
    ],
)
def test_a_form_that_cannot_be_told_is_none(bodies):
    assert JsonCalls.of(bodies) is None


def test_a_list_of_calls_is_read_up_to_its_end():
    def listed(message):
        calls = [call["function"] for call in message.get("tool_calls", ())]
        texts = [f'{{"name": "{c["name"]}", "args": {json.dumps(c["arguments"])}}}' for c in calls]
        return said(message, f"<calls>[{', '.join(texts)}]</calls>" if calls else "")

    form = JsonCalls.of(own_calls(tokenizer(listed)))
    text = '<calls>[{"name": "f", "args": {"a": 1}}, {"name":"g","args":{}}]</calls>'
    content, calls = form.read(f"a{text}b")
    assert content == "ab"
    assert [(call.name, call.arguments) for call in calls] == [("f", {"a": 1}), ("g", {})]


def test_objects_between_tokens_are_read_in_any_order_and_with_any_white_space():
    def bracketed(message):
        calls = [
            {"type": "function", "id": call["id"], "name": call["function"]["name"],
             "arguments": call["function"]["arguments"]}
            for call in message.get("tool_calls", ())
        ]  # fmt: skip
        return said(message, "".join(f"<<call>>{json.dumps(call)}<</call>>" for call in calls))

    form = JsonCalls.of(own_calls(tokenizer(bracketed)))
    for written in (
        '{"name": "f", "arguments": {"a": 1}, "id": "abcdefgh1"}',
        '\n{ "arguments" : {"a":1},\n"name" : "f", "id": "abcdefgh1" }\n',
    ):
        content, calls = form.read(f"so <<call>>{written}<</call>><<call>>{written}<</call>> and")
        assert content == "so  and"
        found = [(call.name, call.arguments, call.id) for call in calls]
        assert found == [("f", {"a": 1}, "abcdefgh1")] * 2
    for broken in ('{"name": "f", "arg', '{"name": f}<</call>>', "f(a=1)<</call>>", ""):
        content, [call] = form.read(f"so <<call>>{broken}")
        assert (content, call.name, call.text) == ("so ", "", f"<<call>>{broken}")
    content, calls = form.read('<<call>>{"tool": "f"}<</call>><<call>>[1]<</call>>')
    assert content == "" and [call.error for call in calls] == [True, True]
    content, calls = form.read('<<call>>{"name": f}<</call>><<call>>{"name": "g"}<</call>>')
    assert [call.name for call in calls] == ["", "g"]


def test_so_are_objects_with_the_name_in_an_object_of_theirs():
    """An OpenAI client's messages have such calls, which some templates write whole."""

    def whole(message):
        calls = message.get("tool_calls", ())
        calls = [json.dumps(call).replace('"id"', '"no"') for call in calls]
        return said(message, "".join(f"[CALL]{call}" for call in calls))

    form = JsonCalls.of(own_calls(tokenizer(whole)))
    for written in (
        '{"no": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}',
        '{"function":\n{"arguments": {"a": 1}, "name": "f"}, "no": "abcdefgh1"}',
    ):
        content, calls = form.read(f"so [CALL] {written} [CALL]{written}")
        found = [(call.name, call.arguments, call.id) for call in calls]
        assert content.strip() == "so" and found == [("f", {"a": 1}, "abcdefgh1")] * 2
    for broken, why in (
        ('{"function": "f"}', "not an object with function, name"),
        ('{"function": {"arguments": {}}}', "it has no `name`"),
    ):
        [call] = form.read(f"[CALL]{broken}")[1]
        assert why in call.answer and call.text == f"[CALL]{broken}"


def test_an_id_may_stand_before_a_call():
    def numbered(message):
        calls = message.get("tool_calls", ())
        calls = [f"<call={call['id']}>{json.dumps(call['function'])}</call>" for call in calls]
        return said(message, "".join(calls))

    form = JsonCalls.of(own_calls(tokenizer(numbered)))
    text = '<call=abcdefgh1>{"name": "f"}</call><call=abcdefgh2>{"name": "f"}</call>'
    assert [call.id for call in form.read(text)[1]] == ["abcdefgh1", "abcdefgh2"]

    def named(message):
        calls = message.get("tool_calls", ())
        return said(message, "".join(f"<call>{c['function']['name']}:{c['id']} "
            f"{json.dumps(c['function']['arguments'])}</call>" for c in calls))  # fmt: skip

    form = JsonCalls.of(own_calls(tokenizer(named)))
    [call] = form.read('<call>f:abcdefgh1 {"a": 1}</call>')[1]
    assert (call.name, call.id) == ("f", "abcdefgh1")


def in_one_element(between, write):
    """A template that writes all calls of a message within `<calls>`."""

    def write_message(message):
        calls = [
            call["function"] | {"call_id": call["id"]} for call in message.get("tool_calls", ())
        ]
        return said(message, f"<calls>{between.join(map(write, calls))}</calls>" if calls else "")

    return tokenizer(write_message)


@pytest.mark.parametrize(
    ("between", "write"),
    [
        (";", lambda call: f"{call['name']} {json.dumps(call['arguments'])}"),
        ("\n", lambda call: f"{call['name']} {json.dumps(call['arguments'])}"),
        ("", json.dumps),
        ("\n", json.dumps),
        ("\n", lambda call: f"\n{json.dumps(call)}\n"),
        ("", lambda call: f"{{{json.dumps(call)}}}"),
    ],
)
def test_calls_of_one_element_end_where_it_does(between, write):
    form = JsonCalls.of(own_calls(in_one_element(between, write)))
    one = {"name": "f", "arguments": {"a": 1}, "call_id": "abcdefgh1"}
    written = [write(one), write(one | {"name": "g"})]
    text = f"<calls>{between.join(written)}</calls>"
    found = [("f", {"a": 1}), ("g", {"a": 1})]
    content, calls = form.read(f"so {text} and {text}")
    assert content == "so  and " and [(c.name, c.arguments) for c in calls] == found * 2
    if "call_id" in text:
        assert {call.id for call in calls} == {"abcdefgh1"}
    behind = text.removesuffix(written[1] + "</calls>")  # white space alone begins no call
    assert len(form.read(behind)[1]) == (2 if between.strip() else 1)
    for cut in (len("</calls>"), len(written[1]) + len("</calls>" + between)):
        calls = form.read(text[:-cut])[1]
        assert [call.name for call in calls if call.name] == ["f", "g"][: len(calls)]
    assert [call.name for call in form.read(text[: -len("}</calls>") - 3])[1]] == ["f", ""]


def test_an_object_behind_plain_words_is_a_call_only_as_the_template_writes_it():
    def worded(message):
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return said(message, "".join(f"Action: {json.dumps(call)}" for call in calls))

    form = JsonCalls.of(own_calls(tokenizer(worded)))
    [call] = form.read('Action: {"name": "f", "arguments": {"a": 1}}')[1]
    assert (call.name, call.arguments) == ("f", {"a": 1})
    plain = 'Action: {"jump": true}'
    assert form.read(plain) == (plain, [])


def test_arguments_in_tags_are_read_as_the_template_writes_them():
    form = Tags.of(tokenizer(in_tags))
    text = in_tags({"role": "assistant", "content": "so", "tool_calls": [
        {"function": {"name": "f", "arguments": {"a": "1 < 2\n", "b-c": "</do>"}}},
        {"function": {"name": "g", "arguments": {}}},
    ]}).removeprefix("<|a|>").removesuffix("<|e|>")  # fmt: skip
    content, calls = form.read(text + "\nend")
    assert content.split() == ["so", "end"]
    assert [(c.name, c.arguments) for c in calls] == [
        ("f", {"a": "1 < 2\n", "b-c": "</do>"}),
        ("g", {}),
    ]
    one = '<do name="f">\n<p name="a">1</p>\n</do>'
    assert [c.name for c in form.read(one * (MAX_CALLS + 1))[1]] == ["f"] * MAX_CALLS
    content, calls = form.read(f'x<do name="f" {one}')
    assert [call.name for call in calls] == ["", "f"] and content == "x"
    assert calls[0].text == '<do name="f"' and """after 'x<do name="'""" in calls[0].answer
    inner = '<p name="x">y</p>'
    [call] = form.read(f'<do name="f">\n<p name="a">{inner}</p>\n</do>')[1]
    assert call.arguments == {"a": inner}
    unopened = tokenizer(
        lambda message: in_tags(message).replace('<do name="', "").replace("\n", "")
    )
    assert Tags.of(unopened) is None
    others = tokenizer(lambda message: re.sub('<p name="zq3', '<q name="zq3', in_tags(message)))
    assert Tags.of(others) is None
    unclosed = tokenizer(lambda message: in_tags(message).replace("</p>", ""))
    assert Tags.of(unclosed).read(one.replace("</p>", "")) == form.read(one)
    ended = tokenizer(lambda message: in_tags(message).replace("<|e|>", "</say>\n<|e|>"))
    text = f"so\n<all>\n{one}\n</all>"
    assert Tags.of(ended).read(f"{text}</say>")[0] == Tags.of(ended).read(text)[0] == "so"
    data = '<do name="f">\n<p name="a"><![CDATA[</p>\n]]></p>\n</do>'
    assert form.read(data)[1][0].arguments == {"a": "</p>\n"}
    assert form.read(data.replace("</p>\n]", "]", 1))[1][0].arguments == {"a": ""}


def test_lists_and_objects_are_tags_within_tags():
    form = Tags.of(tokenizer(in_keys))
    given = {"a": "1", "b": ["x", ["y", "z"]], "c": {"d": {"e": "</a>"}, "f": "g"}}
    text = in_keys({"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": given}}]})  # fmt: skip
    [call] = form.read(text.removeprefix("<|a|>").removesuffix("<|e|>"))[1]
    assert (call.name, call.arguments) == ("f", given)
    for depth in (1, MAX_DEPTH + 1, MAX_DEPTH + 2):
        deep = "<a>" * depth + "x" + "</a>" * depth
        [call] = form.read(f"<run:f>{deep}</run>")[1]
        assert str(call.arguments).count("{") == (1 if call.error else depth)
        assert call.error == (depth > MAX_DEPTH + 1)
    assert Tags.of(tokenizer(said)) is None
    assert Tags.of(tokenizer(in_json)) is None

    def no_lists(message):
        if '["' in json.dumps(message.get("tool_calls", "")):
            raise ValueError("no lists")
        return in_keys(message)

    assert Tags.of(tokenizer(no_lists)) == form._replace(item="")


@pytest.mark.parametrize(
    ("around", "content", "found"),
    [
        (Around(), " a ", ("", "a")),
        (Around("<h>", "<t>"), "<h> a <t>", ("", "a")),
        (Around("<h>", "<t>"), "a", ("", "a")),
        (Around("<h>", "", True, "<o>", "<b>"), " <o>t<b>\n<h>a", ("t", "a")),
        (Around("<h>", "", True, "<o>", "<b>"), "<o>t", ("t", "")),  # cut
        (Around("<h>", "", True, "<o>", "<b>"), "a<b>", ("", "a")),
        (Around("<h>", "", True, "<o>"), "<o>t<h>a", ("t", "a")),
        (Around("<h>", "<t>", True, "<o>", "<b>"), "x<t>", ("", "x")),
    ],
)
def test_what_stands_around_an_answer_is_taken_away(around, content, found):
    assert around.within(content) == found


def test_what_a_template_writes_around_an_answer_is_found():
    def channels(message):
        thought = message.get("reasoning_content")
        before = f"<t>{thought}</t><|e|><|a|>\n" if thought else ""
        return said(message, head=f"<|a|>\n{before}<final>", end="</final><|e|>")

    assert around_answer(tokenizer(said), PAPER_TAGS) == Around()
    user = {"role": "user", "content": "?"}
    assert channels(user) == "<|u|>?</final><|e|>"
    found = around_answer(tokenizer(channels), PAPER_TAGS)
    assert found == Around("<final>", "</final>", True, "<t>", "</t><|e|><|a|>")
    assert found.within("<t>so</t><|e|><|a|><final>42</final>") == ("so", "42")

    def no_thoughts(message):
        return said(message, head="<|a|>\n<final>")

    assert around_answer(tokenizer(no_thoughts), PAPER_TAGS) == Around("<final>")

    def in_paper_tags(message):
        head = "<|a|></think><think>\n</think>\n<final>"
        return said(message, head=head, end="</final><|e|>")

    assert around_answer(tokenizer(in_paper_tags), PAPER_TAGS) == Around("<final>", "</final>")

    def thinks(opens, closes, head, other):
        """A template that writes thoughts before the head, or before another."""

        def write(message):
            thought = message.get("reasoning_content")
            return said(message, head=f"<|a|>{opens}{thought}{closes}{other}" if thought else head)

        return tokenizer(write)

    assert around_answer(thinks("<think>", "</think>", "<|a|><f>", "<f>"), PAPER_TAGS) == Around(
        "<f>"
    )
    assert around_answer(thinks("<t>", "</t>", "<|a|>", ""), PAPER_TAGS) == Around()
    assert around_answer(thinks("<t>", "</t>", "<|a|><f>", "<g>"), PAPER_TAGS) == Around("<f>")
    assert around_answer(thinks("<t>", "</t>", "<|b|><f>", "<f>"), PAPER_TAGS) == Around()

    def twice(message):
        return said(message, calls=message["content"])

    assert around_answer(tokenizer(twice), PAPER_TAGS) == Around()


@pytest.mark.parametrize(
    ("text", "matched", "other"),
    [
        ("a b", ("a b", "a\n\n b", "ab"), ("a_b",)),
        ("(x) 12", ("(x) 3", "(x)456"), ("(x) y", "x 12")),
        ('"call00000"', ('"abc9"', '""'), ('"a b"', '"a<b"')),
        ("call00000 call00001", ("abc call7",), ("abc def",)),  # of several ids, the first
        ("a\u3000b", ("a b",), ()),
    ],
)
def test_a_pattern_is_loose_in_white_space_numbers_and_ids(text, matched, other):
    assert all(re.fullmatch(loose(text), each) for each in matched)
    assert not any(re.fullmatch(loose(text), each) for each in other)
