"""The load of many conversations with simulated tools on the controller's event loop, and what
parked keys and values save a generator.

    python -m benchmarks.conversations [--conversations 1000] [--turns 4] [--windows 6] ...

The environments' process, its tokens and the messages are real; generation is a wait of `--sample`
seconds a turn, and a step a wait that is lognormal around `--step` seconds, in one of 50 a hundred
times as long. Whenever a conversation ends, another begins, so that `--conversations` are always
under way. `stall` is the longest delay of a timer of the event loop, `loop_cores` the CPU time of
the loop's thread for each second, and `cores` that of the whole process, each as the median and
range over windows, `--warm-up` seconds after all have begun.

Then a generator of 1.8 M parameters samples `--turns` turns of `--tokens` tokens of `--parked`
conversations, `--repeats` times with the keys and values of those that wait parked, and as often
with all tokens prefilled again; the two take turns. A tool's answer of 60 tokens comes 40 decode
steps after the turn.

Prints lines, writes conversations.json next to this file, and exits with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from random import Random
from typing import Any

import torch

from benchmarks.measure import VOCAB, Promise, finish, machine, make_llama, spread
from tramontane.config import Config
from tramontane.controller.conversations import Conversations, start_conversations
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.protocol import Turn
from tramontane.generator.engine import SlotEngine
from tramontane.models.loading import load_tokenizer
from tramontane.placement.thread import LocalPlacement
from tramontane.status import Status
from tramontane.tokens import INSERTED, floats, ints
from tramontane.types import Completion, Problem, SamplingParams

BEGIN_SECONDS = 900.0  # limit for all conversations to have begun
TICK_SECONDS = 0.005  # between two looks at the event loop
MOST_CORES, MOST_STALL = 0.25, 0.1  # promised: of the loop's thread, and in seconds
EOS = 1  # of the shipped base model
ANSWER, WAIT_STEPS = 60, 40  # a tool's answer in tokens, and the wait for it in decode steps


class Tools:
    """Answers as many turns as its problem says, each after a simulated tool."""

    def start(self, problem: Problem) -> None:
        self.left, self.random = problem.metadata["turns"], Random()
        self.step_seconds = problem.metadata["step"]

    async def step(self, message: dict[str, Any]) -> Turn:
        slow = 100 if self.random.random() < 0.02 else 1
        await asyncio.sleep(slow * self.step_seconds * self.random.lognormvariate(0, 0.5))
        self.left -= 1
        return Turn("The tool says 42. " * 8, done=not self.left)


class Load:
    """Counts what conversations do, and how the event loop fares."""

    def __init__(self, args: argparse.Namespace, conversations: Conversations) -> None:
        self.args, self.conversations = args, conversations
        self.steps, self.stall = 0, 0.0
        data = {"turns": args.turns, "step": args.step}
        self.problem = Problem("p", "math", "What is 6 times 7?", "42", metadata=data)

    async def converse(self, number: int) -> None:
        """One conversation after another."""
        random, group = Random(number), number
        while True:
            sampling = SamplingParams(self.args.turns * (self.args.tokens + 200))
            request = Completion.requested(group, 0, [], number, sampling)
            while request.status is not Status.ENDED:
                if request.status is Status.SAMPLED:
                    await asyncio.sleep(self.args.sample * random.uniform(0.5, 1.5))
                    request.take_turn(self.sampled(request, random))
                    request.move(Status.STEPPING)
                await self.conversations.answer(sampling.max_tokens, self.problem, request)
                self.steps += 1
            group += self.args.conversations

    def sampled(self, request: Completion, random: Random) -> Completion:
        new = [random.randrange(100, 400) for _ in range(self.args.tokens - 1)] + [EOS]
        copy = request.copy()
        copy.token_ids.extend(new)
        copy.logprobs.extend([-1.0] * len(new))
        copy.versions.extend([0] * len(new))
        return copy.completed("stop")

    async def watch(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(TICK_SECONDS)
            self.stall = max(self.stall, time.perf_counter() - began - TICK_SECONDS)

    async def measure(self) -> dict[str, dict[str, float]]:
        """The median and range of each figure over `--windows` of `--seconds`."""
        tasks = [asyncio.create_task(self.watch())]
        tasks += [asyncio.create_task(self.converse(n)) for n in range(self.args.conversations)]
        await asyncio.wait_for(self._begun(), BEGIN_SECONDS)
        await asyncio.sleep(self.args.warm_up)
        windows = [await self._window(tasks) for _ in range(self.args.windows)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return {name: spread([w[name] for w in windows], 3) for name in windows[0]}

    async def _begun(self) -> None:
        """Wait until as many steps were made as there are conversations."""
        while self.steps < self.args.conversations:
            await asyncio.sleep(0.1)

    async def _window(self, tasks: list[asyncio.Task[None]]) -> dict[str, float]:
        self.stall, steps = 0.0, self.steps
        start = time.perf_counter(), time.thread_time(), time.process_time()
        done, _ = await asyncio.wait(
            tasks, timeout=self.args.seconds, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()  # none ends by itself
        seconds = time.perf_counter() - start[0]
        return {
            "steps_per_second": (self.steps - steps) / seconds,
            "loop_cores": (time.thread_time() - start[1]) / seconds,
            "cores": (time.process_time() - start[2]) / seconds,
            "stall_ms": 1000 * self.stall,
        }


def sampled_with(keep_kv: bool, args: argparse.Namespace, model: Any) -> dict[str, float]:
    """Tokens that a generator prefills and samples for conversations, and its rate."""
    prompt, most = [random_token(n) for n in range(120)], args.turns * (args.tokens + ANSWER)
    engine = SlotEngine(model, args.parked, len(prompt) + most)
    first = SamplingParams(args.tokens)
    engine.submit(
        [Completion.requested(n, 0, prompt, n, first, keep_kv=keep_kv) for n in range(args.parked)]
    )
    waiting: deque[tuple[int, Completion]] = deque()
    began, ended = time.perf_counter(), 0
    while ended < args.parked:
        for completion in engine.step():
            turn = len(completion.token_ids) // (args.tokens + ANSWER) + 1
            if turn == args.turns:
                ended += 1
                continue
            put = [random_token(n) for n in range(ANSWER)]
            limit = len(completion.token_ids) + ANSWER + args.tokens
            request = Completion.requested(
                completion.group, 0, prompt, completion.group, SamplingParams(limit)
            )
            request.token_ids = completion.token_ids + ints(put)
            request.logprobs = completion.logprobs + floats([0.0] * ANSWER)
            request.versions = completion.versions + ints([INSERTED] * ANSWER)
            request.keep_kv = keep_kv
            waiting.append((engine.stats.decode_steps + WAIT_STEPS, request))
        idle = not engine.unfinished and bool(waiting)
        while waiting and (idle or waiting[0][0] <= engine.stats.decode_steps):
            engine.submit([waiting.popleft()[1]])
    stats, seconds = engine.stats, time.perf_counter() - began
    return {
        "prefilled": stats.prefill_tokens,
        "parked": stats.parked_tokens,
        "tokens_per_second": stats.generated_tokens / seconds,
    }


def random_token(place: int) -> int:
    return 2 + place * 7919 % (VOCAB - 2)


def measure_parking(args: argparse.Namespace) -> dict[str, Any]:
    """What `sampled_with` finds for conversations that are parked, and prefilled again."""
    torch.set_num_threads(1)
    model = make_llama("1.8M", 16 * args.turns * (args.tokens + ANSWER))
    model.requires_grad_(False)
    found: dict[str, list[dict[str, float]]] = {"parked": [], "prefilled again": []}
    for _ in range(args.repeats):
        for name, runs in found.items():
            runs.append(sampled_with(name == "parked", args, model))
    return {
        name: {key: spread([run[key] for run in runs]) for key in runs[0]}
        for name, runs in found.items()
    }


def ignore(*_: Any, **__: Any) -> None:
    """No worker of this benchmark is lost."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200, help="sampled in a turn")
    parser.add_argument("--sample", type=float, default=10.0, help="mean seconds of a turn")
    parser.add_argument("--step", type=float, default=0.1, help="median seconds of a tool")
    parser.add_argument("--parked", type=int, default=32, help="conversations of a generator")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=float, default=60.0)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a window")
    args = parser.parse_args()
    data = {"environment": "benchmarks.conversations:Tools"}
    config = Config.model_validate({"data": data, "conversation": {"step_timeout": 300.0}})
    encoder = PromptEncoder(load_tokenizer(config.model), config.data)
    placement = LocalPlacement(config, ignore)
    with start_conversations(config, encoder, placement, ignore) as conversations:
        found = asyncio.run(Load(args, conversations).measure())
    for name, value in found.items():
        print(f"{name:18}{value['median']:9.2f} [{value['lowest']:.2f}, {value['highest']:.2f}]")
    parking = measure_parking(args)
    for name, figures in parking.items():
        print(name, *(f"{key} {value}" for key, value in figures.items()))
    cores, stall = found["loop_cores"]["highest"], found["stall_ms"]["highest"]
    rates = [parking[name]["tokens_per_second"]["median"] for name in parking]
    finish(__file__, {"machine": machine(), **vars(args), "found": found, "parking": parking}, [
        Promise(f"{args.conversations:,} conversations: the event loop takes at most "
                f"{MOST_CORES} cores", f"{cores:.2f}", cores <= MOST_CORES),
        Promise(f"its longest stall is at most {1000 * MOST_STALL:.0f} ms",
                f"{stall:.0f} ms", stall <= 1000 * MOST_STALL),
        Promise("a generator samples no fewer tokens a second from parked keys and values",
                f"{rates[0] / rates[1]:.2f} times as many", rates[0] >= rates[1]),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
