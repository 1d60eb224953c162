"""The things that travel between the rooms: Problem → Request → Completion → Verdict → Group.

Plain data, no torch and no tokenizer, so that every room (and every process) can hold them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Domain = Literal["math", "code"]
Outcome = Literal["right", "wrong", "unscorable", "malformed"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Problem:
    """One task with what its verifier needs.

    Args:
        id: unique within its source.
        domain: chooses the verifier for correctness.
        problem: the statement that the model reads.
        answer: the reference answer (maths), LaTeX or plain text without `$`.
        tests: the tests (code), e.g. `{"type": "stdio", "cases": [{"input", "output"}],
            "checker": "tokens"}`.
        language: ISO 639-1 code of the statement, when known; detected from the text otherwise.
        difficulty: a level, larger is harder, when known.
        source: where the problem comes from.
        metadata: whatever else the source says; carried along, never graded.
    """

    id: str
    domain: Domain
    problem: str
    answer: str | None = None
    tests: dict[str, Any] | None = None
    language: str | None = None
    difficulty: int | None = None
    source: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 are off.

    `max_tokens` counts generated tokens only (the paper's l_max).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass
class Request:
    """One completion to be generated. Requests of one group share `group` and the prompt.

    `seed` alone decides the request's random numbers, whatever runs beside it.
    `token_ids`, `logprobs` and `versions` hold what was generated before an interruption.
    """

    group: int
    index: int
    prompt_ids: list[int]
    seed: int
    sampling: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass
class Completion:
    """A finished request: what was sampled, under which weights.

    Args:
        group, index: which request of which group this answers.
        prompt_ids: the prompt's tokens.
        token_ids: generated tokens; the EOS token is included where it was sampled.
        logprobs: for each token, its log-probability under the distribution it was drawn from
            (temperature included; top-p and top-k are not renormalised for).
        versions: for each token, the version of the weights that sampled it.
        finish_reason: `stop` (EOS) or `length` (l_max reached).
        text: the decoded response without special tokens.
    """

    group: int
    index: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    text: str = ""


@dataclass
class Growth:
    """What one unfinished request gained; the fields are those of `Request`."""

    group: int
    index: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]


@dataclass
class Progress:
    """What a generator did since it was last asked.

    Args:
        completions: those that ended, whole.
        grown: of the others, those that gained tokens.
        busy_seconds: the time that it worked, over its whole life.
    """

    completions: list[Completion]
    grown: list[Growth]
    busy_seconds: float


@dataclass(frozen=True)
class Verdict:
    """What a verifier says of one completion.

    `reward` is the sum of `parts` (format, correctness, length, language, and the names of custom
    rewards); `malformed` means that
    the format failed and nothing else was graded; `unscorable` carries no judgement at all, its
    reward is 0 but must not be trained on as if it were earned. `answer` is the extracted answer.
    """

    reward: float
    parts: dict[str, float]
    verdict: Outcome
    reason: str = ""
    seconds: float = 0.0
    answer: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Group:
    """All completions of one problem, with their verdicts: what advantages are computed over."""

    id: int
    problem: Problem
    completions: list[Completion]
    verdicts: list[Verdict]


@dataclass(frozen=True)
class Stage:
    """What training on a batch takes from the stage of the run that its completions were sampled
    in: lengths in tokens, sizes in completions."""

    name: str
    temperature: float
    eps_high: float
    l_max: int
    n_minibatch: int


@dataclass
class Batch:
    """`n_batch` completions of whole groups, to be trained at weights version `version`. Without a
    `stage`, by the settings that the trainer was made with."""

    version: int
    groups: list[Group]
    stage: Stage | None = None

    @property
    def completions(self) -> list[Completion]:
        return [c for g in self.groups for c in g.completions]
