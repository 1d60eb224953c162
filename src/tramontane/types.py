"""The data types passed between packages: Problem → Request → Completion → Verdict → Group;
`batches` has those that lead to the trainer.

Plain data without torch or a tokenizer, so that every package and process can use them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Outcome = Literal["right", "wrong", "unscorable", "malformed"]
FinishReason = Literal["stop", "length"]
FilterKind = Literal["no diversity", "unscorable", "left over"]
Ending = Literal[
    "completed",  # the environment said so, or the model made no call
    "max_turns",
    "max_tokens",
    "step_timeout",
    "environment_failed",
    "unparsed_call",
    "context_full",  # no room for an answer and another token of the model
]
FAILED: frozenset[Ending] = frozenset({"step_timeout", "environment_failed"})  # unscorable


class ThinkingTags(NamedTuple):
    """The texts before and after the thoughts of a response."""

    opening: str = "<think>"
    closing: str = "</think>"

    @classmethod
    def of(cls, pair: Sequence[str] | None) -> ThinkingTags:
        """The tags of a recorded config; None: the paper's."""
        return cls(*pair) if pair else cls()

    def around(self, thoughts: str) -> str:
        return f"{self.opening}{thoughts}{self.closing}"


PAPER_TAGS = ThinkingTags()  # arXiv 2506.10910, section 2.2

# Versions of tokens that were not sampled by this run's weights.
ELSEWHERE = -1  # recorded: from an earlier run, another model, or a human
INSERTED = -2  # inserted into a sampled completion, and not trained on


class ResponseText(NamedTuple):
    """The parts of a response's text that are not simply its sampled tokens."""

    # Thinking tags, kept in the text even if they are special tokens.
    tags: ThinkingTags = PAPER_TAGS
    prefix: str = ""  # start of every response, which is already at the end of the prompts
    others: tuple[str, ...] = ()  # starts of the responses to prompts at other levels of effort


class Message(TypedDict):
    """A message of a chat; `role` is `system`, `user` or `assistant`."""

    role: str
    content: str


Prompt: TypeAlias = "str | list[Message]"  # a statement, or a chat that ends with the user's turn


@dataclass(frozen=True)
class Reward:
    """A user-defined reward function with its weight.

    Args:
        function: a function of (problem, text, n_tokens) that returns a number from 0 to 1, one of
            a whole group, one of TRL's kind, or its import path; see docs/your-rewards.md.
        weight: factor applied to the function's result.
        name: name in verdicts and metrics; by default the function's.
        malformed: also call the function for malformed completions.
    """

    function: Callable[..., Any] | str
    weight: float = 1.0
    name: str | None = None
    malformed: bool = False


@dataclass(frozen=True)
class Problem:
    """One task, with the data that its verifier needs.

    Args:
        id: unique within its source.
        domain: name in `verifier.domains`; decides the verifier and the format of responses.
        problem: the statement that the model reads; for a chat, the user's last message.
        answer: the reference answer (math), LaTeX or plain text without `$`.
        tests: the tests (code), e.g. `{"type": "stdio", "cases": [{"input", "output"}],
            "checker": "tokens"}`.
        language: ISO 639-1 code of the statement, when known; detected from the text otherwise.
        difficulty: a level, larger is harder, when known.
        source: where the problem comes from.
        messages: the chat that the model reads instead of the statement, if the row has one; a
            system message in it replaces `data.system_prompt`.
        metadata: other fields of the source; for user-defined verifiers and rewards.
        effort: the level of effort that the model is asked for, a name in `data.effort`.
        l_max, l_cache, length_penalty: replace the run's `pipeline.l_max`, `pipeline.l_cache` and
            `verifier.reward.length` for this problem, where not None.
        where: file and line, or index, that the problem was read from, for messages; empty for a
            generated problem. Equal problems may differ in it.
    """

    id: str
    domain: str
    problem: str
    answer: str | None = None
    tests: dict[str, Any] | None = None
    language: str | None = None
    difficulty: int | None = None
    source: str = ""
    messages: list[Message] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    effort: str | None = None
    l_max: int | None = None
    l_cache: int | None = None
    length_penalty: float | None = None
    where: str = field(default="", compare=False)

    @property
    def prompt(self) -> Prompt:
        """The text or the chat that the model reads."""
        return self.messages or self.problem

    def longest(self, l_max: int) -> int:
        """Longest completion of the problem in tokens, where others may have `l_max`."""
        return l_max if self.l_max is None else min(self.l_max, l_max)

    def lengths(self, l_max: int, l_cache: int) -> tuple[int, int]:
        """`l_max` and `l_cache` of the problem, where others may have these."""
        return self.longest(l_max), l_cache if self.l_cache is None else self.l_cache


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 are off.

    `max_tokens` counts generated tokens only (the paper's l_max).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def ints(values: Iterable[int] = ()) -> array[int]:
    """The values as an array of 32-bit integers; an array is returned unchanged."""
    return values if isinstance(values, array) else array("i", values)


def floats(values: Iterable[float] = ()) -> array[float]:
    """The values as an array of 32-bit floats; an array is returned unchanged."""
    return values if isinstance(values, array) else array("f", values)


@dataclass
class ToolCall:
    """One call of a tool, as the model wrote it and as it was answered."""

    # name, arguments: as parsed; `name` is empty for a call that did not parse.
    name: str
    arguments: dict[str, Any]
    answer: str  # what the model reads
    error: bool = False  # True if the model used the tool wrongly; the answer is then the error
    seconds: float = 0.0  # time that the call took
    id: str = ""  # that the model wrote (Mistral v7 and v11, Kimi); empty: none


@dataclass
class TurnRecord:
    """One turn of the model in a conversation, and the environment's answer to it."""

    # start, end: the turn's sampled tokens in its sequence, `token_ids[start:end]`.
    start: int
    end: int
    sequence: int  # number of the conversation's sequence that holds the turn, from 0
    text: str  # the model's message, without special tokens that end it
    messages: list[Message] = field(default_factory=list)  # what the environment inserted after it
    calls: list[ToolCall] = field(default_factory=list)  # the tool calls of the turn, in order
    reward: float | None = None  # the environment's reward of the turn; None if it gives none
    seconds: float = 0.0  # time of the environment's step


class SampledTokens:
    """Token ids, log-probs and versions in compact arrays: 12 bytes a token, whereas lists of
    Python numbers take 76 and slow down the garbage collector. Other sequences are converted.

    `experts`, [n, layers · k] int16, holds the experts that a mixture chose in the steps that drew
    the first n tokens, −1 where none were recorded; None: nowhere.
    """

    token_ids: array[int]
    logprobs: array[float]
    versions: array[int]

    def __post_init__(self) -> None:
        self.token_ids, self.logprobs = ints(self.token_ids), floats(self.logprobs)
        self.versions = ints(self.versions)


@dataclass
class EarlierSequence(SampledTokens):
    """An earlier sequence of a forked conversation; its tokens are not a prefix of a later one."""

    prompt_ids: list[int]
    token_ids: array[int]
    logprobs: array[float]
    versions: array[int]
    experts: NDArray[np.int16] | None = field(default=None, compare=False)


@dataclass
class Request(SampledTokens):
    """One completion to be generated. Requests of one group share `group` and the prompt.

    The request's random numbers depend on `seed` alone, whatever else is running. `token_ids`,
    `logprobs` and `versions` hold what was generated before an interruption, and a conversation's
    tokens so far.

    Args:
        group, index, prompt_ids, seed, sampling: see above; `prompt_ids` is empty until the
            environment has begun the conversation.
        token_ids, logprobs, versions, experts: as in `Completion`.
        turn_start: the place in `token_ids` where the model's current turn begins.
        finish_reason: why the turn ended that the environment is to answer; None while it is
            generated.
        turns: the turns that were answered; not sent to generators.
        earlier: earlier sequences of a forked conversation; not sent to generators.
        keep_kv: keep its keys and values at its end, where there is room: it may continue.
        generator: number of the generator that had it last.
    """

    group: int
    index: int
    prompt_ids: list[int]
    seed: int
    sampling: SamplingParams
    token_ids: array[int] = field(default_factory=ints)
    logprobs: array[float] = field(default_factory=floats)
    versions: array[int] = field(default_factory=ints)
    turn_start: int = 0
    finish_reason: FinishReason | None = None
    turns: list[TurnRecord] = field(default_factory=list)
    earlier: list[EarlierSequence] = field(default_factory=list)
    experts: NDArray[np.int16] | None = field(default=None, compare=False)
    keep_kv: bool = field(default=False, compare=False)
    generator: int | None = field(default=None, compare=False)

    @property
    def sequences(self) -> list[EarlierSequence | Request]:
        """All sequences of the conversation, in order; usually only this one."""
        return [*self.earlier, self]

    @property
    def waits(self) -> bool:
        """True while the environment is to answer a turn, or to begin the conversation."""
        return self.finish_reason is not None or not self.prompt_ids

    @property
    def sampled_from(self) -> int:
        """The place in `token_ids` behind all that was put in: what the model samples begins there,
        or began before an interruption."""
        place = len(self.versions)
        while place > self.turn_start and self.versions[place - 1] != INSERTED:
            place -= 1
        return place

    def copy(self, tokens: int | None = None) -> Request:
        """A copy that does not grow with the request, with its first `tokens` tokens or all."""
        return replace(
            self,
            token_ids=self.token_ids[:tokens],
            logprobs=self.logprobs[:tokens],
            versions=self.versions[:tokens],
        )

    def turn_ended(self, completion: Completion) -> Request:
        """The request with the tokens of a turn, which its environment is to answer."""
        return replace(
            self,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            experts=completion.experts,
            finish_reason=completion.finish_reason,
        )

    def completed(self, reason: FinishReason) -> Completion:
        """The finished request, whose arrays the completion shares."""
        tokens = self.token_ids, self.logprobs, self.versions
        return Completion(
            self.group,
            self.index,
            self.prompt_ids,
            *tokens,
            finish_reason=reason,
            turn_start=self.turn_start,
            turns=self.turns,
            earlier=self.earlier,
            experts=self.experts,
        )


@dataclass
class Completion(SampledTokens):
    """A finished request: the sampled tokens, and the weights versions that sampled them.

    Args:
        group, index: those of the finished request.
        prompt_ids: the prompt's tokens.
        token_ids: generated tokens; the EOS token is included where it was sampled.
        logprobs: for each token, its log-probability under the distribution it was drawn from
            (temperature included; top-p and top-k are not renormalized for).
        versions: for each token, the version of the weights that sampled it, or `ELSEWHERE` or
            `INSERTED`.
        finish_reason: `stop` (EOS) or `length` (l_max reached).
        text: the decoded response without special tokens. From a generator, the text from
            `turn_start` on; for a whole conversation, the texts of its turns, with a blank line
            between them.
        turn_start: the place in `token_ids` where the last turn begins.
        turns: the turns of a conversation with an environment; empty without one.
        ending: why the conversation ended; None without an environment.
        ending_reason: details of the ending, e.g. the error of an environment that failed.
        earlier: earlier sequences of a forked conversation, in order.
        experts: see `SampledTokens`.
    """

    group: int
    index: int
    prompt_ids: list[int]
    token_ids: array[int]
    logprobs: array[float]
    versions: array[int]
    finish_reason: FinishReason
    text: str = ""
    turn_start: int = 0
    turns: list[TurnRecord] = field(default_factory=list)
    ending: Ending | None = None
    ending_reason: str = ""
    earlier: list[EarlierSequence] = field(default_factory=list)
    experts: NDArray[np.int16] | None = field(default=None, compare=False)

    @property
    def sequences(self) -> list[EarlierSequence | Completion]:
        """All sequences of the conversation, in order; usually only this one."""
        return [*self.earlier, self]

    @property
    def n_tokens(self) -> int:
        """Tokens of the whole conversation after its prompts, sampled and inserted."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass
class Growth(SampledTokens):
    """New tokens of unfinished requests, one request after another in the same arrays: a message
    holds six arrays for any number of requests."""

    # token_ids, logprobs, versions: the new tokens, as in `Request`.
    token_ids: array[int] = field(default_factory=ints)
    logprobs: array[float] = field(default_factory=floats)
    versions: array[int] = field(default_factory=ints)
    # groups, indices: `group` and `index` of each request.
    groups: array[int] = field(default_factory=ints)
    indices: array[int] = field(default_factory=ints)
    counts: array[int] = field(default_factory=ints)  # number of new tokens of each request

    def add(
        self,
        group: int,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
    ) -> None:
        """Append the new tokens of one request."""
        self.groups.append(group)
        self.indices.append(index)
        self.counts.append(len(token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)

    def places(self) -> Iterator[tuple[tuple[int, int], slice]]:
        """(group, index) of each request, and the slice of its tokens in the arrays."""
        ends = accumulate(self.counts)
        for group, index, count, end in zip(
            self.groups, self.indices, self.counts, ends, strict=True
        ):
            yield (group, index), slice(end - count, end)


@dataclass
class Progress:
    """A generator's answer to a poll: its work since the previous poll."""

    completions: list[Completion]  # requests that ended, with all their tokens
    grown: Growth  # the new tokens of unfinished requests
    busy_seconds: float  # time that the generator has worked since it was started
    prefilled_tokens: int = 0  # tokens prefilled for the requests that were admitted
    parked_tokens: int = 0  # their tokens that need no prefill: their keys and values were kept


class Judgment(NamedTuple):
    """A verifier's judgment of one answer. `share` is the share of the correctness reward, and
    `answer` what was judged: the extracted answer, or the program."""

    outcome: Outcome
    reason: str
    answer: str | None = None
    share: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """A verifier's judgment of one completion.

    `reward` is the sum of `parts` (format, correctness, length, language, and the names of custom
    rewards). `malformed` means that the format failed and nothing else was graded. `unscorable`
    means that no judgment was possible: the reward is 0, but must not be trained on as if it were
    earned. `answer` is the extracted answer.
    """

    reward: float
    parts: dict[str, float]
    verdict: Outcome
    reason: str = ""
    seconds: float = 0.0
    answer: str | None = None


@dataclass
class TrainedFigures:
    """The trainer's figures of sequences that it trained on, for the records."""

    # float64 array [S]; for a group of conversations, one for each.
    advantages: array[float] = field(default_factory=lambda: array("d"))
    # float32 array [N], sequence after sequence, earlier ones included: log π_θ of each generated
    # token, under the weights before the optimizer step of its minibatch; NaN for a token that was
    # replaced by a given answer.
    logprobs: array[float] = field(default_factory=floats)

    def extend(self, other: TrainedFigures) -> None:
        """Append the figures of further sequences."""
        self.advantages.extend(other.advantages)
        self.logprobs.extend(other.logprobs)


@dataclass
class Group:
    """The completions of one problem, from the moment that it is handed out; advantages are
    computed within it."""

    # Number of the group in the run; negative for trajectories that this run did not sample.
    id: int
    problem: Problem  # the problem that all its completions answer
    completions: list[Completion]  # finished completions, in order of their index
    verdicts: list[Verdict]  # one per completion; empty until all are graded
    # The trainer's figures of the completions, once they have been trained on.
    learned: TrainedFigures | None = None
    deadline: int = 0  # the last version that may train on it (see `controller.staleness`)
    # Unfinished completions, with their tokens so far.
    requests: list[Request] = field(default_factory=list)

    @property
    def sampled(self) -> bool:
        """False for trajectories from elsewhere."""
        return self.id >= 0


@dataclass(frozen=True)
class FilterReason:
    """The reason why a group is not trained on."""

    # `no diversity` (all its rewards are equal), `unscorable` (a completion could not be graded) or
    # `left over` (too few groups for a batch when the problems ran out).
    kind: FilterKind
    detail: str = ""  # e.g. the reason of the first unscorable verdict; may be empty

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind
