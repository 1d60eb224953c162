"""The endpoint's answers: their objects, and what a stream sends when."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest

from tramontane.environments import wire
from tramontane.environments.answers import ChatAnswer, Choice, shown_tokens, token_answer
from tramontane.environments.calls import Parsed, outside_thoughts
from tramontane.tokens import Growth
from tramontane.types import PAPER_TAGS, ToolCall

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
USER = {"role": "user", "content": "?"}


def tokens_of(text):
    """A token for each character of a text."""
    ids = [*map(ord, text)]
    return Growth(ids, [-0.5] * len(ids), [3] * len(ids))


def letters(tokens):
    return [(chr(token), [token]) for token in tokens.token_ids]


class Reader:
    """Reads a text with thoughts in tags, and `*` as a call; counts how often."""

    def __init__(self, *calls):
        self.calls, self.count = calls, 0

    def __call__(self, tokens):
        self.count += 1
        text = "".join(map(chr, tokens.token_ids))
        thoughts, content = outside_thoughts(text, PAPER_TAGS)
        calls = [*self.calls] * content.count("*")
        return Parsed(text, thoughts, content.replace("*", ""), calls)


def answer(read=None, held=0, messages=(USER,), **keys):
    body = wire.ChatRequest(model="m", messages=[*messages], **keys)
    return ChatAnswer(body, [7, 8, 9], read or Reader(), letters, PAPER_TAGS, held)


def streamed(made, reports):
    """The events of a stream, from a list of reports; each has (text, reason) for each choice."""

    async def each():
        for report in reports:
            yield [Choice(None if t is None else tokens_of(t), why) for t, why in report]

    async def all_of_them():
        return [event async for event in made.stream(each())]

    events = asyncio.run(all_of_them())
    assert all(event.startswith("data: ") and event.endswith("\n\n") for event in events)
    assert events.pop() == "data: [DONE]\n\n"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def deltas(events, index=0):
    """What a choice's events add, one after another."""
    choices = [choice for event in events for choice in event["choices"]]
    return [choice["delta"] for choice in choices if choice["index"] == index]


TRUTH = {"token_ids": [104, 105], "token_logprobs": [-0.5, -0.5], "versions": [3, 3]}


def test_a_whole_answer_is_one_object():
    found = answer(n=2).whole([Choice(tokens_of("hi"), "stop"), Choice(tokens_of(""), "length")])
    assert found.pop("id").startswith("chatcmpl-") and isinstance(found.pop("created"), int)
    message = {"role": "assistant", "reasoning_content": None, "content": "hi"}
    end = {"finish_reason": "stop", "logprobs": None, **TRUTH}
    other = {"finish_reason": "length", "logprobs": None, **{key: [] for key in TRUTH}}
    assert found == {
        "model": "m",
        "object": "chat.completion",
        "choices": [
            {"index": 0, "message": message, **end},
            {"index": 1, "message": {**message, "content": ""}, **other},
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        "prompt_token_ids": [7, 8, 9],
    }


def test_two_answers_have_different_ids():
    one, other = (answer().whole([Choice(tokens_of("a"), "stop")]) for _ in range(2))
    assert one["id"] != other["id"]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_calls_have_the_id_that_the_model_wrote_or_one_by_turn_and_number(reason):
    said = {"role": "assistant", "content": "so"}
    read = Reader(ToolCall("f", {"é": 1}, ""), ToolCall("g", {}, "", id="XyZ123456"))
    made = answer(read, messages=[USER, said, USER, said, USER], tools=[TOOL], logprobs=True)
    [choice] = made.whole([Choice(tokens_of("*"), reason)])["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {"id": "call00200", "type": "function", "function": {"name": "f", "arguments": '{"é": 1}'}},
        {"id": "XyZ123456", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert choice["finish_reason"] == ("length" if reason == "length" else "tool_calls")
    shown = {"token": "*", "bytes": [42], "logprob": -0.5, "top_logprobs": []}
    assert choice["logprobs"] == {"content": [shown]}
    [choice] = made.whole([Choice(tokens_of("say *"), reason)])["choices"]
    assert choice["message"]["content"] == "say "


def test_a_stream_sends_what_is_new_and_ends_with_calls_and_tokens():
    read = Reader(ToolCall("f", {}, ""), ToolCall("g", {}, ""))
    reports = [
        [("<think>a", None), (None, None)],
        [("<think>ab</think>", None), ("x", None)],
        [("<think>ab</think>c*", "stop"), ("x", None)],
        [("<think>ab</think>c*", "stop"), ("xy", "length")],
    ]
    events = streamed(answer(read, n=2, stream_options={"include_usage": True}), reports)
    for event in events:
        assert event["object"] == "chat.completion.chunk" and event["model"] == "m"
        assert event["id"] == events[0]["id"] and event["created"] == events[0]["created"]
    assert events.pop()["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 21, "total_tokens": 24,
    }  # fmt: skip
    begin = {"role": "assistant", "content": ""}
    assert [event["choices"][0]["index"] for event in events] == [0, 1, 0, 0, 1, 0, 0, 1, 1]
    assert all("usage" not in event for event in events)
    first = deltas(events)
    calls = first.pop()["tool_calls"]
    assert first == [
        begin,
        {"reasoning_content": "a"},
        {"reasoning_content": "b"},
        {"content": "c"},
    ]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "f"), (1, "g")]
    assert deltas(events, 1) == [begin, {"content": "x"}, {"content": "y"}, {}]
    ends = [event["choices"][0] for event in events if event["choices"][0].get("token_ids")]
    assert [end["finish_reason"] for end in ends] == ["tool_calls", "length"]
    assert [len(end["token_ids"]) for end in ends] == [19, 2]
    assert all(end["prompt_token_ids"] == [7, 8, 9] for end in ends)
    others = [event["choices"][0] for event in events if event["choices"][0] not in ends]
    assert all(other["finish_reason"] is None for other in others)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_usage_is_sent_to_whom_it_matters(options):
    events = streamed(answer(stream_options=options), [[("a", "stop")]])
    assert len(events) == 3 and all(event["choices"] for event in events)
    for reports in ([], [[(None, None)]]):  # without a token
        [_, usage] = streamed(answer(stream_options={"include_usage": True}), reports)
        assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}


def parts(made, *texts):
    """What is sent as an answer grows: after each text of a list, the last one whole."""
    reports = [[(text, "stop" if text == texts[-1] else None)] for text in texts]
    return [delta for delta in deltas(streamed(made, reports))[1:] if delta]


def test_what_may_begin_a_tag_or_a_stop_is_held_back():
    texts = ("abcd", "abcde  ", "abcde  fg", "abcde  fghi")
    sent = [delta["content"] for delta in parts(answer(held=3), *texts)]
    assert sent == ["a", "bcd", "e", "  fghi"]  # white space at the end may be dropped yet
    assert parts(answer(held=0), "ab", "abc", "abcd") == [{"content": c} for c in ("ab", "c", "d")]
    assert parts(answer(held=None), "ab", "abc", "abcd") == [{"content": "abcd"}]
    thoughts = [
        d["reasoning_content"] for d in parts(answer(held=2), "<think>abcd", "<think>abcde")
    ]
    assert thoughts == ["ab", "cde"]
    assert parts(answer(held=2), "x<think>abcd", "x<think>abcde")[:2] == [
        {"reasoning_content": "ab"}, {"content": "x"},
    ]  # fmt: skip
    # A closed thought is whole, and so is one whose tag is in the prompt, once the answer begins.
    assert parts(answer(held=2), "<think>abcd</think>", "<think>abcd</think>x")[0] == {
        "reasoning_content": "ab"
    }
    assert parts(answer(held=2), "<think>abcd</think>xyz", "<think>abcd</think>xyz!") == [
        {"reasoning_content": "abcd"}, {"content": "x"}, {"content": "yz!"},
    ]  # fmt: skip


def test_half_a_character_is_not_sent():
    sent = parts(answer(held=0), "a\ufffd", "a\ufffd\ufffd", "aé")
    assert sent == [{"content": "a"}, {"content": "é"}]


def test_with_tools_content_comes_with_the_end():
    texts = ("<think>a", "<think>a</think>b", "<think>a</think>bc")
    assert parts(answer(tools=[TOOL]), *texts) == [{"reasoning_content": "a"}, {"content": "bc"}]
    assert parts(answer(tools=[TOOL], tool_choice="none"), *texts)[1:] == [
        {"content": "b"}, {"content": "c"},
    ]  # fmt: skip


def test_a_text_that_changed_is_not_sent_over_again():
    """A stream cannot take back: what does not extend it is dropped."""
    assert parts(answer(), "ab", "xyz", "abcd") == [{"content": "ab"}, {"content": "cd"}]


def test_a_long_stream_is_decoded_in_proportion_to_its_length():
    """Each time it has grown by 1/32: 32 · (1 + ln(n / 32)) times for n tokens."""
    read, n = Reader(), 1000
    texts = ["x" * length for length in range(1, n)]
    sent = parts(answer(read), *texts)
    assert sum(len(delta["content"]) for delta in sent) == n - 1
    assert read.count == pytest.approx(32 * (1 + np.log(n / 32)), rel=0.1)


def test_a_stream_that_nobody_reads_any_more_ends_its_sampling():
    ended = []

    async def reports():
        try:
            while True:
                yield [Choice(tokens_of("a"), None)]
        finally:
            ended.append(True)

    async def leave():
        stream = answer().stream(reports())
        for _ in range(2):
            await anext(stream)
        await stream.aclose()
        return [*ended]

    assert asyncio.run(leave()) == [True]


def test_the_token_route_names_tokens_by_their_ids():
    body = wire.TokenRequest(token_ids=[5, 6], request_id="r")
    choices = [Choice(tokens_of("h"), "stop"), Choice(tokens_of("hi"), "length")]
    found = token_answer(body, choices)
    assert (found["request_id"], found["prompt_token_ids"]) == ("r", [5, 6])
    assert [c["index"] for c in found["choices"]] == [0, 1]
    assert [c["finish_reason"] for c in found["choices"]] == ["stop", "length"]
    assert {key: found["choices"][1][key] for key in TRUTH} == TRUTH
    [shown] = found["choices"][0]["logprobs"]["content"]
    name = "token_id:104"
    assert shown == {
        "token": name, "bytes": [*name.encode()], "logprob": -0.5, "top_logprobs": [],
        "token_id": 104,
    }  # fmt: skip
    ids = {token_answer(wire.TokenRequest(token_ids=[5]), [])["request_id"] for _ in range(2)}
    assert len(ids) == 2


def test_bytes_of_tokens_are_those_of_their_names():
    names = {1: "<0xE2>", 2: "âĤ", 3: "▁€", 4: "<0xZZ>", 5: "Ġa"}
    texts = {1: "\ufffd", 2: "\ufffd", 3: "\ufffd", 4: "\ufffd", 5: " é"}
    tokenizer = SimpleNamespace(
        decode=lambda ids: texts[ids[0]], convert_ids_to_tokens=lambda token: names[token]
    )
    shown = shown_tokens(tokenizer, Growth([*names], [0.0] * 5, [0] * 5))
    assert shown == [
        ("\ufffd", [0xE2]),
        ("\ufffd", [0xE2, 0x82]),
        ("\ufffd", None),
        ("\ufffd", [*b"<0xZZ>"]),
        (" é", [*" é".encode()]),
    ]
