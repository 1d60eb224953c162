"""The generator worker: requests in, completions out, weights replaced between two decode steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tramontane.config import GeneratorConfig
from tramontane.errors import InputError
from tramontane.generator.engine import SlotEngine
from tramontane.generator.graphs import CudaGraphs
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.models.packing import pack
from tramontane.models.weights import LocalWeights, Weights
from tramontane.types import Completion, Progress, Request, SamplingParams


class Generator:
    """Samples completions and says of each token how likely it was and which weights drew it.

    A plain class: it knows nothing of where it runs, and shares no memory with anyone.

    Args:
        model: a causal LM, which the generator makes its own (attention, weights).
        tokenizer: for the EOS token and the completions' text.
        config: `kv_cache`, `steps_per_call`, `prefill_tokens` and `cuda_graphs` are used here.
        slots: completions decoded at once.
        max_len: the longest prompt plus its `max_tokens`.

    Raises:
        InputError: a model that the slot engine cannot run.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: GeneratorConfig,
        slots: int,
        max_len: int,
    ) -> None:
        self.model = model.requires_grad_(False)
        self.tokenizer, self.config = tokenizer, config
        self._engine = SlotEngine(
            model,
            slots,
            max_len,
            _eos_ids(model, tokenizer),
            config.prefill_tokens,
            record=self._recorder(),
        )
        self._busy = 0.0

    @classmethod
    def load(cls, model_path: str, config: GeneratorConfig, slots: int, max_len: int) -> Generator:
        """Load a checkpoint folder, Hugging Face name or `tiny` in the configured dtype.

        Raises:
            InputError: nothing there, damaged weights, no EOS token, or an unfit architecture.
        """
        model = load_model(model_path, getattr(torch, config.dtype), config.device)
        return cls(model, load_tokenizer(model_path), config, slots, max_len)

    def _recorder(self) -> CudaGraphs | None:
        device = self.model.device
        return CudaGraphs(device) if device.type == "cuda" and self.config.cuda_graphs else None

    def resize(self, slots: int, max_len: int) -> None:
        """Make room for other sizes, and free the room of the old ones. The arguments are those of
        the constructor.

        Raises:
            RuntimeError: something is in flight.
        """
        self._engine.resize(slots, max_len)

    @property
    def version(self) -> int:
        """The version of the weights that sample from now on."""
        return self._engine.version

    def submit(self, requests: list[Request]) -> None:
        """Queue requests; they take slots in this order as slots fall free.

        Raises:
            InputError: one that can never run, e.g. prompt and `max_tokens` beyond `max_len` or
                the model's context. None of the call's requests is queued then.
        """
        self._engine.submit(requests)

    def step(self, n: int | None = None) -> list[Completion]:
        """Run up to `n` decode steps (`config.steps_per_call`), and return what finished."""
        with self._at_work():
            return self._steps(self.config.steps_per_call if n is None else n)

    def _steps(self, n: int) -> list[Completion]:
        done: list[Completion] = []
        for _ in range(n):
            if not self._engine.unfinished:
                break
            done += self._engine.step()
        for completion in done:
            completion.text = self._decode(completion.token_ids)
        return done

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._busy += time.perf_counter() - start

    def poll(self, requests: list[Request]) -> Progress:
        """Take new requests, `step`, and say what ended and what the others gained: all that it
        takes to go on elsewhere, should this generator die.

        Raises:
            InputError: as `submit`.
        """
        with self._at_work():
            self.submit(requests)
            completions = self._steps(self.config.steps_per_call)
            grown = self._engine.grown()
        return Progress(completions, grown, self._busy)

    def receive(self, version: int, weights: Weights) -> float:
        """Replace the weights between two decode steps, bucket by bucket; everything in flight
        stays in flight.

        Cached keys and values stay as they are (`kv_cache: keep`, the paper's choice, section 3)
        or are rebuilt under the new weights (`recompute`).

        Args:
            version: recorded with every token sampled from now on.
            weights: every parameter by name, on any device, in any dtype; tied ones once or twice.

        Returns:
            Seconds that generation stood still.

        Raises:
            InputError: names or shapes that are not the model's; nothing is changed then.
        """
        start = time.perf_counter()
        with self._at_work():
            own = self.model.state_dict()
            self._check_shapes(weights.shapes(), own)
            with torch.no_grad():
                for bucket in weights.buckets():
                    # Tied weights are written once.
                    for name in {own[name].data_ptr(): name for name in bucket}.values():
                        own[name].copy_(bucket[name])
            self._engine.version = version
            if self.config.kv_cache == "recompute":
                self._engine.recompute()
        return time.perf_counter() - start

    def update_weights(self, version: int, state: dict[str, torch.Tensor]) -> float:
        """`receive` of weights that are at hand.

        Raises:
            InputError: as `receive`, or weights that the model ties differ; nothing is changed.
        """
        own = self.model.state_dict()
        weights = LocalWeights()
        weights.add(state)
        self._check_shapes(weights.shapes(), own)
        given: dict[int, torch.Tensor] = {}
        for name, tensor in state.items():
            twin = given.setdefault(own[name].data_ptr(), tensor)
            if twin.data_ptr() != tensor.data_ptr() and not torch.equal(twin, tensor):
                raise InputError(f"weights of {name} are tied to others but differ from them")
        return self.receive(version, weights)

    def pending(self) -> list[Request]:
        """Everything submitted and unfinished, with tokens, log-probs and versions so far."""
        return self._engine.pending()

    def cancel_all(self) -> None:
        """Drop everything submitted and unfinished."""
        self._engine.clear()

    def probe(
        self, prompts: list[list[int]], tokens: int, seed: int, temperature: float
    ) -> list[Completion]:
        """Complete `prompts` by exactly `tokens` tokens each, beside what is in flight.

        The same prefill and decode path with a small slot cache of its own; EOS is ignored. For
        comparing log-probs with the trainer's.
        """
        longest = max(len(p) for p in prompts) + tokens
        engine = SlotEngine(
            self.model,
            len(prompts),
            longest,
            prefill_tokens=self.config.prefill_tokens,
            version=self.version,
            record=self._recorder(),
        )
        sampling = SamplingParams(tokens, temperature)
        engine.submit([Request(i, 0, p, seed + i, sampling) for i, p in enumerate(prompts)])
        done: list[Completion] = []
        while engine.unfinished:
            done += engine.step()
        for completion in done:
            completion.text = self._decode(completion.token_ids)
        return sorted(done, key=lambda c: c.group)

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the weights on the CPU, for the diagnosis of a parity mismatch."""
        return {
            name: t.detach().to("cpu", copy=True) for name, t in self.model.state_dict().items()
        }

    @torch.inference_mode()
    def hidden_states(self, ids: list[int]) -> list[torch.Tensor]:
        """Of one sequence: the embeddings, then each layer's output, [len(ids), hidden] float32."""
        inputs = pack([ids], self.model.device).model_inputs
        output = self.model(**inputs, output_hidden_states=True)
        return [h[0].float().cpu() for h in output.hidden_states]

    def stats(self) -> dict[str, Any]:
        """Counts and seconds since the start: see `engine.Stats`, and

        `busy_seconds` spent in `step`, `poll` and `receive`; `in_flight`, sequences in a slot now;
        `utilisation`, live share of all slots over all decode steps; `cache_bytes`, the slots' keys
        and values.
        """
        counts = self._engine.stats
        return asdict(counts) | {
            "busy_seconds": self._busy,
            "in_flight": self._engine.in_flight,
            "utilisation": counts.live_slot_steps / max(1, counts.slot_steps),
            "cache_bytes": self._engine.cache_bytes,
        }

    def _decode(self, token_ids: list[int]) -> str:
        text = self.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _check_shapes(
        self, shapes: Mapping[str, torch.Size], own: Mapping[str, torch.Tensor]
    ) -> None:
        if unknown := sorted(shapes.keys() - own.keys()):
            raise InputError(f"weights unknown to the generator's model: {', '.join(unknown)}")
        for name, shape in shapes.items():
            if shape != own[name].shape:
                raise InputError(
                    f"weights of {name}: shape {tuple(shape)}, "
                    f"but the generator's model has {tuple(own[name].shape)}"
                )
        given = {own[name].data_ptr() for name in shapes}
        missing = [n for n, p in self.model.named_parameters() if p.data_ptr() not in given]
        if missing:
            raise InputError(f"weights missing from the update: {', '.join(missing)}")


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Chat models have several: the tokenizer's own and those of the generation config."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    more = configured if isinstance(configured, list) else [configured]
    return {t for t in [tokenizer.eos_token_id, *more] if t is not None}
