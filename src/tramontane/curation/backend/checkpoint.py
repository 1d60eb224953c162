"""A checkpoint that answers in this process, through the generator that training uses.

What a token is drawn from differs in the last digits with what is computed beside it, so an answer
is the same again only in the same company. Therefore, whenever as many answers are finished as
there are slots, they and the unfinished ones' tokens so far are written down, and the unfinished
ones are submitted anew: whether it was killed there or not, the generator goes on from what is
written. That costs a prefill of what is in flight; a kill costs what came since.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tramontane.config import GeneratorConfig
from tramontane.curation.backend import Answer, Gathering, Prompt, answer_seed
from tramontane.curation.backend.journal import Journal
from tramontane.curation.config import ModelConfig
from tramontane.data.prompts import encode_prompt
from tramontane.errors import InputError
from tramontane.generator import Generator
from tramontane.models import loading
from tramontane.types import Completion, Request, SamplingParams


class Checkpoint:
    """The model, in a generator of its own.

    Args:
        config: with a `checkpoint`.

    Raises:
        InputError: as `Generator.load`, or a context that is too short.
    """

    def __init__(self, config: ModelConfig) -> None:
        assert config.checkpoint is not None
        self.config, self.local = config, config.checkpoint
        self.longest = _longest_prompt(config)
        self.generator = Generator.load(
            self.local.path,
            GeneratorConfig(device=self.local.device, dtype=self.local.dtype),
            self.local.slots,
            self.longest + config.max_tokens,
        )

    def answers(
        self, prompts: Sequence[Prompt], n: int, record: Path
    ) -> Iterator[tuple[int, list[Answer]]]:
        """See `Backend`."""
        saved = record.with_suffix(".flight.json")
        state: dict[str, Any] = {"end": 0, "flight": []}
        if saved.is_file():
            state = json.loads(saved.read_text())
        gathering = Gathering(n)
        requests: dict[tuple[int, int], Request] = {}
        for place, prompt in enumerate(prompts):
            made = self._requests(place, prompt, n)
            requests |= {(r.group, r.index): r for r in made}
            if not made:
                fault = f"its prompt is longer than {self.longest} tokens"
                yield place, [Answer("", 0, fault)] * n
        with Journal(record, state["end"]) as journal:
            for place, index, text, tokens in journal:
                del requests[place, index]
                yield from gathering.add(place, index, Answer(text, tokens))
            flight = [_resumed(requests.pop((i, j)), tokens) for i, j, tokens in state["flight"]]
            for done, unfinished in self._generate(flight, deque(requests.values())):
                rows = [(c.group, c.index, c.text, len(c.token_ids)) for c in done]
                end = journal.add(*rows)
                _write(saved, {"end": end, "flight": unfinished})
                for place, index, text, tokens in rows:
                    yield from gathering.add(place, index, Answer(text, tokens))

    def _requests(self, place: int, prompt: Prompt, n: int) -> list[Request]:
        """None, where the prompt is too long."""
        config = self.config
        ids = encode_prompt(self.generator.tokenizer, prompt.text, config.system_prompt)
        sampling = SamplingParams(config.max_tokens, config.temperature, config.top_p)
        return [
            Request(place, j, ids, answer_seed(config.seed, prompt.key, j), sampling)
            for j in range(n if len(ids) <= self.longest else 0)
        ]

    def _generate(
        self, flight: list[Request], waiting: deque[Request]
    ) -> Iterator[tuple[list[Completion], list[tuple[int, int, list[int]]]]]:
        """Yield (what has finished, tokens of what has not) at each moment to go on from."""
        generator, slots = self.generator, self.local.slots
        generator.cancel_all()  # of a call that ended early
        generator.submit(flight)
        unfinished, done = len(flight), list[Completion]()
        while unfinished or waiting:
            # A few that wait besides those in flight, so that no slot is ever empty.
            fresh = [waiting.popleft() for _ in range(min(len(waiting), 2 * slots - unfinished))]
            generator.submit(fresh)
            new = generator.step()
            unfinished += len(fresh) - len(new)
            done += new
            if len(done) >= slots or not unfinished:
                flight = generator.pending()
                generator.cancel_all()
                generator.submit(flight)
                yield done, [(r.group, r.index, r.token_ids) for r in flight]
                done = []


def check_checkpoint(config: ModelConfig) -> dict[str, Any]:
    """See `check_model`."""
    assert config.checkpoint is not None
    loading.check_device(config.checkpoint.device)
    _longest_prompt(config)
    folder = Path(loading.resolve(config.checkpoint.path)).expanduser()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    return {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def _longest_prompt(config: ModelConfig) -> int:
    """Tokens that a prompt may have, beside an answer in the model's context."""
    assert config.checkpoint is not None
    path, longest = config.checkpoint.path, config.checkpoint.max_prompt_tokens
    context = loading.context_length(loading.load_config(path))
    if context is None:
        return longest
    if context <= config.max_tokens:
        raise InputError(
            f"model {path!r}: answers of max_tokens {config.max_tokens} leave no room for a prompt "
            f"in its context of {context}; allow fewer"
        )
    return min(longest, context - config.max_tokens)


def _resumed(request: Request, tokens: list[int]) -> Request:
    # Log-probs and versions go with tokens, but nobody here reads them.
    n = len(tokens)
    return replace(request, token_ids=tokens, logprobs=[0.0] * n, versions=[0] * n)


def _write(path: Path, state: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(state))
    partial.replace(path)
