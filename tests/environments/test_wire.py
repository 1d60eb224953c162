"""Requests and answers of the endpoint, as they are read and written."""

import pytest
from pydantic import ValidationError

from tramontane.environments.calls import Parsed
from tramontane.environments.forms import unparsed
from tramontane.environments.wire import (
    ChatMessage,
    ChatRequest,
    TokenRequest,
    answers,
    logprobs,
    readable,
    truth,
)
from tramontane.errors import InputError
from tramontane.tokens import Growth
from tramontane.types import PAPER_TAGS, PLACE, SamplingParams, ToolCall

USER = {"role": "user", "content": "?"}
CALL = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
URI = "data:image/png;base64,AAAA"


def request(*messages, **keys):
    return ChatRequest(model="m", messages=[*messages] or [USER], **keys)


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_key_that_asks_for_nothing_is_taken(value):
    assert request(unknown=value) == request()


@pytest.mark.parametrize("value", [True, 0, 0.0, "a", [0], {"a": None}])
def test_any_other_unknown_key_is_refused(value):
    with pytest.raises(ValidationError, match="unknown"):
        request(unknown=value)


@pytest.mark.parametrize(
    ("keys", "accepted"),
    [
        ({"n": 1}, True), ({"n": 128}, True), ({"n": 129}, False), ({"n": 0}, False),
        ({"temperature": 0}, True), ({"temperature": 10}, True), ({"temperature": 10.5}, False),
        ({"temperature": float("nan")}, False),
        ({"top_p": 0}, False), ({"top_p": 1}, True), ({"top_p": 1.5}, False),
        ({"top_k": -2}, False), ({"top_k": -1}, True), ({"top_k": 2**31}, False),
        ({"max_tokens": 0}, False), ({"max_completion_tokens": 0}, False),
        ({"seed": 2**63}, False), ({"seed": -(2**63)}, True),
        ({"stop": ["a", ""]}, False), ({"stop": ["a"] * 9}, True),
        ({"response_format": {"type": "text"}}, True),
        ({"response_format": {"type": "json_object"}}, False),
    ],
)  # fmt: skip
def test_values_have_limits(keys, accepted):
    if accepted:
        request(**keys)
    else:
        with pytest.raises(ValidationError, match=next(iter(keys))):
            request(**keys)


@pytest.mark.parametrize(
    ("given", "stop"), [(None, []), ("", []), ([], []), ("a", ["a"]), (["a", "b"], ["a", "b"])]
)
def test_stops_are_a_list(given, stop):
    assert request(stop=given).stop == stop


def test_sampling_has_the_servers_values_where_it_has_none():
    defaults = SamplingParams(9, 0.7, 0.8, 40)
    assert request().params(5, defaults) == SamplingParams(5, 0.7, 0.8, 40)
    given = request(temperature=0, top_p=0.5, top_k=-1)
    assert given.params(5, defaults) == SamplingParams(5, 0.0, 0.5, 0)
    assert request(top_k=3).params(5, defaults).top_k == 3
    assert request(max_tokens=3, max_completion_tokens=4).max_tokens == 4
    assert request(max_tokens=3).max_tokens == 3
    assert TokenRequest(token_ids=[1]).sampling_params.params(5, defaults).top_p == 0.8


SAID = {"role": "assistant", "content": "so"}
SYSTEM = {"role": "system", "content": "s"}
TOOL = {"role": "tool", "content": "t"}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([USER], None),
        ([SYSTEM, USER], None),
        ([SYSTEM], None),
        ([USER, USER], None),
        ([USER, SAID, TOOL, TOOL], None),
        ([USER, SAID, USER, SAID, USER], None),
        ([SAID, USER], "begins with"),
        ([TOOL, USER], "begins with"),
        ([USER, SAID], "ends with"),
        ([USER, SAID, SAID, USER], "two of the assistant in a row"),
        ([USER, SAID | {"content": [{"type": "image_url", "image_url": {"url": URI}}]}, USER],
         "an image in a message of the assistant"),
    ],
)  # fmt: skip
def test_the_order_of_messages_is_that_of_a_chat(messages, said):
    if said is None:
        assert [m.role for m in request(*messages).messages] == [m["role"] for m in messages]
    else:
        with pytest.raises(ValidationError, match=said):
            request(*messages)


@pytest.mark.parametrize("message", ["x", 3, None, [USER]])
def test_a_message_that_is_no_object_is_refused(message):
    with pytest.raises(ValidationError, match="messages"):
        request(message)
    with pytest.raises(ValidationError):
        ChatRequest.model_validate(message)


@pytest.mark.parametrize("function", [None, 5, "f", {}, {"name": 5}])
def test_a_tool_without_a_function_that_has_a_name_is_refused(function):
    with pytest.raises(ValidationError, match="tools: each is {type: function, function: {name"):
        request(tools=[{"type": "function", "function": function}])


def test_images_are_those_of_all_messages_in_their_order():
    def of(role, *uris):
        parts = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
        return {"role": role, "content": [{"type": "text", "text": "a"}, *parts]}

    one, two, three = (URI + letter for letter in "BCD")
    found = request(of("user", one, two), SAID, of("tool", three))
    assert found.images == [one, two, three]
    assert found.messages[0].plain() == {
        "role": "user", "content": "a" + PLACE * 2, "images": [one, two],
    }  # fmt: skip
    assert request().images == []
    assert ChatMessage(role="developer", content="d").plain() == {"role": "system", "content": "d"}


def part(**keys):
    return ChatMessage(role="user", content=["a", keys] if keys.pop("texts", 0) else [keys])


@pytest.mark.parametrize("detail", [None, "", "auto", "high"])
def test_an_image_is_read_in_full(detail):
    """Its detail stands in the part or in its `image_url`."""
    for keys in ({"detail": detail}, {"image_url": {"url": URI, "detail": detail}}):
        shown = part(type="image_url", **{"image_url": {"url": URI}} | keys)
        assert (shown.content, shown.images) == (PLACE, [URI])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"type": "image_url", "image_url": {"url": URI, "detail": "low"}}, "detail 'low'"),
        ({"type": "image_url", "image_url": {"url": URI}, "detail": "low"}, "detail 'low'"),
        ({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}, "nothing is fetched"),
        ({"type": "image_url"}, "nothing is fetched"),
        ({"type": "image", "index": 0}, "nothing is fetched"),
        ({"type": "image", "index": 1}, "content: an image part with index 1, and image 0 of"),
        ({"type": "text"}, "only texts"),
        ({"type": "text", "text": 3}, "only texts"),
        ({"type": "input_audio", "input_audio": {}}, "only texts"),
        ({"texts": 1, "type": "text", "text": "b"}, "only texts"),  # a bare text is no part
    ],
)
def test_a_part_that_is_no_text_and_no_image_in_full_is_refused(keys, said):
    with pytest.raises((ValidationError, InputError), match=said):
        part(**keys)


def test_nobody_types_the_place_of_an_image():
    for content in (f"a{PLACE}", [{"type": "text", "text": f"a{PLACE}"}], [{"text": f"a{PLACE}"}]):
        assert ChatMessage(role="user", content=content).content == "a\ufffd"


@pytest.mark.parametrize(
    ("arguments", "read"),
    [('{"a": [1]}', {"a": [1]}), ({"a": 1}, {"a": 1}), ("", {}), (" ", {}), (None, {})],
)
def test_the_arguments_of_a_call_are_read(arguments, read):
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    [found] = ChatMessage(role="assistant", tool_calls=[call]).parsed().calls
    assert (found.name, found.arguments, found.id) == ("f", read, "")


def test_arguments_that_are_no_object_are_refused():
    for arguments in ("[1]", "{", [1]):
        with pytest.raises(ValidationError):
            ChatMessage(role="assistant", tool_calls=[{"function": {"name": "f",
                        "arguments": arguments}}])  # fmt: skip


def test_a_message_is_read_as_the_model_wrote_it():
    call = CALL | {"id": "XyZ123456"}
    said = ChatMessage(role="assistant", content="so", reasoning_content="t", tool_calls=[call])
    text = 'so\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert said.parsed() == Parsed(text, "t", "so", [ToolCall("f", {"a": 1}, "", id="XyZ123456")])
    assert said.parsed("llama").text == 'so\n{"name": "f", "parameters": {"a": 1}}'
    assert ChatMessage(role="assistant", content="so").parsed("lfm").text == "so"
    assert said.shown() == {"role": "assistant", "content": text}
    assert ChatMessage(role="assistant", reasoning="r").parsed() == Parsed("", "r", "", [])
    assert ChatMessage(role="assistant", reasoning="r", reasoning_content="t").parsed().thoughts
    assert ChatMessage(role="assistant", content="so").shown() == {"role": "assistant",
                                                                   "content": "so"}  # fmt: skip
    alone = ChatMessage(role="assistant", tool_calls=[call]).parsed()
    assert (alone.text, alone.content) == (text[3:], "")


GOOD = ToolCall("f", {}, "")


def broken(text=""):
    return unparsed("why", text)


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        # Only the first thoughts are set apart.
        (Parsed("<think>a</think>b", "a", "b", []), ("a", "b", [])),
        (Parsed("x<think>a</think>b<think>c</think>", "ac", "xb", []),
         ("a", "xb<think>c</think>", [])),
        (Parsed("<think>a", "a", "", []), ("a", "", [])),
        (Parsed("a</think>b", "a", "b", []), ("", "a</think>b", [])),
        (Parsed("a</think>b<think>c", "ac", "b", []), ("", "a</think>b<think>c", [])),
        (Parsed("<h>42", "", "42", []), ("", "42", [])),  # with a header of the template's
        # Thoughts without tags are those that were found.
        (Parsed("ab", "a", " b ", []), ("a", "b", [])),
        # Of calls, those that are read are set apart, and others stay as they were written.
        (Parsed("x {}", "", "x ", [GOOD]), ("", "x", [GOOD])),
        (Parsed("{", "", "", [broken()]), ("", "{", [])),
        (Parsed("a{", "a", "", [broken()]), ("a", "", [])),
        (Parsed("x{} {", "", "x", [GOOD, broken(" { ")]), ("", "x\n{", [GOOD])),
        (Parsed("{} { [", "", "", [broken("{"), GOOD, broken("[")]), ("", "{\n[", [GOOD])),
        (Parsed("<think>a</think>x{}", "a", "x", [GOOD]), ("a", "x", [GOOD])),
    ],
)  # fmt: skip
def test_a_message_is_shown_to_clients_as_it_can_be_streamed(message, wanted):
    found = readable(message, PAPER_TAGS)
    assert (found.thoughts, found.content, found.calls) == wanted
    assert found.text == message.text


def test_answers_of_tools_have_the_order_of_their_calls():
    calls = [{"id": name, "function": {"name": "f"}} for name in "abc"]
    said = ChatMessage(role="assistant", tool_calls=calls)

    def tool(content, call=None):
        return ChatMessage(role="tool", content=content, tool_call_id=call)

    new = [tool("1", "c"), tool("2"), tool("3", "x"), tool("4", "a"), tool("5", "b")]
    new.append(ChatMessage(role="user", content="6"))
    found = answers(said, new)
    assert "".join(message["content"] for message in found) == "451236"
    assert found[-1]["role"] == "user"
    assert answers(ChatMessage(role="assistant"), new[:2])[0]["content"] == "1"
    calls[0].pop("id")  # an answer without an id is that of a call without one
    said = ChatMessage(role="assistant", tool_calls=calls[:2])
    assert answers(said, [tool("1", "b"), tool("2")])[0]["content"] == "2"


def test_tokens_have_one_entry_each():
    tokens = Growth([5, 6], [-0.5, -0.25], [3, 4])
    assert logprobs(tokens, [("a", [97]), ("?", None)]) == {
        "content": [
            {"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []},
            {"token": "?", "bytes": None, "logprob": -0.25, "top_logprobs": []},
        ]
    }
    with pytest.raises(ValueError, match="longer"):
        logprobs(tokens, [("a", [97])])
    assert truth(tokens) == {
        "token_ids": [5, 6], "token_logprobs": [-0.5, -0.25], "versions": [3, 4],
    }  # fmt: skip
