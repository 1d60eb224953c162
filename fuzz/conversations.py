"""Have conversations with hostile environments and hostile models: part of `make hostile`.

`python -m fuzz.conversations --seconds 300 --seed 0` runs rounds of conversations, many at once, in
real processes of environments. Environments raise, hang, return nonsense, print without end, fork,
exit and kill, some of them while they hold the interpreter; the model writes calls that are broken,
nested, huge, full of special tokens, or name tools that do not exist. Each act has the endings that
the documentation promises. Harmless conversations share the processes, and must complete, unless
their process died under them MAX_DEATHS times. The event loop must not stall for longer than
STALL_SECONDS, and after each round there must be no process, file or descriptor that was not there
before. The exit code is 1 if any of this fails.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from fuzz.hostile import World, memory_mb
from fuzz.vocabulary import FORMS
from tramontane.config import Config
from tramontane.controller.conversations import Conversations, start_conversations
from tramontane.data.prompts import PromptEncoder
from tramontane.environments import host
from tramontane.environments.protocol import Turn
from tramontane.models.loading import load_tokenizer
from tramontane.placement.thread import LocalPlacement
from tramontane.status import Status
from tramontane.tokens import ints
from tramontane.types import Completion, Problem, SamplingParams

STEP_SECONDS, LATE_SECONDS = 8.0, 4.0  # limit of a step, and of a process that does not answer
AT_ONCE, L_MAX = 24, 20_000
ROUND_SECONDS = 900.0  # limit of a round
STALL_SECONDS = 1.0  # of the event loop, on a busy machine
GROWTH_MB = 200  # of the controller's process, over all rounds
HARMLESS = "harmless"


def _spin() -> None:
    while True:
        pass


def _print() -> None:
    while True:
        print("x" * 1000)


def _write() -> None:
    while True:
        os.write(1, b"x" * 1000)


def _daemon() -> str:
    """Leaves a process that has its own session and no parent."""
    subprocess.Popen("setsid sleep 1000 & setsid sleep 1000 &", shell=True).wait()
    return "started"


def _fork() -> str:
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
    return "forked"


def _files() -> str:
    for _ in range(200):
        tempfile.mkstemp()
    Path(tempfile.mkdtemp()).chmod(0)
    return "written"


def _grow() -> None:
    kept = []
    while True:
        kept.append(bytearray(1 << 20))


async def _never() -> None:
    await asyncio.sleep(1e6)


async def _block() -> None:
    time.sleep(1e6)


async def _cancel() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


async def _end_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(1)


def _raises(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class _Misuse(_Unprintable, ValueError):
    pass


class _Text(str):
    """Cannot be imported where it is read, if it is sent as it is."""

    def __reduce__(self) -> Any:
        raise RuntimeError("not sent")


class _Broken:
    """Raises whatever is done with it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError("no text")


FAILED, LATE, DONE = "environment_failed", "step_timeout", "completed"
# What an environment does in one of its steps, and the endings that follow.
ACTS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    HARMLESS: (lambda: "Go on!", {DONE}),
    "raise": (_raises(RuntimeError("broken")), {FAILED}),
    "raise a long text": (_raises(RuntimeError("x" * 10**7)), {FAILED}),
    "raise without a text": (_raises(_Unprintable()), {FAILED}),
    "exit by exception": (_raises(SystemExit(3)), {FAILED}),
    "interrupt": (_raises(KeyboardInterrupt()), {FAILED}),
    "generator exit": (_raises(GeneratorExit()), {FAILED}),
    "cancelled": (_raises(asyncio.CancelledError()), {FAILED}),
    "stop iteration": (_raises(StopIteration()), {FAILED}),
    "recursion": (lambda: (lambda f: f(f))(lambda f: f(f)), {FAILED}),
    "return nothing": (lambda: None, {FAILED}),
    "return nonsense": (lambda: {"messages": object()}, {FAILED}),
    "return numbers": (lambda: (1, 2, 3, 4), {FAILED}),
    "return a lock": (threading.Lock, {FAILED}),
    "return no end": (lambda: ("x" for _ in iter(int, 1)), {FAILED}),
    "return nan": (lambda: ("x", float("nan"), False), {FAILED}),
    "return a huge text": (lambda: "word " * 10**7, {FAILED}),
    "return many messages": (lambda: Turn([{"role": "user", "content": "x"}] * 10**5), {FAILED}),
    "return a long text": (lambda: "word " * 10**5, {"context_full"}),
    "return special tokens": (lambda: "<s></s><think>" * 4000, {"context_full", DONE}),
    "return half characters": (lambda: "a\ud800b\x00", {DONE}),
    "return marks": (lambda: "\ufdd0\ufdd1\ufdd00\ufdd0" * 100, {DONE}),
    "hang": (lambda: time.sleep(60), {LATE}),
    "hang asleep": (_never, {LATE}),
    "spin": (_spin, {LATE}),
    "print": (_print, {LATE}),
    "write to the terminal": (_write, {LATE, FAILED}),  # if another has closed it
    "print from a child": (lambda: subprocess.run("yes"), {LATE, FAILED}),
    "block the loop": (_block, {LATE}),
    "hold the interpreter": (lambda: re.match(r"(a+)+$", "a" * 60 + "b"), {LATE}),
    "stop": (lambda: os.kill(os.getpid(), signal.SIGSTOP), {LATE, DONE}),
    "exit": (lambda: os._exit(3), {FAILED}),
    "kill": (lambda: os.kill(os.getpid(), signal.SIGKILL), {FAILED}),
    "kill the group": (lambda: os.killpg(0, signal.SIGKILL), {FAILED}),
    "kill from a child": (lambda: subprocess.run(["kill", "-9", f"-{os.getpgrp()}"]), {FAILED}),
    "return a text of its own": (lambda: _Text("x"), {DONE}),
    "return a broken object": (_Broken, {FAILED}),
    "raise misuse without a text": (_raises(_Misuse()), {FAILED}),
    "abort": (os.abort, {FAILED}),
    "fork": (_fork, {DONE}),
    "daemon": (_daemon, {DONE}),
    "file": (_files, {DONE}),
    "close the terminal": (lambda: [os.close(n) for n in (0, 1, 2)] and "closed", {DONE}),
    "close everything": (lambda: os.closerange(0, 4096), {FAILED, LATE}),
    "open everything": (lambda: [socket.socket() for _ in range(10**6)], {FAILED}),
    "allocate at once": (lambda: bytearray(1 << 40), {FAILED}),
    "allocate": (_grow, {FAILED}),
    "cancel every task": (_cancel, {FAILED, LATE, DONE}),
    "end the loop": (_end_loop, {FAILED, LATE}),
    "threads": (lambda: [threading.Thread(target=_spin, daemon=True).start() for _ in range(9)]
                and "started", {DONE, LATE}),
}  # fmt: skip


class Hostile:
    """Acts as its problem says in its second step, and ends after the third."""

    def start(self, problem: Problem) -> None:
        self.act, self.steps = ACTS[problem.metadata["act"]][0], 0

    def step(self, message: dict[str, Any]) -> Any:
        self.steps += 1
        if self.steps == 3:
            return Turn(done=True)
        answer = self.act() if self.steps == 2 else "Go on!"
        return Turn(answer) if isinstance(answer, str) else answer


def search(query: str, limit: int = 3) -> str:
    """Search.

    Args:
        query: What for.
        limit: How many results.
    """
    return f"{limit} results: {query}"


def speak(draw: Random, specials: list[str]) -> str:
    """A message of a hostile model, which may hold calls of any form."""
    parts = [*specials, "{", "[", '"', "\\", "a ", "\x00", "é", "<"]
    junk = "".join(draw.choice(parts) for _ in range(draw.randint(0, 40)))
    arguments: Any = draw.choice([
        '{"query": "x"}', '{"query": "x", "limit": "2"}', '{"query": 1}', '{"limit": [1]}',
        '{"query": "x"', '{"query": "' + junk + '"}', "[" * 3000, '{"a":' * 2000, "null", "NaN",
        '{"query": "' + "x" * 15_000 + '"}', '{"query": ' + "9" * 5000 + "}", '"\\ud800"', junk,
    ])  # fmt: skip
    name = draw.choice(["search", "Search", "rm -rf", "", "step", "__class__", "x" * 5000, junk])
    call = draw.choice([
        f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>',
        f"<tool_call><function={name}><parameter=query>{arguments}</parameter></function>",
        f'{{"name": "{name}", "parameters": {arguments}}}',
        f"[TOOL_CALLS]{name}[ARGS]{arguments}", f"[TOOL_CALLS][{arguments}]",
        f"<|python_tag|>{arguments}", f"```python\n{arguments}\n```", f"```{arguments}",
        "<tool_call>" * draw.randint(1, 300), "<think></think>" * 900, "</think><tool_call>", junk,
    ])  # fmt: skip
    return draw.choice([call, call * draw.randint(1, 80), f"{junk}{call}{junk}", junk])[:15_000]


class Round:
    """Conversations of one round: harmless ones, and one of each of some acts."""

    def __init__(self, conversations: Conversations, encoder: PromptEncoder, seed: int) -> None:
        self.conversations, self.draw = conversations, Random(seed)
        self.tokenizer = encoder.tokenizer
        self.specials = [str(t) for t in self.tokenizer.added_tokens_decoder.values()]
        self.stall, self.found = 0.0, list[tuple[str, Completion, float]]()

    async def run(self, acts: list[str]) -> None:
        watch = asyncio.create_task(self._watch())
        talks = (self._talk(number, act) for number, act in enumerate(acts))
        await asyncio.wait_for(asyncio.gather(*talks), ROUND_SECONDS)
        watch.cancel()

    async def _talk(self, number: int, act: str) -> None:
        problem = Problem(str(number), "math", "1 + 1?", "2", metadata={"act": act})
        request = Completion.requested(number, 0, [], number, SamplingParams(L_MAX))
        began = time.monotonic()
        while request.status is not Status.ENDED:
            if request.status is Status.SAMPLED:
                request.take_turn(self._sampled(request))
                request.move(Status.STEPPING)
            await self.conversations.answer(L_MAX, problem, request)
        self.found.append((act, request, time.monotonic() - began))

    def _sampled(self, request: Completion) -> Completion:
        text = speak(self.draw, self.specials)
        new = self.tokenizer(text, add_special_tokens=False)["input_ids"][:3000]
        new.append(self.tokenizer.eos_token_id)
        copy = request.copy()
        copy.token_ids.extend(new)
        copy.logprobs.extend([-1.0] * len(new))
        copy.versions.extend(ints([0] * len(new)))
        return copy.completed("stop")

    async def _watch(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.01)
            self.stall = max(self.stall, time.perf_counter() - began - 0.01)

    def faults(self) -> list[str]:
        """The endings that are not those of their act."""
        found = []
        for act, completion, _ in self.found:
            ending, reason = completion.ending or "none", completion.ending_reason
            # A conversation may be taken for the one that harmed its process.
            blamed = reason.startswith(("its process died", "its environment was killed"))
            if ending not in ACTS[act][1] and not blamed:
                found.append(f"{act}: {ending} ({reason[:200]})")
            if ending in (FAILED, LATE) and not 0 < len(reason) < 1000:
                found.append(f"{act}: a reason of {len(reason)} characters")
        return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.conversations")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="only acts with this text in their names")
    args = parser.parse_args()
    host.LATE_SECONDS = LATE_SECONDS
    encoder = PromptEncoder(load_tokenizer("tiny"))
    chosen = [act for act in ACTS if not args.only or args.only in act]
    endings: defaultdict[str, Counter[str]] = defaultdict(Counter)
    slowest: defaultdict[str, float] = defaultdict(float)
    faults, stall, rounds = Counter[str](), 0.0, 0
    end = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory(prefix="tramontane-hostile-") as folder:
        tempfile.tempdir = folder
        memory = memory_mb()
        while time.monotonic() < end:
            draw = Random(f"{args.seed}/{rounds}")
            acts = draw.sample(chosen, min(AT_ONCE // 4, len(chosen)))
            acts += [HARMLESS] * (AT_ONCE - len(acts))
            draw.shuffle(acts)
            config = Config.model_validate({
                "data": {"environment": "fuzz.conversations:Hostile",
                         "tools": ["fuzz.conversations:search"]},
                "conversation": {"step_timeout": STEP_SECONDS, "workers": 2, "memory_mb": 512,
                                 "calls": draw.choice(FORMS), "replay": draw.random() < 0.5},
            })  # fmt: skip
            placement = LocalPlacement(config, print)
            with start_conversations(config, encoder, placement, print) as conversations:
                talks = Round(conversations, encoder, draw.randrange(2**32))
                try:
                    asyncio.run(talks.run(acts))
                except asyncio.TimeoutError:
                    missing = Counter(acts) - Counter(act for act, *_ in talks.found)
                    faults[f"no ending within {ROUND_SECONDS:g} s: {[*missing]}"] += 1
            placement.close()
            for act, completion, seconds in talks.found:
                endings[act][str(completion.ending)] += 1
                slowest[act] = max(slowest[act], seconds)
            # The folder of this process stays until it ends.
            kept = r"file: \S*/tramontane-\d+-\w+$"
            if not rounds:  # the first one starts what stays, as the process that forks workers
                world = World(f"hostile-{secrets.token_hex(4)}", Path(folder))
            left = [what for what in world.leftovers() if not re.fullmatch(kept, what)]
            faults.update(re.sub(r"\d+", "N", what) for what in left)
            faults.update(talks.faults())
            stall, rounds = max(stall, talks.stall), rounds + 1
            print(f"round {rounds}: {len(talks.found)} ended, {sum(faults.values())} faults, "
                  f"stall {talks.stall:.2f} s", flush=True)  # fmt: skip
        grown = memory_mb() - memory
    if stall > STALL_SECONDS:
        faults[f"the event loop stalled for {stall:.1f} s"] += 1
    if grown > GROWTH_MB:
        faults[f"the controller grew by {grown} MB"] += 1
    for act, counts in endings.items():
        print(f"{act:26}{slowest[act]:7.1f} s  {dict(counts)}")
    for fault, times in faults.most_common():
        print(f"    {times} × {fault}")
    total = sum(sum(counts.values()) for counts in endings.values())
    print(f"seed {args.seed}: {total} conversations in {rounds} rounds; stall {stall:.2f} s; "
          f"grew by {grown} MB; {len(faults)} kinds of faults")  # fmt: skip
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
