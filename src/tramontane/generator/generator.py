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
from tramontane.config.device import multiplies_int8
from tramontane.errors import InputError
from tramontane.generator.endings import Endings
from tramontane.generator.engine import SlotEngine
from tramontane.generator.forward import check_steps
from tramontane.generator.fusion import fuse, uncompiled
from tramontane.generator.graphs import CudaGraphs, StepRecorder, run_directly
from tramontane.generator.interface import AnyGenerator
from tramontane.generator.memory import CudaMemory
from tramontane.models import fp8_layers, int8, routing
from tramontane.models.attention import counts_positions
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.models.packing import pack
from tramontane.models.quantized import SAMPLE, QuantizedWeight, named_weights
from tramontane.models.staging import StagedWeights, from_state
from tramontane.models.states import stateful_layers
from tramontane.models.vision import PUBLISHED, Vision
from tramontane.models.weights import Weights
from tramontane.types import Completion, Progress, ResponseText, SamplingParams


class Generator(AnyGenerator):
    """A generator whose engine is the slot engine, in this process.

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
        self._tower_is_trained = False  # versions bring weights of the vision tower too
        keeps_more = bool(routing.blocks(model)) or bool(stateful_layers(model))
        keeps_more |= counts_positions(model)
        if config.compile and model.device.type == "cuda" and not keeps_more:
            fuse(model)
        limit = config.kv_cache_mib
        self._engine = SlotEngine(
            model,
            slots,
            max_len,
            self._endings.ids,
            kv_bytes=None if limit is None else limit * 2**20 // config.workers,
            prefill_tokens=config.prefill_tokens,
            record=self._step_recorder(),
            memory=self._memory(),
            stop_texts=self._endings.texts,
        )
        check_steps(model)
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
            InputError: no checkpoint there, damaged weights, no EOS token, an architecture that the
                slot engine cannot run, or a processor or GPU without the instructions for
                weights of eight bits.
        """
        if config.weights == "int8" and not multiplies_int8():
            raise InputError(
                "generator.weights: this processor has no instructions for int8 (AVX-512 VNNI, "
                "AVX-VNNI or AMX), so it would be slower than in full; leave it out"
            )
        model = load_model(model_path, getattr(torch, config.dtype), config.device)
        if config.return_routed_experts or config.float32_router:
            routing.prepare(model, config.float32_router)
        tokenizer = load_tokenizer(model_path)
        if config.weights != "full":
            kind = {"int8": int8, "fp8": fp8_layers}[config.weights]
            kind.quantize(model, tokenizer.encode(SAMPLE))
        found = cls(model, tokenizer, config, slots, max_len, response)
        dtype = torch.float32 if config.float32_vision else None
        found._engine.vision = Vision(model_path, model.device, dtype)
        return found

    def _step_recorder(self) -> StepRecorder | None:
        device = self.model.device
        if device.type != "cuda":
            return None
        return CudaGraphs(device) if self.config.cuda_graphs else run_directly

    def _memory(self) -> CudaMemory | None:
        config, device, staged = self.config, self.model.device, self._staged
        if device.type != "cuda":
            return None
        weights = sum({id(x): x.nbytes for x in named_weights(self.model).values()}.values())
        # The next version is received while the current one is in use.
        spare = weights if config.staging == "device" else 0
        return CudaMemory(
            device,
            config.gpu_memory_utilization or GPU_MEMORY_SHARE,
            weights + spare,
            lambda: 0 if staged.has_room else spare,
        )

    def resize(self, slots: int, max_len: int) -> None:
        self._engine.resize(slots, max_len)

    @property
    def version(self) -> int:
        return self._engine.version

    def submit(self, requests: list[Completion]) -> None:
        self._engine.submit(requests)

    def step(self, n: int | None = None) -> list[Completion]:
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

    def poll(self, requests: list[Completion], seconds: float = 0.0) -> Progress:
        stats = self._engine.stats
        prefilled, parked = stats.prefill_tokens, stats.parked_tokens
        with self._timed():
            self.submit(requests)
            end = time.monotonic() + seconds
            completions = self._run_steps(self.config.steps_per_call)
            while self._engine.unfinished and time.monotonic() < end:
                completions += self._run_steps(self.config.steps_per_call)
            growth = self._engine.take_growth()
        prefilled, parked = stats.prefill_tokens - prefilled, stats.parked_tokens - parked
        return Progress(completions, growth, self._busy_seconds, prefilled, parked)

    def fetch(self, version: int, weights: Weights) -> None:
        trained = [name for name in weights.shapes() if name.startswith(PUBLISHED)]
        if trained and self._engine.vision:
            self._tower_is_trained = True
            self._staged.add(self._engine.vision.tensors(trained))
        self._staged.fetch(version, weights)

    def swap(self, version: int) -> float:
        start = time.perf_counter()
        with self._timed():
            if self._staged.swap(version, in_place=self._engine.needs_fixed_addresses):
                self._engine.version = version
                if self._tower_is_trained and self._engine.vision:
                    self._engine.vision.forget()
                if self.config.kv_cache == "recompute":
                    self._engine.recompute()
        return time.perf_counter() - start

    def update_weights(self, version: int, state: dict[str, torch.Tensor]) -> float:
        weights = from_state(state, named_weights(self.model))
        self.fetch(version, weights)
        return self.swap(version)

    def pending(self) -> list[Completion]:
        return self._engine.pending()

    def cancel(self, group: int) -> None:
        self._engine.cancel(group)

    def cancel_all(self) -> None:
        self._engine.clear()

    def probe(
        self, prompts: list[list[int]], tokens: int, seed: int, temperature: float
    ) -> list[Completion]:
        # Same prefill and decode path, with a separate cache and without recordings, which would
        # take longer than the probe.
        engine = SlotEngine(
            self.model,
            len(prompts),
            max(map(len, prompts)) + tokens,
            prefill_tokens=self.config.prefill_tokens,
            record=None if self._step_recorder() is None else run_directly,
        )
        engine.version = self.version
        sampling = SamplingParams(tokens, temperature)
        engine.submit(
            [Completion.requested(i, 0, p, seed + i, sampling) for i, p in enumerate(prompts)]
        )
        completions: list[Completion] = []
        while engine.unfinished:
            completions += engine.step()
        for completion in completions:
            completion.text = self._endings.text(completion)
        return sorted(completions, key=lambda c: c.group)

    def weights(self) -> dict[str, torch.Tensor]:
        found = named_weights(self.model).items()
        return {
            name: x.whole().cpu()
            if isinstance(x, QuantizedWeight)
            else x.detach().to("cpu", copy=True)
            for name, x in found
        }

    @torch.inference_mode()
    def hidden_states(self, ids: list[int]) -> list[torch.Tensor]:
        inputs = pack([ids], self.model.device)
        with uncompiled(self.model):
            output = self.model(**inputs, output_hidden_states=True)
        return [h[0].float().cpu() for h in output.hidden_states]

    def stats(self) -> dict[str, Any]:
        counts = self._engine.stats
        return asdict(counts) | {
            "busy_seconds": self._busy_seconds,
            "decoding": self._engine.decoding,
            "utilization": counts.live_slot_steps / max(1, counts.slot_steps),
            "cache_bytes": self._engine.cache_bytes,
        }
