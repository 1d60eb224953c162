"""Participants in one of the project's generators: a checkpoint in the slot engine, or in vLLM."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tramontane.config import GeneratorConfig
from tramontane.curation.backend import answer_seed, in_paper_tags
from tramontane.curation.backend.checkpoint import check_checkpoint, longest_prompt
from tramontane.data.prompts import PromptEncoder
from tramontane.generator import AnyGenerator, load_generator
from tramontane.models.loading import load_tokenizer
from tramontane.oversight.config import ModelConfig
from tramontane.oversight.labels import letter_place
from tramontane.oversight.transcript import Call, Reply, Transcript
from tramontane.oversight.wording import Wording
from tramontane.types import Completion, Request, SamplingParams, ThinkingTags


def open_local(models: Mapping[str, ModelConfig], wording: Wording) -> dict[str, LocalAgent]:
    """The participants by name; models with equal checkpoints and responses share a generator.

    Raises:
        InputError: no such checkpoint or device, or a context that is too short.
    """
    encoders: dict[str, PromptEncoder] = {}
    sharing: dict[str, list[str]] = {}
    for name, model in models.items():
        assert model.checkpoint is not None
        check_checkpoint(model)
        tokenizer = load_tokenizer(model.checkpoint.files)
        encoders[name] = PromptEncoder(tokenizer, model, model.thinking_tags)
        key = f"{model.checkpoint.model_dump_json()} {encoders[name].response}"
        sharing.setdefault(key, []).append(name)
    agents: dict[str, LocalAgent] = {}
    for names in sharing.values():
        engine = _SharedGenerator([models[name] for name in names], encoders[names[0]])
        for name in names:
            agents[name] = LocalAgent(models[name], wording, encoders[name], engine)
    return agents


class LocalAgent:
    """A participant whose calls are requests of a generator.

    Args:
        config: its `checkpoint` is set.
        wording: templates of the prompts.
        encoder: makes prompts into tokens.
        generator: the generator, which may serve other participants too.
    """

    computes = True

    def __init__(
        self,
        config: ModelConfig,
        wording: Wording,
        encoder: PromptEncoder,
        generator: _SharedGenerator,
    ) -> None:
        self.config, self.wording, self.encoder = config, wording, encoder
        self.sampling = SamplingParams(config.max_tokens, config.temperature, config.top_p)
        self.longest_prompt = longest_prompt(config)
        self._generator = generator
        self._calls: dict[int, Call] = {}
        self._done: list[tuple[int, Reply]] = []

    @property
    def waiting(self) -> int:
        return len(self._calls) + len(self._done)

    def submit(self, ticket: int, key: str, call: Call, examples: Sequence[Transcript]) -> None:
        """See `Agent`. A prompt that is too long gets no reply but a fault."""
        ids = self.encoder.encode(self.wording.prompt(call, examples))
        if len(ids) > self.longest_prompt:
            fault = f"a prompt of {len(ids)} tokens is longer than {self.longest_prompt}"
            self._done.append((ticket, Reply("", fault=fault)))
            return
        self._calls[ticket] = call
        seed = answer_seed(self.config.seed, key, 0)
        self._generator.submit(Request(ticket, 0, ids, seed, self.sampling), self)

    def poll(self, seconds: float) -> list[tuple[int, Reply]]:
        """See `Agent`."""
        if not self._done:
            self._generator.run(seconds)
        done, self._done = self._done, []
        return done

    def take(self, completion: Completion) -> None:
        """Take a finished request of this participant."""
        call = self._calls.pop(completion.group)
        probability = None
        if call.task in ("answer", "judge"):
            probability = letter_probability(
                completion, self.encoder.tokenizer, self.encoder.tags, call.question.choices
            )
        text = in_paper_tags(completion.text, self.encoder.tags)
        reply = Reply(text, len(completion.token_ids), probability)
        self._done.append((completion.group, reply))


class _SharedGenerator:
    """A generator, and the participant that each of its requests belongs to."""

    def __init__(self, models: Sequence[ModelConfig], encoder: PromptEncoder) -> None:
        checkpoint = models[0].checkpoint
        assert checkpoint is not None
        settings: dict[str, Any] = {
            name: getattr(checkpoint, name) for name in ("kind", "device", "dtype", "stop", "vllm")
        }
        self._generator: AnyGenerator = load_generator(
            checkpoint.files,
            GeneratorConfig(**settings),
            checkpoint.slots,
            max(longest_prompt(model) + model.max_tokens for model in models),
            encoder.response,
        )
        self._owners: dict[int, LocalAgent] = {}

    def submit(self, request: Request, owner: LocalAgent) -> None:
        self._owners[request.group] = owner
        self._generator.submit([request])

    def run(self, seconds: float) -> None:
        """Decode until a request has finished, or `seconds` have passed."""
        end = time.monotonic() + seconds
        while self._owners:
            completions = self._generator.step()
            for completion in completions:
                self._owners.pop(completion.group).take(completion)
            if completions or time.monotonic() > end:
                return


def letter_probability(
    completion: Completion,
    tokenizer: PreTrainedTokenizerBase,
    tags: ThinkingTags,
    choices: Sequence[str] = (),
) -> float | None:
    """Probability of the answer's letter at its place, given the tokens before it; None without an
    answer.

    It is the sampled token's at the model's temperature, before top-p and top-k. The remainder
    counts for the other letter, so a model that might have said something else there appears less
    certain than it is.
    """
    ids = list(completion.token_ids)

    def text(end: int) -> str:
        return in_paper_tags(str(tokenizer.decode(ids[:end])), tags)

    place = letter_place(text(len(ids)), choices)
    if place is None:
        return None
    # The first token after which the text extends beyond the letter.
    low, high = 0, len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        if len(text(middle + 1)) > place[1]:
            high = middle
        else:
            low = middle + 1
    return math.exp(completion.logprobs[low])
