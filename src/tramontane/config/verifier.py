"""`verifier`: limits of grading, and weights of the reward."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from tramontane.config.domains import (
    BUILT_IN,
    JUDGE,
    DomainConfig,
    checked_path,
    import_path,
    with_built_in,
)
from tramontane.config.judge import JudgeConfig
from tramontane.config.prompt import TagPair
from tramontane.config.resume import MayChange
from tramontane.config.section import Section, key_error
from tramontane.types import ThinkingTags

AXES = ("format", "correctness", "length", "language")  # of the reward
DomainName = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$")]


class CustomReward(Section):
    """A user-defined reward function; see docs/your-rewards.md. A text in its place is the
    function's import path."""

    name: str = Field("", pattern=r"^[a-z][a-z0-9_]*$")
    """Name of the reward in verdicts and metrics: lower-case letters, digits and underscores.
    Default: the function's name."""
    function: str
    """Import path of the function, e.g. `my_rewards.brevity` or `my_rewards:brevity`: of one
    completion, of a whole group, or of TRL's kind."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor applied to the function's result, which must be between 0 and 1 for a function of one
    completion. A negative weight makes it a penalty; 0 turns it off."""
    malformed: bool = False
    """Also call the function for malformed completions, and add its result to their reward, which
    is otherwise 0."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, raw: Any) -> Any:
        raw = {"function": raw} if isinstance(raw, str) else raw
        if isinstance(raw, dict) and "name" not in raw and isinstance(raw.get("function"), str):
            return raw | {"name": import_path(raw["function"]).rpartition(".")[2]}
        return raw

    @field_validator("function")
    @classmethod
    def _importable(cls, path: str) -> str:
        return checked_path(import_path(path))


class RewardConfig(Section):
    """Weights of the four reward axes (arXiv 2506.10910, section 2.2), and user-defined rewards. A
    weight of 0 turns an axis off. Where an environment (`conversation.reward`) or, in the domain of
    `data.domain`, functions alone give the reward, axes that are not set add nothing."""

    format: float = Field(0.1, ge=0)
    """Reward of a well-formed completion. A malformed completion has reward 0 in total, apart from
    custom rewards with `malformed: true`, and from an environment's reward. The paper: 0.1."""
    correctness: float = Field(0.9, ge=0)
    """Reward of a correct completion. The paper: 0.9. Not set, 1 for an environment's reward."""
    length: float = Field(0.1, ge=0)
    """Maximum penalty for length, reached at `pipeline.l_max` tokens. The paper: 0.1."""
    language: float = Field(0.1, ge=0)
    """Reward if problem, thoughts and answer are in the same language. The paper: 0.1."""
    judge: float = Field(0.0, ge=0)
    """Reward of an answer with the highest score of `verifier.judge`, in domains that another
    verifier judges. 0: the judge is not asked there."""
    code: Literal["all_tests", "fraction"] = "all_tests"
    """Correctness of a program: 0 or 1, by `all_tests` (the paper's choice), or the `fraction` of
    tests that pass, which the paper tried without success."""
    reasoning_gym: Literal["full", "partial"] = "full"
    """Correctness of an answer to a problem of Reasoning Gym: 0 or 1, by `full` marks, or the
    generator's score, which may be `partial`."""
    verifiers_scale: float | None = Field(None, gt=0)
    """What the sum of a task's rewards is divided by, in sets of the package `verifiers`, whose
    rewards may have any size and be negative. null: the sum of the task's positive weights."""
    custom: tuple[CustomReward, ...] = ()
    """User-defined rewards, added to the four axes."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts of a verdict's reward."""
        return (*AXES, *(("judge",) if self.judge else ()), *(c.name for c in self.custom))

    @property
    def rewarded(self) -> list[str]:
        """The parts that have a weight."""
        weights = {name: getattr(self, name) for name in (*AXES, "judge")}
        weights |= {custom.name: custom.weight for custom in self.custom}
        return [name for name in self.parts if weights[name]]

    def alone(self, **defaults: float) -> RewardConfig:
        """The weights where an environment or functions alone give the reward: of the axes that are
        not set, only those in `defaults` add something."""
        unset = {axis for axis in AXES if axis not in self.model_fields_set}
        return self.model_copy(update={axis: defaults.get(axis, 0.0) for axis in unset})

    def rates(self, *, earned: bool) -> list[str]:
        """The figures of an evaluation, beside pass@1, that are shown, and of an update that are
        recorded: a rate that nothing rewards would be 0 or 1 whatever the model writes.

        Args:
            earned: the reward of conversations is their environments'.
        """
        measured = {
            "format_rate": bool(self.format) or not earned,
            "language_rate": bool(self.language),
            "mean_reward": earned,  # pass@1 does not show rewards between 0 and 1
            "mean_thinking_tokens": True,
        }
        return [name for name, shown in measured.items() if shown]

    @model_validator(mode="after")
    def _names(self) -> RewardConfig:
        if twice := {name for name in self.parts if self.parts.count(name) > 1}:
            raise key_error(
                f"two rewards are named {min(twice)!r}; rename the custom one", "custom"
            )
        return self


class MathConfig(Section):
    """Grading policies of the math verifier that users may want to change; docs/math-answers.md
    lists all."""

    unevaluated: Literal["right", "wrong"] = "right"
    r"""Unevaluated arithmetic, such as `17+25` for 42, or `\frac{84}{2}`. `wrong` rejects it unless
    the reference is unevaluated too."""
    boxes: Literal["last", "equal"] = "last"
    """Several boxes in one answer: `last` judges the last one, `equal` rejects boxes that
    differ."""
    log: Literal["common", "natural"] = "common"
    r"""Base of `\log` without a written base: 10 (`common`) or e (`natural`)."""
    rounded_places: int | None = Field(6, ge=1)
    """Decimal places that a rounded decimal must have, such as `0.333333` for 1/3. null: rounded
    decimals are wrong."""
    explained: Literal["right", "wrong"] = "wrong"
    """A one-word answer with its reason in the box, such as `Yes, because 7 is prime`. `right`
    judges the word alone."""
    unreadable: Literal["wrong", "unscorable"] = "wrong"
    """Verdict on an answer that differs from an unparseable reference. `unscorable` drops its group
    from training."""


class VerifierConfig(Section):
    """Limits of grading. Worker processes are killed when they exceed a limit; the completion is
    then wrong if it is the cause, and unscorable otherwise."""

    thinking_tags: TagPair | None = None
    """Texts before and after the thoughts of a response, e.g. `["[THINK]", "[/THINK]"]`. The
    system prompt `magistral` names the same tags. null: the pair that the model's tokenizer has as
    tokens (`<think>`, `[THINK]` and others), otherwise `<think>` and `</think>`."""
    workers: MayChange[int] = Field(1, ge=1)
    """Number of grading processes."""
    timeout_s: MayChange[float] = Field(3.0, gt=0)
    """Time limit of one math verdict, in seconds. Time spent waiting for a busy processor does not
    count, up to ten times the limit. The paper does not give it."""
    memory_mb: MayChange[int] = Field(512, ge=256)
    """Memory, in MB, that a grading process may take beyond what it has when it is ready. The paper
    does not give it."""
    code_timeout_s: MayChange[float] = Field(4.0, gt=0)
    """Time limit of one test of a program, in seconds. The paper: 4."""
    code_memory_mb: MayChange[int] = Field(300, ge=16)
    """Memory limit of one test of a program, in MB. The paper: 300."""
    code_tests: int = Field(20, ge=1)
    """Number of tests drawn for a programming problem, the same for all completions of a group; all
    tests if there are fewer. The paper: 20."""
    allow_unsandboxed: MayChange[bool] = False
    """Where no sandbox works, run programs under resource limits alone. false: programs are
    unscorable there. docs/programs.md says what an unsandboxed program can do."""
    math: MathConfig = Field(default_factory=MathConfig)
    """Policies of the math verifier."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """Weights of the reward."""
    judge: JudgeConfig | None = None
    """A model that grades what no verifier can check; see docs/judges.md."""
    domains: dict[DomainName, DomainConfig] = Field(default_factory=lambda: dict(BUILT_IN))
    """Kinds of tasks by name, which a row's `domain` refers to. `math`, `code`, `instructions`,
    `calls`, `reasoning_gym` and `verifiers` are built in; entries with other names are added. See
    docs/your-rewards.md."""

    @field_validator("domains", mode="before")
    @classmethod
    def _with_built_in(cls, value: Any) -> Any:
        return with_built_in(value)

    def verifier_of(self, domain: str) -> str | None:
        """Name or import path of a domain's verifier; None if there is none, or no such domain."""
        return self.domains[domain].verifier if domain in self.domains else None

    def asks_judge(self, domain: str) -> bool:
        """True if the judge is asked about the answers of a domain."""
        return bool(self.reward.judge) or self.verifier_of(domain) == JUDGE

    def share(self) -> VerifierConfig:
        """The config of one of `workers` verifiers that each have their own process: one worker,
        one judge, and its share of the limit on requests."""
        judge = self.judge
        if judge is not None:
            bound = judge.max_requests and max(1, judge.max_requests // self.workers)
            judge = judge.model_copy(update={"workers": 1, "max_requests": bound})
        return self.model_copy(update={"workers": 1, "judge": judge})

    @model_validator(mode="after")
    def _judge_is_asked(self) -> VerifierConfig:
        judged = [name for name in self.domains if self.verifier_of(name) == JUDGE]
        keys = [f"domains.{name}.verifier" for name in judged]
        if self.reward.judge:
            keys.append("reward.judge")
        if keys and self.judge is None:
            raise key_error("no judge is configured; give verifier.judge a model", keys[0], "judge")
        if self.judge is not None and not keys:
            raise key_error(
                "nothing uses it; give a domain `verifier: judge`, or set reward.judge", "judge"
            )
        return self

    def functions_alone(self, domain: str | None) -> bool:
        """True if the rows of a domain are graded by the custom rewards alone."""
        known = domain in self.domains
        return known and bool(self.reward.custom) and self.verifier_of(str(domain)) is None

    @property
    def tags(self) -> ThinkingTags:
        """The configured thinking tags, or `<think>` and `</think>`."""
        return ThinkingTags.of(self.thinking_tags)
