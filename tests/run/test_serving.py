"""A run whose model clients ask while it is trained."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="not installed: pip install 'tramontane-rl[view]'")

import httpx

from tests.controller.test_pipeline import check_ledger, rollouts
from tests.runs import small_config
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train

SECONDS = 300.0  # limit of an answer


class Client(threading.Thread):
    """Asks one thing after another as long as the endpoint's address is in the run's folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.file, self.answers = folder / "endpoint.json", list[dict[str, Any]]()
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.file.exists():
            time.sleep(0.05)
        self.mode = self.file.stat().st_mode & 0o777
        base = json.loads(self.file.read_text())["base_url"]
        with httpx.Client(timeout=SECONDS) as client:
            try:
                model = client.get(f"{base}/models").json()["data"][0]["id"]
                while not self.ended.is_set():
                    said = [{"role": "user", "content": "What is 3 + 4?"}]
                    body = {"model": model, "messages": said, "max_tokens": 24, "n": 2}
                    answer = client.post(f"{base}/chat/completions", json=body)
                    if answer.status_code == 200:
                        self.answers += answer.json()["choices"]
            except httpx.TransportError:  # the run has ended
                pass


@pytest.mark.slow
def test_clients_are_answered_and_what_is_trained_on_stays(tmp_path: Path, one_layer: str) -> None:
    sizes = {"updates": 3, "max_staleness": 0, "diversity": "none"}
    generator = {"serve": {"completions": 4}, "dtype": "float32"}
    config = small_config(tmp_path / "served", model=one_layer, pipeline=sizes, generator=generator)
    client = Client(tmp_path / "served")
    client.start()
    train(config, QuietScreen())
    client.ended.set()
    client.join(SECONDS)
    assert not client.is_alive() and not client.file.exists()
    assert client.mode == 0o600  # the address holds the key
    versions = [max(answer["versions"]) for answer in client.answers]
    assert versions == sorted(versions) and len({*versions}) > 1
    for answer in client.answers:
        assert len(answer["token_ids"]) == len(answer["token_logprobs"]) <= 24
    check_ledger(tmp_path / "served", config)
    generator = {"dtype": "float32"}
    train(
        small_config(tmp_path / "alone", model=one_layer, pipeline=sizes, generator=generator),
        QuietScreen(),
    )
    served, alone = rollouts(tmp_path / "served"), rollouts(tmp_path / "alone")
    places = [
        [(r["update"], r["group"], r["index"], r["problem"]) for r in rows]
        for rows in (served, alone)
    ]
    assert places[0] == places[1]
