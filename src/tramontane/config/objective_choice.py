"""The choice of an objective, and of terms that are added to it."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from tramontane.config.mask import MaskConfig
from tramontane.config.objectives import (
    AGROOptions,
    AIPOOptions,
    Charge,
    CISPOOptions,
    DistillOptions,
    DROOptions,
    GSPOOptions,
    JEPOOptions,
    MagistralOptions,
    MajorityOptions,
    ObjectiveOptions,
    PassAtKOptions,
    SFTOptions,
    SPOOptions,
    TargetOptions,
)
from tramontane.config.resume import Fixed
from tramontane.config.section import Section, key_error, nearest
from tramontane.imports import import_module

AddedTerm = Literal["distill", "sft"]
Weight = Annotated[float, Field(gt=0)]

_LOSS = Fixed("a different loss is a different run")


class Term(NamedTuple):
    """A term added to an objective's loss, times `weight`, with its own charge or None."""

    weight: float
    options: ObjectiveOptions
    charge: Charge | None


class ObjectiveConfig(Section):
    """The loss: `name` selects it and the section with its options, so that a comparison of
    objectives changes one key. A text in place of the section is its name. See
    docs/objectives.md."""

    of_text: ClassVar[str] = "name"

    name: Annotated[str, _LOSS] = "magistral"
    """One of the sections below, or the import path of a module with your own objective."""
    add: Annotated[dict[AddedTerm, Weight], _LOSS] = Field(default_factory=dict)
    """Terms added to the objective, by name, and their weights: `distill`, on the tokens that the
    run samples, and `sft`, on recorded trajectories (`data.trajectories`). Each has the options of
    its section below, and is normalized over its own tokens."""
    mask: MaskConfig = Field(default_factory=MaskConfig)
    """Tokens that the objective leaves out."""
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
    distill: DistillOptions = Field(default_factory=DistillOptions)
    """Options of `distill`."""
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

    @property
    def terms(self) -> dict[str, Term]:
        """The terms beside the objective, by name: those of `add`, and `kl`, whose options and
        charge are the objective's own."""
        beta = getattr(self.options, "kl_coef", 0.0)
        terms = {"kl": Term(beta, self.options, None)} if beta else {}
        for name, weight in self.add.items():
            options: ObjectiveOptions = getattr(self, name)
            terms[name] = Term(weight, options, options.charge)
        return terms

    @property
    def charges(self) -> dict[str, Charge]:
        """The charges of the objective and of added terms, by the name of the other policy."""
        found = [self.options.charge, *(term.charge for term in self.terms.values())]
        return {charge.policy: charge for charge in found if charge}

    @property
    def needs(self) -> frozenset[str]:
        """What the objective, its mask and the added terms need; see `ObjectiveOptions.needs`."""
        together = {"conversations"} if self.mask.of_completions else set()
        return self.options.needs.union(
            together, *(term.options.needs for term in self.terms.values())
        )

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
            if written := CORRECTIONS.get(re.sub(r"[^a-z]", "", self.name.lower())):
                raise key_error(
                    f"{self.name} is a correction for a generator that is not the policy; write, "
                    f"for example, trainer.objective: {{{written}}}. See docs/off-policy.md",
                    "name",
                ) from None
            near = nearest(self.name, BUILT_IN_OBJECTIVES)
            hint = f"did you mean {near!r}? " if near else ""
            raise key_error(
                f"no objective {self.name!r}, and no module of that name; "
                f"{hint}choose from {', '.join(BUILT_IN_OBJECTIVES)}",
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

    @model_validator(mode="after")
    def _check_added(self) -> ObjectiveConfig:
        if self.name in self.add:
            raise key_error("it is the objective itself; leave it out", f"add.{self.name}", "name")
        if "distill" in self.add and isinstance(self.options, TargetOptions):
            raise key_error(
                f"objective {self.name!r} replaces sampled answers, which the teacher has scored; "
                f"leave it out",
                "add.distill",
                "name",
            )
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
        "The baseline is the group's mean reward, without a value network or GAE",
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

# Corrections, by the names that papers and trainers give them, in lower case letters.
CORRECTIONS = {
    "icepop": "mask: {token_ratio: [0.5, 5]}",
    "dppo": "mask: {token_tv: 0.1}",
    "tis": "name: aipo",
    "mis": "mask: {token_ratio: [0, 2]}",
    "overlong": "mask: {truncated: true}",
}

INTERFACE = ("Options", "advantages", "loss")  # the parts of a module with an objective
BUILT_IN_OBJECTIVES = tuple(
    name for name in ObjectiveConfig.model_fields if name not in ("name", "add", "mask", "custom")
)
