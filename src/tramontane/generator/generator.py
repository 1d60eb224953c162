"""The generator worker: requests in, completions out, weights replaced between two decode steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tramontane.config import GPU_MEMORY_SHARE, GeneratorConfig
from tramontane.generator.endings import Endings
from tramontane.generator.engine import SlotEngine
from tramontane.generator.graphs import CudaGraphs, StepRecorder, run_directly
from tramontane.models.kv_memory import kv_budget
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.models.packing import pack
from tramontane.models.staging import StagedWeights, from_state
from tramontane.models.weights import Weights
from tramontane.types import Completion, Progress, Request, ResponseText, SamplingParams


class Generator:
    """Samples completions, with the log-prob of each token and the weight version that drew it.

    A plain class, independent of where it runs; shares no memory with other workers.

    Args:
        model: a causal LM; the generator replaces its attention and its weights.
        tokenizer: for the EOS token and the completions' text.
        config: all keys except `slots`, `dtype` and `device` are used here.
        slots: maximum number of completions decoded at once; memory for keys and values may allow
            fewer.
        max_len: maximum length of a prompt plus its `max_tokens`, in tokens.
        response: thinking tags, and the beginning of every response, for the completions' text.

    Raises:
        InputError: a model that the slot engine cannot run, or no memory for the keys and values of
            one sequence of `max_len` tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: GeneratorConfig,
        slots: int,
        max_len: int,
        response: ResponseText = ResponseText(),  # noqa: B008 (immutable)
    ) -> None:
        self.model = model.requires_grad_(False)
        self.tokenizer, self.config = tokenizer, config
        self._endings = Endings(model, tokenizer, config.stop, response)
        self._staged = StagedWeights(model, on_host=config.staging == "host")
        self._engine = SlotEngine(
            model,
            slots,
            max_len,
            self._endings.ids,
            kv_bytes=self._kv_bytes(),
            prefill_tokens=config.prefill_tokens,
            record=self._step_recorder(),
            stop_texts=self._endings.texts,
        )
        self._busy_seconds = 0.0

    @classmethod
    def load(
        cls,
        model_path: str,
        config: GeneratorConfig,
        slots: int,
        max_len: int,
        response: ResponseText = ResponseText(),  # noqa: B008 (immutable)
    ) -> Generator:
        """Load a checkpoint folder, Hugging Face name or `tiny` in the configured dtype.

        Raises:
            InputError: no checkpoint there, damaged weights, no EOS token, or an architecture that
                the slot engine cannot run.
        """
        model = load_model(model_path, getattr(torch, config.dtype), config.device)
        return cls(model, load_tokenizer(model_path), config, slots, max_len, response)

    def _step_recorder(self) -> StepRecorder | None:
        device = self.model.device
        if device.type != "cuda":
            return None
        return CudaGraphs(device) if self.config.cuda_graphs else run_directly

    def _kv_bytes(self) -> int | None:
        """Memory limit of keys and values in bytes; None for no limit."""
        config, device = self.config, self.model.device
        if config.kv_cache_mib is not None:
            return config.kv_cache_mib * 2**20 // config.workers
        if device.type != "cuda":
            return None
        total = torch.cuda.get_device_properties(device).total_memory
        weights = self.model.get_memory_footprint()
        if config.staging == "device":
            weights *= 2  # the next version is received while the current one is in use
        return kv_budget(total, weights, config.gpu_memory_utilization or GPU_MEMORY_SHARE)

    def resize(self, slots: int, max_len: int) -> None:
        """Change the number of slots and their length, and free the old slots' memory. Arguments as
        in the constructor.

        Raises:
            RuntimeError: a request is unfinished.
            InputError: no memory for a sequence of `max_len` tokens.
        """
        self._engine.resize(slots, max_len)

    @property
    def version(self) -> int:
        """Version of the weights that will sample the next token."""
        return self._engine.version

    def submit(self, requests: list[Request]) -> None:
        """Queue requests; they take slots in this order as slots and memory become free.

        Raises:
            InputError: a request that can never run, e.g. prompt and `max_tokens` beyond `max_len`
                or the model's context. No request of the call is queued then.
        """
        self._engine.submit(requests)

    def step(self, n: int | None = None) -> list[Completion]:
        """Run up to `n` decode steps (default `config.steps_per_call`), and return the completions
        that finished."""
        with self._timed():
            return self._run_steps(self.config.steps_per_call if n is None else n)

    def _run_steps(self, n: int) -> list[Completion]:
        completions: list[Completion] = []
        for _ in range(n):
            if not self._engine.unfinished:
                break
            completions += self._engine.step()
        for completion in completions:
            completion.text = self._endings.text(completion)
        return completions

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._busy_seconds += time.perf_counter() - start

    def poll(self, requests: list[Request], seconds: float = 0.0) -> Progress:
        """Take new requests, `step` until `seconds` have passed, and return the finished
        completions and the new tokens of unfinished ones, from which another generator can continue
        if this one dies.

        Raises:
            InputError: see `submit`.
        """
        with self._timed():
            self.submit(requests)
            end = time.monotonic() + seconds
            completions = self._run_steps(self.config.steps_per_call)
            while self._engine.unfinished and time.monotonic() < end:
                completions += self._run_steps(self.config.steps_per_call)
            growth = self._engine.take_growth()
        return Progress(completions, growth, self._busy_seconds)

    def fetch(self, version: int, weights: Weights) -> None:
        """Copy and check new weights beside those in use; `swap` puts them into use.

        May run in another thread, concurrently with any other method. Only the newest fetched
        version can be swapped in.

        Args:
            version: number of the weights.
            weights: every tensor of the model's state dict by name, on any device, in any dtype;
                tied weights once or twice.

        Raises:
            InputError: names or shapes that are not the model's, or weights that are incomplete or
                not finite; the error names the weight. The weights in use are not affected.
        """
        self._staged.fetch(version, weights)

    def swap(self, version: int) -> float:
        """Use fetched weights from the next decode step on; everything in flight stays in flight.

        Cached keys and values stay as they are (`kv_cache: keep`, the paper's choice, section 3)
        or are rebuilt under the new weights (`recompute`). Does nothing if the version is not
        available, because it is already in use or a newer one is being fetched.

        Args:
            version: recorded with every token sampled from now on.

        Returns:
            Seconds for which generation paused.
        """
        start = time.perf_counter()
        with self._timed():
            if self._staged.swap(version, in_place=self._engine.needs_fixed_addresses):
                self._engine.version = version
                if self.config.kv_cache == "recompute":
                    self._engine.recompute()
        return time.perf_counter() - start

    def update_weights(self, version: int, state: dict[str, torch.Tensor]) -> float:
        """`fetch` and `swap` weights given as one dictionary.

        Raises:
            InputError: see `fetch`; or tied tensors differ. Nothing is changed then.
        """
        weights = from_state(state, self.model.state_dict(keep_vars=True))
        self.fetch(version, weights)
        return self.swap(version)

    def pending(self) -> list[Request]:
        """All unfinished requests, with their tokens, log-probs and versions so far."""
        return self._engine.pending()

    def cancel_all(self) -> None:
        """Drop all unfinished requests."""
        self._engine.clear()

    def probe(
        self, prompts: list[list[int]], tokens: int, seed: int, temperature: float
    ) -> list[Completion]:
        """Complete `prompts` by exactly `tokens` tokens each; requests in flight are not affected.

        Same prefill and decode path, with a separate cache, which uses the slots' memory if nothing
        is in flight. EOS is ignored. The log-probs are compared with the trainer's.
        """
        sampling = SamplingParams(tokens, temperature)
        requests = [Request(i, 0, p, seed + i, sampling) for i, p in enumerate(prompts)]
        with self._engine.vacated():
            completions = self._probed(requests)
        for completion in completions:
            completion.text = self._endings.text(completion)
        return sorted(completions, key=lambda c: c.group)

    def _probed(self, requests: list[Request]) -> list[Completion]:
        """Completions of the requests by a separate engine."""
        engine = SlotEngine(
            self.model,
            len(requests),
            max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests),
            prefill_tokens=self.config.prefill_tokens,
            record=self._step_recorder(),
        )
        engine.version = self.version
        engine.submit(requests)
        completions: list[Completion] = []
        while engine.unfinished:
            completions += engine.step()
        return completions

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the weights on the CPU, for the diagnosis of a parity mismatch."""
        return {
            name: t.detach().to("cpu", copy=True) for name, t in self.model.state_dict().items()
        }

    @torch.inference_mode()
    def hidden_states(self, ids: list[int]) -> list[torch.Tensor]:
        """Embeddings, then each layer's output, of one sequence: [len(ids), hidden] float32."""
        inputs = pack([ids], self.model.device).model_inputs
        output = self.model(**inputs, output_hidden_states=True)
        return [h[0].float().cpu() for h in output.hidden_states]

    def stats(self) -> dict[str, Any]:
        """Counts and seconds since the start.

        Returns:
            The fields of `engine.Stats`; `busy_seconds`, spent in `step`, `poll` and `swap`;
            `in_flight`, sequences that hold a slot now; `utilisation`, the live share of all slots
            over all decode steps; `cache_bytes`, memory of the slots' keys and values.
        """
        counts = self._engine.stats
        return asdict(counts) | {
            "busy_seconds": self._busy_seconds,
            "in_flight": self._engine.in_flight,
            "utilisation": counts.live_slot_steps / max(1, counts.slot_steps),
            "cache_bytes": self._engine.cache_bytes,
        }
