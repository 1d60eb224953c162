"""What a curation is told: the sources, the stages in their order, and a section for each stage."""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import Field, model_validator

from tramontane.config import LANGUAGES, Device, Language, Section, VerifierConfig
from tramontane.data.code import ProgrammingLanguage


class DeduplicateConfig(Section):
    """Exact and near duplicates. `threshold`: the least similarity (Jaccard, of the sets of
    five-character pieces of two statements) of near duplicates; 1 leaves only exact ones.
    `same_numbers`: near duplicates have the same numbers and operators, each as often."""

    threshold: float = Field(0.8, ge=0.5, le=1)
    same_numbers: bool = True


class DecontaminateConfig(DeduplicateConfig):
    """Problems of evaluation sets, named in `against` (files or datasets, of which `split` is
    read, with names of fields as in `fields`). Besides exact and near duplicates: rows with
    `overlap` or more of an evaluation problem's `ngram`s of words."""

    against: tuple[str, ...] = ()
    split: str = "test"
    fields: dict[str, str] = Field(default_factory=dict)
    ngram: int = Field(13, ge=2)
    overlap: float = Field(0.8, gt=0, le=1)


class FilterConfig(Section):
    """Maths problems that have one answer, which the verifier can check. `rewrite`: multiple
    choice becomes an open question where that makes sense; false drops it all. `verifier`: the
    limits under which references are tried."""

    rewrite: bool = True
    verifier: VerifierConfig = Field(default_factory=VerifierConfig)


class CheckpointModel(Section):
    """A model that is run here, in the embedded generator: `path` is `tiny`, a folder or a Hugging
    Face name; `slots` answers are decoded at once. Longer prompts than `max_prompt_tokens` get no
    answer."""

    path: str
    slots: int = Field(128, ge=1)
    max_prompt_tokens: int = Field(1024, ge=1)
    device: Device = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"


class EndpointModel(Section):
    """A server that speaks OpenAI's chat completions under `url` (which mostly ends in /v1).

    `model` is its name for the model, `key_variable` the environment variable that holds the key.
    `concurrency` requests are under way at once. One that fails, or takes longer than `timeout_s`,
    is sent again up to `retries` times, after pauses that double from `backoff_s` on. `extra` lays
    more keys over a request's body; null takes one out.
    """

    url: str = Field(pattern=r"^https?://\S+$")
    model: str
    key_variable: str | None = None
    concurrency: int = Field(32, ge=1)
    timeout_s: float = Field(600.0, gt=0)
    retries: int = Field(6, ge=0)
    backoff_s: float = Field(1.0, gt=0)
    extra: dict[str, Any] = Field(default_factory=dict)


class ModelConfig(Section):
    """Who is asked, a `checkpoint` or an `endpoint`, and how its answers are drawn. `max_tokens`:
    of one answer. `system_prompt`: as in `data`."""

    checkpoint: CheckpointModel | None = None
    endpoint: EndpointModel | None = None
    system_prompt: str | None = None
    temperature: float = Field(0.7, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int = Field(4096, ge=1)
    seed: int = 0

    @property
    def name(self) -> str:
        """As it stands on the rows that it answered."""
        if self.endpoint:
            return self.endpoint.model
        return self.checkpoint.path if self.checkpoint else ""


class DifficultyConfig(Section):
    """How often `model` solves a problem, of `samples` answers. Dropped is what it solves no more
    often than `min_pass_rate` (0: never), or more often than `max_pass_rate`. The paper prints no
    threshold; these are ours. `think_tags`: an answer without them is malformed, as in training;
    false grades it all the same, for a model that has not learnt them."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    samples: int = Field(16, ge=1)
    min_pass_rate: float = Field(0.0, ge=0, lt=1)
    max_pass_rate: float = Field(0.8, ge=0, le=1)
    think_tags: bool = False
    verifier: VerifierConfig = Field(default_factory=VerifierConfig)

    @model_validator(mode="after")
    def _rates(self) -> DifficultyConfig:
        if self.min_pass_rate >= self.max_pass_rate:
            raise ValueError("min_pass_rate must be below max_pass_rate, or nothing is kept")
        return self


class RegradeConfig(DifficultyConfig):
    """The second pass. `dispute_share`: a label is disputed by one other answer that more than this
    share of the samples give."""

    dispute_share: float = Field(0.5, ge=0, lt=1)


class ReviewConfig(Section):
    """Maths problems read by `model`, which is asked `votes` times what is wrong with each."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    votes: int = Field(3, ge=1)


class TranslateConfig(Section):
    """A `share` of the English problems into one of `languages` each, drawn by `seed`. What comes
    back with a fault is asked for again, `attempts` times in all."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    share: float = Field(0.1, gt=0, le=1)
    languages: tuple[Language, ...] = Field(LANGUAGES[1:], min_length=1)
    attempts: int = Field(3, ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _languages(self) -> TranslateConfig:
        if "en" in self.languages:
            raise ValueError("languages: en is what is translated from; leave it out")
        return self


class CodeConfig(Section):
    """Programming problems, whose tests the given solutions vote on (arXiv 2506.10910, section
    4.1; it prints none of these numbers, the defaults are ours).

    A test stays if at least `agreement` of the solutions that have a vote print the same, and that
    is its label. If it is not, no solution passes, and at least `relabel_agreement` and `min_votes`
    print the same, that becomes the label. A problem with fewer tests than `want_tests` is given
    more, labelled so too, on inputs from `inputs` (`model`: what `model` proposes), the first named
    first; one left with fewer than `min_tests` is dropped.
    `max_solutions` are drawn where there are more; null: all are run. `float_tolerance`: of tests
    that name no checker, where solutions print decimals otherwise than the label; null: never.
    `languages`: a problem that leaves the choice is asked once for each. `verifier`: its workers,
    and the limits of one run."""

    agreement: float = Field(0.5, gt=0, le=1)
    relabel_agreement: float = Field(0.8, gt=0, le=1)
    min_votes: int = Field(3, ge=1)
    min_tests: int = Field(1, ge=1)
    want_tests: int = Field(20, ge=0)
    inputs: tuple[Literal["mutation", "model"], ...] = ("mutation",)
    model: ModelConfig | None = None
    max_solutions: int | None = Field(20, ge=1)
    float_tolerance: float | None = Field(1e-6, gt=0)
    languages: tuple[ProgrammingLanguage, ...] = ("python", "cpp")
    verifier: VerifierConfig = Field(default_factory=VerifierConfig)

    @model_validator(mode="after")
    def _model(self) -> CodeConfig:
        if ("model" in self.inputs) != (self.model is not None):
            raise ValueError("inputs: name model in it and say which under `model`, or neither")
        return self


class CurateConfig(Section):
    """One curation. `inputs` are files (.jsonl, .jsonl.gz, .parquet) or Hugging Face datasets, of
    which `split` is read; `fields` maps a Problem's field to the rows' own name for it. `out` is
    the folder of the result. `chunk_rows` rows are decided and written at once."""

    inputs: tuple[str, ...] = ()
    out: str | None = None
    fields: dict[str, str] = Field(default_factory=dict)
    split: str = "train"
    chunk_rows: int = Field(2000, ge=1)
    stages: tuple[str, ...] = ("deduplicate", "filter")
    deduplicate: DeduplicateConfig = Field(default_factory=DeduplicateConfig)
    decontaminate: DecontaminateConfig = Field(default_factory=DecontaminateConfig)
    filter: FilterConfig = Field(default_factory=FilterConfig)
    review: ReviewConfig = Field(default_factory=ReviewConfig)
    difficulty: DifficultyConfig = Field(default_factory=DifficultyConfig)
    regrade: RegradeConfig = Field(default_factory=RegradeConfig)
    translate: TranslateConfig = Field(default_factory=TranslateConfig)
    code: CodeConfig = Field(default_factory=CodeConfig)

    @model_validator(mode="after")
    def _stages(self) -> CurateConfig:
        known = [n for n, f in type(self).model_fields.items() if _is_section(f.annotation)]
        for name in self.stages:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
                raise ValueError(f"stages: no stage {name!r}; {hint}")
        if len(set(self.stages)) < len(self.stages):
            raise ValueError("stages: a stage stands there twice; run it a second time by itself")
        if ("decontaminate" in self.stages) != bool(self.decontaminate.against):
            raise ValueError(
                "decontaminate: name the stage in `stages` and the evaluation sets in "
                "`decontaminate.against`, or neither"
            )
        for name in self.stages:
            model = getattr(getattr(self, name), "model", None)
            if isinstance(model, ModelConfig) and bool(model.checkpoint) == bool(model.endpoint):
                raise ValueError(
                    f"{name}: give it one model: {name}.model.checkpoint.path=FOLDER, or "
                    f"{name}.model.endpoint.url=URL and {name}.model.endpoint.model=NAME"
                )
        return self


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)
