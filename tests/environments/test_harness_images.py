"""Harnesses whose chats have images."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("fastapi", reason="not installed: pip install 'tramontane-rl[view]'")

from tests.environments.harnesses import ask
from tests.environments.test_harness import play
from tests.environments.test_worker import KEY
from tests.pictures import uri
from tests.vision import write_wrapper
from tramontane.config import Config
from tramontane.data.images import images_of
from tramontane.environments.worker import EnvironmentWorker
from tramontane.evaluation.checkpoint import encoder_of
from tramontane.types import Problem

ONE, OTHER = uri(width=30, height=30), uri(width=56, height=28, seed=1)
SEEN = SimpleNamespace()


def part(image):
    return {"type": "image_url", "image_url": {"url": image}}


def user(*parts):
    return {
        "role": "user",
        "content": [
            part(p) if p.startswith("data:") else {"type": "text", "text": p} for p in parts
        ],
    }


class Shows:
    """Asks about the row's image and, behind the answer, about another; then anew about that."""

    def run(self, problem, base_url):
        chat = [user(*problem.images, "What?")]
        chat.append(ask(base_url, chat))
        ask(base_url, [*chat, user("And ", OTHER, "?")])
        ask(base_url, [user("Only ", OTHER, ".")])
        ask(base_url, [{"role": "user", "content": "None."}])
        return 1.0


class Refused:
    """Sends what is not taken, and then a text."""

    def run(self, problem, base_url):
        chats = {
            "address": [user("a")],
            "broken": [user(f"{ONE[:60]}", "?")],
            "large": [user(uri(width=70, height=70), "?")],
            "said": [user("a"), {"role": "assistant", "content": [part(ONE)]}, user("b")],
        }
        chats["address"][0]["content"].append(part("https://a.b/c.png"))
        SEEN.refused = {}
        route = f"{base_url.removesuffix('/v1')}/inference/v1/generate"

        def post(name, ids):
            answer = httpx.post(route, json={"token_ids": ids}, timeout=30).json()
            if "error" in answer:
                SEEN.refused[name] = answer["error"]["code"], answer["error"]["message"]

        post("tokens at first", [259, 5])
        for name, chat in chats.items():
            body = {"model": "tramontane", "messages": chat}
            answer = httpx.post(f"{base_url}/chat/completions", json=body, timeout=30)
            SEEN.refused[name] = answer.status_code, answer.json()["error"]["message"]
        body = {"model": "tramontane", "messages": [user(ONE, "?")]}
        answer = httpx.post(f"{base_url}/chat/completions", json=body, timeout=30).json()
        ids = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
        assert 259 in ids
        post("tokens", [259, 5])
        post("more tokens", [*ids, 259])
        post("extended", [*ids, 5])
        return 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_wrapper(folder)
    return str(folder)


def worker_of(folder, name):
    data = {
        "train": "playground:", "system_prompt": None, "environment": f"{__name__}:{name}",
        "images": {"max_pixels": 60 * 60},
    }  # fmt: skip
    config = Config(model=folder, data=data)
    return EnvironmentWorker(config, encoder_of(config))


def test_a_harness_shows_images_in_the_conversations_tokens(folder):
    worker = worker_of(folder, "Shows")
    given = Problem("1", "math", "Go on.", answer="5", images=[ONE])
    answer, request, _ = asyncio.run(play(worker, "A.", "B.", "C.", "D.", given=given))
    assert answer.ending == "completed", answer.reason
    encoder = worker._format.encoder
    token = encoder.images.token_id
    counts = [[*s.prompt_ids, *s.token_ids].count(token) for s in request.sequences]
    one, other = (encoder.expansion(image).count("[IMG]") for image in (ONE, OTHER))
    assert counts == [one + other, other, 0]
    assert [(s.images, s.put_images) for s in request.sequences] == [
        ([ONE], [OTHER]), ([OTHER], []), ([], []),
    ]  # fmt: skip
    first = encoder.decode([*request.earlier[0].prompt_ids, *request.earlier[0].token_ids])
    assert encoder.expansion(OTHER) in first and "And " in first
    assert images_of(given, request) == [ONE, OTHER]


def test_what_a_harness_may_not_send_is_its_own_error(folder):
    worker = worker_of(folder, "Refused")
    answer, request, _ = asyncio.run(play(worker, "A.", "B."))
    assert answer.ending == "completed", answer.reason
    assert {code for code, _ in SEEN.refused.values()} == {400}
    words = {name: said for name, (_, said) in SEEN.refused.items()}
    assert "nothing is fetched" in words["address"] and "max_pixels allows" in words["large"]
    assert "broken" in words["broken"] or "base64" in words["broken"]
    assert "an image in a message of the assistant" in words["said"]
    assert all("image tokens" in words.pop(f"{name}tokens") for name in ("", "more "))
    assert "image tokens" in words["tokens at first"] and len(words) == 5
    assert request.images == [ONE] and len(request.turns) == 2
    assert KEY not in worker._open
