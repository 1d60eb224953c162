"""The interface of generators, the rules that every request must meet, and the error of a model
that has diverged, whichever engine runs it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from tramontane.config import GeneratorConfig
from tramontane.config.generator import MOST_ALLOWED
from tramontane.errors import InputError
from tramontane.models.weights import Weights
from tramontane.types import Completion, Progress


class AnyGenerator(Protocol):
    """Samples completions, with the log-prob of each token and the weight version that drew it.

    A plain class, independent of where it runs; shares no memory with other workers. A completion
    in flight is decoded or queued; one that is decoding holds a slot.
    """

    config: GeneratorConfig
    tokenizer: PreTrainedTokenizerBase

    @property
    def version(self) -> int:
        """Version of the weights that will sample the next token."""

    def resize(self, slots: int, max_len: int) -> None:
        """Change the number of slots and their length.

        Args:
            slots: maximum number of completions decoded at once.
            max_len: maximum length of a prompt plus its `max_tokens`, in tokens.

        Raises:
            RuntimeError: a request is unfinished.
            InputError: no memory for a sequence of `max_len` tokens.
        """

    def submit(self, requests: list[Completion]) -> None:
        """Queue requests; they take slots in this order as slots and memory become free.

        Raises:
            InputError: a request that can never run, e.g. prompt and `max_tokens` beyond `max_len`
                or the model's context. No request of the call is queued then.
        """

    def step(self, n: int | None = None) -> list[Completion]:
        """Run up to `n` decode steps (default `config.steps_per_call`), and return the completions
        that finished."""

    def poll(self, requests: list[Completion], seconds: float = 0.0) -> Progress:
        """Take new requests, `step` until `seconds` have passed, and return the finished
        completions and the new tokens of unfinished ones, from which another generator can continue
        if this one dies.

        Raises:
            InputError: see `submit`.
        """

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

    def swap(self, version: int) -> float:
        """Use fetched weights from the next decode step on; everything in flight stays in flight.

        Cached keys and values stay as they are (`kv_cache: keep`, arXiv 2506.10910, section 3) or
        are rebuilt under the new weights (`recompute`). Does nothing if the version is not
        available, because it is already in use or a newer one is being fetched.

        Args:
            version: recorded with every token sampled from now on.

        Returns:
            Seconds for which generation paused.
        """

    def update_weights(self, version: int, state: dict[str, torch.Tensor]) -> float:
        """`fetch` and `swap` weights given as one dictionary.

        Raises:
            InputError: see `fetch`; or tied tensors differ. Nothing is changed then.
        """

    def pending(self) -> list[Completion]:
        """All unfinished requests, with their tokens, log-probs and versions so far."""

    def cancel(self, group: int) -> None:
        """Drop the unfinished requests of a group."""

    def cancel_all(self) -> None:
        """Drop all unfinished requests."""

    def probe(
        self, prompts: list[list[int]], tokens: int, seed: int, temperature: float
    ) -> list[Completion]:
        """Complete `prompts` with exactly `tokens` tokens each, ignoring EOS; requests in flight
        are not affected. The log-probs are compared with the trainer's."""

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that the generator computes with, by name, on the CPU, to diagnose a parity
        mismatch; those that cannot be determined are missing."""

    def hidden_states(self, ids: list[int]) -> list[torch.Tensor]:
        """Embeddings, then each layer's output, of one sequence: [len(ids), hidden] float32; empty
        if the engine does not expose them."""

    def stats(self) -> dict[str, Any]:
        """Counts and seconds since the start.

        Returns:
            The fields of `engine.Stats`; `busy_seconds`, spent in `step`, `poll` and `swap`;
            `decoding`, sequences that hold a slot now; `utilization`, the live share of all slots
            over all decode steps; `cache_bytes`, memory of the slots' keys and values.
        """


def not_finite(version: int) -> InputError:
    """The error for logits that are not finite, from which no token can be drawn.

    Args:
        version: of the weights; 0 has not been trained by this run.
    """
    if version:
        return InputError(
            f"the model has diverged: its logits are not finite (NaN) under the weights of update "
            f"{version}. Resume with a lower trainer.learning_rate, or start again with one. If a "
            f"resumed run fails again, its newest checkpoint has diverged too: delete that folder, "
            f"and resume from the previous one"
        )
    return InputError(
        "the model's logits are not finite (NaN): these weights have diverged or are damaged, or "
        "their numbers are beyond the range of generator.dtype; set that to float32, or take a "
        "different checkpoint"
    )


def check_request(request: Completion, vocab: int, limit: int, holder: str) -> None:
    """Reject a request that can never run.

    Args:
        request: with the tokens it has so far.
        vocab: number of tokens in the model's vocabulary.
        limit: longest prompt plus `max_tokens`, in tokens.
        holder: what sets the limit, for the error message.

    Raises:
        InputError: an empty prompt, unknown tokens, more than `limit` tokens, nothing left to
            generate, tokens without log-probs or versions, or sampling parameters out of range.
    """
    s = request.sampling
    name = f"request {request.index} of group {request.group}"
    if not request.prompt_ids:
        raise InputError(f"{name}: an empty prompt; give at least a BOS token")
    if not all(0 <= t < vocab for t in request.prompt_ids):
        raise InputError(f"{name}: prompt tokens outside the model's vocabulary of {vocab}")
    if len(request.prompt_ids) + s.max_tokens > limit:
        raise InputError(
            f"{name}: {len(request.prompt_ids)} prompt tokens and max_tokens {s.max_tokens} "
            f"do not fit {holder} of {limit} tokens; shorten either"
        )
    if len(request.token_ids) >= s.max_tokens:
        raise InputError(f"{name}: max_tokens {s.max_tokens} leaves nothing to generate")
    if not len(request.token_ids) == len(request.logprobs) == len(request.versions):
        raise InputError(f"{name}: needs a log-prob and a version for each of its tokens")
    if s.record_allowed and not 0 < s.top_k <= MOST_ALLOWED:
        raise InputError(
            f"{name}: allowed tokens are recorded for a top_k from 1 to {MOST_ALLOWED}, not "
            f"{s.top_k}"
        )
    if s.temperature < 0 or not 0 < s.top_p <= 1 or s.top_k < 0:
        raise InputError(f"{name}: needs temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0, not {s}")
