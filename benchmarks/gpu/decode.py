"""Part B: decode steps of the generator beside the memory's bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import GROUP, MODES, Bench, requests
from tramontane.generator import Generator

DECODED = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B")
EIGHT_BITS = ("Qwen2.5-1.5B", "Qwen2.5-7B")  # also with `generator.weights: fp8`
ROWS = (1, 8, 64, 128, 256, 512)
CONTEXT = 2000  # tokens of a sequence in the middle of a measurement
# By number of sequences, tokens of the longest one.
STRAGGLERS = {64: (1500, 32000), 128: (1500, 8000, 32000)}
OTHERS = 1500
STRAGGLING = "Qwen2.5-1.5B"
PROFILED = "Qwen2.5-1.5B", 64  # shape and rows of the steps whose kernels are counted
WARM_UP = 5  # steps: admission, prefill and, on today's engine, recording


def best_mode() -> str:
    return list(MODES)[-1]


def timed_steps(bench: Bench, generator: Generator, steps: int) -> dict[str, float]:
    """Milliseconds of a decode step, the mean number of sequences, and their mean context."""
    before = generator.stats()
    milliseconds = 1e3 * bench.seconds(lambda: generator.step(steps)) / steps
    after = generator.stats()
    rows = after["live_slot_steps"] - before["live_slot_steps"]
    lengths = [len(r.prompt_ids) + len(r.token_ids) for r in generator.pending() if r.token_ids]
    return {
        "rows": rows / (after["decode_steps"] - before["decode_steps"]),
        "context": sum(lengths) / len(lengths) - steps / 2,
        "ms": milliseconds,
    }


def decode(bench: Bench, name: str, mode: str, **keys: Any) -> dict[str, Any]:
    """A step at each number of rows, on one engine: sequences are added to those in flight. Ends
    early if memory holds fewer. `keys` are of the generator's config."""
    numbers = bench.pick(ROWS, (1, 8))
    context, steps = bench.pick((CONTEXT, 40), (40, 4))
    room = len(numbers) * (WARM_UP + steps) + 1
    prompt = context - WARM_UP - steps // 2
    generator = bench.make_generator(name, numbers[-1], prompt + room, mode, **keys)
    found: list[dict[str, float]] = []
    for wanted in numbers:
        count = wanted - generator.stats()["decoding"]
        generator.submit(requests(wanted - count, count, prompt, room))
        generator.step(WARM_UP)
        found.append({"wanted": wanted, **timed_steps(bench, generator, steps)})
        if found[-1]["rows"] < 0.9 * wanted:
            break
    return {"steps": found, "cache_bytes": generator.stats()["cache_bytes"]}


def stragglers(bench: Bench, rows: int) -> dict[str, Any]:
    """Decode steps of `rows` sequences, one of them long, for each of its lengths."""
    lengths = STRAGGLERS[rows]
    steps = bench.pick(30, 4)
    room = WARM_UP + steps + 1
    live, others, scale = bench.pick((rows, OTHERS, 1), (8, 15, 100))
    generator = bench.make_generator(STRAGGLING, live, max(lengths) // scale + room, best_mode())
    found = []
    for longest in lengths:
        generator.submit(requests(0, 1, longest // scale, room))
        generator.submit(requests(GROUP, live - 1, others, room))
        generator.step(WARM_UP)
        found.append({"longest": longest, **timed_steps(bench, generator, steps)})
        while generator.pending():
            generator.step(8)
    return {"steps": found}


def kernels(bench: Bench, mode: str) -> dict[str, Any]:
    """Kernels of a decode step, and the milliseconds that they take together."""
    name, rows = PROFILED
    steps = 3
    generator = bench.make_generator(name, rows, 128, mode)
    generator.submit(requests(0, rows, 64, WARM_UP + steps + 1))
    generator.step(WARM_UP)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not bench.tiny:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        bench.seconds(lambda: generator.step(steps))
    kind = torch.autograd.DeviceType.CPU if bench.tiny else torch.autograd.DeviceType.CUDA
    events = [event for event in profile.events() if event.device_type == kind]
    time = "self_cpu_time_total" if bench.tiny else "self_device_time_total"
    busy = sum(getattr(event, time) for event in events)
    return {"kernels": len(events) / steps, "busy_ms": busy / 1e3 / steps}


def decodes(*names: str) -> dict[str, Callable[[Bench], dict[str, Any]]]:
    return {
        f"decode {name} {mode}": partial(decode, name=name, mode=mode)
        for name in names
        for mode in reversed(MODES)
    }


# The most important first, should ten minutes not be enough.
ITEMS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    **decodes("Qwen2.5-1.5B"),
    **{f"straggler {rows}": partial(stragglers, rows=rows) for rows in STRAGGLERS},
    **decodes("Qwen2.5-7B", "Qwen2.5-0.5B"),
    **{
        f"decode {name} fp8": partial(decode, name=name, mode=best_mode(), weights="fp8")
        for name in EIGHT_BITS
    },
    **{f"kernels {mode}": partial(kernels, mode=mode) for mode in MODES},
}
