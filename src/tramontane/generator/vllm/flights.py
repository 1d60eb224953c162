"""The unfinished requests of a vLLM generator, with their tokens so far."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tramontane.generator.endings import Endings
from tramontane.generator.interface import check_request, not_finite
from tramontane.tokens import Growth, ints
from tramontane.types import Completion, FinishReason

Features: TypeAlias = Callable[[Completion], tuple[list[int], bytes]]
_SEEDS = 2**63
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that its multiples differ modulo _SEEDS


class Gained(NamedTuple):
    """New tokens of a request as vLLM's process reports them; see `inside/vllm_worker.py`."""

    token_ids: Any
    logprobs: Any
    versions: Any
    finish_reason: FinishReason | None


@dataclass
class _Pending:
    """An unfinished request with its tokens so far.

    Attributes:
        request: a copy, whose tokens grow.
        reported: number of tokens that the caller knows of.
        version: newest weights when it was submitted; requests share cached prompts only within a
            version, so that none reads keys and values of outdated weights.
        sent: vLLM has it.
        probe: always runs to its last token.
    """

    request: Completion
    reported: int
    version: int
    sent: bool = False
    probe: bool = False

    @cached_property
    def sampled_from(self) -> int:
        """See `Completion`; read before its tokens grow."""
        return self.request.sampled_from


class Flights:
    """Unfinished requests by their names in vLLM, in order of submission.

    Args:
        endings: of completions.
        vocab: number of tokens of the model.
        features: the places of the image tokens of a request that has images, and the features
            there, as float32.
    """

    def __init__(self, endings: Endings, vocab: int, features: Features) -> None:
        self._endings, self._vocab, self._features = endings, vocab, features
        # vLLM rejects token ids beyond the vocabulary, which some tokenizers have.
        self._stop_ids = sorted(id_ for id_ in endings.ids if id_ < vocab)
        self._flights: dict[str, _Pending] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._flights)

    def add(
        self, requests: Sequence[Completion], limit: int, version: int, probe: bool = False
    ) -> None:
        """Take requests, whose prompt and `max_tokens` must fit `limit` tokens.

        Raises:
            InputError: a request that can never run. No request of the call is taken then.
        """
        for request in requests:
            check_request(request, self._vocab, limit, "the generator's length")
        for request in requests:
            count = len(request.token_ids)
            self._flights[str(self._serial)] = _Pending(request.copy(), count, version, probe=probe)
            self._serial += 1

    def send_again(self) -> None:
        """Let all go to another process of vLLM, with their tokens so far."""
        for flight in self._flights.values():
            flight.sent = False

    def take_unsent(self) -> list[dict[str, Any]]:
        """Requests that vLLM does not have yet, as messages to its process."""
        unsent = {name: f for name, f in self._flights.items() if not f.sent}
        # Siblings share their features, which are pickled once then.
        shared: dict[Any, tuple[list[int], bytes]] = {}
        for flight in unsent.values():
            flight.sent = True
        return [self._message(name, flight, shared) for name, flight in unsent.items()]

    def note(self, gained: Mapping[str, Gained]) -> tuple[list[Completion], list[str]]:
        """Note the new tokens of requests.

        Returns:
            Completions, without text, and names of requests that vLLM must drop, since a stop text
            ended them.

        Raises:
            InputError: the logits were not finite.
        """
        completions, stopped = [], []
        for name, new in gained.items():
            if (broken := np.isnan(np.asarray(new.logprobs, dtype=np.float32))).any():
                raise not_finite(int(np.asarray(new.versions)[broken][0]))
            flight = self._flights[name]
            request, before = flight.request, len(flight.request.token_ids)
            sampled_from = flight.sampled_from
            request.token_ids.frombytes(new.token_ids.tobytes())
            request.logprobs.frombytes(new.logprobs.tobytes())
            request.versions.frombytes(new.versions.tobytes())
            reason = new.finish_reason
            if (
                not flight.probe
                and (end := self._stop_text(request.token_ids, before, sampled_from)) is not None
            ):
                del request.token_ids[end:], request.logprobs[end:], request.versions[end:]
                if reason is None:
                    stopped.append(name)
                reason = "stop"
            if reason is not None:
                del self._flights[name]
                completions.append(request.completed(reason))
        return completions, stopped

    def take_growth(self) -> Growth:
        """New tokens of each unfinished request since it was submitted or the last call."""
        growth = Growth()
        for flight in self._flights.values():
            r, before = flight.request, flight.reported
            if len(r.token_ids) > before:
                flight.reported = len(r.token_ids)
                tokens = r.token_ids[before:], r.logprobs[before:], r.versions[before:]
                growth.add(r.group, r.index, *tokens)
        return growth

    def pending(self) -> list[Completion]:
        """All unfinished requests, with their tokens so far, in order of submission."""
        return [flight.request.copy() for flight in self._flights.values()]

    def clear(self, group: int | None = None) -> list[str]:
        """Drop all requests, or a group's; returns the names of those that vLLM has."""
        gone = {
            name: flight
            for name, flight in self._flights.items()
            if group is None or flight.request.group == group
        }
        for name in gone:
            del self._flights[name]
        return [name for name, flight in gone.items() if flight.sent]

    def _message(self, name: str, flight: _Pending, shared: dict[Any, Any]) -> dict[str, Any]:
        request = flight.request
        sampling, begun = request.sampling, len(request.token_ids)
        params: dict[str, Any] = {
            "max_tokens": sampling.max_tokens - begun,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": (request.seed + begun * _SEED_STEP) % _SEEDS,
        }
        # vLLM itself uses only the EOS tokens of the model's config.
        params["stop_token_ids"] = [] if flight.probe else self._stop_ids
        params["ignore_eos"] = True
        prompt = ints([*request.prompt_ids, *request.token_ids])
        message = {"name": name, "prompt": prompt, "sampling": params, "salt": str(flight.version)}
        if shown := (*request.images, *request.put_images):
            key = shown, prompt.tobytes()
            message["features"] = shared[key] = shared.get(key) or self._features(request)
        return message

    def _stop_text(self, ids: array[int], begin: int, sampled_from: int) -> int | None:
        """Number of tokens up to the first, from place `begin` on, that completes a stop text; the
        text begins at `sampled_from` or later."""
        texts = self._endings.texts
        if texts is None:
            return None
        for end in range(begin + 1, len(ids) + 1):
            if texts.may_end[ids[end - 1]] and texts.found(
                ids[max(sampled_from, end - texts.tail) : end].tolist()
            ):
                return end
        return None
