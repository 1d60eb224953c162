"""The process of a vLLM generator: `python vllm_worker.py FD`, with the interpreter of vLLM's
environment.

It imports nothing from tramontane, whose dependencies conflict with vLLM's. Messages arrive on the
socket FD as tuples (method, arguments...) and are answered by ("done", result) or ("error",
traceback). A heartbeat is sent every second.

The engine runs in this process step by step (vLLM's `LLMEngine`), so that requests, new weights and
reports fall exactly between two decode steps.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from array import array
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

PULSE_SECONDS = 1.0


class SampledTokens(NamedTuple):
    """Tokens that a request gained, and `stop` or `length` if it ended."""

    token_ids: array[int]
    logprobs: array[float]
    versions: array[int]
    finish_reason: str | None


class Worker:
    """vLLM's engine, with the tokens sampled since the last report."""

    def __init__(self) -> None:
        self.ahead = False
        self._version = 0
        self._gained: dict[str, SampledTokens] = {}
        self._lengths: dict[str, int] = {}  # tokens sampled here, by unfinished request
        self._contexts: dict[str, int] = {}  # tokens of the prompt, by unfinished request
        self._steps = 0  # since the last report
        self._busy_seconds = 0.0
        self._counts = dict.fromkeys(
            ("generated_tokens", "prefill_tokens", "recomputed_tokens", "decode_steps"), 0
        )

    def start(self, engine_args: dict[str, Any]) -> dict[str, Any]:
        """Start the engine with random weights; returns facts about it."""
        import vllm_weights  # registers the backend
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        options = {"backend": vllm_weights.BACKEND}
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                weight_transfer_config=options,
                worker_extension_cls="vllm_weights.ReadableWeights",
                **engine_args,
            )
        )
        self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        config = self._engine.vllm_config
        self._drain_steps = config.max_concurrent_batches
        cache = config.cache_config
        return {"blocks": cache.num_gpu_blocks, "block_size": cache.block_size}

    @property
    def idle(self) -> bool:
        """True if no request is unfinished."""
        return not self._lengths

    def advance(
        self, requests: list[dict[str, Any]], steps: int, ahead: bool
    ) -> tuple[dict[str, tuple[Any, ...]], dict[str, float]]:
        """Queue requests, and run the engine until `steps` steps are done since the last report, or
        no request is left.

        `ahead`: continue with the next steps after the report, until the next message.

        Returns:
            `SampledTokens` by request, and counts since the start.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for request in requests:
            name, prompt = request["name"], request["prompt"]
            params = SamplingParams(
                output_kind=RequestOutputKind.DELTA,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                **request["sampling"],
            )
            inputs = {"prompt_token_ids": list(prompt), "cache_salt": request["salt"]}
            if features := request.get("features"):
                inputs |= self._embedded(len(prompt), *features)
            self._engine.add_request(name, inputs, params)
            self._lengths[name], self._contexts[name] = 0, len(prompt)
        while self._steps < steps and not self.idle:
            self.step()
        self._steps, self.ahead = 0, ahead
        # Plain tuples, since the class is not available on the other side.
        gained = {name: tuple(tokens) for name, tokens in self._gained.items()}
        self._gained = {}
        return gained, self._counts | {"busy_seconds": self._busy_seconds}

    def _embedded(self, count: int, places: list[int], values: bytes) -> dict[str, Any]:
        """What a prompt of `count` tokens has besides them: features at some places, which the
        weights do not change, in place of embeddings."""
        import torch

        features = torch.frombuffer(bytearray(values), dtype=torch.float32).view(len(places), -1)
        dtype = self._engine.vllm_config.model_config.dtype
        whole = torch.zeros(count, features.shape[1], dtype=dtype)
        whole[places] = features.to(dtype)
        embedded = set(places)
        by_token = [place not in embedded for place in range(count)]
        return {"prompt_embeds": whole, "prompt_is_token_ids": by_token}

    def abort(self, names: list[str]) -> None:
        """Drop unfinished requests and their unreported tokens."""
        self._engine.abort_request(names)
        for name in names:
            for by_name in (self._lengths, self._contexts, self._gained):
                by_name.pop(name, None)

    def load(self, version: int, path: str, table: list[Any], recompute: bool) -> float:
        """Replace the weights between two steps; requests stay, with their keys and values.

        Args:
            version: recorded with the tokens sampled from now on.
            path: see `vllm_weights.SharedFile`.
            table: see `vllm_weights.SharedFile`.
            recompute: recompute the keys and values of all requests under the new weights.

        Returns:
            Seconds for which generation paused.
        """
        began = time.perf_counter()
        engine = self._engine
        engine.sleep(0, mode="keep")  # level 0 is a pause of the scheduler; weights stay
        for _ in range(self._drain_steps):  # steps already begun by asynchronous scheduling
            self._take(engine.step())
        engine.collective_rpc("start_weight_update")
        update = {"path": path, "table": table}
        engine.collective_rpc("update_weights", kwargs={"update_info": update})
        engine.collective_rpc("finish_weight_update")
        engine.set_weight_version(str(version))
        self._version = version
        if recompute:
            engine.reset_prefix_cache(reset_running_requests=True)
            self._counts["recomputed_tokens"] += sum(
                self._contexts[name] + length for name, length in self._lengths.items() if length
            )
        engine.wake_up(["scheduling"])
        seconds = time.perf_counter() - began
        self._busy_seconds += seconds
        return seconds

    def effective_weights(self) -> dict[str, tuple[tuple[int, ...], bytes]]:
        """(shape, float32 values) by name in the checkpoint; see `vllm_weights`."""
        found = self._engine.collective_rpc("effective_weights")
        return {
            name: (tuple(tensor.shape), tensor.numpy().tobytes())
            for name, tensor in found[0].items()
        }

    def step(self) -> None:
        """Run one step of the engine and note its tokens."""
        began = time.perf_counter()
        self._take(self._engine.step())
        self._busy_seconds += time.perf_counter() - began
        self._counts["decode_steps"] += 1
        self._steps += 1

    def _take(self, outputs: list[Any]) -> None:
        """Note sampled tokens. Weights change only when no step is under way, so all have the
        current version."""
        for output in outputs:
            name, sampled = output.request_id, output.outputs[0]
            if name not in self._lengths:
                continue  # aborted
            gained = self._gained.get(name) or SampledTokens(
                array("i"), array("f"), array("i"), None
            )
            count = len(sampled.token_ids)
            if not self._lengths[name]:
                cached = output.num_cached_tokens or 0
                self._counts["prefill_tokens"] += self._contexts[name] - cached
            gained.token_ids.extend(sampled.token_ids)
            gained.logprobs.extend(sampled.logprobs.logprobs)
            gained.versions.extend([self._version] * count)
            self._counts["generated_tokens"] += count
            self._lengths[name] += count
            if sampled.finish_reason:
                gained = gained._replace(finish_reason=sampled.finish_reason)
                del self._lengths[name], self._contexts[name]
            self._gained[name] = gained


def serve(connection: Connection) -> None:
    """Answer messages, and run ahead between them, until the other side is gone."""
    lock = threading.Lock()

    def send(answer: Any) -> None:
        with lock:
            connection.send(answer)

    def show_life() -> None:
        while True:
            time.sleep(PULSE_SECONDS)
            send(None)

    worker = Worker()
    threading.Thread(target=show_life, daemon=True).start()
    while True:
        while worker.ahead and not worker.idle and not connection.poll():
            worker.step()
        try:
            method, *arguments = connection.recv()
        except EOFError:
            return
        try:
            result = getattr(worker, method)(*arguments)
        except Exception:
            send(("error", traceback.format_exc()))
        else:
            send(("done", result))


if __name__ == "__main__":
    # Terminals and job systems signal every process; only the controller reacts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # vLLM's own shutdown is slow, and nothing is left to save
