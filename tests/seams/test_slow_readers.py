"""Readers that are slower than what is written for them."""

import asyncio
import json
import re
import time
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="not installed: pip install 'tramontane-rl[view]'")

from tests.controller.counting import CountingGenerator
from tests.controller.test_generators import pool_of
from tests.environments.test_endpoint import KEY, Recorded
from tests.placement.test_process import SECONDS, printed_by
from tramontane.config import Config
from tramontane.controller.pooled_generator import ASKED
from tramontane.controller.sampling import Sampler
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.endpoint import ModelEndpoint, key_is, make_app
from tramontane.placement.printed import BURST
from tramontane.types import SamplingParams


@pytest.mark.parametrize("slow", [0.0, 0.05])
def test_a_reader_that_looks_away_misses_nothing(slow: float) -> None:
    """The last tokens may come while a client is written to; nobody else wakes it afterwards."""
    pool = pool_of([CountingGenerator()], [])

    async def use() -> None:
        sampler = Sampler(pool, ASKED)

        async def read(tokens: int) -> int:
            async for (found,) in sampler.sample([1], 1, 0, SamplingParams(tokens)):
                seen = len(found.token_ids)
                for _ in range(seen % 4):
                    await asyncio.sleep(slow)
            return seen

        for tokens in range(1, 12):
            assert await asyncio.wait_for(read(tokens), 10) == tokens
        pool.close()

    asyncio.run(use())


def test_a_flood_is_neither_waited_for_nor_kept_and_is_counted(tmp_path, monkeypatch, capfd):
    code = "import os\nfor _ in range(200): os.write(1, b'x' * 99 + b'\\n' + b'y' * (1 << 20))\n"
    code += "os.write(1, b'\\nlast')"
    began = time.monotonic()
    printed_by(code, tmp_path, monkeypatch)
    shown = capfd.readouterr().err
    assert time.monotonic() - began < SECONDS / 3
    assert len(shown) < 2 * BURST
    dropped = sum(map(int, re.findall(r"(\d+) bytes dropped", shown)))
    kept = sum(len(line) - len("reward: ") for line in shown.splitlines() if "dropped" not in line)
    assert abs(200 * (100 + (1 << 20)) + 5 - dropped - kept) < 1000  # line ends


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_reads_slowly_gets_all_and_holds_up_nobody(streams: bool) -> None:
    """Each part of its answer is taken only once ten others are answered."""
    sampler = Recorded()
    sampler.text = "One and two are three. " * 2
    encoder = PromptEncoder(sampler.tokenizer)
    model = ModelEndpoint("tiny", Config(), encoder, SamplingParams(300, 0.7), *sampler.served)
    app = make_app(key_is(KEY, model))

    async def ask(pause: Any, stream: bool) -> tuple[int, str]:
        messages = [{"role": "user", "content": "1 + 1?"}]
        body = json.dumps({"model": "tiny", "messages": messages, "stream": stream}).encode()
        asked, sent = [{"type": "http.request", "body": body}], list[dict[str, Any]]()

        async def receive() -> dict[str, Any]:
            if not asked:
                await asyncio.sleep(SECONDS)
            return asked.pop()

        async def send(part: dict[str, Any]) -> None:
            await pause()
            sent.append(part)

        path = f"/{KEY}/v1/chat/completions"
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
        await app(scope | {"headers": headers}, receive, send)
        text = b"".join(part.get("body", b"") for part in sent).decode()
        if not stream:
            return len(sent), json.loads(text)["choices"][0]["message"]["content"]
        lines = text.removesuffix("data: [DONE]\n\n").strip().split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        return len(sent), "".join(delta.get("content") or "" for delta in deltas)

    async def at_once() -> None:
        return None

    async def others() -> None:
        answers = await asyncio.gather(*(ask(at_once, not streams) for _ in range(10)))
        assert {text for _, text in answers} == {sampler.text.strip()}

    async def use() -> tuple[int, str]:
        return await asyncio.wait_for(ask(others, streams), SECONDS)

    parts, text = asyncio.run(use())
    assert text.strip() == sampler.text.strip()
    assert parts > 10 or not streams
