"""Hostile clients of an endpoint, all at once: `python -m fuzz.clients --seconds 120`.

`tramontane serve` answers the shipped model. Clients are slow, repeat, vanish and lie, several at a
time, drawn from `ACTS`; beside them an honest one asks without a pause. Each of its requests must
be answered within `PATIENCE` seconds, no client may be answered with a fault of the server (500),
and the server must still run at the end. The exit code is 1 if any of this fails.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx

PATIENCE = 60.0  # seconds that an honest request may take beside the others
AT_ONCE = 6
START_SECONDS = 180.0

Act = Callable[["Target", Random], object]


class Target:
    """The endpoint under attack, and the statuses that it answered with."""

    def __init__(self, base: str) -> None:
        self.base, self.parts = base, urlsplit(base)
        self.statuses: Counter[int] = Counter()

    def ask(self, timeout: float = PATIENCE, **keys: Any) -> httpx.Response:
        chat = [{"role": "user", "content": "What is 2 + 3?"}]
        body = {"model": "tiny", "messages": chat, "max_tokens": 16} | keys
        answer = httpx.post(f"{self.base}/chat/completions", json=body, timeout=timeout)
        self.statuses[answer.status_code] += 1
        return answer

    def raw(self, head: str, body: bytes) -> socket.socket:
        """A connection on which a request was begun by hand."""
        place = str(self.parts.hostname), int(self.parts.port or 80)
        link = socket.create_connection(place, timeout=10)
        path = f"{self.parts.path}/chat/completions"
        link.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + body)
        return link


def body_of(**keys: object) -> bytes:
    chat = [{"role": "user", "content": "Count to a hundred."}]
    return json.dumps({"model": "tiny", "messages": chat, "max_tokens": 300} | keys).encode()


def read_slowly(target: Target, draw: Random) -> None:
    body = body_of(stream=True)
    with target.raw(f"Content-Type: application/json\r\nContent-Length: {len(body)}", body) as link:
        for _ in range(10):
            link.recv(draw.randint(1, 40))
            time.sleep(0.1)


def write_slowly(target: Target, draw: Random) -> None:
    body = body_of()
    with target.raw(f"Content-Type: application/json\r\nContent-Length: {len(body)}", b"") as link:
        for start in range(0, min(len(body), 40), 4):
            link.sendall(body[start : start + 4])
            time.sleep(0.1)


def vanish(target: Target, draw: Random) -> None:
    body = body_of(stream=draw.random() < 0.5, n=draw.randint(1, 8))
    with target.raw(f"Content-Type: application/json\r\nContent-Length: {len(body)}", body):
        time.sleep(draw.random())


def repeat(target: Target, draw: Random) -> None:
    for _ in range(4):  # as OpenAI's client does by itself
        try:
            target.ask(timeout=0.05, max_tokens=200, seed=1)
        except httpx.TimeoutException:
            continue


def lie(target: Target, draw: Random) -> None:
    """A body that is shorter, longer or of another kind than its head says."""
    body = draw.choice([body_of(), b"{" * 10_000, b"\xff\xfe\x00", b"null", b"[]", b'"\\ud83d"'])
    said = draw.choice([0, 1, len(body) - 1, len(body) + 7, 10**12, "minus one"])
    with target.raw(f"Content-Type: application/json\r\nContent-Length: {said}", body) as link:
        link.settimeout(2)
        try:
            answered = link.recv(4096).decode(errors="replace")
        except (TimeoutError, ConnectionError):
            return
        if status := re.match(r"HTTP/1\.1 (\d+)", answered):
            target.statuses[int(status[1])] += 1


def exaggerate(target: Target, draw: Random) -> None:
    requests: list[dict[str, Any]] = [
        {"n": 128}, {"n": 10**9}, {"max_tokens": 10**9}, {"temperature": 1e-38}, {"top_p": 1e-8},
        {"top_k": 2**31 - 1}, {"seed": -(2**63)}, {"stop": ["a"] * 100}, {"logprobs": True},
        {"messages": []}, {"messages": [{"role": "user", "content": "x" * 100_000}]},
        {"messages": [{"role": "user", "content": "<think>\u202e\x00</think>"}]},
        {"tools": [{"type": "function", "function": {"name": "a" * 1000}}]},
        {"stop_token_ids": [-1, 10**12]}, {"model": "other"}, {"logit_bias": {"1": 100}},
    ]  # fmt: skip
    target.ask(**draw.choice(requests))


ACTS: dict[str, Act] = {
    act.__name__: act for act in (read_slowly, write_slowly, vanish, repeat, lie, exaggerate)
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.clients")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    command = [sys.executable, "-m", "tramontane", "serve", "tiny"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    watchdog = threading.Timer(START_SECONDS + args.seconds + 2 * PATIENCE, server.kill)
    watchdog.start()
    try:
        found = (re.search(r"http://\S+?/v1", line) for line in server.stdout)
        target = Target(next(match[0] for match in found if match))
        output: list[str] = []
        threading.Thread(target=lambda: output.extend(server.stdout or ()), daemon=True).start()
        return attacked(target, server, args, output)
    finally:
        watchdog.cancel()
        server.terminate()
        server.wait(30)


def attacked(
    target: Target, server: subprocess.Popen[str], args: argparse.Namespace, output: list[str]
) -> int:
    end, acts, faults = time.monotonic() + args.seconds, Counter[str](), Counter[str]()

    def attack(number: int) -> None:
        draw = Random(f"{args.seed}/{number}")
        while time.monotonic() < end:
            name = draw.choice([*ACTS])
            acts[name] += 1
            try:
                ACTS[name](target, draw)
            except (OSError, httpx.HTTPError) as error:
                acts[f"{name}: {type(error).__name__}"] += 1

    attackers = [threading.Thread(target=attack, args=(n,)) for n in range(AT_ONCE)]
    for attacker in attackers:
        attacker.start()
    honest, slowest = 0, 0.0
    while time.monotonic() < end and server.poll() is None:
        began = time.monotonic()
        try:
            status = target.ask().status_code
            faults[f"an honest request was answered with {status}"] += status != 200
        except httpx.HTTPError as error:
            faults[f"an honest request failed: {type(error).__name__}"] += 1
        honest, slowest = honest + 1, max(slowest, time.monotonic() - began)
    for attacker in attackers:
        attacker.join(2 * PATIENCE)
    faults["the server has ended"] += server.poll() is not None
    faults["the server failed (500)"] += target.statuses[500]
    faults["tracebacks"] += sum("Traceback" in line for line in output)
    faults = +faults
    for name, count in sorted(acts.items()):
        print(f"{name:40} {count}")
    print(f"seed {args.seed}: {honest} honest requests, the slowest {slowest:.1f} s; statuses "
          f"{dict(sorted(target.statuses.items()))}; {len(faults)} kinds of faults")  # fmt: skip
    for fault, count in faults.items():
        print(f"  {count} × {fault}")
    if faults:
        print("".join(output[-60:]))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
