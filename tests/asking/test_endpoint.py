"""An endpoint over real sockets: the requests sent to it, and all its failures."""

import json
import time
from collections import Counter
from email.utils import formatdate
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.asking.server import BLANKS, DIE, HANG_UP, STALL, Reply, Server, body, status
from tramontane import InputError
from tramontane.asking import Answer, Prompt
from tramontane.asking.endpoint import EndpointClient, Failed, read_answer
from tramontane.config import parse
from tramontane.config.asking import EndpointModel, ModelConfig


def endpoint(server, **settings):
    of_answers = {
        k: settings.pop(k) for k in ("temperature", "seed", "system_prompt") if k in settings
    }
    options = {"retries": 3, "backoff_s": 0.01, "timeout_s": 20, **settings}
    model = EndpointModel(url=server.url, model="m", **options)
    return EndpointClient(ModelConfig(endpoint=model, max_tokens=99, **of_answers))


def ask(client, texts, n, tmp_path):
    prompts = [Prompt(f"key {text}", text) for text in texts]
    found = dict(client.answers(prompts, n, tmp_path / "answers.jsonl"))
    return [found[i] for i in range(len(texts))]


def echo(asked, before):
    return f"{asked['messages'][-1]['content']} {asked['seed']}"


def test_requests_and_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "abc")
    with Server(echo) as server:
        client = endpoint(
            server,
            key_variable="SOME_KEY",
            temperature=0.3,
            system_prompt="Be kind.",
            extra={"top_k": 5, "top_p": None},
        )
        answers = ask(client, ["a", "b"], 3, tmp_path)
    bodies = [asked for _, asked, _, _ in server.requests]
    assert {path for _, _, path, _ in server.requests} == {"/v1/chat/completions"}
    assert {h["Authorization"] for *_, h in server.requests} == {"Bearer abc"}
    seeds = {asked.pop("seed") for asked in bodies}
    assert len(seeds) == 6  # the n answers to a prompt must be different answers
    assert all(0 <= seed < 2**31 for seed in seeds)
    texts = Counter(asked.pop("messages")[1]["content"] for asked in bodies)
    assert texts == {"a": 3, "b": 3}
    assert bodies == [{"model": "m", "max_tokens": 99, "temperature": 0.3, "top_k": 5}] * 6
    for text, group in zip("ab", answers, strict=True):
        assert [a.text.split()[0] for a in group] == [text] * 3
        assert [a.tokens for a in group] == [2] * 3
    # The same questions from another client are the same requests.
    with Server(echo) as server:
        (tmp_path / "else").mkdir()
        assert ask(endpoint(server), ["b"], 3, tmp_path / "else") == answers[1:]


def test_a_key_that_is_not_set(monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    with Server(echo) as server, pytest.raises(InputError, match="SOME_KEY, which is not set"):
        endpoint(server, key_variable="SOME_KEY")


@pytest.mark.parametrize("code", [400, 401, 500])
def test_a_key_that_a_server_repeats_is_in_no_message(tmp_path, monkeypatch, code):
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    reply = Reply(lambda handler, _: handler.respond(
        handler.headers["Authorization"].encode(), code, {}))  # fmt: skip
    with Server(lambda *_: reply) as server:
        client = endpoint(server, key_variable="SOME_KEY", retries=0)
        try:
            said = ask(client, ["a"], 1, tmp_path)[0][0].fault
        except InputError as error:
            said = str(error)
    assert f"HTTP {code}: Bearer [key]" in said


@pytest.mark.parametrize(
    "settings",
    [
        {"url": "https://me:sk-secret@host/v1"},
        {"url": "https://host/v1?api-key=sk-secret"},
        {"url": "https://host/v1#sk-secret"},
        {"url": "https://host/v1", "extra": {"api-key": "sk-secret"}},
        {"url": "https://host/v1", "extra": {"Authorization": "sk-secret"}},
    ],
)
def test_a_key_in_a_config_is_refused_and_not_repeated(settings):
    with pytest.raises(InputError, match="key_variable") as refused:
        parse(EndpointModel, {"model": "m"} | settings, "config.yaml")
    assert "sk-secret" not in str(refused.value)


PASSING = {
    "500": status(500),
    "503": status(503, Retry_After=0),
    "429": status(429),
    "408": status(408),
    "rubbish": body(b"<html>busy</html>"),
    "half an answer": DIE,
    "no answer": HANG_UP,
    "empty": body(b""),
    "no choices": body(b'{"choices": []}'),
    "an error in JSON": body(b'{"error": "overloaded"}'),
    "no text": body(b'{"choices": [{"message": {"content": null}}]}'),
    "not UTF-8": body(b'{"choices": "\xff'),
    "deep": body(b"[" * 100_000),
}


@pytest.mark.parametrize("failure", PASSING.values(), ids=PASSING)
def test_temporary_failures_are_retried(failure, tmp_path):
    with Server(lambda asked, before: failure if before == 0 else echo(asked, 0)) as server:
        [[answer]] = ask(endpoint(server), ["a"], 1, tmp_path)
    assert answer.text.startswith("a ") and not answer.fault
    assert len(server.requests) == 2


@pytest.mark.parametrize("silence", [STALL, BLANKS], ids=["nothing", "blanks"])
def test_a_stall_ends_at_the_timeout(silence, tmp_path):
    with Server(lambda asked, before: silence if before < 2 else echo(asked, 0)) as server:
        [[answer]] = ask(endpoint(server, timeout_s=0.5, retries=0), ["a"], 1, tmp_path)
        assert answer.fault == "no answer within 0.5 s (tried 1 times)"
        [[answer]] = ask(endpoint(server, timeout_s=0.5, retries=50), ["a"], 1, tmp_path)
        assert answer.text.startswith("a ")


@pytest.mark.parametrize(
    "failure", [status(500, "out of memory"), DIE, HANG_UP, body(b"no"), STALL]
)
@pytest.mark.slow
def test_a_prompt_that_always_fails_is_recorded_and_stops_no_other(failure, tmp_path):
    def mind(asked, before):
        return failure if asked["messages"][0]["content"] == "b" else echo(asked, 0)

    with Server(mind) as server:
        client = endpoint(server, timeout_s=2, retries=1)
        a, b, c = ask(client, ["a", "b", "c"], 2, tmp_path)
    assert all(answer.text and not answer.fault for answer in (*a, *c))
    for answer in b:
        assert answer.text == "" and answer.fault.endswith("(tried 2 times)")
    if failure is STALL:
        assert "no answer within 2 s" in b[0].fault
    elif failure is not DIE and failure is not HANG_UP:
        assert "out of memory" in b[0].fault or "not a chat completion" in b[0].fault
    tries = Counter(asked["messages"][0]["content"] for _, asked, _, _ in server.requests)
    assert tries == {"a": 2, "b": 4, "c": 2}


def test_no_server_at_all(tmp_path):
    with Server(echo) as server:
        pass
    [[answer]] = ask(endpoint(server, retries=1), ["a"], 1, tmp_path)
    assert "ConnectError" in answer.fault


def test_pauses_grow(tmp_path):
    with Server(lambda asked, before: status(500)) as server:
        ask(endpoint(server, backoff_s=0.1), ["a"], 1, tmp_path)
    times = [at for at, *_ in server.requests]
    gaps = [b - a for a, b in pairwise(times)]
    assert len(gaps) == 3
    for n, gap in enumerate(gaps):  # half of each pause is random
        assert gap >= 0.05 * 2**n


@pytest.mark.parametrize("form", ["seconds", "date"])
@pytest.mark.slow
def test_all_requests_keep_a_pause_that_the_server_asks_for(form, tmp_path):
    def mind(asked, before):
        if len(server.requests) > 2:
            return echo(asked, 0)
        # A date is whole seconds: between 1 and 2 from now.
        return status(
            429, Retry_After=1 if form == "seconds" else formatdate(time.time() + 2, usegmt=True)
        )

    with Server(mind) as server:
        answers = ask(endpoint(server, concurrency=2), list("abcdef"), 1, tmp_path)
    assert all(not a.fault for [a] in answers)
    times = [at for at, *_ in server.requests]
    assert len(times) == 8
    # The second may be refused late, on a busy machine; the third comes after the first's pause.
    assert times[2] - times[0] >= 0.9


def test_a_permanent_failure_of_a_prompt_is_not_retried(tmp_path):
    def mind(asked, before):
        too_long = asked["messages"][0]["content"] == "b"
        return status(400, "context length exceeded") if too_long else echo(asked, 0)

    with Server(mind) as server:
        a, b = ask(endpoint(server), ["a", "b"], 1, tmp_path)
    assert a[0].text and "HTTP 400: context length exceeded" in b[0].fault
    assert len(server.requests) == 2


@pytest.mark.parametrize("code", [401, 402, 404])
def test_a_permanent_failure_of_all_prompts_ends_the_command(code, tmp_path):
    with Server(lambda asked, before: status(code, "no such model")) as server:
        with pytest.raises(InputError, match=f"HTTP {code}: no such model; correct it"):
            ask(endpoint(server, concurrency=1), ["a", "b"], 5, tmp_path)
        assert len(server.requests) <= 2


def test_nothing_is_sent_after_a_failure_of_all_prompts():
    with Server(lambda *_: status(401, "no such key")) as server:
        client = endpoint(server, concurrency=1)
        for _ in range(2):
            with pytest.raises(InputError, match="HTTP 401"):
                client.ask(Prompt("key", "a")).result(20)
        assert len(server.requests) == 1


def test_recorded_answers_are_not_requested_again(tmp_path):
    record = tmp_path / "answers.jsonl"
    prompts = [Prompt(text, text) for text in "abcd"]
    with Server(echo) as server:
        whole = dict(endpoint(server).answers(prompts, 2, record))
    lines = record.read_bytes().splitlines(keepends=True)
    assert len(lines) == 8
    record.write_bytes(b"".join(lines[:5]) + lines[5][:-4])  # killed during a write
    with Server(echo) as server:
        assert dict(endpoint(server).answers(prompts, 2, record)) == whole
        assert len(server.requests) == 3
        assert dict(endpoint(server).answers(prompts, 2, record)) == whole
        assert len(server.requests) == 3


def test_the_next_process_requests_failed_answers_again(tmp_path):
    with Server(lambda asked, before: status(500)) as server:
        [[answer]] = ask(endpoint(server, retries=0), ["a"], 1, tmp_path)
    assert answer.fault
    with Server(echo) as server:
        [[answer]] = ask(endpoint(server), ["a"], 1, tmp_path)
    assert not answer.fault


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "x", "reasoning_content": "hm"}, "<think>hm</think>x"),
        ({"content": "x", "reasoning": "hm"}, "<think>hm</think>x"),
        ({"content": "x", "reasoning_content": None}, "x"),
        ({"content": None, "reasoning_content": "hm"}, "<think>hm</think>"),
        ({"content": "<think>hm</think>x"}, "<think>hm</think>x"),
        ({"content": ""}, ""),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                    {"type": "text", "text": "x"},
                ]
            },
            "<think>hm</think>x",
        ),
        ({"content": "half a pair \ud800"}, "half a pair ?"),
    ],
)
def test_separate_thoughts_are_put_between_the_tags(message, text):
    assert read_answer(json.dumps({"choices": [{"message": message}]}).encode()) == Answer(text, 0)
    cut = {"message": message, "finish_reason": "length"}
    assert read_answer(json.dumps({"choices": [cut]}).encode()) == Answer(text, 0, cut=True)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3)
    | st.dictionaries(
        st.sampled_from(["choices", "message", "content", "usage", "completion_tokens", "type",
                         "text", "thinking", "reasoning"]),
        children,
        max_size=4,
    ),
)  # fmt: skip


@settings(deadline=None)
@given(ANYTHING, st.booleans())
def test_any_response_is_an_answer_or_a_failure(value, inside):
    if inside:
        value = {"choices": [{"message": value}], "usage": value}
    try:
        answer = read_answer(json.dumps(value).encode())
    except Failed:
        return
    answer.text.encode()
    assert isinstance(answer.tokens, int)
