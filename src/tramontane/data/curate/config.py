"""What a curation is told: the sources, the stages in their order, and a section for each stage."""

from __future__ import annotations

import difflib
from typing import Literal

from pydantic import Field, model_validator

from tramontane.config import Section, VerifierConfig
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


class CodeConfig(Section):
    """Programming problems, whose tests the given solutions vote on (arXiv 2506.10910, section
    4.1; it prints none of these numbers, the defaults are ours).

    A test stays if at least `agreement` of the solutions that have a vote print the same, and that
    is its label. If it is not, no solution passes, and at least `relabel_agreement` and `min_votes`
    print the same, that becomes the label. A problem with fewer tests than `want_tests` is given
    more, labelled so too, on inputs from `inputs`; one left with fewer than `min_tests` is dropped.
    `max_solutions` are drawn where there are more; null: all are run. `float_tolerance`: of tests
    that name no checker, where solutions print decimals otherwise than the label; null: never.
    `languages`: a problem that leaves the choice is asked once for each. `verifier`: its workers,
    and the limits of one run."""

    agreement: float = Field(0.5, gt=0, le=1)
    relabel_agreement: float = Field(0.8, gt=0, le=1)
    min_votes: int = Field(3, ge=1)
    min_tests: int = Field(1, ge=1)
    want_tests: int = Field(20, ge=0)
    inputs: tuple[Literal["mutation"], ...] = ("mutation",)
    max_solutions: int | None = Field(20, ge=1)
    float_tolerance: float | None = Field(1e-6, gt=0)
    languages: tuple[ProgrammingLanguage, ...] = ("python", "cpp")
    verifier: VerifierConfig = Field(default_factory=VerifierConfig)


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
        return self


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)
