"""A generator whose engine is vLLM, in a separate process."""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tramontane.config import GeneratorConfig
from tramontane.errors import InputError
from tramontane.generator.endings import Endings
from tramontane.generator.interface import AnyGenerator
from tramontane.generator.vllm import environment
from tramontane.generator.vllm.flights import Flights, Gained
from tramontane.generator.vllm.process import VllmProcess, engine_args, variables
from tramontane.models.host import flat
from tramontane.models.loading import context_length, load_model, load_tokenizer, vocabulary
from tramontane.models.names import folder_of, pinned, resolve
from tramontane.models.shape import shape_of
from tramontane.models.staging import collect, from_state
from tramontane.models.vision import Vision
from tramontane.models.weights import Held, Weights
from tramontane.models.wrapped import PARENT, write_config
from tramontane.temporary import temporary_folder
from tramontane.tokens import given_ids
from tramontane.types import Completion, Progress, ResponseText, SamplingParams

HEARTBEAT = 30.0  # seconds; the default of timeouts.heartbeat

Row = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, offset in bytes


class VllmGenerator(AnyGenerator):
    """A generator whose engine is vLLM.

    vLLM's process gets tokens, and returns tokens, their log-probs, and the version of the weights
    of the step that sampled each. It starts with random weights: the checkpoint's weights arrive
    through shared memory, like every later version. A continued request draws different random
    numbers from an uninterrupted one.

    Args:
        model: checkpoint folder, Hugging Face name or `tiny`.
        config: all keys except `cuda_graphs` and the pipeline's are used here.
        slots: completions decoded at once.
        max_len: maximum length of a prompt plus its `max_tokens`, in tokens.
        response: thinking tags, and the beginning of every response, for the completions' text.
        heartbeat: longest silence before vLLM's process counts as hung, in seconds.

    Raises:
        InputError: no checkpoint there, damaged weights, no EOS token, no environment with a tested
            version of vLLM, or a model whose weights cannot be sent to vLLM.
        WorkerDied: vLLM's process ended at its start.
        VllmError: vLLM refused the model or the arguments.
    """

    _process: VllmProcess

    def __init__(
        self,
        model: str,
        config: GeneratorConfig,
        slots: int,
        max_len: int,
        response: ResponseText = ResponseText(),  # noqa: B008 (immutable)
        heartbeat: float = HEARTBEAT,
    ) -> None:
        self.config, self._heartbeat = config, heartbeat
        # vLLM takes a name without a revision.
        self._path = str(folder_of(model)) if pinned(model)[1] else resolve(model)
        self._environment = environment.find(config.vllm.python)
        environment.check_device(self._environment, config.device)
        loaded = load_model(model, getattr(torch, config.dtype))
        self.tokenizer = load_tokenizer(model)
        self._endings = Endings(loaded, self.tokenizer, config.stop, response)
        self._flights = Flights(self._endings, vocabulary(loaded), self._features)
        dtype = torch.float32 if config.float32_vision else None
        self._vision = Vision(model, config.device, dtype)
        self._sees = False  # vLLM's process takes features in place of embeddings, which is slower
        self._model_config = loaded.config
        if hasattr(loaded.config, PARENT):  # vLLM reads only the config: that of the text half
            self._config_folder = temporary_folder("config")
            self._path = self._config_folder.name
            write_config(loaded, Path(self._path))
        self._shared = SharedTensors(loaded)
        del loaded
        self._memory = threading.Lock()  # held while the shared tensors are written or read
        self._version: int = 0
        self._fetched: int | None = 0  # the version in the shared tensors, if they are complete
        self._held: Held | None = None  # the same, unless it was loaded from files
        self._ended: list[Completion] = []
        self._counts: dict[str, float] = {}
        self._start(slots, max_len)

    @property
    def version(self) -> int:
        return self._version

    @property
    def pid(self) -> int:
        """Process id of vLLM."""
        return self._process.pid

    def resize(self, slots: int, max_len: int) -> None:
        """See `AnyGenerator`; vLLM restarts if either is larger than at its start, and fewer slots
        change nothing."""
        if self._flights:
            raise RuntimeError(f"resize with {len(self._flights)} sequences unfinished")
        most, longest = self._capacity
        if slots > most or max_len > longest:
            self._process.close()
            self._start(max(slots, most), max(max_len, longest))
        self._max_len = max_len

    def submit(self, requests: list[Completion]) -> None:
        if not self._sees and any(r.images or r.put_images for r in requests):
            self._open_eyes()
        context = context_length(self._model_config) or self._max_len
        self._flights.add(requests, min(context, self._max_len), self._version)

    def step(self, n: int | None = None) -> list[Completion]:
        """See `AnyGenerator`; a step samples a token for each sequence whose prompt has been
        read."""
        self._advance(self.config.steps_per_call if n is None else n, ahead=False)
        return self._take_ended()

    def poll(self, requests: list[Completion], seconds: float = 0.0) -> Progress:
        """See `AnyGenerator`; vLLM does at least `steps_per_call` steps between two reports, and
        keeps running meanwhile."""
        end = time.monotonic() + seconds
        self.submit(requests)
        self._advance(self.config.steps_per_call, ahead=True)
        while self._flights and time.monotonic() < end:
            self._advance(self.config.steps_per_call, ahead=True)
        growth = self._flights.take_growth()
        return Progress(self._take_ended(), growth, self._counts["busy_seconds"])

    def fetch(self, version: int, weights: Weights) -> None:
        with self._memory:
            held, self._fetched, self._held = self._held, None, None
            collect(weights, self._shared.tensors, held)
            self._fetched = version
            self._held = Held(weights.version, self._shared.tensors)

    def swap(self, version: int) -> float:
        if not self._memory.acquire(blocking=False):  # a newer version is being fetched
            return 0.0
        try:
            if self._fetched != version or self._version == version:
                return 0.0
            return self._load(version)
        finally:
            self._memory.release()

    def update_weights(self, version: int, state: dict[str, torch.Tensor]) -> float:
        self.fetch(version, from_state(state, self._shared.tensors))
        return self.swap(version)

    def pending(self) -> list[Completion]:
        self._advance(0, ahead=False)
        return self._flights.pending()

    def cancel(self, group: int) -> None:
        self._process.call("abort", self._flights.clear(group))
        self._ended = [completion for completion in self._ended if completion.group != group]

    def cancel_all(self) -> None:
        self._process.call("abort", self._flights.clear())
        self._ended.clear()

    def probe(
        self, prompts: list[list[int]], tokens: int, seed: int, temperature: float
    ) -> list[Completion]:
        sampling = SamplingParams(tokens, temperature)
        requests = [
            Completion.requested(i, -1, p, seed + i, sampling) for i, p in enumerate(prompts)
        ]
        self._flights.add(requests, self._capacity[1], self._version, probe=True)
        found: list[Completion] = []
        while len(found) < len(prompts):
            self._advance(self.config.steps_per_call, ahead=False)
            found += [c for c in self._ended if c.index < 0]
            self._ended = [c for c in self._ended if c.index >= 0]
        for completion in found:
            completion.index = 0
        return sorted(found, key=lambda c: c.group)

    def weights(self) -> dict[str, torch.Tensor]:
        """See `AnyGenerator`; empty for a model that is split over devices."""
        if self.config.vllm.tensor_parallel > 1:
            return {}
        found: Mapping[str, tuple[tuple[int, ...], bytes]]
        found = self._process.call("effective_weights")
        known = self._shared.tensors
        tensors = {
            name: torch.frombuffer(bytearray(values), dtype=torch.float32).view(shape)
            for name, (shape, values) in found.items()
        }
        # vLLM pads the vocabulary.
        return {n: t[: len(known[n])] for n, t in tensors.items() if n in known}

    def hidden_states(self, ids: list[int]) -> list[torch.Tensor]:
        """Empty: vLLM does not expose the outputs of its layers."""
        return []

    def stats(self) -> dict[str, Any]:
        """See `AnyGenerator`; counted since the start of vLLM's process. `cache_bytes` is the
        memory that it has reserved for keys and values."""
        self._advance(0, ahead=False)
        slots, steps = self._capacity[0], int(self._counts["decode_steps"])
        generated = self._counts["generated_tokens"]
        return self._counts | {
            "live_slot_steps": generated,
            "slot_steps": slots * steps,
            "utilization": generated / max(1, slots * steps),
            "decoding": min(slots, len(self._flights)),
            "cache_bytes": self._cached_tokens * self._bytes_per_token,
        }

    def _open_eyes(self) -> None:
        """Restart vLLM's process so that it takes features; unfinished requests continue in it.

        Raises:
            InputError: the model takes no images, or these change more than embeddings.
        """
        if not self._vision.processor.family.plain:
            raise InputError(
                f"generator.kind vllm: a prompt has an image, and those of "
                f"{self._vision.processor.parent!r} change more than the embeddings of their "
                f"tokens; use slots"
            )
        self._sees, longest = True, self._max_len
        self._process.close()
        self._start(*self._capacity)
        self._max_len = longest
        self._flights.send_again()

    def _features(self, request: Completion) -> tuple[list[int], bytes]:
        """The places of a request's image tokens, and the features there, as float32."""
        ids = given_ids(request.prompt_ids, request.token_ids, request.versions)
        places, found = self._vision.placed(ids, [*request.images, *request.put_images])
        return places, found.float().cpu().numpy().tobytes()

    def _start(self, slots: int, max_len: int) -> None:
        """Start vLLM's process, with the newest weights."""
        self._capacity, self._max_len = (slots, max_len), max_len
        self._process = VllmProcess(
            self._environment, variables(self.config), torch.get_num_threads(), self._heartbeat
        )
        arguments = engine_args(self.config, self._path, self._model_config, slots, max_len)
        if self._sees:
            arguments = {"enable_prompt_embeds": True} | arguments
        facts = self._process.call("start", arguments)
        self._cached_tokens = facts["blocks"] * facts["block_size"]
        shape = shape_of(self._model_config, self._path)
        self._bytes_per_token = shape.kv_bytes_per_token(self.config.dtype)
        with self._memory:
            assert self._fetched is not None, "a fetch failed, which ends a run"
            self._load(self._fetched)

    def _load(self, version: int) -> float:
        recompute = self.config.kv_cache == "recompute"
        seconds = self._process.call(
            "load", version, self._shared.path, self._shared.table, recompute
        )
        self._version = version
        return float(seconds)

    def _advance(self, steps: int, ahead: bool) -> None:
        """Run vLLM until it has done `steps` steps since the last report, and note its tokens.
        `ahead`: vLLM continues after the report."""
        gained, self._counts = self._process.call(
            "advance", self._flights.take_unsent(), steps, ahead
        )
        completions, stopped = self._flights.note(
            {name: Gained(*tokens) for name, tokens in gained.items()}
        )
        if stopped:
            self._process.call("abort", stopped)
        for completion in completions:
            completion.text = self._endings.text(completion)
        self._ended += completions

    def _take_ended(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended


class SharedTensors:
    """A copy of a model's weights in shared memory (a memory file of Linux).

    Attributes:
        tensors: by name in the model's state dict; tied weights are one tensor.
        path: the memory as a file, for processes on this machine while this object exists.
        table: the same memory as the tensors of a Hugging Face checkpoint.

    Raises:
        InputError: a model whose parameters are not laid out like the tensors of its checkpoints.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        state = model.state_dict(keep_vars=True)
        unique = {id(tensor): tensor for tensor in state.values()}
        rooms = dict(zip(unique, flat(unique.values(), self._allocate), strict=True))
        for key, tensor in unique.items():
            rooms[key].copy_(tensor.data)
        self.tensors = {name: rooms[id(tensor)] for name, tensor in state.items()}
        self.table = self._layout(model)

    def _allocate(self, size: int) -> torch.Tensor:
        file = os.memfd_create("tramontane weights")
        weakref.finalize(self, os.close, file)
        os.posix_fallocate(file, 0, size)  # fails here, not in a copy, if memory is full
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        self._memory = mmap.mmap(file, size)
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def _layout(self, model: PreTrainedModel) -> list[Row]:
        """The table of the tensors under a checkpoint's names: newer models in transformers fuse
        some, e.g. those of experts."""
        start = min(tensor.data_ptr() for tensor in self.tensors.values())
        rows: list[Row] = []
        for name, tensor in revert_weight_conversion(model, dict(self.tensors)).items():
            offset = tensor.data_ptr() - start
            if not 0 <= offset < len(self._memory) or not tensor.is_contiguous():
                raise InputError(
                    f"generator.kind vllm: {model.config.model_type} models cannot be sent to "
                    f"vLLM, since {name} of a checkpoint is not part of a parameter; use slots"
                )
            dtype = str(tensor.dtype).removeprefix("torch.")
            rows.append((name, dtype, tuple(tensor.shape), offset))
        return rows
