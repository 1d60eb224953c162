"""A checkpoint in this process, run by the generator that training uses.

The logits of a token depend, in their last digits, on the other sequences of the same forward pass,
so an answer is repeatable only among the same neighbors. Therefore, whenever as many answers are
finished as there are slots, the finished answers and the tokens of unfinished ones are written to
disk, and the unfinished requests are resubmitted. The generator thus continues from the same state
whether the process was killed or not. This costs a prefill of the sequences in flight; a kill costs
the tokens decoded since the last write.
"""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tramontane.asking import Answer, Collector, Prompt, answer_seed, in_paper_tags
from tramontane.config import GeneratorConfig
from tramontane.config.asking import ModelConfig
from tramontane.config.device import dtype_warnings
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.generator import Generator
from tramontane.journals import Journal
from tramontane.models import loading
from tramontane.models.image_tokens import ImageProcessor
from tramontane.models.names import resolve
from tramontane.tokens import floats, ints
from tramontane.types import Completion, Illustrated, SamplingParams
from tramontane.workplace import write_whole


class Checkpoint:
    """A model in the embedded generator.

    Args:
        config: its `checkpoint` is set.

    Raises:
        InputError: see `Generator.load`; or a context that is too short.
    """

    def __init__(self, config: ModelConfig) -> None:
        assert config.checkpoint is not None
        self.config, self.checkpoint = config, config.checkpoint
        self.max_prompt = longest_prompt(config)  # tokens
        tokenizer = loading.load_tokenizer(self.checkpoint.files)
        images = ImageProcessor(self.checkpoint.files)
        self.encoder = PromptEncoder(tokenizer, config, config.thinking_tags, images=images)
        self.generator = Generator.load(
            self.checkpoint.files,
            GeneratorConfig(
                device=self.checkpoint.device,
                dtype=self.checkpoint.dtype,
                stop=self.checkpoint.stop,
            ),
            self.checkpoint.slots,
            self.max_prompt + config.max_tokens,
            self.encoder.response,
        )

    def answers(
        self, prompts: Sequence[Prompt], n: int, record: Path
    ) -> Iterator[tuple[int, list[Answer]]]:
        """See `Model`."""
        saved = record.with_suffix(".flight.json")
        state: dict[str, Any] = {"end": 0, "flight": []}
        if saved.is_file():
            state = json.loads(saved.read_text())
        collector, tags = Collector(n), self.encoder.tags
        requests: dict[tuple[int, int], Completion] = {}
        for place, prompt in enumerate(prompts):
            made = self._requests(place, prompt, n)
            requests |= {(r.group, r.index): r for r in made}
            if not made:
                fault = f"its prompt is longer than {self.max_prompt} tokens"
                yield place, [Answer("", 0, fault)] * n
        with Journal(record, state["end"]) as journal:
            for place, index, text, tokens in journal:
                del requests[place, index]
                yield from collector.add(place, index, Answer(text, tokens))
            flight = [_resumed(requests.pop((i, j)), tokens) for i, j, tokens in state["flight"]]
            for done, unfinished in self._generate(flight, deque(requests.values())):
                rows = [
                    (c.group, c.index, in_paper_tags(c.text, tags), len(c.token_ids)) for c in done
                ]
                end = journal.add(*rows)
                write_whole(saved, json.dumps({"end": end, "flight": unfinished}))
                for place, index, text, tokens in rows:
                    yield from collector.add(place, index, Answer(text, tokens))

    def _requests(self, place: int, prompt: Prompt, n: int) -> list[Completion]:
        """The prompt's n requests; an empty list if the prompt is too long."""
        config = self.config
        shown = prompt.images
        ids = self.encoder.encode(Illustrated(prompt.text, shown) if shown else prompt.text)
        sampling = SamplingParams(config.max_tokens, config.temperature, config.top_p)
        if len(ids) > self.max_prompt:
            return []
        seeds = [answer_seed(config.seed, prompt.key, j) for j in range(n)]
        return Completion.for_seeds(place, ids, seeds, sampling, shown)

    def _generate(
        self, flight: list[Completion], waiting: deque[Completion]
    ) -> Iterator[tuple[list[Completion], list[tuple[int, int, list[int]]]]]:
        """Yield (finished completions, (group, index, tokens) of the others) at each write."""
        generator, slots = self.generator, self.checkpoint.slots
        generator.cancel_all()  # requests of an unfinished earlier call
        generator.submit(flight)
        unfinished, done = len(flight), list[Completion]()
        while unfinished or waiting:
            # More requests than slots are submitted, so that no slot is ever empty.
            fresh = [waiting.popleft() for _ in range(min(len(waiting), 2 * slots - unfinished))]
            generator.submit(fresh)
            new = generator.step()
            unfinished += len(fresh) - len(new)
            done += new
            if len(done) >= slots or not unfinished:
                flight = generator.pending()
                generator.cancel_all()
                generator.submit(flight)
                yield done, [(r.group, r.index, r.token_ids.tolist()) for r in flight]
                done = []


def check_checkpoint(config: ModelConfig) -> dict[str, Any]:
    """See `check_model`."""
    assert config.checkpoint is not None
    loading.check_device(config.checkpoint.device)
    for warning in dtype_warnings(config.checkpoint, "checkpoint."):
        warnings.warn(warning, stacklevel=3)
    longest_prompt(config)
    folder = Path(resolve(config.checkpoint.path)).expanduser()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    return {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def longest_prompt(config: ModelConfig) -> int:
    """Maximum tokens of a prompt, so that an answer still fits the model's context.

    Raises:
        InputError: no prompt could fit.
    """
    assert config.checkpoint is not None
    path, limit = config.checkpoint.path, config.checkpoint.max_prompt_tokens
    context = loading.context_length(loading.load_config(path))
    if context is None:
        return limit
    if context <= config.max_tokens:
        raise InputError(
            f"model {path!r}: answers of max_tokens {config.max_tokens} leave no room for a prompt "
            f"in its context of {context}; allow fewer"
        )
    return min(limit, context - config.max_tokens)


def _resumed(request: Completion, tokens: list[int]) -> Completion:
    # A request's tokens need log-probs and versions, which are not read here.
    n = len(tokens)
    return replace(
        request, token_ids=ints(tokens), logprobs=floats([0.0] * n), versions=ints([0] * n)
    )
