"""Options of the objectives, one section for each, and the choice between them.

Options are here, not in the objectives' files in `trainer/objectives`, so that a config can be
checked and described without importing torch.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from tramontane.config.resume import Fixed
from tramontane.config.section import Section, key_error, nearest
from tramontane.imports import import_module

LossNormalization = Literal[
    "group_tokens", "minibatch_tokens", "sequence", "sequence_sum", "constant"
]
AdvantageNormalization = Literal["minibatch", "group", "none"]

_LOSS = Fixed("a different loss is a different run")


class ObjectiveOptions(Section):
    """Options that every objective has."""

    loss_normalization: Annotated[LossNormalization, _LOSS] = "group_tokens"
    """Divisor of summed token losses: the tokens of the group (`group_tokens`, the paper's choice)
    or of the minibatch (`minibatch_tokens`); the tokens of each sequence times the number of
    sequences (`sequence`); the number of sequences (`sequence_sum`); or G · l_max (`constant`)."""

    @property
    def samples(self) -> int:
        """Number of completions judged together; divides the group's size."""
        return 1

    @property
    def every_group(self) -> bool:
        """True if the objective also learns from groups with equal rewards, so that
        `pipeline.diversity` must be `none`."""
        return False

    @property
    def uses_behavior(self) -> bool:
        """True if the objective uses the behavior log-probs log μ. They are then computed for
        trajectories without them."""
        return True

    @property
    def of_sampler(self) -> bool:
        """True if log μ must come from the policy that sampled, not from a later one."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        """Inputs beyond log-probs, advantages and weights that the objective needs with these
        options; docs/objectives.md lists their names."""
        return frozenset()


class KLOptions(ObjectiveOptions):
    """Options of a policy gradient with an added β · KL(π_θ ‖ π_ref) (arXiv 2506.09477)."""

    kl_coef: float = Field(0.0, ge=0)
    """β, the coefficient of the KL divergence. Above 0, a second model, π_ref, is in memory: the
    weights at the start of the run. The paper: 0, no KL term."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], _LOSS] = "k1"
    """Estimator of the KL divergence: `k1` ℓ, `k2` ℓ²/2 or `k3` ℓ + e^−ℓ − 1, with
    ℓ = log π_θ/π_ref."""
    kl_as: Annotated[Literal["reward", "loss", "both"], _LOSS] = "reward"
    """Where the estimate enters: subtracted from the advantage as a constant (`reward`), added to
    the `loss` and differentiated, or `both`. Not every combination with `kl_estimator` has the
    gradient of KL(π_θ ‖ π_ref), see docs/kl.md; the default has."""
    kl_level: Annotated[Literal["token", "sequence"], _LOSS] = "token"
    """Ratio used for the estimate: each `token`'s, where a reward counts for the token and those
    before it, or the whole `sequence`'s."""

    @property
    def needs(self) -> frozenset[str]:
        if not self.kl_coef:
            return frozenset()
        terms = {
            "reference": True,
            "kl_baseline": self.kl_as != "loss",
            "conversations": self.kl_as != "loss" or self.kl_level == "sequence",
        }
        return frozenset(name for name, present in terms.items() if present)


class AdvantageOptions(KLOptions):
    """Options of an objective that compares completions within their group."""

    advantage_normalization: Annotated[AdvantageNormalization, _LOSS] = "minibatch"
    """Sequences whose mean and standard deviation normalize the advantages: the `minibatch` (the
    paper's choice) or each `group`. `none`: rewards minus their group's mean. The paper found no
    significant difference."""


class MagistralOptions(AdvantageOptions):
    """Magistral's objective. Defaults are the paper's (arXiv 2506.10910, section 2.1), alternatives
    its ablations; see docs/objectives.md."""

    eps_low: float = Field(0.2, ge=0, le=1)
    """ε_low: ratios π_θ/π_old below 1 − ε_low are clipped. The paper does not give it; 0.2 is the
    usual value."""
    eps_high: float = Field(0.28, ge=0)
    """ε_high: ratios π_θ/π_old above 1 + ε_high are clipped. The paper: 0.26 to 0.28, adjusted by
    hand to hold the entropy (Medium); 0.3 (Small)."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus. The paper: 0; it recommends adjusting ε_high instead."""
    importance_correction: Literal["off", "truncated", "clipped"] = "off"
    """Correction for the difference between the generator's policy μ and the trainer's. `off` uses
    μ as π_old (the paper's choice). `truncated` and `clipped` use the trainer's policy at the start
    of the update, and weight each token by π_old/μ, capped at importance_cap, or clipped to
    [1/importance_cap, importance_cap]."""
    importance_cap: float = Field(2.0, gt=1)
    """Cap of the importance weight. The default is ours; the paper has no correction."""

    @property
    def needs(self) -> frozenset[str]:
        terms = {
            "entropy": self.entropy_coef != 0,
            "proximal": self.importance_correction != "off",
        }
        return super().needs | frozenset(name for name, present in terms.items() if present)


class AIPOOptions(AdvantageOptions):
    """AIPO, LlamaRL's objective (arXiv 2505.24034): a policy gradient with truncated importance
    weights."""

    loss_normalization: Annotated[LossNormalization, _LOSS] = "sequence_sum"
    """Divisor of summed token losses. The default is the paper's sum over tokens."""
    advantage_normalization: Annotated[AdvantageNormalization, _LOSS] = "none"
    """Sequences whose mean and standard deviation normalize the advantages. The default is the
    paper's: rewards minus their group's mean."""
    rho: float = Field(4.0, gt=0)
    """ρ: cap of the importance weight π_θ/μ. LlamaRL: 2 to 10."""
    correction: Annotated[bool, _LOSS] = True
    """Correct for samples of an older policy. false: the weight is 1, for comparisons; the paper
    reports sudden drops."""


class CISPOOptions(AdvantageOptions):
    """CISPO (MiniMax-M1, arXiv 2506.13585), with the settings of ScaleRL (arXiv 2510.13786)."""

    eps_max: float = Field(5.0, gt=0)
    """ε_max: cap of the importance weight π_θ/μ. ScaleRL: 4, 5 and 8 perform equally."""


class GSPOOptions(AdvantageOptions):
    """GSPO (arXiv 2507.18071): ratios and clipping of whole sequences."""

    loss_normalization: Annotated[LossNormalization, _LOSS] = "sequence"
    """Divisor of summed token losses. The default is the paper's mean over sequences."""
    advantage_normalization: Annotated[AdvantageNormalization, _LOSS] = "group"
    """Sequences whose mean and standard deviation normalize the advantages. The default is the
    paper's."""
    eps_low: float = Field(3e-4, ge=0, le=1)
    """Sequence ratios below 1 − ε_low are clipped. The default is the paper's."""
    eps_high: float = Field(4e-4, ge=0)
    """Sequence ratios above 1 + ε_high are clipped. The default is the paper's."""

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"conversations"}


class InferenceOptions(KLOptions):
    """Options of an objective for k samples at inference (arXiv 2503.19595)."""

    renamed: ClassVar = {"centred": "centered"}

    loss_normalization: Annotated[LossNormalization, _LOSS] = "sequence_sum"
    """Divisor of summed token losses. The default is the paper's sum over tokens."""
    k: Annotated[int, Field(ge=2), _LOSS] = 4
    """k: samples at inference; divides `pipeline.group_size`. A larger group is split into groups
    of k."""
    centered: Annotated[bool, _LOSS] = False
    """Subtract the mean of the k advantages: less variance, but biased."""
    rho: float = Field(4.0, gt=0)
    """Cap of the importance weight π_θ/μ. Ours; the paper is on-policy."""

    @property
    def samples(self) -> int:
        return self.k


class PassAtKOptions(InferenceOptions):
    """The greatest reward among k samples (arXiv 2503.19595)."""


class MajorityOptions(InferenceOptions):
    """The reward of the most frequent answer among k samples (arXiv 2503.19595)."""


class AGROOptions(ObjectiveOptions):
    """AGRO, any-generation reward optimization (arXiv 2503.19612)."""

    loss_normalization: Annotated[LossNormalization, _LOSS] = "sequence_sum"
    """Divisor of summed token losses. The default is the paper's sum over tokens."""
    beta: float = Field(0.1, gt=0)
    """β: strength of the regularization towards π_ref, the weights at the start of the run. The
    optimum is π_ref · e^(r/β), normalized."""
    form: Annotated[Literal["off_policy", "on_policy"], _LOSS] = "off_policy"
    """Gradient: `off_policy` uses samples of any policy without correction; `on_policy` is the
    regularized policy gradient, with an importance weight."""
    rho: float = Field(4.0, gt=0)
    """Cap of the importance weight π_θ/μ of `on_policy`. Ours."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"reference", "sequence_logprobs"})


class TargetOptions(ObjectiveOptions):
    """Options of an objective that learns from the reference answer, which replaces the sampled
    answer in completions."""

    targets: Annotated[Literal["unsolved", "always"], _LOSS] = "unsolved"
    """Groups whose completions get the reference answer: those without a right completion
    (`unsolved`), or all (`always`). Problems without a reference answer are excluded."""
    target_after: Annotated[str | None, _LOSS] = None
    """Text after which the answer begins; a completion without this text keeps its own answer.
    null: the closing thinking tag."""
    target_text: Annotated[str, _LOSS] = "\n\\boxed{{answer}}"
    """Text that follows, in which `{answer}` stands for the reference answer; an EOS token is
    appended. For long-form answers, `"\\n{answer}"`."""

    @model_validator(mode="after")
    def _holds_the_answer(self) -> TargetOptions:
        if "{answer}" not in self.target_text:
            raise key_error(
                f"{self.target_text!r} does not say where the answer stands: it must contain "
                f"{{answer}}",
                "target_text",
            )
        return self


class JEPOOptions(TargetOptions):
    """JEPO (arXiv 2503.19618): learns chains of thought without a verifier, by a lower bound of the
    reference answer's likelihood."""

    removed: ClassVar = {
        "format_reward": (-10.0, "it is FORMAT_REWARD in trainer/objectives/jepo.py")
    }

    loss_normalization: Literal["sequence_sum"] = "sequence_sum"
    """Log-probs of answers are summed, never averaged over their length."""
    bound: Annotated[Literal["one_sample", "n_sample"], _LOSS] = "n_sample"
    """Lower bound: of each completion alone (`one_sample`), or of a group's completions together
    (`n_sample`), which is tighter."""
    first_sum: Annotated[Literal["sum", "mean"], _LOSS] = "sum"
    """Gradient of the thoughts under `n_sample`: the `sum` over the completions, which is exact, or
    their `mean`, 1/n of it."""
    baseline: Annotated[Literal["leave_one_out", "none"], _LOSS] = "leave_one_out"
    """Baseline of the thoughts' advantage. Without the answer of another completion of the group,
    `leave_one_out` has an advantage of 0."""
    supervised_coef: float = Field(0.01, ge=0)
    """β_sup: coefficient of the gradient of the answer itself. The paper: 0 to 0.01 on verifiable
    data, 1 on data that no verifier can check."""
    advantage_normalization: Annotated[AdvantageNormalization, _LOSS] = "minibatch"
    """Completions whose standard deviation divides the advantages: the `minibatch` or each `group`.
    `none`: no division. The paper does not say which."""
    advantage_clip: float | None = Field(1.0, gt=0)
    """Bound of an advantage's absolute value. null: no bound."""
    rho: float = Field(4.0, gt=0)
    """Cap of the importance weight π_θ/μ of sampled tokens. Ours; the paper is on-policy."""

    @property
    def every_group(self) -> bool:
        return True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"targets"})


class SPOOptions(ObjectiveOptions):
    """SPO, soft policy optimization (arXiv 2503.05453)."""

    removed: ClassVar = {
        "q_max": (-0.01, "the bound is SUCCESS_MAX in trainer/objectives/spo.py"),
        "r_min": (1e-3, "the bound is REWARD_MIN in trainer/objectives/spo.py"),
    }

    loss_normalization: Literal["sequence_sum"] = "sequence_sum"
    """The loss is the mean over completions."""
    beta: float = Field(0.1, gt=0)
    """β: strength of the regularization towards π_ref, the weights at the start of the run."""
    loss: Annotated[Literal["cross_entropy", "squared"], _LOSS] = "cross_entropy"
    """Loss of Q_T. `cross_entropy`, the paper's default, reads e^Q as a probability of success and
    needs rewards from 0 to 1; `squared` is (Q_T − r)²."""
    success: Annotated[Literal["plain", "beta"], _LOSS] = "plain"
    """Probability of success of `cross_entropy`: e^Q (`plain`), or e^(Q/β), which is consistent
    with β (`beta`)."""
    initial_value: Annotated[Literal["group", "importance"], _LOSS] = "group"
    """Samples for Q_0, a log mean: those of the `group`, as if drawn from π_ref, or the same
    weighted by π_ref/μ (`importance`), which is exact for any μ and needs its log-probs."""

    @property
    def uses_behavior(self) -> bool:
        return self.initial_value == "importance"

    @property
    def of_sampler(self) -> bool:
        return self.uses_behavior

    @property
    def needs(self) -> frozenset[str]:
        terms = {"sequence_logprobs", "behavior_sums"} if self.uses_behavior else set()
        return frozenset({"conversations", "reference", *terms})


class DROOptions(ObjectiveOptions):
    """DRO, direct reward optimization of single trajectories (arXiv 2405.19107)."""

    loss_normalization: Literal["sequence_sum"] = "sequence_sum"
    """The loss is the mean over completions."""
    form: Annotated[Literal["value", "policy"], _LOSS] = "value"
    """`value` (DRO-V) learns V with a separate network; `policy` (DRO-P) uses the mean over the
    minibatch instead."""
    values: Annotated[Literal["token", "prompt"], _LOSS] = "token"
    """Prefixes for which `value` learns V: that of every `token`, which the paper finds better, or
    the `prompt` alone."""
    tau: float = Field(1.0, gt=0)
    """τ: strength of the regularization towards π_ref, the weights at the start of the run. The
    default is the paper's, for rewards of standard deviation 1."""

    @property
    def uses_behavior(self) -> bool:
        return False

    @property
    def needs(self) -> frozenset[str]:
        terms = {"conversations", "values"} if self.form == "value" else {"sequence_logprobs"}
        return frozenset({"reference", *terms})


class SFTOptions(ObjectiveOptions):
    """Supervised fine-tuning: the negative log-likelihood of given responses."""

    loss_normalization: Annotated[LossNormalization, _LOSS] = "minibatch_tokens"
    """Divisor of summed token losses. `minibatch_tokens` gives the mean over all response tokens,
    as in pre-training."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"top1"})


class ObjectiveConfig(Section):
    """The loss: `name` selects it and the section with its options, so that a comparison of
    objectives changes one key. See docs/objectives.md."""

    name: Annotated[str, _LOSS] = "magistral"
    """One of the sections below, or the import path of a module with your own objective."""
    magistral: MagistralOptions = Field(default_factory=MagistralOptions)
    """Options of `magistral`."""
    aipo: AIPOOptions = Field(default_factory=AIPOOptions)
    """Options of `aipo`."""
    cispo: CISPOOptions = Field(default_factory=CISPOOptions)
    """Options of `cispo`."""
    gspo: GSPOOptions = Field(default_factory=GSPOOptions)
    """Options of `gspo`."""
    pass_at_k: PassAtKOptions = Field(default_factory=PassAtKOptions)
    """Options of `pass_at_k`."""
    majority: MajorityOptions = Field(default_factory=MajorityOptions)
    """Options of `majority`."""
    agro: AGROOptions = Field(default_factory=AGROOptions)
    """Options of `agro`."""
    spo: SPOOptions = Field(default_factory=SPOOptions)
    """Options of `spo`."""
    jepo: JEPOOptions = Field(default_factory=JEPOOptions)
    """Options of `jepo`."""
    dro: DROOptions = Field(default_factory=DROOptions)
    """Options of `dro`."""
    sft: SFTOptions = Field(default_factory=SFTOptions)
    """Options of `sft`."""
    custom: dict[str, Any] = Field(default_factory=dict)
    """Options of your own objective, which its module declares in a class `Options`."""

    @property
    def options(self) -> ObjectiveOptions:
        """The section of the objective that `name` selects."""
        if self.name in BUILT_IN_OBJECTIVES:
            options: ObjectiveOptions = getattr(self, self.name)
        else:
            options = import_module(self.name).Options.model_validate(self.custom)
        return options

    @model_validator(mode="after")
    def _check_name(self) -> ObjectiveConfig:
        if self.name in BUILT_IN_OBJECTIVES:
            return self
        try:
            if not re.fullmatch(r"\w+(\.\w+)*", self.name):
                raise ModuleNotFoundError(name=self.name)
            module = import_module(self.name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self.name}.".startswith(f"{error.name}."):
                raise  # the module exists, but one of its imports fails
            if known := AS_MAGISTRAL.get(re.sub(r"[^a-z0-9+]", "", self.name.lower())):
                title, keys, more = known
                raise key_error(
                    f"{title} is the objective `magistral` with these keys: {{name: magistral, "
                    f"magistral: {{{keys}}}}}. {more}. See docs/objectives.md",
                    "name",
                ) from None
            near = nearest(self.name, BUILT_IN_OBJECTIVES)
            hint = f"did you mean {near!r}? " if near else ""
            raise key_error(
                f"no objective {self.name!r}, and no module of that name; "
                f"{hint}there are: {', '.join(BUILT_IN_OBJECTIVES)}",
                "name",
            ) from None
        if missing := [name for name in INTERFACE if not hasattr(module, name)]:
            raise key_error(
                f"module {self.name!r} is not an objective: it has no {', no '.join(missing)}",
                "name",
            )
        if not issubclass(module.Options, ObjectiveOptions):
            raise key_error(
                f"class Options of module {self.name!r} must derive from "
                f"tramontane.config.ObjectiveOptions",
                "name",
            )
        try:
            module.Options.model_validate(self.custom)
        except ValidationError as error:
            first = error.errors()[0]
            location = ".".join(map(str, ("custom", *first["loc"])))
            raise key_error(first["msg"].removeprefix("Value error, "), location) from None
        return self


# Algorithms that are settings of `magistral`, by their names in lower case without punctuation: the
# name as papers write it, the keys, and one more sentence.
AS_MAGISTRAL = {
    "grpo": (
        "GRPO",
        "advantage_normalization: group, loss_normalization: sequence, eps_low: 0.2, "
        "eps_high: 0.2, kl_coef: 0.04, kl_estimator: k3, kl_as: loss",
        "A whole run is in configs/grpo.yaml",
    ),
    "dapo": (
        "DAPO",
        "advantage_normalization: group, loss_normalization: group_tokens, eps_low: 0.2, "
        "eps_high: 0.28",
        "A whole run is in configs/dapo.yaml, with dynamic sampling (pipeline.diversity: "
        "correctness) and the soft overlong punishment (verifier.reward.length)",
    ),
    "drgrpo": (
        "Dr. GRPO",
        "advantage_normalization: none, loss_normalization: constant, eps_low: 0.2, eps_high: 0.2",
        "There is no KL term; the rest is as in configs/grpo.yaml",
    ),
    "ppo": (
        "PPO's clipped loss",
        "advantage_normalization: minibatch, loss_normalization: minibatch_tokens, eps_low: 0.2, "
        "eps_high: 0.2, kl_coef: 0.05, kl_estimator: k1, kl_as: reward",
        "The baseline is the group's mean reward: there is no value network and no GAE",
    ),
    "rloo": (
        "RLOO",
        "advantage_normalization: none, loss_normalization: sequence_sum, eps_low: 1, "
        "eps_high: 1e9, kl_coef: 0.05, kl_estimator: k1, kl_as: reward, kl_level: sequence",
        "The advantage of RLOO is G / (G - 1) times as large, which AdamW does not notice",
    ),
    "reinforce": (
        "REINFORCE",
        "advantage_normalization: none, loss_normalization: sequence_sum, eps_low: 1, "
        "eps_high: 1e9",
        "The baseline is the group's mean reward",
    ),
    "reinforce++": (
        "REINFORCE++ with its group baseline",
        "advantage_normalization: minibatch, loss_normalization: minibatch_tokens, eps_low: 0.2, "
        "eps_high: 0.2, kl_coef: 0.001, kl_estimator: k1, kl_as: reward",
        "Without a baseline it is not available",
    ),
}

INTERFACE = ("Options", "advantages", "loss")  # the parts of a module with an objective
BUILT_IN_OBJECTIVES = tuple(
    name for name in ObjectiveConfig.model_fields if name not in ("name", "custom")
)
