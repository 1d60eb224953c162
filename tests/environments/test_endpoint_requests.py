"""What an endpoint samples, where its answers end, how its requests fail; clients that leave."""

import asyncio
import json
import signal
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="not installed: pip install 'tramontane-rl[view]'")

from fastapi.testclient import TestClient
from tokenizers import decoders

from tests.environments.templates import tokenizer_of
from tests.environments.test_endpoint import KEY, MAX_LEN, Recorded, ask, joined
from tramontane import loopback
from tramontane.config import Config, PromptConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.data.special_tokens import SpecialTokens
from tramontane.environments.endpoint import (
    Endpoint,
    ModelEndpoint,
    answering,
    key_is,
    make_app,
)
from tramontane.environments.wire import ChatRequest
from tramontane.models.loading import load_tokenizer
from tramontane.types import Completion, SamplingParams

VOCAB = 2048
TINY = load_tokenizer("tiny")


def ids_of(text: str) -> list[int]:
    return [int(token) for token in TINY(text, add_special_tokens=False)["input_ids"]]


class Told:
    """Samples reports that are given, each with (tokens, reason) for each choice."""

    def __init__(self, *reports: Sequence[tuple[list[int], Any]]) -> None:
        self.reports, self.seeds = reports, list[int]()

    async def sample(
        self, prompt_ids: list[int], n: int, seed: int, sampling: Any, images: Any
    ) -> AsyncGenerator[list[Completion], None]:
        self.seeds.append(seed)
        for report in self.reports:
            yield [
                Completion(-1, i, prompt_ids, ids, [-0.5] * len(ids), [3] * len(ids), reason)  # type: ignore[arg-type]
                for i, (ids, reason) in enumerate(report)
            ]


def made(sampler: Any, encoder: PromptEncoder | None = None, **config: Any) -> ModelEndpoint:
    sizes = (sampler.sample, MAX_LEN, VOCAB)
    encoder = encoder or PromptEncoder(TINY)
    return ModelEndpoint("tiny", Config(**config), encoder, SamplingParams(300, 0.7), *sizes)


def client_of(endpoint: Endpoint) -> TestClient:
    return TestClient(make_app(key_is(KEY, endpoint)), raise_server_exceptions=False)


def test_a_seed_is_the_requests_else_another_each_time() -> None:
    sampler = Told([(ids_of("2"), "stop")])
    client = client_of(made(sampler))
    for keys in ({"seed": 0}, {"seed": -5}, {}, {}):
        assert ask(client, **keys).status_code == 200
    assert sampler.seeds[:2] == [0, -5]
    one, other = sampler.seeds[2:]
    assert one != other and one >= 0 and other >= 0


def test_tokens_have_the_room_of_the_context_and_are_of_the_vocabulary() -> None:
    client = client_of(made(Told([([5], "length")])))

    def status(*token_ids: int) -> int:
        body = {"token_ids": token_ids}
        return client.post(f"/{KEY}/inference/v1/generate", json=body).status_code

    assert [status(*[5] * count) for count in (MAX_LEN - 1, MAX_LEN)] == [200, 400]
    assert [status(token) for token in (0, VOCAB - 1, VOCAB, -1)] == [200, 200, 400, 400]


def test_an_answer_may_begin_with_its_stop() -> None:
    ids = ids_of("three four")
    client = client_of(made(Told(*([(ids[: n + 1], None)] for n in range(len(ids))))))
    choice = ask(client, stop="three").json()["choices"][0]
    assert choice["message"]["content"] == "" and choice["finish_reason"] == "stop"
    assert choice["token_ids"] == ids_of("three")


def test_an_answer_ends_before_the_first_stop_of_the_config() -> None:
    """Its last token may hold more than one."""
    client = client_of(made(Told([(ids_of("one. two."), "stop")]), generator={"stop": [".", 5]}))
    assert ask(client).json()["choices"][0]["message"]["content"] == "one"


def test_a_choice_that_has_ended_stays_as_it_is() -> None:
    sampler = Told(
        [(ids_of("one"), None), (ids_of("one"), None)],
        [(ids_of("one two"), None), (ids_of("one"), None)],
        [(ids_of("one two three"), None), (ids_of("one 2"), "length")],
    )
    first, second = ask(client_of(made(sampler)), stop="two", n=2).json()["choices"]
    assert (first["token_ids"], first["finish_reason"]) == (ids_of("one two"), "stop")
    assert (second["token_ids"], second["finish_reason"]) == (ids_of("one 2"), "length")


def test_a_stream_holds_back_what_may_begin_a_stop_and_no_more() -> None:
    said = "012345678901234"
    ids = [token for letter in said for token in ids_of(letter)]
    reports = [[(ids[:count], None)] for count in range(1, len(ids) + 1)]
    sampler, stop = Told(*reports, [(ids, "length")]), "twelve chars"
    answer = ask(client_of(made(sampler)), stop=stop, stream=True)
    assert joined(answer)[1] == said
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line[6:7] == "{"]
    found = [event["choices"][0]["delta"].get("content") for event in events]
    assert [*filter(None, found)] == ["0", "1", "2", "3", said[4:]]  # 11 may begin the stop


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_template_reads_what_is_whole_and_what_the_prompt_holds(stream: bool) -> None:
    tokenizer, asked = tokenizer_of.__wrapped__("qwen2.5"), list[Any]()
    tokenizer.response_template = {"fields": {"content": {"close": "<|im_end|>"}}}
    # One that drops the space at the start of a text.
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace(replacement="Ġ")
    ids = tokenizer(" so it is", add_special_tokens=False)["input_ids"]
    sampler = Told(*([(ids[:count], None)] for count in range(1, len(ids))), [(ids, "length")])
    encoder = PromptEncoder(tokenizer, PromptConfig(response_prefix="Hm,"))

    def read(text: str, *, prefix: str, **given: Any) -> dict[str, str]:
        asked.append((text, prefix))
        return {"content": "Hm," + text}

    tokenizer.parse_response = read
    client = client_of(made(sampler, encoder))
    asked.clear()  # of what was tried
    answer = ask(client, stream=stream)
    if stream:
        assert joined(answer)[1] == "Hm, so it is"
    else:
        assert answer.json()["choices"][0]["message"]["content"] == "Hm, so it is"
    assert {text.removesuffix("<|im_end|>") for text, _ in asked} == {" so it is"}  # no part of it
    assert all(prefix.endswith("assistant\nHm,") for _, prefix in asked)


def test_prompts_are_written_one_after_another_outside_the_event_loop() -> None:
    """Tokenizers are not reentrant, and the loop serves other clients meanwhile."""
    inside, most, threads = list[int](), list[int](), set[str]()

    class Slow(SpecialTokens):
        def encode(self, *given: Any) -> list[int]:
            inside.append(1)
            most.append(len(inside))
            threads.add(threading.current_thread().name)
            time.sleep(0.01)
            inside.pop()
            return super().encode(*given)

    encoder = PromptEncoder(TINY)
    encoder.special = Slow(TINY, encoder.tags)
    endpoint = made(Told([(ids_of("2"), "stop")]), encoder)
    body = ChatRequest(model="tiny", messages=[{"role": "user", "content": "1 + 1?"}])  # type: ignore[list-item]

    async def both() -> None:
        await asyncio.gather(*(endpoint.chat(body) for _ in range(2)))

    asyncio.run(both())
    assert most == [1, 1] and threading.main_thread().name not in threads


class Endless:
    """Samples nothing, for ever."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), False

    async def sample(self, *_: Any) -> AsyncGenerator[list[Completion], None]:
        self.begun.set()
        try:
            await asyncio.Event().wait()
            yield []
        finally:
            self.ended = True


@pytest.mark.parametrize("leaves", [True, False])
def test_nothing_is_left_of_a_request(leaves: bool) -> None:
    """A client that leaves is not sampled for, and one that stays is not listened to any more."""
    body = json.dumps({"token_ids": [5]}).encode()
    scope: dict[str, Any] = {"type": "http", "method": "POST"}
    scope |= {"path": f"/{KEY}/inference/v1/generate"}
    scope |= {"query_string": b"", "headers": [(b"content-type", b"application/json")]}

    async def use() -> tuple[int, bool]:
        sampler = Endless()
        sampling = sampler if leaves else Told([([5], "length")])
        messages, statuses = [{"type": "http.request", "body": body}], list[int]()

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await (sampler.begun if leaves else asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(part: dict[str, Any]) -> None:
            statuses.append(part.get("status", 0))

        await make_app(key_is(KEY, made(sampling)))(scope, receive, send)
        for _ in range(99):  # the loop of a server does not stop after an answer
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return statuses[0], sampler.ended

    assert asyncio.run(use()) == ((499, True) if leaves else (200, False))


def test_a_failure_to_find_an_endpoint_is_not_hidden() -> None:
    def find(key: str) -> Endpoint:
        raise ZeroDivisionError(key)

    with pytest.raises(ZeroDivisionError, match="a-key"):
        TestClient(make_app(find)).get(f"/{KEY}/v1/models")


def test_a_failed_request_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Told):
        async def sample(self, *_: Any) -> AsyncGenerator[list[Completion], None]:
            yield [][1]

    assert ask(client_of(made(Broken()))).status_code == 500
    [record] = caplog.records
    assert record.name.startswith("tramontane") and "IndexError" in record.getMessage()


class Failing(Recorded):
    """Fails for one chat, before or after its first tokens."""

    late = False

    async def sample(self, prompt_ids: list[int], *rest: Any) -> AsyncGenerator[Any, None]:
        fails = "poison" in self.tokenizer.decode(prompt_ids)
        if fails and not self.late:
            raise ZeroDivisionError("poison")
        async for report in super().sample(prompt_ids, *rest):
            yield report
            if fails:
                raise ZeroDivisionError("poison")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_exception_fails_its_request_alone_with_its_traceback(late: bool, stream: bool) -> None:
    failing, said = Failing(), list[str]()
    failing.text, failing.late = "It is 2.", late
    parts = PromptEncoder(failing.tokenizer), SamplingParams(300, 0.7), *failing.served, said.append
    client = TestClient(make_app(key_is(KEY, ModelEndpoint("tiny", Config(), *parts))))
    for _ in range(3):  # as often as it comes
        answer = ask(client, "poison", stream=stream)
        if stream:
            assert "[DONE]" not in answer.text
        else:
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (500, "server_error")
            assert "ZeroDivisionError" in error["message"] and "poison" not in error["message"]
        assert ask(client).json()["choices"][0]["message"]["content"] == "It is 2."
    assert len(said) == 3
    for trace in said:
        assert "Traceback" in trace and trace.endswith("ZeroDivisionError: poison\n")


def test_an_endpoint_answers_at_its_address_until_its_context_ends() -> None:
    async def status(address: loopback.Address) -> bytes:
        host, port = address.socket.getsockname()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"GET /{address.key}/v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        line = await reader.readline()
        writer.close()
        return line

    async def use() -> None:
        handled = signal.getsignal(signal.SIGINT)
        with loopback.listening(0) as address:
            async with answering(made(Told()), address, ends_by_signal=False) as serving:
                assert b" 200 " in await status(address)
                assert signal.getsignal(signal.SIGINT) is handled  # by whoever runs the loop
            assert serving.done()

    asyncio.run(asyncio.wait_for(use(), 20))
