"""`tramontane serve` as a process, with the tiny base."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any

import httpx
import pytest

import tramontane
from tests.forked import Command
from tests.paths import ROOT
from tests.run.test_resume import wait_until
from tramontane.data import playground
from tramontane.models.loading import load_tokenizer

pytest.importorskip("fastapi", reason="not installed: pip install 'tramontane-rl[view]'")

SECONDS = 120.0  # limit of a start, and of an answer
PROMPT = "What is 3 + 4?"
OPTIONS = ["generator.device=cpu", "--slots", "8", "--max-tokens", "24"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving("tiny") as address:
        yield address


@contextmanager
def serving(model: str) -> Iterator[str]:
    process = Command("serve", model, *OPTIONS)
    try:
        wait_until(lambda: re.search(r"^http\S+\n", process.printed, re.M) is not None, process)
        yield re.findall(r"^http\S+", process.printed, re.M)[0]
        os.kill(process.pid, signal.SIGINT)
        assert process.wait() == 130, process.printed
    finally:
        process.process.kill()


@cache
def client() -> httpx.Client:
    """One for all requests: each has certificates to read when it is made."""
    return httpx.Client(timeout=SECONDS)


def ask(address: str, **keys: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], **keys}
    answer = client().post(f"{address}/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_greedy_answers_are_those_of_generate(address: str) -> None:
    choice = ask(address, temperature=0, max_tokens=30)["choices"][0]
    message = choice["message"]
    (expected,) = tramontane.generate("tiny", PROMPT, temperature=0.0, max_tokens=30, device="cpu")
    thoughts, _, content = expected.removeprefix("<think>").partition("</think>")
    assert (message["reasoning_content"], message["content"]) == (thoughts, content.strip())
    assert choice["versions"] == [0] * len(choice["token_ids"])
    assert all(logprob <= 0 for logprob in choice["token_logprobs"])


def test_both_routes_sample_the_same_tokens(address: str) -> None:
    chat = ask(address, temperature=1.0, seed=5, n=3)
    root = address.removesuffix("/v1")
    body = {
        "token_ids": chat["prompt_token_ids"],
        "sampling_params": {"temperature": 1.0, "seed": 5, "n": 3},
    }
    tokens = client().post(f"{root}/inference/v1/generate", json=body).json()
    found = [choice["token_ids"] for choice in chat["choices"]]
    assert found == [choice["token_ids"] for choice in tokens["choices"]]
    assert len({*map(tuple, found)}) == 3


def test_more_requests_than_slots_are_answered_together(address: str) -> None:
    with ThreadPoolExecutor(32) as clients:
        answers = list(clients.map(lambda seed: ask(address, seed=seed), range(32)))
    assert len({tuple(a["choices"][0]["token_ids"]) for a in answers}) > 16
    assert len({a["id"] for a in answers}) == 32


def test_the_client_of_openai(address: str) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    client = openai.OpenAI(base_url=address, api_key="none", timeout=SECONDS)
    model = client.models.list().data[0].id
    asked = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0}
    whole = client.chat.completions.create(**asked)
    pieces = list(client.chat.completions.create(**asked, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].token_ids == pieces[-1].choices[0].token_ids
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{address.rsplit('/', 2)[0]}/other/v1", api_key="x").models.list()


@pytest.mark.slow
def test_an_image_in_a_chat_is_seen() -> None:
    """By the client of OpenAI, as `generate` sees it."""
    openai = pytest.importorskip("openai", reason="openai is not installed")
    drawn = playground.problems("test", 0, (1, 2), ["en"], ["drawn_sums"], count=2)
    problems = list(islice(drawn, 2))
    with serving("tiny_vision") as address:
        client = openai.OpenAI(base_url=address, api_key="none", timeout=SECONDS)
        for problem in problems:
            [image] = problem.images
            parts = [
                {"type": "image_url", "image_url": {"url": image}},
                {"type": "text", "text": problem.problem},
            ]
            chat: Any = [{"role": "user", "content": parts}]
            asked = {"model": "tiny_vision", "messages": chat, "temperature": 0}
            answer = client.chat.completions.create(**asked)
            choice = answer.choices[0].to_dict()
            (expected,) = tramontane.generate(
                "tiny_vision", problem.problem, images=[image], temperature=0.0, max_tokens=24,
                device="cpu",
            )  # fmt: skip
            message = choice["message"]
            assert message["content"] in expected
            assert (message.get("reasoning_content") or "") in expected
            assert len(choice["token_ids"]) > 9 and len(answer.prompt_token_ids) > 64


@pytest.mark.parametrize("posts", ["messages", "tokens"])
def test_rollouts_of_verifiers(address: str, monkeypatch: pytest.MonkeyPatch, posts: str) -> None:
    """Its environment, interception server and clients, for sums that its rubric judges."""
    vf = pytest.importorskip(
        "verifiers.v1", reason="needs tramontane-rl[verifiers]", exc_type=ImportError
    )
    monkeypatch.syspath_prepend(str(ROOT / "tests/verifier"))
    agent = {"runtime": {"type": "subprocess"}}
    env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset={"id": "sums_taskset"}, agent=agent))
    client = vf.EvalClientConfig(base_url=address, api_key_var="NO_KEY")
    if posts == "tokens":
        tiny, form = load_tokenizer("tiny").name_or_path, {"name": "default"}
        client = vf.TrainClientConfig(
            base_url=address, api_key_var="NO_KEY", renderer_model_name=tiny, renderer=form
        )
    context = vf.ModelContext("tiny", client, vf.SamplingConfig(temperature=0, max_tokens=24))

    async def rollouts() -> list[Any]:
        async with env.serving():
            slots = [slot for task in env.taskset for slot in env.slots(task)]
            return await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))

    for number, episode in enumerate(asyncio.run(rollouts())):
        assert episode.ok, episode
        (trace,) = episode.traces
        said = ask(
            address,
            messages=[
                {"role": "system", "content": "Calculate."},
                {"role": "user", "content": f"{number} + 1?"},
            ],
            temperature=0,
            max_tokens=24,
        )["choices"][0]["message"]
        assert trace.last_reply == (said["content"] or "")
        assert trace.rewards["right"].score == (trace.last_reply == str(number + 1))
