"""Participants of discussions: simulated, in one of the project's generators, or behind an
endpoint.

All implement `Agent`: calls go in at any time, and replies come out in any order, so that
concurrent discussions share each model's batches, like rollouts.
"""

from __future__ import annotations

import math
import time
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, Protocol

from tramontane.asking import Answer, Prompt, answer_seed, in_paper_tags
from tramontane.config import GeneratorConfig
from tramontane.config.device import dtype_warnings
from tramontane.types import Completion, SamplingParams, ThinkingTags
from tramontane_oversight.config import ModelConfig
from tramontane_oversight.responses import letter_place
from tramontane_oversight.transcript import Call, Reply, Transcript
from tramontane_oversight.wording import Wording

# torch takes seconds to import, and only checkpoints need it.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Agent(Protocol):
    """A participant that answers calls.

    Attributes:
        computes: True if `poll` computes replies, False if it only waits for them.
    """

    computes: bool

    @property
    def waiting(self) -> int:
        """Number of calls without a reply."""

    def submit(self, ticket: int, key: str, call: Call, examples: Sequence[Transcript]) -> None:
        """Take a call.

        Args:
            ticket: number that comes back with the reply.
            key: with the model's seed, determines the reply's randomness.
            call: what is asked.
            examples: worked examples for a judge.

        Raises:
            InputError: the model has refused all earlier calls.
        """

    def poll(self, seconds: float) -> list[tuple[int, Reply]]:
        """Work or wait for at most about `seconds`, and return (ticket, reply) of each finished
        call.

        Raises:
            InputError: the model cannot answer any call until the user corrects something.
        """


def open_agents(models: Mapping[str, ModelConfig], wording: Wording) -> dict[str, Agent]:
    """The participants by name. Checkpoints with equal sections and responses share a generator.

    Raises:
        InputError: no such checkpoint or device, a context that is too short, or no key for an
            endpoint.
    """
    from tramontane_oversight.simulated import SimulatedAgent

    for warning in dtype_warnings(models, "models."):
        warnings.warn(warning, stacklevel=3)
    agents: dict[str, Agent] = {}
    sharing: dict[str, list[tuple[str, LocalAgent]]] = {}
    for name, model in models.items():
        if model.simulated:
            agents[name] = SimulatedAgent(model.simulated, model.seed)
        elif model.endpoint:
            agents[name] = RemoteAgent(model, wording)
        else:
            assert model.checkpoint is not None
            agents[name] = local = LocalAgent(model, wording)
            key = f"{model.checkpoint.model_dump_json()} {local.encoder.response}"
            sharing.setdefault(key, []).append((name, local))
    for group in sharing.values():
        generator = _SharedGenerator([local for _, local in group])
        for _, local in group:
            local.generator = generator
    return agents


class Immediate:
    """An agent that replies to each call at once, by its method `reply`."""

    computes = True

    def __init__(self) -> None:
        self._done: list[tuple[int, Reply]] = []

    @property
    def waiting(self) -> int:
        return len(self._done)

    def reply(self, key: str, call: Call, examples: Sequence[Transcript]) -> Reply:
        """The reply to a call; see `Agent.submit`."""
        raise NotImplementedError

    def submit(self, ticket: int, key: str, call: Call, examples: Sequence[Transcript]) -> None:
        self._done.append((ticket, self.reply(key, call, examples)))

    def poll(self, seconds: float) -> list[tuple[int, Reply]]:
        done, self._done = self._done, []
        return done


class RemoteAgent:
    """A participant behind an OpenAI-compatible HTTP server: a separate request for each call,
    `endpoint.concurrency` at once. `endpoint.timeout_s` and `retries` bound the wait for a reply.

    Args:
        config: its `endpoint` is set.
        wording: templates of the prompts.

    Raises:
        InputError: the variable for the key is not set.
    """

    computes = False

    def __init__(self, config: ModelConfig, wording: Wording) -> None:
        from tramontane.asking.endpoint import EndpointClient

        self.wording = wording
        self._endpoint = EndpointClient(config)
        self._calls: dict[Future[Answer], int] = {}

    @property
    def waiting(self) -> int:
        return len(self._calls)

    def submit(self, ticket: int, key: str, call: Call, examples: Sequence[Transcript]) -> None:
        """See `Agent`.

        Raises:
            InputError: the server has refused all earlier requests.
        """
        prompt = Prompt(key, self.wording.prompt(call, examples))
        self._calls[self._endpoint.ask(prompt)] = ticket

    def poll(self, seconds: float) -> list[tuple[int, Reply]]:
        replies = []
        for future in wait(self._calls, seconds, FIRST_COMPLETED).done:
            answer = future.result()
            reply = Reply(answer.text, answer.tokens, fault=answer.fault)
            replies.append((self._calls.pop(future), reply))
        return replies


class LocalAgent:
    """A checkpoint whose calls are requests of a generator, which may serve other agents too.

    Args:
        config: its `checkpoint` is set.
        wording: templates of the prompts.

    Raises:
        InputError: no such checkpoint or device, or a context that is too short.
    """

    computes = True
    generator: _SharedGenerator

    def __init__(self, config: ModelConfig, wording: Wording) -> None:
        from tramontane.asking.checkpoint import check_checkpoint, longest_prompt
        from tramontane.data.prompts import PromptEncoder
        from tramontane.models.loading import load_tokenizer

        assert config.checkpoint is not None
        check_checkpoint(config)
        self.config, self.wording, self.checkpoint = config, wording, config.checkpoint
        tokenizer = load_tokenizer(self.checkpoint.files)
        self.encoder = PromptEncoder(tokenizer, config, config.thinking_tags)
        self.sampling = SamplingParams(config.max_tokens, config.temperature, config.top_p)
        self.longest_prompt = longest_prompt(config)
        self._calls: dict[int, Call] = {}
        self._done: list[tuple[int, Reply]] = []

    @property
    def waiting(self) -> int:
        return len(self._calls) + len(self._done)

    def submit(self, ticket: int, key: str, call: Call, examples: Sequence[Transcript]) -> None:
        ids = self.encoder.encode(self.wording.prompt(call, examples))
        if len(ids) > self.longest_prompt:
            fault = f"a prompt of {len(ids)} tokens is longer than {self.longest_prompt}"
            self._done.append((ticket, Reply("", fault=fault)))
            return
        self._calls[ticket] = call
        seed = answer_seed(self.config.seed, key, 0)
        self.generator.submit(Completion.requested(ticket, 0, ids, seed, self.sampling), self)

    def poll(self, seconds: float) -> list[tuple[int, Reply]]:
        if not self._done:
            self.generator.run(seconds)
        done, self._done = self._done, []
        return done

    def take(self, completion: Completion) -> None:
        """Take a finished request of this participant."""
        call, tags = self._calls.pop(completion.group), self.encoder.tags
        probability = None
        if call.task in ("answer", "judge"):
            probability = letter_probability(
                completion, self.encoder.tokenizer, tags, call.question.choices
            )
        text = in_paper_tags(completion.text, tags)
        self._done.append((completion.group, Reply(text, len(completion.token_ids), probability)))


class _SharedGenerator:
    """A generator, and the participant that each of its requests belongs to."""

    def __init__(self, agents: Sequence[LocalAgent]) -> None:
        from tramontane.generator import load_generator

        checkpoint = agents[0].checkpoint
        settings: dict[str, Any] = {
            name: getattr(checkpoint, name) for name in ("kind", "device", "dtype", "stop", "vllm")
        }
        self._generator = load_generator(
            checkpoint.files,
            GeneratorConfig(**settings),
            checkpoint.slots,
            max(agent.longest_prompt + agent.config.max_tokens for agent in agents),
            agents[0].encoder.response,
        )
        self._owners: dict[int, LocalAgent] = {}

    def submit(self, request: Completion, owner: LocalAgent) -> None:
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
    lengths = range(1, len(ids) + 1)
    token = bisect_right(lengths, place[1], key=lambda end: len(text(end)))
    return math.exp(completion.logprobs[min(token, len(ids) - 1)])
