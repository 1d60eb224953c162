"""The configuration of a curation: sources, stages in order, and a section for each stage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tramontane.config import (
    LANGUAGES,
    DomainConfig,
    Language,
    Section,
    VerifierConfig,
    key_error,
    nearest,
)
from tramontane.config.asking import ModelConfig
from tramontane.data.code import ProgrammingLanguage


class DeduplicateConfig(Section):
    """Removal of exact and near duplicates. The paper does not describe its own."""

    threshold: float = Field(0.8, ge=0.5, le=1)
    """Lowest similarity of near duplicates: the Jaccard index of the sets of five-character pieces
    of two statements. 1: only exact duplicates are removed."""
    same_numbers: bool = True
    """Near duplicates must have the same numbers and operators, each equally often."""


class DecontaminateConfig(DeduplicateConfig):
    """Removal of problems that occur in evaluation sets: exact and near duplicates, and problems
    that share word n-grams. The paper gives no thresholds."""

    against: tuple[str, ...] = ()
    """Evaluation sets: files or Hugging Face datasets."""
    split: str = "test"
    """Split of the datasets to read."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Names of the sets' fields, where they differ from a Problem's."""
    ngram: int = Field(13, ge=2)
    """Length of the n-grams, in words."""
    overlap: float = Field(0.8, gt=0, le=1)
    """A row is removed if it contains at least this share of an evaluation problem's n-grams."""


class FilterConfig(Section):
    """Selection of math problems with a single answer that the verifier can check."""

    rewrite: bool = True
    """Rewrite multiple choice as an open question where possible, as the paper does. false: drop
    all multiple choice."""
    verifier: VerifierConfig = Field(default_factory=VerifierConfig)
    """Limits for parsing references."""


class DifficultyConfig(Section):
    """Selection by the share of a model's answers that are correct (arXiv 2506.10910, section 4.1).
    The paper gives no thresholds."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """The model that answers."""
    samples: int = Field(16, ge=1)
    """Answers per problem. The paper: 16."""
    min_pass_rate: float = Field(0.0, ge=0, lt=1)
    """Problems with at most this pass rate are dropped. 0: only problems that are never solved."""
    max_pass_rate: float = Field(0.8, ge=0, le=1)
    """Problems with a higher pass rate are dropped."""
    think_tags: bool = False
    """Answers without think tags count as malformed, as in training. false: such answers are
    graded, for a model that has not learned the tags."""
    verifier: VerifierConfig = Field(default_factory=VerifierConfig)
    """Limits of grading."""

    @model_validator(mode="after")
    def _rates(self) -> DifficultyConfig:
        if self.min_pass_rate >= self.max_pass_rate:
            raise key_error(
                "min_pass_rate must be below max_pass_rate, or nothing is kept",
                "min_pass_rate",
                "max_pass_rate",
            )
        return self


class RegradeConfig(DifficultyConfig):
    """Second selection by difficulty, with a model trained on the first pass's problems; also drops
    problems with disputed labels."""

    dispute_share: float = Field(0.5, ge=0, lt=1)
    """A label is disputed if more than this share of the answers agree on a different one. The
    paper: the majority."""


class ReviewConfig(Section):
    """Review of math problems by a model, which names each one's fault."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """The model that reviews."""
    votes: int = Field(3, ge=1)
    """Reviews per problem."""


class TranslateConfig(Section):
    """Translation of a share of the English problems, each into one language."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """The model that translates."""
    share: float = Field(0.1, gt=0, le=1)
    """Share of the English problems to translate. The paper: 0.1."""
    languages: tuple[Language, ...] = Field(LANGUAGES[1:], min_length=1)
    """Languages to translate into, without en. The default is the paper's six."""
    attempts: int = Field(3, ge=1)
    """Maximum number of requests per problem; a faulty translation is requested again."""
    seed: int = 0
    """Seed for drawing problems and languages."""

    @model_validator(mode="after")
    def _languages(self) -> TranslateConfig:
        if "en" in self.languages:
            raise key_error("en is the source language; leave it out", "languages")
        return self


class CodeConfig(Section):
    """Programming problems whose tests are voted on by their solutions (arXiv 2506.10910, section
    4.1). The paper gives none of these numbers."""

    agreement: float = Field(0.5, gt=0, le=1)
    """A test is kept if at least this share of voting solutions print the same output, and that is
    its label."""
    relabel_agreement: float = Field(0.8, gt=0, le=1)
    """A test that no solution passes is relabeled if at least this share of voting solutions agree
    on a different output."""
    min_votes: int = Field(3, ge=1)
    """Lowest number of solutions that agree on a new label."""
    min_tests: int = Field(1, ge=1)
    """Problems that end up with fewer tests are dropped."""
    want_tests: int = Field(20, ge=0)
    """Problems with fewer tests get more, labeled by the solutions. The paper uses 20 tests in
    training."""
    max_tests: int | None = Field(20, ge=1)
    """Problems with more tests keep those that best reject wrong programs: ones that the source
    calls wrong, and mutants of the solutions. The default is the number of tests used in training.
    null: all tests."""
    inputs: tuple[Literal["mutation", "model"], ...] = ("mutation",)
    """Sources of inputs for additional tests, in order: `mutation` of known inputs, or inputs
    proposed by `model`."""
    model: ModelConfig | None = None
    """The model that proposes inputs. Set if and only if `inputs` names model."""
    max_solutions: int | None = Field(20, ge=1)
    """Maximum number of solutions to run per problem; a random selection if there are more. null:
    all solutions."""
    float_tolerance: float | None = Field(1e-6, gt=0)
    """Tolerance for tests without a checker if solutions print decimals that differ from the
    label's. null: outputs are always compared exactly."""
    languages: tuple[ProgrammingLanguage, ...] = ("python", "cpp")
    """Languages of the programs; a problem without a language becomes one problem per language. The
    paper: Python and C++."""
    verifier: VerifierConfig = Field(default_factory=VerifierConfig)
    """Limits of one run of a solution, and the number of workers."""

    @model_validator(mode="after")
    def _model(self) -> CodeConfig:
        if ("model" in self.inputs) != (self.model is not None):
            raise key_error(
                "name model in it and say which under `model`, or neither", "inputs", "model"
            )
        return self


class CurateConfig(Section):
    """A curation, as `tramontane curate` reads it; see docs/curation.md."""

    inputs: tuple[str, ...] = ()
    """Sources: files (JSON, CSV or Parquet) or Hugging Face datasets (`NAME` or `NAME#SUBSET`)."""
    out: str | None = None
    """Folder of the result."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Names of a row's fields, if different from a Problem's."""
    domain: str | None = None
    """Domain of all rows, like `data.domain` in training. Known domains are those in a stage's
    `verifier.domains`. null: the domain named in the row, else `code` or `math`."""
    split: str = "train"
    """Split of Hugging Face datasets to read."""
    chunk_rows: int = Field(2000, ge=1)
    """Number of rows decided and written at once."""
    stages: tuple[str, ...] = ("deduplicate", "filter")
    """Stages, in order: names of the sections below, each at most once. With evaluation sets in
    `decontaminate.against`, the default has decontaminate in the middle."""
    deduplicate: DeduplicateConfig = Field(default_factory=DeduplicateConfig)
    """Removal of exact and near duplicates."""
    decontaminate: DecontaminateConfig = Field(default_factory=DecontaminateConfig)
    """Removal of problems that occur in evaluation sets."""
    filter: FilterConfig = Field(default_factory=FilterConfig)
    """Selection of math problems with a single answer that the verifier can check."""
    review: ReviewConfig = Field(default_factory=ReviewConfig)
    """Review of math problems by a model."""
    difficulty: DifficultyConfig = Field(default_factory=DifficultyConfig)
    """Selection by the pass rate of a model."""
    regrade: RegradeConfig = Field(default_factory=RegradeConfig)
    """Second selection by pass rate, by a model trained on the first pass's problems."""
    translate: TranslateConfig = Field(default_factory=TranslateConfig)
    """Translation of a share of the English problems."""
    code: CodeConfig = Field(default_factory=CodeConfig)
    """Programming problems whose tests are voted on by their solutions."""

    @property
    def domains(self) -> dict[str, DomainConfig]:
        """The domains of all stages' verifiers."""
        stages = self.filter, self.difficulty, self.regrade, self.code
        return {k: v for stage in stages for k, v in stage.verifier.domains.items()}

    @model_validator(mode="after")
    def _stages(self) -> CurateConfig:
        if self.decontaminate.against and "stages" not in self.model_fields_set:
            self.stages = ("deduplicate", "decontaminate", "filter")
        known = [n for n, f in type(self).model_fields.items() if _is_section(f.annotation)]
        for name in self.stages:
            if name not in known:
                near = nearest(name, known)
                hint = f"did you mean {near!r}?" if near else f"choose from {', '.join(known)}"
                raise key_error(f"no stage {name!r}; {hint}", "stages")
        if len(set(self.stages)) < len(self.stages):
            raise key_error("a stage is named twice; run it a second time by itself", "stages")
        if ("decontaminate" in self.stages) != bool(self.decontaminate.against):
            raise key_error(
                "name the stage in `stages` and the evaluation sets in `decontaminate.against`, "
                "or neither",
                "decontaminate",
                "stages",
            )
        for name in self.stages:
            model = getattr(getattr(self, name), "model", None)
            if isinstance(model, ModelConfig) and bool(model.checkpoint) == bool(model.endpoint):
                raise key_error(
                    f"give it one model: {name}.model.checkpoint.path=FOLDER, or "
                    f"{name}.model.endpoint.url=URL and {name}.model.endpoint.model=NAME",
                    name,
                )
        return self


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)
