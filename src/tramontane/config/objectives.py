"""Options of the objectives, one section for each; `objective_choice` has the choice between them.

Options are here, not in the objectives' files in `trainer/objectives`, so that a config can be
checked and described without importing torch.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from tramontane.config.resume import Fixed
from tramontane.config.section import Section, key_error

LossNormalization = Literal[
    "group_tokens", "minibatch_tokens", "sequence", "sequence_sum", "constant"
]
AdvantageNormalization = Literal["minibatch", "group", "none"]
Estimator = Literal["k1", "k2", "k3"]

_LOSS = Fixed("a different loss is a different run")


class Charge(NamedTuple):
    """A distance to another policy, the `reference` or the `teacher`, which is subtracted, times
    `coef`, from the advantages of sampled tokens. `scope` is what a token is charged for: its own
    distance (`token`), also that of the `rest` of its sequence, or that of the whole `sequence`.
    With `baseline`, the mean of the group's other completions at the same position is subtracted
    from the distance first."""

    policy: Literal["reference", "teacher"]
    coef: float
    estimator: Estimator
    scope: Literal["token", "rest", "sequence"]
    baseline: bool = True


class ObjectiveOptions(Section):
    """Options that every objective has."""

    term_tokens: ClassVar[Literal["all", "sampled", "recorded"]] = "all"
    """Tokens that the objective learns from as an added term: all, those that the run samples, or
    those of recorded trajectories."""

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
    def charge(self) -> Charge | None:
        """What is subtracted from the advantages of sampled tokens; None: nothing."""
        return None

    @property
    def needs(self) -> frozenset[str]:
        """Inputs beyond log-probs, advantages and weights that the objective needs with these
        options; docs/your-objective.md lists their names."""
        return frozenset()


class KLOptions(ObjectiveOptions):
    """Options of a policy gradient with an added β · KL(π_θ ‖ π_ref) (arXiv 2506.09477)."""

    kl_coef: float = Field(0.0, ge=0)
    """β, the coefficient of the KL divergence. Above 0, a second model, π_ref, is in memory: the
    weights at the start of the run. The paper: 0, no KL term."""
    kl_estimator: Annotated[Estimator, _LOSS] = "k1"
    """Estimator of the KL divergence: `k1` ℓ, `k2` ℓ²/2 or `k3` ℓ + e^−ℓ − 1, with
    ℓ = log π_θ/π_ref."""
    kl_as: Annotated[Literal["reward", "loss", "both"], _LOSS] = "reward"
    """Where the estimate enters: subtracted from the advantage as a constant (`reward`), added to
    the `loss` and differentiated, or `both`. Not every combination with `kl_estimator` has the
    gradient of KL(π_θ ‖ π_ref), see docs/kl.md; the default does."""
    kl_level: Annotated[Literal["token", "sequence"], _LOSS] = "token"
    """Ratio used for the estimate: each `token`'s, where a reward counts for the token and those
    before it, or the whole `sequence`'s."""

    @property
    def charge(self) -> Charge | None:
        if not self.kl_coef or self.kl_as == "loss":
            return None
        scope: Literal["sequence", "rest"] = "sequence" if self.kl_level == "sequence" else "rest"
        return Charge("reference", self.kl_coef, self.kl_estimator, scope)

    @property
    def needs(self) -> frozenset[str]:
        if not self.kl_coef:
            return frozenset()
        alone = self.charge is None and self.kl_level == "token"
        return frozenset({"reference"} if alone else {"reference", "conversations"})


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

    renamed: ClassVar[Any] = {"centred": "centered"}

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
    """β: strength of the regularization toward π_ref, the weights at the start of the run. The
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
                f"{self.target_text!r} does not say where the answer is: it must contain "
                f"{{answer}}",
                "target_text",
            )
        return self


class JEPOOptions(TargetOptions):
    """JEPO (arXiv 2503.19618): learns chains of thought without a verifier, from a lower bound on
    the reference answer's likelihood."""

    removed: ClassVar[Any] = {
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
    """Baseline of the thoughts' advantage. If no other completion of the group has the answer,
    `leave_one_out` gives an advantage of 0."""
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

    removed: ClassVar[Any] = {
        "q_max": (-0.01, "the bound is SUCCESS_MAX in trainer/objectives/spo.py"),
        "r_min": (1e-3, "the bound is REWARD_MIN in trainer/objectives/spo.py"),
    }

    loss_normalization: Literal["sequence_sum"] = "sequence_sum"
    """The loss is the mean over completions."""
    beta: float = Field(0.1, gt=0)
    """β: strength of the regularization toward π_ref, the weights at the start of the run."""
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
    """τ: strength of the regularization toward π_ref, the weights at the start of the run. The
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

    term_tokens: ClassVar[Literal["all", "sampled", "recorded"]] = "recorded"

    loss_normalization: Annotated[LossNormalization, _LOSS] = "minibatch_tokens"
    """Divisor of summed token losses. `minibatch_tokens` gives the mean over all response tokens,
    as in pre-training."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"top1"})


class DistillOptions(ObjectiveOptions):
    """On-policy distillation: the divergence between the policy and a teacher, on the policy's own
    completions; see docs/distillation.md."""

    term_tokens: ClassVar[Literal["all", "sampled", "recorded"]] = "sampled"

    loss_normalization: Annotated[LossNormalization, _LOSS] = "minibatch_tokens"
    """Divisor of summed token losses. `minibatch_tokens` gives the mean over all tokens."""
    top_k: Annotated[int | None, Field(ge=0), _LOSS] = None
    """Tokens whose probabilities are compared: null, the sampled one alone; K, the teacher's K
    likeliest, with all others as one; 0, the whole vocabulary, for which V numbers per token are
    sent to the trainer."""
    divergence: Annotated[Literal["reverse", "forward", "js"], _LOSS] = "reverse"
    """KL(π_θ ‖ π_T) (`reverse`), KL(π_T ‖ π_θ) (`forward`), or the generalized Jensen-Shannon
    divergence (`js`, arXiv 2306.13649). The sampled token alone gives only `reverse`."""
    js_beta: float = Field(0.5, gt=0, lt=1)
    """β of `js`: the teacher's share of the mixture that both are compared with."""
    discount: Annotated[Literal[0, 1], _LOSS] = 0
    """What a token is charged for besides its own divergence: nothing (0), as usual, which is only
    a part of the gradient; or all that follows it in its completion (1), which makes the gradient
    that of the divergence of whole completions (arXiv 2506.09477), with more variance."""
    baseline: Annotated[bool, _LOSS] = True
    """With the sampled token alone, subtract the mean of the group's other completions at the same
    position: less variance, and no bias."""
    rho: float | None = Field(4.0, gt=0)
    """Cap of the importance weight π_θ/μ of sampled tokens. null: a weight of 1 for every token,
    for comparisons."""

    @property
    def every_group(self) -> bool:
        return True

    @property
    def charge(self) -> Charge | None:
        if self.top_k is not None:
            return None
        return Charge("teacher", 1.0, "k1", "rest" if self.discount else "token", self.baseline)

    @property
    def needs(self) -> frozenset[str]:
        charge = self.charge
        alone = not self.discount and not (charge and charge.baseline)
        teacher = "teacher" if charge else "teacher_top"
        return frozenset({teacher} if alone else {teacher, "conversations"})

    @model_validator(mode="after")
    def _of_distributions(self) -> DistillOptions:
        if self.top_k is None and self.divergence != "reverse":
            raise key_error(
                f"{self.divergence} compares whole distributions, and top_k is null, the sampled "
                f"token alone; set top_k",
                "divergence",
                "top_k",
            )
        return self
