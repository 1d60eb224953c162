"""The data types passed between packages: Problem → Completion → Verdict → Group;
`batches` has those that lead to the trainer.

Plain data without torch or a tokenizer, so that every package and process can use them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict

from tramontane.status import Status, moved
from tramontane.tokens import (
    INSERTED,
    AllowedTokens,
    EarlierSequence,
    Growth,
    SampledTokens,
    floats,
    ints,
)

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


class ResponseText(NamedTuple):
    """The parts of a response's text that are not simply its sampled tokens."""

    # Thinking tags, kept in the text even if they are special tokens.
    tags: ThinkingTags = PAPER_TAGS
    prefix: str = ""  # start of every response, which is already at the end of the prompts
    others: tuple[str, ...] = ()  # starts of the responses to prompts at other levels of effort


class _Said(TypedDict):
    role: str
    content: str


class Message(_Said, total=False):
    """A message of a chat, as chat templates read it; `role` is `system`, `user`, `assistant` or
    `tool`."""

    reasoning_content: str  # thoughts
    tool_calls: list[dict[str, Any]]
    name: str  # of the tool that answers, and the id of the call
    tool_call_id: str
    images: list[str]  # data URIs, each for a `PLACE` in the content


@dataclass(frozen=True)
class Illustrated:
    """A prompt with images: each `IMAGE` in its texts is the place of one, in order. Without any,
    all come before the text of the last message.

    `images` are data URIs of their files' bytes.
    """

    text: str | list[Message]
    images: Sequence[str]


IMAGE = "<image>"  # as other frameworks' rows mark the place of an image
PLACE = "\ufdd3"  # the place of an image in a text on its way to the template; a noncharacter
# A statement, or a chat that ends with the user's turn; with images or without.
Prompt: TypeAlias = "str | list[Message] | Illustrated"


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
        images: of the prompt, as data URIs; see `Illustrated`.
        renamed: columns of the row that are in the fields above under another name or in another
            form (`question`, an answer that is a number), as the row has them; see `row`.
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
    images: list[str] = field(default_factory=list)
    renamed: dict[str, Any] = field(default_factory=dict)

    @property
    def row(self) -> dict[str, Any]:
        """The columns of the problem's row by name, with the row's own values, and the fields that
        the row does not have, unless they are None."""
        names = ("id", "domain", "problem", "answer", "tests", "language", "difficulty", "source")
        fields = {name: getattr(self, name) for name in names}
        own = {name: value for name, value in fields.items() if value is not None}
        return own | self.metadata | self.renamed

    @property
    def prompt(self) -> Prompt:
        """The text or the chat that the model reads, with its images."""
        text = self.messages or self.problem
        return Illustrated(text, self.images) if self.images else text

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
    record_allowed: bool = False  # record the tokens that top-p and top-k allow; needs a `top_k`

    @property
    def recorded(self) -> int:
        """Largest number of allowed tokens that is recorded for each token."""
        return self.top_k if self.record_allowed else 0


@dataclass
class ToolCall:
    """One call of a tool, as the model wrote it and as it was answered."""

    # name, arguments: as parsed; `name` is empty for a call that did not parse.
    name: str
    arguments: dict[str, Any]
    answer: str  # what the model reads, with a `PLACE` for each image
    error: bool = False  # True if the model used the tool wrongly; the answer is then the error
    seconds: float = 0.0  # time that the call took
    id: str = ""  # that the model wrote (Mistral v7 and v11, Kimi); empty: none
    text: str = ""  # what the model wrote, if this call cannot be read and others of its turn can


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
    # Images of the prompt of the sequence that a harness began behind it, in place of those so far;
    # None: it went on.
    anew: list[str] | None = None
    opened: list[Message] = field(default_factory=list)  # the chat that begins with it, no images

    @property
    def images(self) -> list[str]:
        """Those of `messages`, as data URIs."""
        return [image for message in self.messages for image in message.get("images", ())]


@dataclass
class Completion(SampledTokens):
    """One completion of a problem, from the request for it (`requested`) to its end: the sampled
    tokens, and the weights versions that sampled them. Those of one group share `group`.

    Its random numbers depend on `seed` alone, whatever else is running.

    Args:
        group, index: its group, and its place in it.
        prompt_ids: the prompt's tokens; empty until the environment has begun the conversation.
        token_ids: the tokens so far, of all turns; the EOS token is included where it was sampled.
        logprobs: for each token, its log-probability under the distribution it was drawn from
            (with temperature, top-p and top-k).
        versions: for each token, the version of the weights that sampled it, or `ELSEWHERE` or
            `INSERTED`.
        finish_reason: why the last turn ended, `stop` (EOS) or `length` (l_max reached); None
            while it is sampled.
        text: the decoded response without special tokens. From a generator, the text from
            `turn_start` on; for a whole conversation, the texts of its turns, with a blank line
            between them.
        turn_start: the place in `token_ids` where the last turn begins.
        turns: the answered turns of a conversation with an environment; empty without one. Not
            sent to generators.
        ending: why the conversation ended; None without an environment.
        ending_reason: details of the ending, e.g. the error of an environment that failed.
        earlier: earlier sequences of a forked conversation, in order. Not sent to generators.
        experts, allowed: see `SampledTokens`.
        seed, sampling: how it is sampled; meaningless where it was read from a record.
        keep_kv: keep its keys and values at its end, where there is room: it may continue.
        generator: number of the generator that had it last.
        status: see `status.MOVES`; changed by `move`.
        images, put_images: those of the prompt, and those of the tokens that were put in, as data
            URIs, in the order of the image tokens.
        opened: the chat with which an environment began the conversation, without images; empty for
            the problem's own prompt. Not sent to generators.
    """

    group: int
    index: int
    prompt_ids: list[int]
    token_ids: array[int] = field(default_factory=ints)
    logprobs: array[float] = field(default_factory=floats)
    versions: array[int] = field(default_factory=ints)
    finish_reason: FinishReason | None = None
    text: str = ""
    turn_start: int = 0
    turns: list[TurnRecord] = field(default_factory=list)
    ending: Ending | None = None
    ending_reason: str = ""
    earlier: list[EarlierSequence] = field(default_factory=list)
    experts: NDArray[np.int16] | None = field(default=None, compare=False)
    allowed: AllowedTokens | None = None
    seed: int = 0
    sampling: SamplingParams = SamplingParams(0)
    keep_kv: bool = field(default=False, compare=False)
    generator: int | None = field(default=None, compare=False)
    status: Status = Status.ENDED
    images: Sequence[str] = field(default=(), compare=False)
    put_images: Sequence[str] = field(default=(), compare=False)
    opened: Sequence[Message] = field(default=(), compare=False)

    @classmethod
    def requested(
        cls,
        group: int,
        index: int,
        prompt_ids: list[int],
        seed: int,
        sampling: SamplingParams,
        *tokens: Any,
        **fields: Any,
    ) -> Completion:
        """A completion that is to be sampled, with the `token_ids`, `logprobs` and `versions` that
        it has already, if any, and other fields."""
        fields |= zip(("token_ids", "logprobs", "versions"), tokens, strict=False)
        turn_ended = fields.get("finish_reason") is not None
        status = Status.STEPPING if turn_ended else Status.SAMPLED
        fields["status"] = status if prompt_ids else Status.OPENING
        return cls(group, index, prompt_ids, seed=seed, sampling=sampling, **fields)

    @classmethod
    def for_seeds(
        cls,
        group: int,
        prompt_ids: list[int],
        seeds: Iterable[int],
        sampling: SamplingParams,
        images: Sequence[str] = (),
    ) -> list[Completion]:
        """The requests of a group outside of training, one for each seed."""
        return [
            cls.requested(group, index, prompt_ids, seed, sampling, images=images)
            for index, seed in enumerate(seeds)
        ]

    def move(self, to: Status) -> None:
        """Change the status.

        Raises:
            RuntimeError: `MOVES` has no such change.
        """
        self.status = moved(self.status, to, f"completion {self.group}/{self.index}")

    @property
    def sequences(self) -> list[EarlierSequence | Completion]:
        """All sequences of the conversation, in order; usually only this one."""
        return [*self.earlier, self]

    @property
    def n_tokens(self) -> int:
        """Tokens of the whole conversation after its prompts, sampled and inserted."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def sampled_from(self) -> int:
        """The place in `token_ids` behind all that was put in: what the model samples begins there,
        or began before an interruption."""
        place = len(self.versions)
        while place > self.turn_start and self.versions[place - 1] != INSERTED:
            place -= 1
        return place

    def copy(self, tokens: int | None = None) -> Completion:
        """A copy that does not grow with this one, with its first `tokens` tokens or all."""
        return replace(self, **self.part(slice(tokens)))

    def keep(self, tokens: int, of: SampledTokens | None = None) -> None:
        """Forget all but the first tokens, its own or those of another sequence."""
        vars(self).update((of or self).part(slice(tokens)))

    def grow(self, grown: Growth, new: slice) -> None:
        """Append the `new` ones of all requests' new tokens to its own arrays."""
        if grown.allowed is not None and self.sampling.record_allowed:
            if self.allowed is None:
                self.allowed = AllowedTokens()
            self.allowed.extend(grown.allowed[new], place=len(self.token_ids))
        self.token_ids.extend(grown.token_ids[new])
        self.logprobs.extend(grown.logprobs[new])
        self.versions.extend(grown.versions[new])

    def completed(self, reason: FinishReason) -> Completion:
        """It at the end of its turn, as a generator returns it, without images; it shares the
        arrays."""
        return replace(self, finish_reason=reason, status=Status.ENDED, images=(), put_images=())

    def illustrate(self, images: Sequence[str]) -> None:
        """Set the images of all its sequences: `images` of the first prompt, and those that the
        answers to its turns brought, behind a turn or in the prompt of the sequence that follows.
        """
        for number, sequence in enumerate(self.sequences):
            own = [turn for turn in self.turns if turn.sequence == number]
            put = [i for turn in own if turn.end < len(sequence.token_ids) for i in turn.images]
            sequence.images, sequence.put_images = images, put
            images = [*images, *(image for turn in own for image in turn.images)]
            if own and own[-1].anew is not None:
                images = own[-1].anew

    def take_turn(self, completed: Completion) -> None:
        """Take the tokens that a generator has `completed`, and their text."""
        names = "token_ids", "logprobs", "versions", "experts", "allowed", "finish_reason", "text"
        for name in names:
            setattr(self, name, getattr(completed, name))

    def put_in(self, token_ids: Sequence[int], max_tokens: int) -> None:
        """Let it be sampled further, behind tokens that the model did not write.

        Args:
            token_ids: appended; not trained on.
            max_tokens: its new limit.
        """
        n = len(token_ids)
        self.token_ids = self.token_ids + ints(token_ids)
        self.logprobs = self.logprobs + floats([0.0] * n)
        self.versions = self.versions + ints([INSERTED] * n)
        self.sampling = replace(self.sampling, max_tokens=max_tokens)
        self.finish_reason, self.text = None, ""
        self.move(Status.SAMPLED)


Request = Completion.requested  # its name when a request was a class of its own


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
    requests: list[Completion] = field(default_factory=list)

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
