"""`data`: problem sources, and which of their problems are handed out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tramontane.config.prompt import PromptConfig
from tramontane.config.section import Section, key_error
from tramontane.config.trajectories import TrajectoriesConfig

Language = Literal["en", "fr", "es", "it", "de", "zh", "ru"]
ProblemKind = Literal["sums", "stories", "programs"]
LANGUAGES: tuple[Language, ...] = ("en", "fr", "es", "it", "de", "zh", "ru")


class PlaygroundConfig(Section):
    """Problems that `playground:` generates; see docs/playground.md."""

    levels: tuple[int, int] = (1, 8)
    """Easiest and hardest level, both included, from 1 to 8."""
    languages: tuple[Language, ...] = LANGUAGES
    """Languages of the statements, drawn uniformly. The default is the paper's seven."""
    kinds: tuple[ProblemKind, ...] = ("sums", "stories")
    """Kinds of problems, drawn uniformly: arithmetic, word problems, small Python programs."""

    @model_validator(mode="after")
    def _levels(self) -> PlaygroundConfig:
        low, high = self.levels
        if not 1 <= low <= high <= 8:
            raise key_error(
                f"levels {low}–{high} must lie within 1–8, the lower one first", "levels"
            )
        return self


class TooHard(Section):
    """Conditions and length of a rest for problems that are never solved."""

    after: int = Field(ge=1)
    """Visits in a row without a correct completion after which a problem rests. The paper prints no
    number."""
    return_after: Annotated[int, Field(ge=1)] | Literal["stage"] = "stage"
    """Updates that a problem rests, or `stage`: until the next stage begins. A problem that is
    unsolved again when it returns rests again at once."""


class CurriculumConfig(Section):
    """Rules that take a problem out of the training data by its record in this run; see
    docs/curriculum.md. The paper removes solved problems and adds harder ones, and prints no
    rule."""

    retire_after: int | None = Field(None, ge=1)
    """Visits in a row, each solved by the whole group, after which a problem is not handed out
    again. null: problems are never retired."""
    too_hard: TooHard | None = None
    """Rest for problems that no completion solves. null: no problem rests."""


LayoutName = Literal[
    "verl",
    "numina",
    "big_math",
    "intellect3",
    "dolci",
    "gpqa",
    "livecodebench",
    "deepcoder_lcb",
    "olympiadbench",
    "humaneval",
    "mbpp",
    "ifeval",
    "ifeval_loose",
    "bfcl",
]


class NamedSetConfig(Section):
    """A dataset that a short name stands for, in `data.train`, `data.eval` and `evaluation.also`;
    see docs/data.md."""

    source: str
    """A file, as for `data.train`, or a Hugging Face dataset (`NAME` or `NAME#SUBSET`)."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Names of a row's fields, as in `data.fields`, which does not apply to named sets."""
    domain: str | None = None
    """Domain of all rows, as in `data.domain`, which does not apply to named sets."""
    layout: LayoutName | None = None
    """Conversion of a public layout that is more than a renaming of fields, e.g. `verl`. null: the
    rows have the fields of docs/data.md, under the names in `fields`."""


class DataConfig(PromptConfig):
    """Problem sources for training and evaluation, the prompts made of the problems, and the
    selection of problems by pass rate."""

    train: str = "playground:"
    """Source of training problems: `playground:`, `reasoning_gym:NAME`, a file (JSON lines, a JSON
    array, CSV, each also gzip, or Parquet), a Hugging Face dataset (`NAME` or `NAME#SUBSET`), a
    short name (`polaris`) or a local file of a named set's layout (`polaris@FILE`)."""
    eval: str | None = "playground:"
    """Source of evaluation problems, as for `train`. null: the run is not evaluated."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Names of a row's fields, where they differ from a Problem's, e.g. `{problem: question}`."""
    eval_fields: dict[str, str] | None = None
    """Names of a row's fields in `eval`, where they differ from those in `train`. null: as
    `fields`."""
    sets: dict[str, NamedSetConfig] = Field(default_factory=dict)
    """Further short names of datasets, e.g. `mine: {source: me/my-set, fields: {answer: a}}`."""
    domain: str | None = None
    """Domain of all rows of files and datasets, a name in `verifier.domains`. null: the domain that
    a row names itself; without one, `code` for a row with tests, else `math`."""
    split: str = "train"
    """Split of a Hugging Face dataset that is trained on. Files have no splits."""
    eval_split: str = "test"
    """Split of a Hugging Face dataset that is evaluated on."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of training problems, evenly spaced over the source. A generated source with a
    limit is a fixed set of that many problems. null: all problems, or no end."""
    shuffle: bool = True
    """Go through a finite source in a new order each epoch, decided by the seed. false: in the
    source's order."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt that is accepted, in tokens; the room that the model's context leaves next to
    `pipeline.l_max` is a further limit. null: 1,024 for a finite source; for a source without end
    256, or the longest of its first 256 prompts."""
    overlong_prompts: Literal["refuse", "drop"] = "refuse"
    """Problems whose prompt is above the limit: `refuse` to start, and say how many there are, or
    `drop` them from training and evaluation."""
    eval_overlap: Literal["warn", "refuse", "drop", "ignore"] = "warn"
    """Training problems with the statement of an evaluation problem, or nearly that: `warn` of
    them, `refuse` to start, `drop` them from training, or `ignore` them and do not look. Sources
    without an end are not looked through."""
    min_pass_rate: float | None = Field(None, ge=0, le=1)
    """Lowest pass rate of a problem that is handed out, included. null: no lower bound. Requires a
    finite source. The paper does not print its thresholds."""
    max_pass_rate: float | None = Field(None, ge=0, le=1)
    """Highest pass rate of a problem that is handed out, included. null: no upper bound. Requires a
    finite source. The paper does not print its thresholds."""
    pass_rate: Literal["recorded", "running"] = "recorded"
    """Pass rate that problems are selected by: `recorded` in the problem's row (`pass_rate`, as
    curation writes it), or `running`, measured by this run so far, falling back to the recorded
    rate for a problem that was not visited."""
    pass_rates: str | None = None
    """Path of another run's `problems.jsonl`, whose recorded pass rates take precedence over those
    in the rows, by problem id."""
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    """Rules that retire solved problems and rest problems that are too hard."""
    playground: PlaygroundConfig = Field(default_factory=PlaygroundConfig)
    """Problems that `playground:` generates."""
    trajectories: TrajectoriesConfig | None = None
    """Completions from elsewhere that batches are filled with. null: the run samples all of its
    completions."""

    @property
    def selects(self) -> bool:
        """True if problems are selected by pass rate."""
        return self.min_pass_rate is not None or self.max_pass_rate is not None

    @model_validator(mode="after")
    def _range(self) -> DataConfig:
        low, high = self.min_pass_rate, self.max_pass_rate
        if low is not None and high is not None and low > high:
            raise key_error(
                f"min_pass_rate {low:g} is above max_pass_rate {high:g}: swap them",
                "min_pass_rate",
                "max_pass_rate",
            )
        return self
