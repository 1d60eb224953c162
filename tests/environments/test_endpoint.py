"""The endpoint's answers, for completions that are given: what was sampled is what is read."""

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="not installed: pip install 'tramontane-rl[view]'")

from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.environments.templates import UNREAD
from tramontane.config import Config, EffortConfig, PromptConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.data.special_tokens import SpecialTokens
from tramontane.environments.chat import Chat
from tramontane.environments.chat_format import ChatFormat
from tramontane.environments.endpoint import ModelEndpoint, key_is, make_app
from tramontane.environments.wire import ChatMessage, ChatRequest, write
from tramontane.models.loading import load_tokenizer
from tramontane.types import Completion, SamplingParams

KEY = "a-key"
MAX_LEN = 400
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class Recorded:
    """Samples the same text for every request, `pace` tokens at a time."""

    def __init__(self) -> None:
        self.served = self.sample, MAX_LEN, 2048
        self.tokenizer = load_tokenizer("tiny")
        self.text, self.pace = "", 1
        self.prompts: list[list[int]] = []
        self.images: Sequence[str] = ()
        self.asked: list[SamplingParams] = []
        self.reports = self.dropped = 0

    async def sample(
        self,
        prompt_ids: list[int],
        n: int,
        seed: int,
        sampling: SamplingParams,
        images: Sequence[str] = (),
    ) -> AsyncGenerator[list[Completion], None]:
        self.prompts.append(prompt_ids)
        self.images = images
        self.asked.append(sampling)
        ids = self.tokenizer(self.text, add_special_tokens=False)["input_ids"]
        ids = [*ids, self.tokenizer.eos_token_id][: sampling.max_tokens]
        try:
            for end in range(1, len(ids), self.pace):
                self.reports += 1
                yield [
                    Completion.requested(
                        -1,
                        i,
                        prompt_ids,
                        seed,
                        sampling,
                        token_ids=ids[:end],
                        logprobs=[-0.5] * end,
                        versions=[3] * end,
                    )
                    for i in range(n)
                ]
            reason = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
            size = len(ids)
            yield [
                Completion(-1, i, prompt_ids, ids, [-0.5] * size, [3] * size, reason)
                for i in range(n)
            ]
        finally:
            self.dropped += 1


@pytest.fixture(scope="module")
def sampler() -> Recorded:
    return Recorded()


@pytest.fixture(scope="module")
def client(sampler: Recorded) -> TestClient:
    encoder = PromptEncoder(sampler.tokenizer)
    model = ModelEndpoint("tiny", Config(), encoder, SamplingParams(300, 0.7), *sampler.served)
    return TestClient(make_app(key_is(KEY, model)), raise_server_exceptions=False)


def ask(client: TestClient, content: Any = "1 + 1?", **keys: Any) -> Any:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    body = {"model": "tiny", "messages": messages, **keys}
    headers = {"Content-Type": "application/json"}  # in ASCII, so that half a pair can be sent
    return client.post(f"/{KEY}/v1/chat/completions", content=json.dumps(body), headers=headers)


def joined(answer: Any) -> tuple[str, str, list[Any], dict[str, Any]]:
    """(thoughts, content, calls, last chunk's choice) of a stream."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    deltas = [choice["delta"] for choice in choices]
    texts = [
        "".join(delta.get(key, "") for delta in deltas) for key in ("reasoning_content", "content")
    ]
    return *texts, [c for d in deltas for c in d.get("tool_calls", ())], choices[-1]  # type: ignore[return-value]


def test_an_answer_has_its_tokens(client: TestClient, sampler: Recorded) -> None:
    sampler.text, sampler.pace = "<think>one and one</think>\nIt is 2.", 3
    answer = ask(client, logprobs=True).json()
    choice, ids = answer["choices"][0], answer["choices"][0]["token_ids"]
    assert choice["message"]["reasoning_content"] == "one and one"
    assert choice["message"]["content"] == "It is 2." and choice["finish_reason"] == "stop"
    assert sampler.tokenizer.decode(ids[:-1]) == sampler.text
    assert choice["token_logprobs"] == [-0.5] * len(ids) and choice["versions"] == [3] * len(ids)
    assert len(choice["logprobs"]["content"]) == len(ids)
    assert answer["prompt_token_ids"] == sampler.prompts[-1]
    assert answer["usage"]["completion_tokens"] == len(ids)


def test_log_probs_have_the_bytes_of_characters_that_are_split(
    client: TestClient, sampler: Recorded
) -> None:
    sampler.text = "é 😀 漢"
    answer = ask(client, logprobs=True).json()["choices"][0]
    shown = answer["logprobs"]["content"][:-1]
    assert any("\ufffd" in each["token"] for each in shown)
    assert bytes(b for each in shown for b in each["bytes"]).decode() == sampler.text


def test_the_prompt_is_that_of_training(client: TestClient, sampler: Recorded) -> None:
    sampler.text = "2"
    ask(client, "What is 3 + 4?")
    assert sampler.prompts[-1] == PromptEncoder(sampler.tokenizer).encode("What is 3 + 4?")


def test_reasoning_effort_is_a_level_of_the_config(sampler: Recorded) -> None:
    levels = {"low": EffortConfig(phrase="Be brief.")}
    encoder = PromptEncoder(sampler.tokenizer, efforts=levels)
    model = ModelEndpoint("tiny", Config(), encoder, SamplingParams(300, 0.7), *sampler.served)
    client, sampler.text = TestClient(make_app(key_is(KEY, model))), "2"
    assert ask(client, reasoning_effort="low").status_code == 200
    assert sampler.prompts[-1] == encoder.at("low").encode("1 + 1?") != encoder.encode("1 + 1?")
    refused = ask(client, reasoning_effort="high")
    assert refused.status_code == 400 and "the model's levels are low" in refused.text


def test_calls_are_read_and_written_back(client: TestClient, sampler: Recorded) -> None:
    sampler.text, sampler.pace = f"<think>add</think>\n{CALL}{CALL}", 4
    first = ask(client, tools=[TOOL]).json()
    assert "Add two numbers." in sampler.tokenizer.decode(sampler.prompts[-1])
    message, ids = first["choices"][0]["message"], first["choices"][0]["token_ids"]
    assert first["choices"][0]["finish_reason"] == "tool_calls" and message["content"] is None
    calls = message["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1}] * 2
    assert calls[0]["id"] != calls[1]["id"]
    # The harness answers in any order.
    answers = [
        {"role": "tool", "content": f"result {n}", "tool_call_id": calls[n]["id"]} for n in (1, 0)
    ]
    ask(client, [{"role": "user", "content": "1 + 1?"}, message, *answers], tools=[TOOL])
    shown = sampler.tokenizer.decode(sampler.prompts[-1])
    assert shown.index("result 0") < shown.index("result 1")
    assert shown.count('"name": "add", "arguments"') == 2
    assert "add</think>" not in shown  # as the template writes the message, which reads no thoughts
    assert first["prompt_token_ids"] == sampler.prompts[-1][: len(first["prompt_token_ids"])]
    assert ids != []


def test_without_tools_nothing_is_a_call(client: TestClient, sampler: Recorded) -> None:
    sampler.text = CALL
    for keys in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        message = ask(client, **keys).json()["choices"][0]["message"]
        assert message["content"] == CALL and "tool_calls" not in message
        assert "add" not in sampler.tokenizer.decode(sampler.prompts[-1])


def test_a_broken_call_stays_in_the_content(client: TestClient, sampler: Recorded) -> None:
    sampler.text = "<tool_call>{broken</tool_call>"
    choice = ask(client, tools=[TOOL]).json()["choices"][0]
    assert choice["message"]["content"] == sampler.text and choice["finish_reason"] == "stop"


pieces = st.sampled_from(
    ["<think>", "</think>", "a b", " 12", "\n", "é😀", "<thi", CALL, "<tool_call>{", "STOP", "  "]
)


@given(st.lists(pieces, min_size=1, max_size=8), st.integers(1, 5), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_stream_adds_up_to_the_whole_answer(
    client: TestClient, sampler: Recorded, parts: list[str], pace: int, tools: bool, stops: bool
) -> None:
    sampler.text, sampler.pace = "".join(parts), pace
    keys: dict[str, Any] = {"tools": [TOOL]} if tools else {}
    keys |= {"stop": ["STOP"]} if stops else {}
    whole = ask(client, **keys).json()["choices"][0]
    thoughts, content, calls, last = joined(ask(client, stream=True, **keys))
    message = whole["message"]
    assert thoughts == (message["reasoning_content"] or "")
    assert content == (message["content"] or "")
    assert [c["function"] for c in calls] == [c["function"] for c in message.get("tool_calls", ())]
    assert last["token_ids"] == whole["token_ids"]
    assert last["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("pace", [1, 7])
def test_a_stop_ends_the_answer_and_drops_the_rest(
    client: TestClient, sampler: Recorded, pace: int
) -> None:
    sampler.text, sampler.pace, sampler.reports = "one two three " + "four " * 40, pace, 0
    choice = ask(client, stop="three").json()["choices"][0]
    assert choice["message"]["content"] == "one two" and choice["finish_reason"] == "stop"
    text = sampler.tokenizer.decode(choice["token_ids"])
    assert text.rstrip().endswith("three") and sampler.reports < 20
    for count, token in enumerate(choice["token_ids"][:2], 1):
        asked = {"token_ids": [5, 6], "sampling_params": {"stop_token_ids": [token]}}
        found = client.post(f"/{KEY}/inference/v1/generate", json=asked).json()["choices"][0]
        assert found["token_ids"] == choice["token_ids"][:count]
        assert found["finish_reason"] == "stop"


def test_tokens_go_in_and_out(client: TestClient, sampler: Recorded) -> None:
    sampler.text, sampler.pace = "2", 1
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1, "n": 2, "logprobs": 1}}
    answer = client.post(f"/{KEY}/inference/v1/generate", json=body).json()
    assert sampler.prompts[-1] == [5, 6] and len(answer["choices"]) == 2
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length" and choice["versions"] == [3]
    shown, token = choice["logprobs"]["content"][0], choice["token_ids"][0]
    assert shown["token"] == f"token_id:{token}" and shown["logprob"] == -0.5  # of vLLM before 0.33
    assert shown["token_id"] == token and shown["top_logprobs"] == []  # and since
    for model, status in (("tiny", 200), ("other", 404)):
        named = client.post(f"/{KEY}/inference/v1/generate", json=body | {"model": model})
        assert named.status_code == status


NESTED = [
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "tool_calls": [
            {"function": {"name": "add", "arguments": '{"a":' * 9000 + "1" + "}" * 9000}}
        ],
    },
    {"role": "user", "content": "?"},
]


def test_a_tools_argument_may_be_anything(client: TestClient, sampler: Recorded) -> None:
    sampler.text = CALL
    for parameters in ({"properties": {"a": True}}, {"$ref": "#"}, {}, None):
        function = {"name": "add", "parameters": parameters}
        answer = ask(client, tools=[{"type": "function", "function": function}])
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"


def test_sampling_is_the_requests_else_the_servers(client: TestClient, sampler: Recorded) -> None:
    sampler.text = "2"
    ask(client)
    assert sampler.asked[-1] == SamplingParams(300, 0.7)
    ask(client, temperature=0, top_p=0.5, top_k=-1, max_completion_tokens=5)
    assert sampler.asked[-1] == SamplingParams(5, 0.0, 0.5, 0)


@pytest.mark.parametrize(
    ("keys", "status", "said"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "assistant", "content": "2"}]}, 400, "begins with"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "data URI"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, 400, "only texts"),
        ({"temperature": -1}, 400, "temperature"),
        ({"n": 0}, 400, "n: "),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"include_reasoning": False}, 400, "include_reasoning"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 400, "chat_template_kwargs"),
        ({"unknown": 0}, 400, "unknown"),
        ({"add_generation_prompt": False}, 400, "add_generation_prompt"),
        ({"seed": 2**70}, 400, "seed"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"max_tokens": MAX_LEN}, 400, "maximum context length is 400 tokens"),
        ({"model": "gpt-4"}, 404, "'tiny'"),
        ({"stop": [""]}, 400, "stop"),
        *(
            (
                {"tools": [{"type": "function", "function": {"name": "f", "parameters": wrong}}]},
                400,
                said,
            )
            for wrong, said in (
                ("x", "'f': not an object"),
                ({"properties": None}, "'f': properties: None is not of type 'object'"),
                ({"properties": {"a": {"enum": 5}}}, "'f': properties.a.enum: 5 is not"),
                ({"properties": {"a": {"type": "int"}}}, "'f': properties.a.type: 'int' is not"),
                ({"properties": {"a": {"pattern": "("}}}, "'f': properties.a.pattern: '(' is not"),
            )
        ),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, 400, "tools: each is"),
        ({"messages": NESTED}, 400, "nested too deeply"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    client: TestClient, keys: dict[str, Any], status: int, said: str
) -> None:
    answer = ask(client, **keys)
    assert answer.status_code == status and said in answer.json()["error"]["message"]


def test_a_chat_that_is_too_long_is_refused_with_the_code_of_openai(client: TestClient) -> None:
    token = {"token_ids": [5] * 9, "sampling_params": {"max_tokens": MAX_LEN}}
    for answer in (
        ask(client, "so " * MAX_LEN),
        client.post(f"/{KEY}/inference/v1/generate", json=token),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["type"] == "invalid_request_error" and "400 tokens" in error["message"]


def test_a_neutral_value_is_one_that_is_not_given(client: TestClient, sampler: Recorded) -> None:
    sampler.text = "2"
    fields = {*ChatRequest.model_fields, "logit_bias", "guided_json"} - {"model", "messages"}
    assert ask(client, **dict.fromkeys(fields)).status_code == 200
    assert sampler.asked[-1] == SamplingParams(300, 0.7)
    empty: dict[str, Any] = {"logit_bias": {}, "chat_template_kwargs": {}, "documents": []}
    values = {"n": 1, "best_of": 1, "length_penalty": 1.0, "echo": False, "ignore_eos": False}
    values |= {"priority": 0, "include_reasoning": True, "return_routed_experts": False}
    values |= {"stop": "", "modalities": ["text"], "prompt_cache_key": "a"}  # type: ignore[dict-item]
    assert ask(client, **empty, **values, guided_regex="").status_code == 200
    said = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None}
    chat = [{"role": "user", "content": "1 + 1?"}, said, {"role": "user", "content": "2 + 2?"}]
    assert ask(client, chat, stream_options={"include_usage": None}).status_code == 200
    body = {"token_ids": [5], "sampling_params": None, "features": {}, "output_mode": "tokens"}
    assert client.post(f"/{KEY}/inference/v1/generate", json=body).status_code == 200


def test_reasoning_is_read_by_both_names() -> None:
    for key in ("reasoning", "reasoning_content"):
        for other in (None, ""):
            said = {"role": "assistant", "content": "2"}
            said |= dict.fromkeys(("reasoning_content", "reasoning"), other) | {key: "hm"}
            assert ChatMessage.model_validate(said).parsed().thoughts == "hm"


def test_a_chat_is_tokenized_once_however_many_turns_it_has(sampler: Recorded) -> None:
    encoded = list[int]()

    class Counting(SpecialTokens):
        def encode(self, *given: Any) -> list[int]:
            encoded.append(len(given[0]))
            return super().encode(*given)

    said = [("user", "1 + 1?"), ("assistant", "2")] * 20 + [("user", "3 + 3?")]
    chat = [ChatMessage(role=role, content=text) for role, text in said]  # type: ignore[arg-type]
    encoder = PromptEncoder(sampler.tokenizer)
    encoder.special = Counting(sampler.tokenizer, encoder.tags)
    tokens = write(Chat(ChatFormat(encoder)), chat)
    plain = [{"role": role, "content": text} for role, text in said]
    assert tokens == encoder.encode(plain)  # type: ignore[arg-type]
    assert sum(encoded) < 4 * len(sampler.tokenizer.decode(tokens))


HALF = "a \ud83d"  # half a surrogate pair, as programs that cut UTF-16 write


@pytest.mark.parametrize(
    "keys",
    [
        {"content": HALF},
        {"content": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
        {"tools": [{"type": "function", "function": {"name": HALF, "parameters": {HALF: HALF}}}]},
        {"stop": HALF},
        {"user": HALF},
        {
            "content": [
                {"role": "user", "content": "Go."},
                {
                    "role": "assistant",
                    "reasoning_content": HALF,
                    "tool_calls": [
                        {
                            "id": HALF,
                            "function": {"name": HALF, "arguments": json.dumps({HALF: HALF})},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": HALF, "content": HALF},
            ]
        },
    ],
)
def test_half_a_surrogate_pair_is_cleaned_where_it_enters(
    client: TestClient, sampler: Recorded, keys: dict[str, Any]
) -> None:
    sampler.text = "2"
    assert ask(client, **keys).status_code == 200
    for key in ("model", HALF):  # in an error's message
        refused = ask(client, **{**keys, key: HALF})
        assert refused.status_code in (400, 404) and refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "1: JSON decode error: Expecting property name"),
        ("[1]", "Input should be"),
        ('"text"', "Input should be"),
        ("", "Field required"),
        ('{"model": "tiny"}', "messages: Field required"),
        ('{"model": "tiny", "messages": []}', "messages: List should have"),
    ],
)
def test_malformed_bodies_are_refused(client: TestClient, content: str, said: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = client.post(f"/{KEY}/v1/chat/completions", content=content, headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == 400 and error["message"].startswith(said)


def test_the_key_is_in_the_address_or_the_header(client: TestClient) -> None:
    listed = client.get(f"/{KEY}/v1/models").json()
    (model,) = listed.pop("data")
    assert listed == {"object": "list"}
    shown = {"id": "tiny", "object": "model", "created": 0, "owned_by": "tramontane"}
    assert model == shown | {"max_model_len": MAX_LEN}
    assert client.get(f"/{KEY}/v1/models/{model['id']}").json() == model
    unknown = client.get(f"/{KEY}/v1/models/some/other")
    error = unknown.json()["error"]
    assert unknown.status_code == error["code"] == 404 and "'some/other'" in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": None, "code": 404}
    good = {"Authorization": f"Bearer {KEY}"}
    assert client.get("/v1/models", headers=good).status_code == 200
    for path, headers in (("/v1/models", {}), ("/other/v1/models", good)):
        assert client.get(path, headers=headers).status_code == 401
    for page in ("openapi.json", "docs", "redoc"):  # FastAPI's, which need no key
        assert client.get(f"/{page}").status_code == 404


def test_no_request_has_a_thread(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of a server outlive its event loop: after SIGTERM, `serve` waited 20 s for them."""
    threads: list[Any] = []
    monkeypatch.setattr("anyio.to_thread.run_sync", threads.append)
    statuses = [ask(client).status_code, ask(client, n=0).status_code]
    statuses += [client.get(f"/{KEY}/v1/models{path}").status_code for path in ("", "/none")]
    assert statuses == [200, 400, 200, 404] and not threads


def test_tools_whose_calls_cannot_be_read_are_refused() -> None:
    sampler = Recorded()  # its tokenizer keeps the template
    encoder = PromptEncoder(sampler.tokenizer, PromptConfig(chat_template=UNREAD))
    model = ModelEndpoint("tiny", Config(), encoder, SamplingParams(300), *sampler.served)
    client, sampler.text = TestClient(make_app(key_is(KEY, model))), "2"
    refused = ask(client, tools=[TOOL])
    assert refused.status_code == 400 and "conversation.calls" in refused.json()["error"]["message"]
    assert ask(client).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_headers_around_an_answer_are_not_streamed(stream: bool) -> None:
    sampler = Recorded()  # its tokenizer keeps the template
    template = (
        "{% for m in messages %}{{ m.role }}>{% if m.role == 'assistant' %}"
        "{% if m.reasoning_content %}aside,{{ m.reasoning_content }};to {% endif %}all,"
        "{% endif %}{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant>{% endif %}"
    )
    encoder = PromptEncoder(sampler.tokenizer, PromptConfig(chat_template=template))
    model = ModelEndpoint("tiny", Config(), encoder, SamplingParams(300), *sampler.served)
    client = TestClient(make_app(key_is(KEY, model)))
    sampler.text = "aside,One and one;to all,It is 2."
    answer, said = ask(client, stream=stream), {"reasoning_content": "", "content": ""}
    if stream:
        lines = [x[6:] for x in answer.text.split("\n\n") if x.startswith("data: {")]
        deltas = [json.loads(x)["choices"][0]["delta"] for x in lines if json.loads(x)["choices"]]
    else:
        deltas = [answer.json()["choices"][0]["message"]]
    for delta in deltas:
        for key in said:
            said[key] += delta.get(key) or ""
    assert said == {"reasoning_content": "One and one", "content": "It is 2."}
